#!/usr/bin/env python3
"""What fine-tuning each published Whisper takes of a card, planned without the card and without any weights.

    python3 benchmarks/whisper_cards.py --gpu "GTX 980"

One utterance of 30 s with the longest label at once, every block recomputed, half precision; or validation's peak where
that is more. MiB of all that the process has on the card; in bold what fits.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import AUTO, MemoryConfig, TrainConfig, TuningConfig
from konkanivani.memory.known_gpus import find_gpu

# Width, heads, blocks of the encoder and of the decoder, inner width, mel bands, tokens (Radford et al., 2022).
SIZES = {
    "tiny": (384, 6, 4, 4, 1536, 80, 51_865),
    "base": (512, 8, 6, 6, 2048, 80, 51_865),
    "small": (768, 12, 12, 12, 3072, 80, 51_865),
    "medium": (1024, 16, 24, 24, 4096, 80, 51_865),
    "turbo": (1280, 20, 32, 4, 5120, 128, 51_866),
    "large-v3": (1280, 20, 32, 32, 5120, 128, 51_866),
}
MODES = {
    "all weights": TuningConfig(),
    "--freeze encoder": TuningConfig(freeze="encoder"),
    "--lora_rank 32": TuningConfig(lora_rank=32),
}
LABEL = 444  # tokens of text behind start and prompt


@dataclass(frozen=True)
class Flags:
    """Which card."""

    gpu: str = "GTX 980"
    """A card by its name."""
    sizes: tuple[str, ...] = tuple(SIZES)
    """Which models."""


def peak_mib(size: str, tuning: TuningConfig, gpu_name: str) -> int:
    """The peak of training or validation, whichever is more."""
    from konkanivani.base.amount import resolve
    from konkanivani.memory.devices import cuda_costs
    from konkanivani.memory.planner import ALWAYS, Planner
    from konkanivani.memory.tracer import BatchShape
    from konkanivani.model.whisper.architecture import WhisperArchitecture
    from konkanivani.model.whisper.shape import WhisperShape
    from konkanivani.recipe.planning.tracing import kept_traces

    memory = MemoryConfig(mixed_precision=True, gradient_checkpointing=AUTO)
    config = resolve(TrainConfig(memory=memory))
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, ctc_weight=0.0, label_smoothing=0.0))
    gpu = find_gpu(gpu_name)
    costs = cuda_costs(gpu.name, gpu.capability)
    with kept_traces(config, WhisperArchitecture(WhisperShape(*SIZES[size]), tuning), costs) as traces:
        planner = Planner(traces, 2**50, LABEL / 30)
        training = planner.peak(BatchShape(1, 30.0, LABEL), ALWAYS)
        _, validation = planner.validation_seconds(30.0, LABEL, 30.0)
    return max(training, validation) // 2**20


def table(flags: Flags) -> str:
    """A line a size."""
    most = find_gpu(flags.gpu).memory // 2**20
    print(f"MiB of {flags.gpu}, which has {most}:\n\n| | {' | '.join(MODES)} |\n|---|{'---|' * len(MODES)}")
    for size in flags.sizes:
        peaks = [peak_mib(size, tuning, flags.gpu) for tuning in MODES.values()]
        cells = [f"**{peak:,}**" if peak <= most else f"{peak:,}" for peak in peaks]
        print(f"| {size} | {' | '.join(cells)} |", flush=True)
    return ""


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    sys.exit(run_script(lambda: table(flags)))
