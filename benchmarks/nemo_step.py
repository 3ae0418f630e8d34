#!/usr/bin/env python3
"""Times one optimizer step of a Conformer of NeMo's, 17 x 512, by NeMo's own modules and by this trainer, in turn.

    python3 benchmarks/nemo_step.py --nemo nemo/bin/python --rounds 3

The shape of AI4Bharat's Konkani recogniser with a CTC head of 257, random weights, one utterance of noise, fp32, AdamW
and clipping. NeMo's side is its ConformerEncoder, ConvASRDecoder and CTCLoss in an environment of its own, keeping
every activation, as its recipes do; ours recomputes every block, or as it is asked to. Each side has a process of its
own, a round is one step of each, one after another. Peak is live tensor bytes of the second step, counted at dispatch
by the same counter; the steps after it are timed, and not counted, which costs time.
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
REST = 0.5  # seconds before each step: the other side's threads spin for a while when they have nothing to do
COUNTED = 2  # steps before the timed ones: the optimizer of NeMo makes its state in the first


@dataclass(frozen=True)
class Flags:
    """What is compared."""

    nemo: str
    """Python of an environment with nemo_toolkit[asr]."""
    seconds: float = 20.0
    """Length of the utterance."""
    rounds: int = 3
    """Timed steps of each side; the median counts."""
    threads: int = 2
    """Of each side."""
    gradient_checkpointing: Literal["always", "never"] = "always"
    """Of ours: recompute every block, or keep every activation."""
    optimizer: Literal["adamw", "adamw8bit", "adafactor"] = "adamw"
    """Of ours."""


def begin(python: str, script: str, flags: Flags) -> subprocess.Popen:
    """A side's process, which makes a step whenever it is sent a line, and answers with one."""
    words = [python, str(FOLDER / script), str(flags.seconds), str(flags.threads)]
    words += [flags.gradient_checkpointing, flags.optimizer]  # which NeMo's side leaves unread
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def one_step(side: subprocess.Popen, is_counted: bool) -> dict[str, float]:
    """Seconds and MiB of its next step; MiB of the last one that was counted."""
    time.sleep(REST)
    side.stdin.write("count\n" if is_counted else "step\n")
    side.stdin.flush()
    for line in side.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise ResourceError(f"{side.args[1]} ended early. Run it by hand: {' '.join(side.args)}")


def compare(flags: Flags) -> str:
    """Both sides in turn; the medians and their ratios."""
    sides = {"NeMo": begin(flags.nemo, "theirs.py", flags), "ours": begin(sys.executable, "ours.py", flags)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(COUNTED + flags.rounds):
        for name, side in sides.items():
            found[name].append(one_step(side, number < COUNTED))
    for side in sides.values():
        side.kill()
    seconds = {name: statistics.median(step["seconds"] for step in steps[COUNTED:]) for name, steps in found.items()}
    peaks = {name: steps[COUNTED - 1]["peak_mib"] for name, steps in found.items()}
    lines = [f"{name:6}{seconds[name]:8.2f} s{peaks[name]:8.0f} MiB" for name in sides]
    ratio = f"ours / NeMo: time {seconds['ours'] / seconds['NeMo']:.2f}, peak {peaks['ours'] / peaks['NeMo']:.2f}"
    return "\n".join([*lines, ratio])


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
