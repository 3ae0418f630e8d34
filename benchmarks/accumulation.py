#!/usr/bin/env python3
"""Compare the effect of gradient accumulation on loss and gradient of a Whisper model in transformers and this trainer.

    python3 benchmarks/accumulation.py

Each optimizer step has the same four utterances with 4, 20, 4 and 20 labels, in micro-batches of four, of two or of
one, from the same small random weights, in fp32 on a CPU, at learning rate 0. Reported are the loss and the gradient
norm that the installed `Seq2SeqTrainer` logs, and the values of `train_step`. A mean over the labels of the step does
not depend on the division into micro-batches. The exit code is 0 in any case, since this is a measurement.
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
    """Flags of this script."""

    seed: int = 0
    """Seed of weights and utterances."""
    divided: bool = False
    """Set `accepts_loss_kwargs` so that the Trainer assumes a model that does not divide by the labels of the step."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def compare(flags: Flags) -> str:
    """Return the report."""
    # find_spec() does not import the packages, which takes seconds.
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
