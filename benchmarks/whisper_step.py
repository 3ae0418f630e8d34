#!/usr/bin/env python3
"""Time one optimizer step of a Whisper model by this trainer and by transformers in turn: seconds, memory, ratios.

    python3 benchmarks/whisper_step.py --size base --rounds 5
    python3 benchmarks/whisper_step.py --device cuda --amp --size small

Workload: noise utterances with features of Whisper's 30 s window (6 s with "digits"), cross entropy over all labels of
the step, all blocks recomputed, clipping, AdamW. Each side runs in its own process; a round is one step of each,
sequentially. Both start from the same random weights. Their losses must agree, except with --audio_context speech,
where this trainer leaves out the silence after an utterance, which transformers cannot. Peak is the number of live
tensor bytes counted at dispatch (CUDA: the allocator's); growth is VmHWM minus the resident memory of the process
before its model; the figure above the state is the peak minus weights, gradients and moments of the trained parameters,
16 bytes each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import importlib.util
import json
from dataclasses import dataclass
from typing import Literal

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    size: Literal["tiny", "base", "small", "digits", "medium_blocks"] = "tiny"
    """Shape of the model with random weights. "digits" is the one of whisper_learning.py; "medium_blocks" has four
    encoder blocks and one decoder block of medium."""
    train: Literal["all", "decoder", "lora"] = "all"
    """Trained part: everything, the decoder, or LoRA of rank 32 on queries and values."""
    rounds: int = 5
    """Steps of each side after a warm-up; the median counts."""
    accum: int = 4
    """Micro-batches in the step."""
    batch: int = 1
    """Utterances in a micro-batch."""
    shortest: float = 5.0
    """Seconds of speech in the shortest utterance."""
    longest: float = 28.0
    """Seconds of speech in the longest utterance."""
    tokens_per_second: float = 16.0
    """Labels per second of speech (Konkani in Whisper's tokens: 7.5 per word); at most 448 per utterance."""
    audio_context: Literal["window", "speech"] = "window"
    """Input of this trainer's encoder: the whole window, as in transformers, or the speech alone."""
    window_seconds: int | None = None
    """Length of the encoder's window in seconds (default: 30, or 6 with "digits")."""
    at_once: tuple[int, ...] = (1, 2)
    """Numbers of concurrent micro-batches of this trainer to measure (CPU only)."""
    weights: tuple[Literal["card", "half", "host", "ahead"], ...] = ("card",)
    """Locations of this trainer's weights to measure; "ahead" is the host with the next block prefetched. Micro-batches
    run concurrently only with "card"."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    amp: bool = False
    """Autocast on both sides: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def compare_steps(flags: Flags) -> str:
    """Return the report."""
    if min(flags.rounds, flags.accum, flags.batch, flags.window_seconds or 1, *flags.at_once) < 1 or not (
        flags.at_once and flags.weights
    ):
        raise UsageError(
            "--rounds, --accum, --batch, --window_seconds and --at_once must be at least 1, --weights not empty."
        )
    if not 0 < flags.tokens_per_second < 1000:
        raise UsageError("--tokens_per_second must be more than 0 and less than 1000.")
    for package in {"transformers", *(["peft"] if flags.train == "lora" else [])}:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package}, beside which this measures, is not installed. Run: pip install -e .[test].")
    from benchmarks.measuring.whisper.comparison import compare
    from benchmarks.measuring.whisper.work import DEFAULT_WINDOWS, WhisperTerms

    terms = WhisperTerms(
        size=flags.size,
        train=flags.train,
        utterances=flags.accum * flags.batch,
        together=flags.batch,
        shortest=flags.shortest,
        longest=flags.longest,
        tokens_per_second=flags.tokens_per_second,
        device=flags.device,
        mixed_precision=flags.amp,
        audio_context=flags.audio_context,
        window_seconds=flags.window_seconds or DEFAULT_WINDOWS.get(flags.size, 30),
    )
    if not 0.2 <= flags.shortest <= flags.longest <= terms.window_seconds:
        raise UsageError(f"--shortest must be at least 0.2, --longest no less and at most {terms.window_seconds}.")
    comparison = compare(terms, flags.rounds, flags.at_once if flags.device == "cpu" else (1,), flags.weights)
    return json.dumps(comparison.as_json()) if flags.json else comparison.markdown()


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare_steps(flags)))
