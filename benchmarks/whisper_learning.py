#!/usr/bin/env python3
"""Compare the training of a small random Whisper model by this trainer and by a plain loop around transformers.

    python3 benchmarks/whisper_learning.py --voices ../shared/data/digits_en --folder /tmp/whisper_learning

Both start from one folder of random weights and take the same number of steps with the same batch size, learning rates
and schedule, without SpecAugment. No checkpoint is selected: the final weights are scored on other speakers, with
greedy decoding. This trainer runs a second time with --audio_context speech. Then it continues from the folder that it
exported, once with a frozen encoder and once with low-rank products (LoRA), at the trainer's default learning rates,
for a third of the epochs. Seconds are the steps' only; the runs are sequential. An existing run is not repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import importlib.util
import json
from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    voices: str
    """Folder of recorded voices saying digits: train.jsonl, test.jsonl."""
    folder: str
    """Folder for the random weights and the runs."""
    epochs: int = 30
    """Epochs of the runs from random weights."""
    width: int = 64
    """Width of the model; it has two blocks and one."""
    seconds: int = 6
    """Input length of the model in seconds. No utterance may be longer, since neither side drops longer ones."""
    rate: float = 1e-3
    """Peak learning rate of the runs from random weights."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the order of the utterances; one pair of runs per seed."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def measure(flags: Flags) -> str:
    """Train the missing runs; return the report."""
    if min(flags.epochs, flags.width, flags.seconds, flags.rate, len(flags.seeds)) <= 0 or flags.width % 2:
        raise UsageError("--epochs, --width, --seconds and --rate must be above 0, --width even, --seeds not empty.")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("The other loop needs transformers, which is not here. Install it: pip install -e .[test].")
    from benchmarks.measuring.learning.whisper import Task, learn, table_of

    folder = Path(flags.folder).resolve()
    task = Task(Path(flags.voices).resolve(), folder, flags.epochs, flags.rate, flags.width, flags.seconds)
    found = [run for seed in flags.seeds for run in learn(task, seed)]
    return json.dumps([dataclasses.asdict(run) for run in found]) if flags.json else table_of(found)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
