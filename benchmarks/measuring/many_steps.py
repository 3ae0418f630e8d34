"""Growth of live tensors and resident memory over many optimizer steps in one process."""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.measuring.fixed_step import VOCABULARY
from benchmarks.measuring.random_speech import build_speech
from konkanivani.base.config import TrainConfig
from konkanivani.base.device import choose_device
from konkanivani.base.randomness import derive_seed
from konkanivani.data.batch import GlobalBatch
from konkanivani.data.batching import same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import parameter_count
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, StepReport, train_step

GROWTH_PERCENT = 5.0  # limit of the growth of resident memory after SETTLED_STEP
SETTLED_STEP = 200
SAMPLES = 50  # steps per median of resident memory: complete cycles of trimming the heap
TOLD_STEPS = 100  # steps between two lines of progress


@dataclass(frozen=True)
class Moment:
    """State after a step, with its global batch freed: bytes of live tensors, resident MiB, and the step's report."""

    live: int
    resident_mib: float
    seconds: float
    audio_seconds: float
    report: StepReport


@dataclass(frozen=True)
class Drift:
    """Memory growth over a run. Live bytes are of all tensors between two steps; resident memory is in MiB.

    `settled_mib` is the median over SAMPLES steps from `settled_step`, `end_mib` and `step_s` over the last ones; on a
    CPU, `step_s` includes counting the live bytes. `growth_mib_per_step` is the growth from `settled_mib` to `end_mib`,
    `late_growth_mib_per_step` the growth since the middle. A cache of bounded size raises only the former.
    """

    preset: str
    params: int
    steps: int
    skipped_steps: int
    splits: int
    audio_seconds: float
    live_first: int
    live_last: int
    live_most: int
    settled_step: int
    settled_mib: float
    end_mib: float
    largest_mib: float
    growth_percent: float
    growth_mib_per_step: float
    late_growth_mib_per_step: float
    step_s: float
    loss: float
    is_within: bool

    def sentence(self) -> str:
        """Return the result as text."""
        return (
            f"{self.preset}, {self.steps} steps on {self.audio_seconds:.0f} s of audio: live bytes between steps "
            f"{self.live_first} at first, {self.live_last} at last, {self.live_most} at most; resident "
            f" {self.settled_mib:.0f} MiB after step {self.settled_step}, "
            f"{self.end_mib:.0f} MiB at the end ({self.growth_percent:+.1f} %, {self.growth_mib_per_step:+.3f} MiB "
            f"a step, {self.late_growth_mib_per_step:+.3f} in the second half), {self.step_s:.2f} s a step then: "
            f"{'within' if self.is_within else 'OUTSIDE'} the bars."
        )


class Windows(Protocol):
    """Sequence of global batches, indexed by step."""

    def __getitem__(self, number: int) -> GlobalBatch: ...


@dataclass(frozen=True)
class RandomGlobalBatches:
    """Endless random global batches of `size` utterances of `shortest` to `longest` seconds.

    Each is a function of (seed, number). With `distinct`, the sequence repeats after so many global batches.
    """

    seed: int
    size: int
    batch_size: int
    shortest: float
    longest: float
    distinct: int | None = None

    def __getitem__(self, number: int) -> GlobalBatch:
        seed = derive_seed(self.seed, "drift", number % self.distinct if self.distinct else number)
        lengths, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        speeches = [
            build_speech(lengths.uniform(self.shortest, self.longest), VOCABULARY, generator) for _ in range(self.size)
        ]
        return split_into_micro_batches(speeches, same_size(self.batch_size), OUR_TOKENS)


def measure(config: TrainConfig, steps: int, shortest: float, longest: float, distinct: int | None) -> Drift:
    """Build the model of `config`, train it for `steps` steps on noise, and return its memory growth."""
    device = choose_device(config.run.device)
    set_mmap_threshold()  # as in a run with a memory budget
    parts = build_step_parts(config, architecture_of(config, VOCABULARY), device, steps)
    global_batches = RandomGlobalBatches(
        config.run.seed, config.global_batch_size, config.data.batch_size, shortest, longest, distinct
    )
    return summarize(config.run.preset, parameter_count(parts.model), follow_steps(parts, global_batches, steps))


def follow_steps(parts: StepParts, global_batches: Windows, steps: int) -> list[Moment]:
    """Train on the first `steps` global batches and return the memory after each step.

    LiveBytes follows storages from allocation to release, so tensors that wait for the garbage collector count as live.
    """
    live, device = LiveBytes(), parts.forward.device
    live.count(parts.state_tensors())
    moments = []
    # One uninterrupted count: a tensor that outlives its step is seen only if it was created during the count.
    with nullcontext() if device.type == "cuda" else live:
        for step in range(steps):
            # The global batch is generated before the clock starts.
            global_batch, began = global_batches[step], time.perf_counter()
            report, audio_seconds = train_step(parts, global_batch, step), global_batch.audio_seconds
            seconds = time.perf_counter() - began
            del global_batch  # its tensors are not part of the memory between two steps
            moments.append(Moment(live_now(device, live), resident_mib(), seconds, audio_seconds, report))
            if not (step + 1) % TOLD_STEPS:
                print(f"{step + 1} steps, {resident_mib():.0f} MiB resident", file=sys.stderr, flush=True)
    return moments


def live_now(device: torch.device, live: LiveBytes) -> int:
    """Return the bytes of live tensors; on CUDA, those in use according to the allocator."""
    # LiveBytes is off on CUDA, where the allocator counts at no cost.
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live.live


def summarize(preset: str, params: int, moments: Sequence[Moment]) -> Drift:
    """Return the memory growth over `moments`, one per step of a run from its first step."""
    # In a short run, the first half is the time to settle.
    settled = min(SETTLED_STEP, len(moments) // 2)
    last = max(len(moments) - SAMPLES, settled)
    middle = (settled + last) // 2
    settled_mib, middle_mib, end_mib = (median_mib(moments, first) for first in (settled, middle, last))
    growth, most = 100 * (end_mib / settled_mib - 1), max(moment.live for moment in moments)
    return Drift(
        preset=preset,
        params=params,
        steps=len(moments),
        skipped_steps=sum(moment.report.is_skipped for moment in moments),
        splits=sum(moment.report.splits for moment in moments),
        audio_seconds=round(sum(moment.audio_seconds for moment in moments), 1),
        live_first=moments[0].live,
        live_last=moments[-1].live,
        live_most=most,
        settled_step=settled,
        settled_mib=round(settled_mib, 1),
        end_mib=round(end_mib, 1),
        largest_mib=round(max(moment.resident_mib for moment in moments), 1),
        growth_percent=round(growth, 2),
        growth_mib_per_step=round((end_mib - settled_mib) / max(1, last - settled), 4),
        late_growth_mib_per_step=round((end_mib - middle_mib) / max(1, last - middle), 4),
        step_s=round(statistics.median(moment.seconds for moment in moments[-SAMPLES:]), 3),
        loss=round(moments[-1].report.loss, 3),
        # Between two steps only the state is alive: not a byte more than after the first step is acceptable.
        is_within=most <= moments[0].live and growth <= GROWTH_PERCENT,
    )


def median_mib(moments: Sequence[Moment], first: int) -> float:
    """Return the median resident memory in MiB over `SAMPLES` steps from `first`."""
    return statistics.median(moment.resident_mib for moment in moments[first : first + SAMPLES])
