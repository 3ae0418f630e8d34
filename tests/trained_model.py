"""Tiny model trained on the tones of tests/conftest.py, for tests that need recognized words."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from konkanivani.checkpoints.checkpointer import BEST
from konkanivani.inference.recognizer import Recognizer, load_recognizer
from tests.conftest import TINY_MODEL, TRAINER, run_folders, speak, write_corpus
from tests.fork_server import ROOT, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT


@dataclass(frozen=True)
class Trained:
    """Checkpoint with its recognizer, and the folder of its training recordings."""

    checkpoint: Path
    recognizer: Recognizer
    recordings: Path


def train_tones(directory: Path) -> None:
    """Train a tiny model in a few seconds; it recognizes words with almost no errors."""
    corpus = write_corpus(directory / "tones", {"train": 160, "valid": 5, "test": 5})
    flags = (
        *(*TINY_MODEL, *corpus.flags(), *run_folders(directory), "--tokenizer_type", "char", "--ctc_weight", "0.9"),
        *("--max_steps", "150", "--batch_size", "8", "--gradient_accumulation_steps", "1", "--num_workers", "0"),
        *("--learning_rate", "0.005", "--warmup_steps", "20", "--epochs", "50", "--speed_perturbation", "1.0"),
        *(
            "--frequency_masks",
            "0",
            "--time_masks",
            "0",
            "--dropout",
            "0",
            "--save_minutes",
            "0",
            "--augmentation",
            "none",
        ),
    )
    assert (
        fork_server().start(Job(ROOT / TRAINER, flags, directory / "output.txt", threads=1)).wait(PROCESS_TIMEOUT) == 0
    )


def load_trained(directory: Path) -> Trained:
    """Return the model that `train_tones` has trained in this folder."""
    checkpoint = directory / "checkpoints" / BEST
    return Trained(checkpoint, load_recognizer(checkpoint, device="cpu"), directory / "tones" / "audio")


def tones(words: tuple[str, ...], seed: int = 0) -> np.ndarray:
    """Return a recording of words, as tones in quiet noise at 16 kHz."""
    audio = speak(list(words))
    return audio + 0.005 * np.random.default_rng(seed).standard_normal(len(audio)).astype(np.float32)
