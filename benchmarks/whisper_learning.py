#!/usr/bin/env python3
"""What a small Whisper model learns from nothing, here and in a plain loop around transformers, on the same speech.

    python3 benchmarks/whisper_learning.py --voices ../shared/data/digits_en --folder /tmp/whisper_learning

Both begin with one folder of random weights and take as many steps of as many utterances, at the same rates by the
same schedule, without SpecAugment; nothing chooses a checkpoint, the last weights are scored on other people's voices,
greedily. Ours does it once more with --audio_context speech. Then it goes on from the folder that it exported, with its
encoder frozen, and with low-rank products: at the trainer's own rates, for a third of the epochs. Seconds are those of
the steps alone, and one run follows another. A run that is there is not trained again.
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
    """What is trained, and how long."""

    voices: str
    """Folder of real voices saying digits: train.jsonl, test.jsonl."""
    folder: str
    """Where the random weights and the runs go."""
    epochs: int = 30
    """Of the runs from nothing."""
    width: int = 64
    """Of the model; it has two blocks and one."""
    seconds: int = 6
    """Of its window: longer utterances are left out of neither side, so none may be."""
    rate: float = 1e-3
    """Peak learning rate from nothing."""
    seeds: tuple[int, ...] = (1,)
    """A pair of runs each: order of the utterances."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def measure(flags: Flags) -> str:
    """Trains what has not been trained yet; what is to be printed."""
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
