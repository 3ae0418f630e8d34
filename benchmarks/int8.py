#!/usr/bin/env python3
"""Measures what ways of storing an ONNX file's weights in eight bits change in what it hears.

python3 benchmarks/int8.py --onnx konkani.onnx --manifest data/builtin/valid.jsonl
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import DataError, UsageError
from konkanivani.data.manifest import read_manifest


@dataclass(frozen=True)
class Flags:
    """What is quantised, and the speech it is measured on."""

    onnx: str
    """ONNX file that export_asr.py --onnx wrote."""
    manifest: str
    """JSONL manifest whose first utterances are heard."""
    utterances: int = 70
    """How many of them."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure(flags: Flags) -> str:
    """Measures; returns what is to be printed."""
    if flags.utterances < 1:
        raise UsageError("--utterances must be at least 1.")
    if not Path(flags.onnx).is_file():
        raise DataError(f"There is no ONNX file at {flags.onnx}. Write one with export_asr.py --onnx.")
    manifest = read_manifest(flags.manifest)
    from konkanivani.inference.onnx_export import require_onnx

    require_onnx()
    from benchmarks.measuring.eight_bits import measure_ways
    from konkanivani.data.audio.waveform import load_audio

    chosen = range(min(flags.utterances, len(manifest)))
    distances = measure_ways(Path(flags.onnx).read_bytes(), (load_audio(manifest[place].source) for place in chosen))
    if flags.json:
        return json.dumps([dataclasses.asdict(distance) for distance in distances])
    return "\n".join(distance.sentence() for distance in distances)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
