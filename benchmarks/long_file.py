#!/usr/bin/env python3
"""Transcribe a long file in a separate process: memory beyond the model, speed, and word error rate.

    python3 benchmarks/long_file.py --checkpoint checkpoints/checkpoint_best.pt --minutes 60 --json

The file is joined from the utterances of a manifest, with silence between them. The growth is the difference between
the resident memory of the process with its model and its peak (VmHWM). The speed is measured without excluding other
processes of the machine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
import subprocess
import tempfile
from dataclasses import dataclass, field

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import DecodingConfig
from konkanivani.base.errors import ResourceError, UsageError


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    checkpoint: str = "checkpoints/checkpoint_best.pt"
    """A checkpoint_*.pt file."""
    manifest: str = "data/builtin/test.jsonl"
    """Utterances to join, repeatedly."""
    minutes: float = 60.0
    """Length of the file."""
    gap: float = 0.5
    """Seconds of silence after each utterance."""
    file: str | None = None
    """Transcribe this file and print the result as JSON (None: join one, and transcribe it in another process)."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


def measure(flags: Flags) -> str:
    """Return the report."""
    if not 0 < flags.minutes <= 600 or not 0 <= flags.gap <= 60:
        raise UsageError("--minutes must be above 0 and at most 600, --gap from 0 to 60.")
    from benchmarks.measuring.long_recording import transcribe, utterances_for, write_long_file
    from konkanivani.evaluation.metrics import error_rates
    from konkanivani.inference.recognizer import build_recognizer

    if flags.file is not None:
        recognizer = build_recognizer(flags.checkpoint, flags.decoding, "cpu")
        return json.dumps(dataclasses.asdict(transcribe(recognizer, Path(flags.file))))
    utterances = utterances_for(flags.manifest, 60 * flags.minutes, flags.gap)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.flac"
        seconds = write_long_file(path, utterances, flags.gap)
        run = transcribe_in_child(flags, path)
    rates = error_rates([" ".join(utterance.text for utterance in utterances)], [run.pop("text")])
    run["times_real_time"] = round(seconds / run["seconds"], 1)
    run |= {"audio_seconds": round(seconds, 1), "utterances": len(utterances), "wer": rates.wer, "cer": rates.cer}
    if flags.json:
        return json.dumps(run)
    return (
        f"{seconds / 60:.1f} min of {len(utterances)} utterances: resident +{run['rss_growth_mib']} MiB, "
        f"{run['times_real_time']} times real time, {run['segments']} segments, "
        f"WER {rates.wer:.1%}, CER {rates.cer:.1%}"
    )


def transcribe_in_child(flags: Flags, path: Path) -> dict[str, object]:
    """Return the JSON that this script prints about the file in another process; raise ResourceError if it fails."""
    settings = dataclasses.asdict(flags.decoding) | {"checkpoint": flags.checkpoint, "file": str(path)}
    given = [part for name, value in settings.items() if value is not None for part in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ResourceError(f"The transcription ended with exit code {done.returncode}. Fix the error above.")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
