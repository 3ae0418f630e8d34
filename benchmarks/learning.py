#!/usr/bin/env python3
"""Compare the learning curves of this trainer and of a plain SpeechBrain Conformer on several data sets.

    python3 benchmarks/learning.py --voices ../shared/data/digits_en --sentences ../shared/data/konkani_text/*.txt \
        --folder /tmp/learning --plot docs/learning.png

Data sets: the recorded voices with their own split; the same with each speaker left out in turn (for the test; another
one for validation); sentences spoken by espeak-ng's Marathi voices; the built-in corpus. `--minutes` shortens their
training speech. This trainer uses the training script's defaults and --preset minimal; the other model has the same
width and depth. A finished run is not repeated, so the command may be interrupted, or repeated with more sets or seeds.
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
    """Flags of this script."""

    voices: str
    """Folder of recorded voices: train.jsonl, valid.jsonl, test.jsonl with speakers."""
    sentences: tuple[str, ...]
    """Files of sentences for espeak-ng, one per line."""
    folder: str
    """Folder for data sets and runs."""
    sets: tuple[str, ...] = ()
    """voices, sentences, builtin, without_NAME (empty: all)."""
    learners: tuple[Literal["ours", "speechbrain"], ...] = ("ours", PEER)
    """Toolkits to train."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds; one run each."""
    epochs: int = 15
    """Epochs of every run."""
    minutes: tuple[float, ...] = ()
    """Minutes of training speech to draw from each set (empty: all of it)."""
    flags: str = ""
    """Additional flags of the training script; use another --folder for these runs."""
    side_by_side: int = 1
    """Concurrent runs, each with its share of the cores."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the training."""
    environment: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of the other toolkit."""
    plot: str | None = None
    """Draw the curves into this PNG file."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def measure(flags: Flags) -> str:
    """Train the missing runs; return the report."""
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
    # The plot is drawn with the other toolkit's environment, which has the plotting library.
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
