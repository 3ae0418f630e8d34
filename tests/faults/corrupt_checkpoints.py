"""Checkpoints that are truncated or have a flipped bit, and the outcome of resuming from them."""

import contextlib
import io
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST, Checkpointer
from konkanivani.errors import CheckpointError


@dataclass(frozen=True)
class Damage:
    """Damaged content of a file and the name of the damage."""

    name: str
    content: bytes


def truncations(whole: bytes) -> Iterator[Damage]:
    """Yield the file truncated to nothing, one byte, half, 99.99 %, and all but one byte."""
    sizes = {"0 bytes": 0, "1 byte": 1, "50 %": len(whole) // 2, "99.99 %": int(0.9999 * len(whole))}
    for name, size in {**sizes, "all but a byte": len(whole) - 1}.items():
        yield Damage(f"cut to {name}", whole[:size])


def bit_flips(whole: bytes, count: int, seed: int) -> Iterator[Damage]:
    """Yield the file with one flipped bit, at `count` distinct positions, uniformly drawn."""
    draw = random.Random(seed)
    for place in draw.sample(range(8 * len(whole)), count):
        yield flip_bit(whole, place)


def flip_bit(whole: bytes, place: int) -> Damage:
    flipped = bytearray(whole)
    flipped[place // 8] ^= 1 << place % 8
    return Damage(f"bit {place} flipped", bytes(flipped))


def are_equal(one: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two checkpoints are equal, every tensor bit for bit."""
    return _comparable(vars(one)) == _comparable(vars(other))


def _comparable(value: object) -> object:
    """Return the value with tensors as their bytes: NaN is not equal to itself, its bytes are."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: _comparable(part) for name, part in value.items()}
    return [_comparable(part) for part in value] if isinstance(value, list | tuple) else value


def resume_from_damaged(folder: Path, damage: Damage, last: Checkpoint, before: Checkpoint) -> str:
    """Return the result of a resume in a copy of a run's folder whose newest checkpoint is damaged.

    `detected`: the file was renamed and the newest of the others, `before`, was used; `harmless`: it was loaded and
    equals the saved one. Any other outcome is a sentence on the error.
    """
    (folder / LAST).write_bytes(damage.content)
    with contextlib.redirect_stdout(io.StringIO()):
        path, result = Checkpointer(folder, keep=2).read_newest_sound()
    aside = folder / f"{LAST}.damaged"
    if path.name == LAST:
        return "harmless" if are_equal(result, last) else f"{damage.name}: read wrongly"
    if not are_equal(result, before):
        return f"{damage.name}: {path.name} was used"
    if not aside.exists() or aside.read_bytes() != damage.content or (folder / LAST).exists():
        return f"{damage.name}: not moved aside"
    aside.unlink()
    return "detected"


def count_resume_outcomes(checkpoints: Path, damages: Iterator[Damage], work: Path) -> Counter[str]:
    """Count the results over all damages to a run's newest checkpoint."""
    shutil.copytree(checkpoints, work)
    others = [read_checkpoint(path) for path in work.glob("checkpoint_*.pt") if path.name != LAST]
    last, before = read_checkpoint(work / LAST), max(others, key=lambda other: other.step)
    return Counter(resume_from_damaged(work, damage, last, before) for damage in damages)


def is_rejected_if_all_are_damaged(checkpoints: Path, content: bytes, work: Path) -> bool:
    """Return whether a folder of damaged checkpoints is rejected twice, with every file kept under some name."""
    shutil.copytree(checkpoints, work)
    names = [path.name for path in work.glob("checkpoint_*.pt")]
    for name in names:
        (work / name).unlink()  # some are hard links to one file
        (work / name).write_bytes(content)
    for _ in range(2):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                Checkpointer(work, keep=2).read_newest_sound()
        except CheckpointError as error:
            refused = "--fresh" in str(error)
        else:
            return False
    return refused and sorted(p.name for p in work.glob("*.damaged")) == sorted(f"{name}.damaged" for name in names)
