#!/usr/bin/env python3
"""Compare the GPU tensors of a Whisper fine-tuning step in this trainer and in transformers, without GPU or weights.

    python3 benchmarks/off_card.py --sizes medium large-v3

Both steps run on fake tensors without data, and the same counter adds up the bytes of live storages: a step of two
micro-batches, each with one utterance of 30 s and 448 labels, all blocks recomputed, AdamW. transformers runs in fp32
as in its Trainer (autocast would add half-precision weights, which needs more); this trainer runs its matrix products
in half precision, with --weights card, half and host. Printed are MiB and the reduction factor.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    sizes: tuple[str, ...] = ("tiny", "base", "small", "medium", "turbo", "large-v3")
    """Names of the models."""


def transformers_peak(size: str) -> int:
    """Return the peak bytes of transformers' second step."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.measuring.whisper.theirs import config_of
    from konkanivani.planning.tensors import LiveBytes
    from konkanivani.planning.whisper_table import SIZES

    # The CUDA allocator rounds each allocation up to a multiple of 512 bytes.
    live = LiveBytes(rounding=512)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = transformers.WhisperForConditionalGeneration(config_of(SIZES[size])).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        live.count([*model.parameters(), *model.buffers()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        features = torch.zeros(1, SIZES[size].mel_bins, 3000)
        labels = torch.zeros(1, 448, dtype=torch.long)
        for _ in range(2):
            # Only the second step counts: in the first one AdamW has not allocated its moments before the backward
            # pass.
            live.restart_peak()
            for _ in range(2):
                model(input_features=features, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def our_peaks(size: str) -> list[int]:
    """Return the peak bytes of this trainer's tensors on the GPU for each location of the weights."""
    from konkanivani.base.auto_defaults import resolve
    from konkanivani.base.config import AUTO, LossConfig, MemoryConfig, TrainConfig
    from konkanivani.memory.activation_checkpointing import RecomputePolicy
    from konkanivani.memory.devices import cuda_costs
    from konkanivani.model.whisper.architecture import WhisperArchitecture
    from konkanivani.planning.tracer import BatchShape
    from konkanivani.planning.traces import build_tracer
    from konkanivani.planning.whisper_table import PLACES, SIZES

    memory = MemoryConfig(mixed_precision=True, gradient_checkpointing=AUTO)
    config = resolve(TrainConfig(memory=memory, loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0)))
    shape, costs = SIZES[size], cuda_costs("a card", (8, 0))
    tracers = (build_tracer(config, WhisperArchitecture(shape), costs, place) for place in PLACES.values())
    peaks = [tracer.trace(BatchShape(1, 30.0, 447), RecomputePolicy("always")) for tracer in tracers]
    # Only tensors are compared: the internal workspace of an attention kernel is a tensor on neither side.
    inside = costs.attention_workspace(1, shape.source_positions, shape.d_model, is_half=True)
    return [max(peak.forward, peak.backward - inside, peak.update) for peak in peaks]


def table(flags: Flags) -> str:
    """Print one line per model size."""
    print(f"{'':10}{'transformers':>14}{'card':>16}{'half':>16}{'host':>16}")
    for size in flags.sizes:
        theirs = transformers_peak(size)
        cells = [f"{peak / 2**20:,.0f} (1/{theirs / peak:.1f})" for peak in our_peaks(size)]
        print(f"{size:10}{theirs / 2**20:>14,.0f}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    return ""


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    sys.exit(run_script(lambda: table(flags)))
