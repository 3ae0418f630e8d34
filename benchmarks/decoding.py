#!/usr/bin/env python3
"""Measure the speed of each decoder of a preset in multiples of real time, and the gain of the decoder's cache.

    python3 benchmarks/decoding.py --preset original --json

Noise of a fixed length passes through the front end, the encoder and each decoder of a model with random weights. The
end token is disabled, so that every beam search runs for the number of tokens that speech of that length has,
regardless of the weights; the time of greedy CTC does not depend on its result.
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
    """Flags of this script."""

    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    vocab_size: int = 1000
    """Tokens in the vocabulary."""
    seconds: float = 6.0
    """Length of an utterance."""
    tokens_per_second: float = 5.0
    """Tokens per second of speech: about 5 with a subword vocabulary, 12 with characters."""
    utterances: int = 1
    """Utterances per batch."""
    beam: int = 10
    """Hypotheses kept."""
    tokens: int = 100
    """Tokens of the hypothesis that is decoded with and without cache."""
    rounds: int = 3
    """Rounds after a warm-up, each running every decoder once; the median counts."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Device to measure on."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure(flags: Flags) -> str:
    """Return the report."""
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
