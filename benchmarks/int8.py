#!/usr/bin/env python3
"""Compare ways to store the weights of an ONNX file in 8 bits by their effect on the recognized text.

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
    """Flags of this script."""

    onnx: str
    """ONNX file that export_asr.py --onnx wrote."""
    manifest: str
    """JSONL manifest whose first utterances are recognized."""
    utterances: int = 70
    """Number of utterances."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure(flags: Flags) -> str:
    """Return the report."""
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
