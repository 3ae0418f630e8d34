"""Invariant 8: after a kill during a save, a truncation or a bit flip, the newest sound checkpoint is found."""

import dataclasses
import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints import checkpointer
from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.errors import CheckpointError
from tests.faults.save_killer import POINTS, SaveKiller
from tests.timeouts import PROCESS_TIMEOUT


def checkpoint(step: int) -> Checkpoint:
    state = {"weight": torch.full((1000,), float(step)), "step": step}
    return Checkpoint("--seed 1\n", b"tokens", 3, step, 7, {"model": state})


def is_sound(result: Checkpoint) -> bool:
    """Return whether all parts of the checkpoint were written by one save."""
    state = result.states["model"]
    return state["step"] == result.step and bool((state["weight"] == result.step).all())


def save_three_times(folder: Path, prepare: Callable[[Path], None]) -> int | None:
    """Save two steps, then a third in a child process prepared to fail; return the exit code of the child."""
    for step in (1, 2):
        Checkpointer(folder, keep=2, step_of_last=step - 1).save(checkpoint(step), epoch=step, is_best=True)

    def save() -> None:
        prepare(folder)
        Checkpointer(folder, keep=1, step_of_last=2).save(checkpoint(3), epoch=3, is_best=True)

    process = multiprocessing.get_context("fork").Process(target=save)
    process.start()
    process.join(PROCESS_TIMEOUT)
    return process.exitcode


def check_sound(folder: Path, step: int, name: str = "checkpoint_last.pt") -> None:
    """Assert that the newest sound checkpoint has this step and name, and that every `*.pt` file is complete."""
    path, result = Checkpointer(folder, keep=2).read_newest_sound()
    assert (path.name, result.step) == (name, step)
    assert all(is_sound(read_checkpoint(path)) for path in folder.glob("*.pt"))


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.label)
def test_kill_at_any_point_of_save_leaves_sound_checkpoint(tmp_path, point):
    assert save_three_times(tmp_path, SaveKiller(point, 0).install) == -signal.SIGKILL
    if point.has_epoch:
        check_sound(tmp_path, 3, "checkpoint_epoch_3.pt")
    else:
        check_sound(tmp_path, 3 if point.is_published else 2)


def test_negative_control_save_in_place_leaves_damaged_checkpoint(tmp_path, monkeypatch):
    def write_in_place(path: Path, saved: Checkpoint) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        write_checkpoint(path.with_suffix(""), saved)

    patch_write = partial(monkeypatch.setattr, checkpointer, "write_checkpoint", write_in_place)
    assert save_three_times(tmp_path, lambda _: patch_write()) == -signal.SIGXFSZ
    with pytest.raises(AssertionError):
        check_sound(tmp_path, 2)


def test_save_after_kill_between_renames_leaves_no_extra_file(tmp_path):
    for step in (1, 2):
        Checkpointer(tmp_path, keep=2).save(checkpoint(step))
    last, previous = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_previous.pt"
    previous.unlink()
    previous.hardlink_to(last)  # the state after a kill before the last rename
    Checkpointer(tmp_path, keep=2, step_of_last=2).save(checkpoint(3))
    assert sorted(tmp_path.iterdir()) == [last, previous]
    assert [read_checkpoint(path).step for path in (last, previous)] == [3, 2]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9999])
def test_truncated_checkpoint_falls_back_to_previous(tmp_path, share, capsys):
    checkpointer_ = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        checkpointer_.save(checkpoint(step))
    last = tmp_path / "checkpoint_last.pt"
    os.truncate(last, int(last.stat().st_size * share))
    path, result = checkpointer_.read_newest_sound()
    assert (path.name, result.step) == ("checkpoint_previous.pt", 1)
    assert "checkpoint_last.pt" in capsys.readouterr().out
    assert (tmp_path / "checkpoint_last.pt.damaged").exists()


def test_flipped_bit_is_detected_or_harmless(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    Checkpointer(tmp_path, keep=2).save(checkpoint(5))
    whole = path.read_bytes()
    draw, detected = random.Random(0), 0
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            result = read_checkpoint(path)
        except CheckpointError:
            detected += 1
        else:
            assert is_sound(result) and dataclasses.replace(result, states={}) == dataclasses.replace(
                checkpoint(5), states={}
            )
    assert detected > 75


def test_negative_control_torch_load_accepts_flipped_bit(tmp_path):
    """Without the CRC check, training would use the flipped bit in the middle of the weights."""
    path = tmp_path / "checkpoint_last.pt"
    Checkpointer(tmp_path, keep=2).save(checkpoint(5))
    flipped = bytearray(path.read_bytes())
    middle = flipped.index(torch.full((8,), 5.0).numpy().tobytes()) + 1000
    flipped[middle] ^= 1
    path.write_bytes(flipped)
    loaded = torch.load(path, weights_only=True)["states"]["model"]["weight"]  # noqa: TID251
    assert not torch.equal(loaded, torch.full((1000,), 5.0))
    with pytest.raises(CheckpointError, match="CRC"):
        read_checkpoint(path)


def test_all_checkpoints_damaged_raises_error(tmp_path):
    checkpointer_ = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        checkpointer_.save(checkpoint(step), epoch=step, is_best=True)
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="None of the 5"):
        checkpointer_.read_newest_sound()
    assert Path(tmp_path / "checkpoint_last.pt.damaged").exists()


def test_interrupted_write_raises_keyboard_interrupt_and_leaves_no_file(tmp_path, monkeypatch):
    def interrupted(_record: object, _file: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")  # raised by the torch writer while it closes the archive

    monkeypatch.setattr("konkanivani.checkpoints.checkpoint.torch.save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "checkpoint_last.pt", checkpoint(1))
    assert list(tmp_path.iterdir()) == []
