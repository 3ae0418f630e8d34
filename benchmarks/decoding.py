#!/usr/bin/env python3
"""Measures how many times faster than the speech itself a preset decodes, and what the decoder's cache saves.

    python3 benchmarks/decoding.py --preset original --json

Noise of a fixed length goes through the front end, the encoder and each decoder of a model with random weights. Its end
token is out of reach, so that every beam search runs for as many tokens as speech of that length has, no matter what
the weights say; greedy CTC takes the same time whatever it finds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """What is decoded."""

    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    vocab_size: int = 1000
    """Tokens in the vocabulary."""
    seconds: float = 6.0
    """Length of an utterance."""
    tokens_per_second: float = 5.0
    """Tokens that are searched for in a second of it: about 5 of a subword vocabulary, 12 characters."""
    utterances: int = 1
    """Utterances that are decoded together."""
    beam: int = 10
    """Hypotheses kept."""
    tokens: int = 100
    """Tokens of one hypothesis that is decoded with the cache and without."""
    rounds: int = 3
    """Every decoder in turn, so many times after a warm-up; the median counts."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Where to measure."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure(flags: Flags) -> str:
    """Measures; returns what is to be printed."""
    sizes = flags.utterances, flags.beam, flags.tokens, flags.rounds, flags.seconds, flags.tokens_per_second
    if min(sizes) <= 0 or flags.vocab_size < 5:
        raise UsageError("Every number must be above 0, and --vocab_size at least 5.")
    from benchmarks.measuring.fixed_decoding import DecodedSpeech, measure_decoding

    speech = DecodedSpeech(flags.seconds, flags.tokens_per_second, flags.utterances)
    result = measure_decoding(
        flags.preset, flags.vocab_size, speech, flags.beam, flags.tokens, flags.rounds, flags.device
    )
    return json.dumps(dataclasses.asdict(result)) if flags.json else result.sentences()


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
