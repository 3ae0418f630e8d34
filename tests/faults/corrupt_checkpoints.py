"""Checkpoints that were sound and are not any more: cut short, or with a bit flipped; and what is made of them."""

import contextlib
import io
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.base.errors import CheckpointError
from konkanivani.training.checkpoint.checkpoint import Checkpoint, read_checkpoint
from konkanivani.training.checkpoint.checkpointer import LAST, Checkpointer


@dataclass(frozen=True)
class Damage:
    """What a file has become, and in words how."""

    name: str
    content: bytes


def truncations(whole: bytes) -> Iterator[Damage]:
    """The file cut to nothing, one byte, half, all but a ten-thousandth, all but a byte."""
    sizes = {"0 bytes": 0, "1 byte": 1, "50 %": len(whole) // 2, "99.99 %": int(0.9999 * len(whole))}
    for name, size in {**sizes, "all but a byte": len(whole) - 1}.items():
        yield Damage(f"cut to {name}", whole[:size])


def flips(whole: bytes, count: int, seed: int) -> Iterator[Damage]:
    """The file with one bit flipped, at so many places of it, evenly drawn and never the same."""
    draw = random.Random(seed)
    for place in draw.sample(range(8 * len(whole)), count):
        yield flip(whole, place)


def flip(whole: bytes, place: int) -> Damage:
    flipped = bytearray(whole)
    flipped[place // 8] ^= 1 << place % 8
    return Damage(f"bit {place} flipped", bytes(flipped))


def same(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints hold the same, every tensor bit for bit."""
    return _plain(vars(one)) == _plain(vars(other))


def _plain(value: object) -> object:
    """The value with tensors as their bytes, which are equal where NaN is not."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def resume_from(folder: Path, damage: Damage, last: Checkpoint, before: Checkpoint) -> str:
    """What becomes of a resume in a copy of a run's folder whose newest checkpoint is damaged, in a word.

    `detected`: it was moved aside by name and the newest of the others, `before`, is used; `harmless`: it is loaded,
    and is what was saved. Anything else is a sentence.
    """
    (folder / LAST).write_bytes(damage.content)
    with contextlib.redirect_stdout(io.StringIO()):
        path, found = Checkpointer(folder, keep=2).read_newest_sound()
    aside = folder / f"{LAST}.damaged"
    if path.name == LAST:
        return "harmless" if same(found, last) else f"{damage.name}: read wrongly"
    if not same(found, before):
        return f"{damage.name}: {path.name} was used"
    if not aside.exists() or aside.read_bytes() != damage.content or (folder / LAST).exists():
        return f"{damage.name}: not moved aside"
    aside.unlink()
    return "detected"


def try_damages(checkpoints: Path, damages: Iterator[Damage], work: Path) -> Counter[str]:
    """How often each came of it, over all the damages to a run's newest checkpoint."""
    shutil.copytree(checkpoints, work)
    others = [read_checkpoint(path) for path in work.glob("checkpoint_*.pt") if path.name != LAST]
    last, before = read_checkpoint(work / LAST), max(others, key=lambda other: other.step)
    return Counter(resume_from(work, damage, last, before) for damage in damages)


def refuses_where_all_are_bad(checkpoints: Path, content: bytes, work: Path) -> bool:
    """Whether a folder whose checkpoints are all damaged is refused, twice, every file still there under some name."""
    shutil.copytree(checkpoints, work)
    names = [path.name for path in work.glob("checkpoint_*.pt")]
    for name in names:
        (work / name).unlink()  # some are one file under two names
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
