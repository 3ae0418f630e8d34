#!/usr/bin/env python3
"""How fast and how well it learns, beside a plain SpeechBrain Conformer, on several sets of speech.

    python3 benchmarks/learning.py --voices ../shared/data/digits_en --sentences ../shared/data/konkani_text/*.txt \
        --folder /tmp/learning --plot docs/learning.png

Sets: the real voices as they come, each person of theirs left out in turn (who is tested on; another is validated on),
sentences spoken by espeak-ng's Marathi voices, the built-in corpus; `--minutes` cuts their training speech. Ours is
trained by the training script with its defaults and --preset minimal; the other one is as wide and as deep. A run that
is there is not trained again, so the command may be broken off, and given again with more sets or seeds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Literal

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError

PEER = "speechbrain"


@dataclass(frozen=True)
class Flags:
    """What is trained, on what."""

    voices: str
    """Folder of real voices: train.jsonl, valid.jsonl, test.jsonl with speakers."""
    sentences: tuple[str, ...]
    """Files of sentences that espeak-ng speaks, one a line."""
    folder: str
    """Where sets and runs go."""
    sets: tuple[str, ...] = ()
    """voices, sentences, builtin, without_NAME (none: all)."""
    learners: tuple[Literal["ours", "speechbrain"], ...] = ("ours", PEER)
    """Who learns."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """A run each."""
    epochs: int = 15
    """Of every run."""
    minutes: tuple[float, ...] = ()
    """Minutes of training speech that are drawn from each set (none: all of it)."""
    flags: str = ""
    """Flags of the training script beside the defaults, to try a difference: give another --folder for its runs."""
    side_by_side: int = 1
    """Runs at a time, each with its share of the cores."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where they learn."""
    environment: str = "~/.cache/konkanivani/peers"
    """Where the other's environment is made."""
    plot: str | None = None
    """Draw the curves into this PNG file."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def measure(flags: Flags) -> str:
    """Trains what has not been trained yet; what is to be printed."""
    if min(flags.epochs, flags.side_by_side, *flags.minutes, *map(bool, (flags.seeds, flags.learners))) <= 0:
        raise UsageError("--epochs, --side_by_side and --minutes must be above 0, --seeds and --learners not empty.")
    from benchmarks.measuring.learning.runs import Order, run_of
    from benchmarks.measuring.learning.sets import Sources, cut_training
    from benchmarks.measuring.learning.tables import epochs_table, rates_table
    from benchmarks.measuring.peers.environment import PACKAGES, peer_python

    folder, environment = Path(flags.folder).resolve(), Path(flags.environment).expanduser()
    sources = Sources(Path(flags.voices), tuple(str(Path(file).resolve()) for file in flags.sentences))
    sets = [sources.make(name, folder / "sets") for name in flags.sets or sources.names()]
    if flags.minutes:
        sets = [cut_training(made, minutes) for made, minutes in product(sets, flags.minutes)]
    needs_peer = PEER in flags.learners or flags.plot
    python = peer_python(environment, PACKAGES) if needs_peer else Path(sys.executable)
    threads = max(1, (os.cpu_count() or 1) // flags.side_by_side)
    orders = [
        Order(learner, made, seed, flags.epochs, folder / "runs", flags.flags, threads, python, flags.device)
        for seed, made, learner in product(flags.seeds, sets, flags.learners)
    ]
    with ThreadPoolExecutor(flags.side_by_side) as workers:
        runs = list(workers.map(run_of, orders))
    if flags.plot:
        drawing = [str(python), str(Path(__file__).parent / "measuring" / "learning" / "drawing.py"), flags.plot]
        subprocess.run(drawing, input=json.dumps([asdict(run) for run in runs]), text=True, check=True)
    if flags.json:
        return json.dumps([asdict(run) for run in runs])
    return "\n\n".join([rates_table(runs), *([epochs_table(runs, PEER)] if len(flags.learners) > 1 else [])])


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
