"""The smallest complete run: two epochs on a corpus of tones, with every step saved."""

import contextlib
import io
from pathlib import Path

from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from tests.conftest import run_folders, write_corpus
from tests.run_setup import begin_run

SMALL_MODEL = (
    *("--d_model", "8", "--encoder_layers", "1", "--decoder_layers", "1", "--attention_heads", "2"),
    *("--convolution_kernel", "3", "--subsampling_channels", "2", "--tokenizer_type", "char", "--device", "cpu"),
)


def train_small_run(folder: Path) -> Path:
    """Train in `folder` and return it: corpus, logs, and checkpoints last, previous, best and of two epochs."""
    corpus = write_corpus(folder / "corpus", {"train": 6, "valid": 2})
    flags = ("--batch_size", "2", "--gradient_accumulation_steps", "1", "--epochs", "2", "--save_steps", "1")
    arguments = [*SMALL_MODEL, *corpus.flags(), *flags, "--num_workers", "0", *run_folders(folder)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build_run(begin_run(arguments))
        with run.logs.logbook:
            train(run)
    return folder
