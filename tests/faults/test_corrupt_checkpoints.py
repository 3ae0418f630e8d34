"""Any changed bit of a checkpoint is detected or harmless, and one sound checkpoint is kept."""

import shutil
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints import checkpoint, checkpointer
from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import BEST, LAST, PREVIOUS, Checkpointer
from konkanivani.errors import CheckpointError, ResourceError
from tests.conftest import mark_full
from tests.faults.corrupt_checkpoints import flip, flips, refuses_where_all_are_bad, same, truncations, try_damages

FLIPS = 40  # benchmarks/faults.py --parts files --full: 1,000


@pytest.fixture
def folder(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run / "checkpoints", tmp_path / "checkpoints"))


def test_the_newest_checkpoint_of_a_real_run_cut_short_is_named_moved_aside_and_the_one_before_used(folder, tmp_path):
    found = try_damages(folder, truncations((folder / LAST).read_bytes()), tmp_path / "work")
    assert found == {"detected": 5}


def test_a_bit_flipped_anywhere_is_detected_or_harmless(folder, tmp_path):
    found = try_damages(folder, flips((folder / LAST).read_bytes(), FLIPS, seed=1), tmp_path / "work")
    assert set(found) <= {"detected", "harmless"} and found["detected"] > FLIPS / 2, found


@pytest.mark.parametrize("bits", [1, *mark_full(8)])
def test_every_byte_of_the_list_of_records_flipped_is_detected_or_harmless(bits, tmp_path):
    """The directory holds the offsets and formats; random flips in a run's weights seldom hit it."""
    saver = Checkpointer(tmp_path / "run", keep=2)
    for step in (1, 2):
        saver.save(small(step))
    content = (tmp_path / "run" / LAST).read_bytes()
    ends = content.index(b"PK\x01\x02")  # directory of records at the end of the zip
    assert len(content) - ends < 2000
    places = (8 * byte + (byte + bit) % 8 for byte in range(ends, len(content)) for bit in range(bits))
    damages = (flip(content, place) for place in places)
    found = try_damages(tmp_path / "run", damages, tmp_path / "work")
    assert set(found) == {"detected", "harmless"}, found


def test_negative_control_without_the_sums_a_flipped_bit_is_read_wrongly(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("konkanivani.checkpoints.checkpoint._check_sums", lambda archive: None)
    found = try_damages(folder, flips((folder / LAST).read_bytes(), FLIPS, seed=1), tmp_path / "work")
    assert any("read wrongly" in outcome for outcome in found), found


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 5000], ids=["empty", "begun", "zeros"])
def test_where_all_are_bad_it_is_refused_however_often_it_is_started(folder, tmp_path, content):
    assert refuses_where_all_are_bad(folder, content, tmp_path / "work")


def small(step: int) -> Checkpoint:
    return Checkpoint("--seed 1\n", b"tokens", 3, step, 7, {"model": {"weight": torch.full((1000,), float(step))}})


def rot(path: Path) -> None:
    """Flip a bit in the middle of the file, in a copy: the same file may be sound under another name."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def sound_steps(folder: Path) -> set[int]:
    """Return the steps of all sound checkpoints in the folder."""
    found = set()
    for path in folder.glob("*.pt"):
        try:
            found.add(read_checkpoint(path).step)
        except CheckpointError:
            pass
    return found


def of_three_epochs(folder: Path) -> Checkpointer:
    keeper = Checkpointer(folder, keep=2)
    for step in (1, 2, 3):
        keeper.save(small(step), epoch=step)
    return keeper


def rotting_disk(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """Corrupt the checkpoints of these steps on the disk after they are written."""
    write = checkpointer.write_checkpoint

    def write_and_rot(path: Path, written: Checkpoint) -> None:
        write(path, written)
        if written.step in bad:
            rot(path)

    monkeypatch.setattr(checkpointer, "write_checkpoint", write_and_rot)


def test_a_save_that_is_not_on_the_disk_as_written_replaces_and_deletes_nothing(tmp_path, monkeypatch):
    keeper = of_three_epochs(tmp_path)
    rotting_disk(monkeypatch, bad={4, 5, 6})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for step in (4, 5, 6):
        with pytest.raises(ResourceError, match="differs from the data written"):
            keeper.save(small(step), epoch=step, is_best=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert sound_steps(tmp_path) == {2, 3}
    keeper.save(small(7), epoch=7)
    assert sound_steps(tmp_path) == {3, 7}


def test_negative_control_without_reading_back_the_last_sound_one_is_deleted(tmp_path, monkeypatch):
    keeper = of_three_epochs(tmp_path)
    rotting_disk(monkeypatch, bad={4, 5, 6})
    monkeypatch.setattr(checkpointer, "is_whole", lambda path: True)
    for step in (4, 5, 6):
        keeper.save(small(step), epoch=step)
    assert sound_steps(tmp_path) == set()


def test_a_damaged_last_never_takes_the_place_of_a_sound_previous(tmp_path):
    keeper = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        keeper.save(small(step))
    rot(tmp_path / LAST)
    keeper.save(small(3))
    assert read_checkpoint(tmp_path / PREVIOUS).step == 1 and read_checkpoint(tmp_path / LAST).step == 3
    rot(tmp_path / LAST)
    assert keeper.read_newest_sound()[1].step == 1


def test_a_run_that_goes_on_from_an_old_epoch_keeps_it_until_there_is_a_newer_sound_one(tmp_path, monkeypatch):
    keeper = of_three_epochs(tmp_path)
    for name in (LAST, PREVIOUS, "checkpoint_epoch_3.pt"):
        rot(tmp_path / name)
    path, found = keeper.read_newest_sound()
    assert (path.name, found.step) == ("checkpoint_epoch_2.pt", 2)
    rotting_disk(monkeypatch, bad={3, 4})
    for step in (3, 4):
        with pytest.raises(ResourceError):
            keeper.save(small(step), epoch=step)
        assert keeper.read_newest_sound()[1].step == 2
    keeper.save(small(5), epoch=3)
    keeper.save(small(6), epoch=4, is_best=True)
    assert sound_steps(tmp_path) == {5, 6} and read_checkpoint(tmp_path / BEST).step == 6


def test_what_is_no_damage_moves_no_checkpoint_aside(tmp_path, monkeypatch):
    """Too many open files, or a disconnected drive: the file is readable later."""
    keeper = Checkpointer(tmp_path, keep=2)
    keeper.save(small(1))

    def fail(path: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(checkpoint, "load_archive", fail)
    with pytest.raises(ResourceError, match="Too many open files"):
        keeper.read_newest_sound()
    monkeypatch.undo()
    assert same(keeper.read_newest_sound()[1], small(1))
