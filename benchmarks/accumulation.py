#!/usr/bin/env python3
"""What gradient accumulation does to the loss and the gradient of a Whisper model: transformers' Trainer, and this one.

    python3 benchmarks/accumulation.py

The same four utterances of 4, 20, 4 and 20 labels are one optimizer step each time, in micro-batches of four, of two
and of one, from the same small random weights, in fp32 on a CPU, at the learning rate 0. The loss and the gradient norm
are what `Seq2SeqTrainer` logs, as it is installed, and what `train_step` reports. A mean over the labels of the step
does not depend on how it is cut. The exit code is 0 either way: this is a measurement.
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

NEEDED = ("transformers", "accelerate")


@dataclass(frozen=True)
class Flags:
    """What is drawn, and how it is printed."""

    seed: int = 0
    """Weights and utterances follow from it."""
    divided: bool = False
    """Tell the Trainer that the model does not divide by the labels of the step (`accepts_loss_kwargs`)."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def compare(flags: Flags) -> str:
    """Measures; returns what is to be printed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The Trainer of this comparison needs {' and '.join(missing)}, which cannot be imported here. Install "
            f"what is missing: pip install {' '.join(missing)}."
        )
    from benchmarks.measuring.accumulated import measure

    found = measure(flags.seed, flags.divided)
    return json.dumps(dataclasses.asdict(found)) if flags.json else found.table()


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
