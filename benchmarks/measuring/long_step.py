"""Peak of live tensors and growth of resident memory in one optimizer step on one utterance of any length."""

from dataclasses import dataclass

import torch

from konkanivani.base.config import TrainConfig
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.units import MIB
from konkanivani.data.batch import Example, GlobalBatch
from konkanivani.data.batching import same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import parameter_count
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import train_step

VOCABULARY = 1000
FIRST_TOKEN = 5  # after the special tokens
WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class LongStep:
    """Measurements of the step: memory in MiB, loss in nats per token, `splits` retries with less memory."""

    seconds: float
    tokens: int
    params: int
    peak_above_state_mib: int
    rss_growth_mib: int
    loss: float
    is_skipped: bool
    splits: int


def measure(config: TrainConfig, seconds: float, tokens_per_second: float) -> LongStep:
    """Build the model of `config` and train one step on an utterance of `seconds` seconds, on the CPU."""
    set_mmap_threshold()  # as in a run with a memory budget
    resident_before, cpu = resident_mib(), torch.device("cpu")
    parts = build_step_parts(config, architecture_of(config, VOCABULARY), cpu, 100)
    # The first step allocates the optimizer state, which `state_tensors` then includes.
    train_step(parts, build_global_batch(WARM_UP_SECONDS, tokens_per_second), step=0)
    global_batch = build_global_batch(seconds, tokens_per_second)
    live = LiveBytes()
    live.count(parts.state_tensors())
    with live:
        report = train_step(parts, global_batch, step=1)
    params = parameter_count(parts.model)
    return LongStep(
        seconds=seconds,
        tokens=global_batch.tokens,
        params=params,
        # The state is weights, gradients and two moments, 16 bytes per parameter.
        peak_above_state_mib=round((live.peak - STATE_BYTES * params) / MIB),
        rss_growth_mib=round(parts.monitor.overall_peak_mib() - resident_before),
        loss=round(report.loss, 3),
        is_skipped=report.is_skipped,
        splits=report.splits,
    )


def build_global_batch(seconds: float, tokens_per_second: float) -> GlobalBatch:
    """Return a global batch of one utterance of noise with random tokens, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(seconds * tokens_per_second))
    speech = Example(
        utterance_id="noise",
        waveform=0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=generator),
        tokens=torch.randint(FIRST_TOKEN, VOCABULARY, (count,), generator=generator).tolist(),
        augment_seed=0,
    )
    return split_into_micro_batches([speech], same_size(1), OUR_TOKENS)
