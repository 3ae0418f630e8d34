#!/usr/bin/env python3
"""Times one optimizer step of a Whisper model by this trainer and by transformers in turn: seconds, memory, ratios.

    python3 benchmarks/whisper_step.py --size base --rounds 5
    python3 benchmarks/whisper_step.py --device cuda --amp --size small

The work: utterances of noise to features of a window of 30 s each (6 s of "digits"), cross entropy of all labels of
the step, every block recomputed, clipping, AdamW. Each side has a process of its own; a round is one step of each, one
after another. Both begin with the same random weights. Their losses must agree, but with --audio_context speech: then
ours leaves out the silence behind an utterance, which transformers cannot. Peak is live tensor bytes counted at
dispatch (CUDA: the allocator's), growth is VmHWM over the process before its model; what is above the state is the peak
without weights, gradients and moments of what is trained, 16 bytes a parameter.
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
    """What is compared."""

    size: Literal["tiny", "base", "small", "digits", "medium_blocks"] = "tiny"
    """Shape of the model; its weights are random. "digits" is whisper_learning.py's, "medium_blocks" has four of the
    encoder and one of the decoder of medium."""
    train: Literal["all", "decoder", "lora"] = "all"
    """What of it is trained: everything, the decoder, or LoRA of rank 32 on queries and values."""
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
    """Labels of a second of speech (Konkani in Whisper's tokens: 7.5 a word); at most 448 an utterance."""
    audio_context: Literal["window", "speech"] = "window"
    """What ours has its encoder take: all of the window, as transformers does, or the speech alone."""
    window_seconds: int | None = None
    """Of the encoder's window; left out, 30, and 6 of "digits"."""
    at_once: tuple[int, ...] = (1, 2)
    """Ours with so many micro-batches side by side, each of these ways (on a card it is one after another)."""
    weights: tuple[Literal["card", "half", "host", "ahead"], ...] = ("card",)
    """Ours with its weights in each of these places: "ahead" is the host with the next block's on their way. Only what
    lies on the card is taken side by side."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where."""
    amp: bool = False
    """Autocast on both sides: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def compare_steps(flags: Flags) -> str:
    """Races, and returns what is to be printed."""
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
