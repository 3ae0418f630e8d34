"""A process that kills itself at a chosen instant of a save. The trainer has no hook for it and needs none.

Python calls audit hooks before it creates, changes or removes a name; writing and fsync are wrapped. A kill after one
of these operations equals a kill before the next: nothing else happens in between.
"""

import builtins
import io
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from konkanivani.checkpoints import checkpoint
from konkanivani.checkpoints.checkpointer import BEST, LAST, PREVIOUS

PARTIAL = LAST + ".partial"
AFTER_HALF = "after half of the bytes"
BEST_NAME = re.escape(BEST)
EPOCH = r"checkpoint_epoch_\d+\.pt"
# Index of the argument that is the created, changed or removed name, by audited operation.
NAME_ARGUMENT = {"open": 0, "os.link": 1, "os.rename": 1, "os.remove": 0}


@dataclass(frozen=True)
class Point:
    """Instant before an operation on a file of the checkpoint folder; `name` is a regular expression, "" the folder.

    A write ends after `share` of the bytes of checkpoint_last.pt; `occurrence` counts within one save. `is_published`:
    whether checkpoint_last.pt is already renamed. `has_epoch`: whether the epoch checkpoint exists, in a save at the
    end of an epoch.
    """

    label: str
    operation: Literal["open", "write", "fsync", "os.link", "os.rename", "os.remove"]
    name: str = re.escape(PARTIAL)
    share: float = 0.0
    occurrence: int = 1
    is_published: bool = False
    has_epoch: bool = False


def _link_points(what: str, name: str, has_epoch: bool) -> tuple[Point, Point, Point]:
    """Return the three instants of giving a file a second name."""
    operations = (
        (f"{what}: before a leftover link is removed", "os.remove", rf"{name}\.partial"),
        (f"{what}: before the link", "os.link", rf"{name}\.partial"),
        (f"{what}: after the link, before the rename", "os.rename", name),
    )
    first, second, third = (Point(*operation, has_epoch=has_epoch) for operation in operations)
    return first, second, third


POINTS = (
    Point("before the file is opened", "open"),
    Point("before the first byte", "write"),
    Point("after 1 % of the bytes", "write", share=0.01),
    Point(AFTER_HALF, "write", share=0.5),
    Point("after 99 % of the bytes", "write", share=0.99),
    Point("before the file's fsync", "fsync"),
    *_link_points("epoch (after the file's fsync)", EPOCH, has_epoch=False),
    *_link_points("best", BEST_NAME, has_epoch=True),
    *_link_points("previous", re.escape(PREVIOUS), has_epoch=True),
    Point("last: before its rename", "os.rename", re.escape(LAST), has_epoch=True),
    Point("last: after its rename, before the folder's fsync", "fsync", "", is_published=True),
    Point("before an old epoch is removed", "os.remove", EPOCH, is_published=True),
    Point("between two old epochs' removals", "os.remove", EPOCH, occurrence=2, is_published=True),
)

# The first kill leaves the file under its working name and as an epoch; overwriting it would tear the epoch.
CRITICAL_SEQUENCE = tuple(point for point in POINTS if point.label in ("best: before the link", AFTER_HALF))[::-1]


@dataclass
class SaveKiller:
    """Audit hook that kills its process at `point`, after `skip` passes."""

    point: Point
    skip: int
    folder: str = ""
    passed: int = 0
    in_this_save: int = 0

    def install(self, folder: Path) -> None:
        """Watch the operations of this process in the checkpoint folder from now on."""
        self.folder = os.path.realpath(folder)
        sys.addaudithook(self._on_audit_event)
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            self._check_operation("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        os.fsync = fsync
        checkpoint.open = self._open

    def _on_audit_event(self, event: str, arguments: tuple) -> None:
        if event in NAME_ARGUMENT and isinstance(path := arguments[NAME_ARGUMENT[event]], str | os.PathLike):
            self._check_operation(event, os.fspath(path))

    def _check_operation(self, operation: str, path: str | bytes) -> None:
        path = os.path.realpath(os.fsdecode(path))
        if path != self.folder and os.path.dirname(path) != self.folder:
            return
        name = "" if path == self.folder else os.path.basename(path)
        if (operation, name) == ("open", PARTIAL):
            self.in_this_save = 0
        if operation == self.point.operation and re.fullmatch(self.point.name, name):
            self.in_this_save += 1
            if self.in_this_save == self.point.occurrence and self._is_due():
                kill_self()

    def _is_due(self) -> bool:
        self.passed += 1
        return self.passed > self.skip

    def _open(self, path: Path, mode: str) -> io.BufferedIOBase:
        file = builtins.open(path, mode)
        if mode == "rb" or self.point.operation != "write" or path.name != PARTIAL or not self._is_due():
            return file
        last = path.with_name(LAST)
        return _KilledWriter(file.detach(), int(self.point.share * last.stat().st_size) if last.exists() else 0)


class _KilledWriter(io.BufferedWriter):
    """File whose writer dies after `most` bytes."""

    def __init__(self, raw: io.RawIOBase, most: int) -> None:
        super().__init__(raw)
        self.remaining_bytes = most

    def write(self, data: bytes) -> int:
        data = memoryview(data).cast("B")
        if len(data) >= self.remaining_bytes:
            super().write(data[: self.remaining_bytes])
            self.flush()
            kill_self()
        self.remaining_bytes -= len(data)
        return super().write(data)


def kill_self() -> NoReturn:
    """End this process with SIGKILL, as the kernel does when memory runs out, or a scheduler after its grace period."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")
