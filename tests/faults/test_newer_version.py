"""A checkpoint of a newer version is refused with a sentence wherever it is given, and stays where it lies."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from konkanivani.base.errors import CheckpointError
from konkanivani.inference.averaging import NamedCheckpoint, average_checkpoints
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.recipe.build import build_run
from konkanivani.training.checkpoint.checkpoint import read_checkpoint
from konkanivani.training.checkpoint.checkpointer import LAST
from tests.starts import begin_run


def of_a_newer_format(record: dict) -> None:
    record["format"] += 1
    record["weights_by_expert"] = record.pop("states")


def with_a_newer_flag(record: dict) -> None:
    record["config"] += "--mixture_of_experts 8\n"


def with_a_newer_choice(record: dict) -> None:
    record["config"] = record["config"].replace("--encoder_type 'conformer'", "--encoder_type 'zipformer'")


def with_a_newer_weight(record: dict) -> None:
    record["states"]["model"]["encoder.gate"] = torch.zeros(3)


def with_a_newer_state(record: dict) -> None:
    record["states"]["moving_average"] = {"weight": torch.zeros(3)}


WORDS = {
    of_a_newer_format: "another, newer version",
    with_a_newer_flag: "--mixture_of_experts",
    with_a_newer_choice: "--encoder_type",
    with_a_newer_weight: "encoder.gate",
    with_a_newer_state: "'moving_average'",
}

CONFIGURED = (of_a_newer_format, with_a_newer_flag, with_a_newer_choice)


def resume(folder: Path) -> None:
    build_run(begin_run(["--resume", str(folder / LAST), "--device", "cpu", "--log_dir", str(folder / "runs")]))


def resume_auto(folder: Path) -> None:
    flags = ("--resume", "auto", "--checkpoint_dir", str(folder), "--log_dir", str(folder / "runs"), "--device", "cpu")
    build_run(begin_run([*flags, "--train_manifest", str(folder / "train.jsonl")]))


def begin_from(folder: Path) -> None:
    fresh = str(folder / "fresh")
    flags = ("--init_from", str(folder / LAST), "--checkpoint_dir", fresh, "--log_dir", fresh, "--device", "cpu")
    begin_run([*flags, "--train_manifest", str(folder / "train.jsonl")])


def recognise(folder: Path) -> None:
    load_recognizer(folder / LAST, device="cpu")


def average(folder: Path) -> None:
    average_checkpoints([NamedCheckpoint(LAST, read_checkpoint(folder / LAST))])


@pytest.fixture
def newer(small_run: Path, tmp_path: Path, monkeypatch) -> Callable[[Callable[[dict], None]], Path]:
    """A folder with the checkpoint of a run, as a newer version would have written it."""

    def made(change: Callable[[dict], None]) -> Path:
        monkeypatch.chdir(small_run)
        folder = tmp_path / "newer"
        folder.mkdir()
        (folder / "train.jsonl").touch()
        record = torch.load(small_run / "checkpoints" / LAST, weights_only=True)  # noqa: TID251
        change(record)
        torch.save(record, folder / LAST)
        return folder

    return made


# Weights alone are read by those that need no more: a newer state beside them is none of theirs.
REFUSED = [
    *((change, resume) for change in WORDS),
    *((change, use) for change in CONFIGURED for use in (resume_auto, begin_from, recognise)),
    (with_a_newer_weight, recognise),
    (of_a_newer_format, average),
]


@pytest.mark.parametrize("change, use", REFUSED, ids=lambda part: part.__name__)
def test_it_is_refused_and_left_alone(change, use, newer):
    folder = newer(change)
    before = (folder / LAST).read_bytes()
    with pytest.raises(CheckpointError) as refused:
        use(folder)
    said = str(refused.value)
    assert WORDS[change] in said and "\n" not in said and said.endswith(".") and len(said) < 500, said
    assert (folder / LAST).read_bytes() == before and not list(folder.glob("*.damaged"))


@pytest.mark.parametrize("use", [resume, begin_from, recognise, average], ids=lambda use: use.__name__)
def test_negative_control_the_same_checkpoint_unchanged_is_taken(use, newer):
    use(newer(lambda record: None))
