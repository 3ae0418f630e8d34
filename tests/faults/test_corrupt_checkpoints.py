"""Any changed bit of a checkpoint is detected or harmless, and one valid checkpoint is kept."""

import shutil
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints import checkpoint, checkpointer
from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import BEST, LAST, PREVIOUS, Checkpointer
from konkanivani.errors import CheckpointError, ResourceError
from tests.conftest import mark_full
from tests.faults.corrupt_checkpoints import (
    are_equal,
    bit_flips,
    count_resume_outcomes,
    flip_bit,
    is_rejected_if_all_are_damaged,
    truncations,
)

FLIPS = 40  # benchmarks/faults.py --parts files --full: 1,000


@pytest.fixture
def folder(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run / "checkpoints", tmp_path / "checkpoints"))


def test_truncated_checkpoint_is_renamed_and_the_previous_one_resumed(folder, tmp_path):
    result = count_resume_outcomes(folder, truncations((folder / LAST).read_bytes()), tmp_path / "work")
    assert result == {"detected": 5}


def test_any_flipped_bit_is_detected_or_harmless(folder, tmp_path):
    result = count_resume_outcomes(folder, bit_flips((folder / LAST).read_bytes(), FLIPS, seed=1), tmp_path / "work")
    assert set(result) <= {"detected", "harmless"} and result["detected"] > FLIPS / 2, result


@pytest.mark.parametrize("bits", [1, *mark_full(8)])
def test_flipped_bits_in_zip_directory_are_detected_or_harmless(bits, tmp_path):
    """The directory holds the offsets and formats; random flips in the file of a run rarely hit it."""
    saver = Checkpointer(tmp_path / "run", keep=2)
    for step in (1, 2):
        saver.save(small_checkpoint(step))
    content = (tmp_path / "run" / LAST).read_bytes()
    ends = content.index(b"PK\x01\x02")  # directory of records at the end of the zip
    assert len(content) - ends < 2000
    places = (8 * byte + (byte + bit) % 8 for byte in range(ends, len(content)) for bit in range(bits))
    damages = (flip_bit(content, place) for place in places)
    result = count_resume_outcomes(tmp_path / "run", damages, tmp_path / "work")
    assert set(result) == {"detected", "harmless"}, result


def test_negative_control_without_checksums_a_flipped_bit_is_not_detected(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("konkanivani.checkpoints.checkpoint._check_sums", lambda archive: None)
    result = count_resume_outcomes(folder, bit_flips((folder / LAST).read_bytes(), FLIPS, seed=1), tmp_path / "work")
    assert any("read wrongly" in outcome for outcome in result), result


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 5000], ids=["empty", "zip signature only", "zeros"])
def test_resume_is_rejected_repeatedly_if_all_checkpoints_are_damaged(folder, tmp_path, content):
    assert is_rejected_if_all_are_damaged(folder, content, tmp_path / "work")


def small_checkpoint(step: int) -> Checkpoint:
    return Checkpoint("--seed 1\n", b"tokens", 3, step, 7, {"model": {"weight": torch.full((1000,), float(step))}})


def corrupt(path: Path) -> None:
    """Flip a bit in the middle of a copy of the file: other names of the same file must stay valid."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def valid_steps(folder: Path) -> set[int]:
    """Return the steps of all valid checkpoints in the folder."""
    result = set()
    for path in folder.glob("*.pt"):
        try:
            result.add(read_checkpoint(path).step)
        except CheckpointError:
            pass
    return result


def save_three_epochs(folder: Path) -> Checkpointer:
    keeper = Checkpointer(folder, keep=2)
    for step in (1, 2, 3):
        keeper.save(small_checkpoint(step), epoch=step)
    return keeper


def corrupt_written_checkpoints(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """Corrupt the checkpoints of these steps on the disk after they are written."""
    write = checkpointer.write_checkpoint

    def write_and_corrupt(path: Path, written: Checkpoint) -> None:
        write(path, written)
        if written.step in bad:
            corrupt(path)

    monkeypatch.setattr(checkpointer, "write_checkpoint", write_and_corrupt)


def test_save_that_fails_verification_replaces_and_deletes_nothing(tmp_path, monkeypatch):
    keeper = save_three_epochs(tmp_path)
    corrupt_written_checkpoints(monkeypatch, bad={4, 5, 6})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for step in (4, 5, 6):
        with pytest.raises(ResourceError, match="differs from the data written"):
            keeper.save(small_checkpoint(step), epoch=step, is_best=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert valid_steps(tmp_path) == {2, 3}
    keeper.save(small_checkpoint(7), epoch=7)
    assert valid_steps(tmp_path) == {3, 7}


def test_negative_control_without_verification_the_last_valid_one_is_deleted(tmp_path, monkeypatch):
    keeper = save_three_epochs(tmp_path)
    corrupt_written_checkpoints(monkeypatch, bad={4, 5, 6})
    monkeypatch.setattr(checkpointer, "is_whole", lambda path: True)
    for step in (4, 5, 6):
        keeper.save(small_checkpoint(step), epoch=step)
    assert valid_steps(tmp_path) == set()


def test_damaged_last_checkpoint_never_replaces_a_valid_previous_one(tmp_path):
    keeper = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        keeper.save(small_checkpoint(step))
    corrupt(tmp_path / LAST)
    keeper.save(small_checkpoint(3))
    assert read_checkpoint(tmp_path / PREVIOUS).step == 1 and read_checkpoint(tmp_path / LAST).step == 3
    corrupt(tmp_path / LAST)
    assert keeper.read_newest_sound()[1].step == 1


def test_resumed_epoch_checkpoint_is_kept_until_a_newer_one_is_valid(tmp_path, monkeypatch):
    keeper = save_three_epochs(tmp_path)
    for name in (LAST, PREVIOUS, "checkpoint_epoch_3.pt"):
        corrupt(tmp_path / name)
    path, result = keeper.read_newest_sound()
    assert (path.name, result.step) == ("checkpoint_epoch_2.pt", 2)
    corrupt_written_checkpoints(monkeypatch, bad={3, 4})
    for step in (3, 4):
        with pytest.raises(ResourceError):
            keeper.save(small_checkpoint(step), epoch=step)
        assert keeper.read_newest_sound()[1].step == 2
    keeper.save(small_checkpoint(5), epoch=3)
    keeper.save(small_checkpoint(6), epoch=4, is_best=True)
    assert valid_steps(tmp_path) == {5, 6} and read_checkpoint(tmp_path / BEST).step == 6


def test_read_error_without_damage_renames_no_checkpoint(tmp_path, monkeypatch):
    """With too many open files, or a disconnected drive, the file is readable later."""
    keeper = Checkpointer(tmp_path, keep=2)
    keeper.save(small_checkpoint(1))

    def fail(path: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(checkpoint, "load_archive", fail)
    with pytest.raises(ResourceError, match="Too many open files"):
        keeper.read_newest_sound()
    monkeypatch.undo()
    assert are_equal(keeper.read_newest_sound()[1], small_checkpoint(1))
