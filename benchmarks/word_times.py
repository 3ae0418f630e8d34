#!/usr/bin/env python3
"""Compare the times of recognized words with the synthesizer's own, on the test part of the built-in corpus.

    python3 benchmarks/word_times.py --checkpoint checkpoints/checkpoint_best.pt --utterances 100 --json

Each sentence is synthesized again, which must reproduce the samples of the corpus, while espeak-ng reports the start of
each word.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass, field

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import DecodingConfig
from konkanivani.base.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    checkpoint: str = "checkpoints/checkpoint_best.pt"
    """A checkpoint_*.pt file."""
    manifest: str = "data/builtin/test.jsonl"
    """Test part of the built-in corpus."""
    utterances: int = 100
    """Number of utterances, from the first one."""
    json: bool = False
    """Print one line of JSON instead of sentences."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


def compare(flags: Flags) -> str:
    """Return the report."""
    if flags.utterances < 1:
        raise UsageError("--utterances must be at least 1.")
    from benchmarks.measuring.spoken_words import measure
    from konkanivani.inference.recognizer import build_recognizer

    found = measure(build_recognizer(flags.checkpoint, flags.decoding, "cpu"), flags.manifest, flags.utterances)
    if flags.json:
        return json.dumps(dataclasses.asdict(found))
    lines = [f"{found.utterances} utterances, {found.starts.words} of {found.spoken} words recognised as spoken"]
    for name, differences in (("starts", found.starts), ("ends", found.ends)):
        lines.append(
            f"{name}: median {differences.median} ms, mean {differences.mean} ms, 90 % within "
            f"{differences.percentile_90} ms"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
