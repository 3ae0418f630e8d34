"""A checkpoint of a newer version is rejected with one sentence by every command, and is not moved."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.averaging import NamedCheckpoint, average_checkpoints
from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.errors import CheckpointError
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.recipe.build import build_run
from tests.run_setup import begin_run

CONFORMER, ZIPFORMER = "--encoder_type 'conformer'", "--encoder_type 'zipformer'"
ZEROS = torch.zeros(3)
# New features of a checkpoint, and the resulting message.
CHANGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "format": (lambda r: r.update(format=r["format"] + 1, weights_by_expert=r.pop("states")), "another, newer version"),
    "flag": (lambda r: r.update(config=r["config"] + "--mixture_of_experts 8\n"), "--mixture_of_experts"),
    "choice": (lambda r: r.update(config=r["config"].replace(CONFORMER, ZIPFORMER)), "--encoder_type"),
    "weight": (lambda r: r["states"]["model"].update({"encoder.gate": ZEROS}), "encoder.gate"),
    "state": (lambda r: r["states"].update(moving_average={"weight": ZEROS}), "'moving_average'"),
}
ON_A_CPU = ("--device", "cpu")


def resume(folder: Path, *flags: str) -> None:
    build_run(begin_run(["--resume", *flags, *ON_A_CPU, "--log_dir", str(folder / "runs")]))


def init_from(folder: Path) -> None:
    fresh, manifest = str(folder / "fresh"), ("--train_manifest", str(folder / "train.jsonl"))
    begin_run(["--init_from", str(folder / LAST), "--checkpoint_dir", fresh, "--log_dir", fresh, *ON_A_CPU, *manifest])


USES: dict[str, Callable[[Path], object]] = {
    "resume": lambda folder: resume(folder, str(folder / LAST)),
    "resume auto": lambda folder: resume(
        folder, "auto", "--checkpoint_dir", str(folder), "--train_manifest", str(folder / "train.jsonl")
    ),
    "init from": init_from,
    "recognise": lambda folder: load_recognizer(folder / LAST, device="cpu"),
    "average": lambda folder: average_checkpoints([NamedCheckpoint(LAST, read_checkpoint(folder / LAST))]),
}


@pytest.fixture
def write_newer(small_run: Path, tmp_path: Path, monkeypatch) -> Callable[[Callable[[dict], None]], Path]:
    """Return a function that writes the checkpoint of a run to a folder as a newer version would."""

    def write(change: Callable[[dict], None]) -> Path:
        monkeypatch.chdir(small_run)
        folder = tmp_path / "newer"
        folder.mkdir()
        (folder / "train.jsonl").touch()
        record = torch.load(small_run / "checkpoints" / LAST, weights_only=True)  # noqa: TID251
        change(record)
        torch.save(record, folder / LAST)
        return folder

    return write


# Commands that need only the weights ignore a newer state.
REJECTED = [
    *((change, "resume") for change in CHANGES),
    *((change, use) for change in ("format", "flag", "choice") for use in ("resume auto", "init from", "recognise")),
    *(("weight", "recognise"), ("format", "average")),
]


@pytest.mark.parametrize("change, use", REJECTED)
def test_newer_checkpoint_is_rejected_and_not_renamed(change, use, write_newer):
    folder = write_newer(CHANGES[change][0])
    before = (folder / LAST).read_bytes()
    with pytest.raises(CheckpointError) as refused:
        USES[use](folder)
    output = str(refused.value)
    assert CHANGES[change][1] in output and "\n" not in output and output.endswith(".") and len(output) < 500, output
    assert (folder / LAST).read_bytes() == before and not list(folder.glob("*.damaged"))


@pytest.mark.parametrize("use", ["resume", "init from", "recognise", "average"])
def test_negative_control_the_unchanged_checkpoint_is_accepted(use, write_newer):
    USES[use](write_newer(lambda record: None))
