#!/usr/bin/env python3
"""Time one optimizer step of a 17 x 512 Conformer by NeMo's own modules and by this trainer, in turn.

    python3 benchmarks/nemo_step.py --nemo nemo/bin/python --rounds 3

The model has the shape of AI4Bharat's Konkani recognizer with a CTC head of 257, random weights, one utterance of
noise, fp32, AdamW and clipping. NeMo uses its ConformerEncoder, ConvASRDecoder and CTCLoss in a separate environment
and keeps all activations, as in its recipes; this trainer recomputes every block, or follows --gradient_checkpointing.
Each side runs in its own process; a round is one step of each, sequentially. Peak is the number of live tensor bytes in
the second step, counted at dispatch by the same counter. The later steps are timed without counting, because counting
takes time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Literal

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import ResourceError

FOLDER = Path(__file__).resolve().parent / "measuring" / "nemo"
REST = 0.5  # seconds before each step: idle threads of the other side spin for a while
COUNTED = 2  # steps before the timed ones: the optimizer of NeMo allocates its state in the first


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    nemo: str
    """Python of an environment with nemo_toolkit[asr]."""
    seconds: float = 20.0
    """Length of the utterance."""
    rounds: int = 3
    """Timed steps of each side; the median counts."""
    threads: int = 2
    """Threads of each side."""
    gradient_checkpointing: Literal["always", "never"] = "always"
    """This trainer's recomputation: every block, or none."""
    optimizer: Literal["adamw", "adamw8bit", "adafactor"] = "adamw"
    """This trainer's optimizer."""


def begin(python: str, script: str, flags: Flags) -> subprocess.Popen:
    """Start the process of one side, which makes a step per line on stdin and answers with one line."""
    words = [python, str(FOLDER / script), str(flags.seconds), str(flags.threads)]
    words += [flags.gradient_checkpointing, flags.optimizer]  # ignored by NeMo's side
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def one_step(side: subprocess.Popen, is_counted: bool) -> dict[str, float]:
    """Return the seconds of the next step, and the MiB of the last counted one."""
    time.sleep(REST)
    side.stdin.write("count\n" if is_counted else "step\n")
    side.stdin.flush()
    # Lines of other output, such as logs of the libraries, are skipped.
    for line in side.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise ResourceError(f"{side.args[1]} ended early. Run it by hand: {' '.join(side.args)}")


def compare(flags: Flags) -> str:
    """Run both sides in turn; return the medians and their ratios."""
    sides = {"NeMo": begin(flags.nemo, "theirs.py", flags), "ours": begin(sys.executable, "ours.py", flags)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(COUNTED + flags.rounds):
        for name, side in sides.items():
            found[name].append(one_step(side, number < COUNTED))
    for side in sides.values():
        side.kill()
    seconds = {name: statistics.median(step["seconds"] for step in steps[COUNTED:]) for name, steps in found.items()}
    # The second step, since the first one runs without optimizer state.
    peaks = {name: steps[COUNTED - 1]["peak_mib"] for name, steps in found.items()}
    lines = [f"{name:6}{seconds[name]:8.2f} s{peaks[name]:8.0f} MiB" for name in sides]
    ratio = f"ours / NeMo: time {seconds['ours'] / seconds['NeMo']:.2f}, peak {peaks['ours'] / peaks['NeMo']:.2f}"
    return "\n".join([*lines, ratio])


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
