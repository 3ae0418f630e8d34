"""The training script on a rank 1 whose memory holds one utterance at a time; other ranks hold as many as they get."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "training_scripts")]  # this folder's numbers.py is not Python's

from konkanivani.model.front_end import FrontEnd  # noqa: E402 - only now it can be found

computed = FrontEnd.forward


def forward(front_end, waveforms, sample_lengths, augment_seeds):
    if len(waveforms) > 1 and augment_seeds is not None:
        raise MemoryError("the test's memory is full")
    return computed(front_end, waveforms, sample_lengths, augment_seeds)


if os.environ["RANK"] == "1":
    FrontEnd.forward = forward
runpy.run_path(str(ROOT / "training_scripts" / "train_konkanivani_asr.py"), run_name="__main__")
