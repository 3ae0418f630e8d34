"""`log.jsonl`: all fields of steps, skips, validations and rehearsals; non-finite numbers are null."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from konkanivani.base.files import atomic_append, atomic_replace, sync_file
from konkanivani.training.logs.records import (
    FROM_NOTHING,
    Record,
    RehearsalRecord,
    Resumed,
    SkipRecord,
    StepRecord,
    ValidationRecord,
)

LOG_NAME = "log.jsonl"
KINDS = {StepRecord: "step", SkipRecord: "skip", ValidationRecord: "validation", RehearsalRecord: "rehearsal"}


class JsonLinesSink:
    """Writer of `log.jsonl`: one JSON object per line, "kind" first; numbers read back as the same floats."""

    def __init__(self, path: Path, resumed: Resumed):
        self.name = str(path)
        self._path = path
        self._resumed = resumed
        self._is_cut = False

    def open(self) -> None:
        """Remove incomplete lines and lines after the resumed position; until that succeeds nothing is appended."""
        if not self._is_cut:
            if self._path.is_file():
                self._cut()
            self._is_cut = True

    def write(self, record: Record) -> None:
        kind = KINDS.get(type(record))
        if kind is None:
            return
        self.open()
        # allow_nan=False: Python's NaN and Infinity are not JSON, and other readers refuse them.
        line = json.dumps({"kind": kind} | _finite(asdict(record)), ensure_ascii=False, allow_nan=False)
        atomic_append(self._path, line.encode() + b"\n")

    def sync(self) -> None:
        sync_file(self._path)

    def close(self) -> None: ...

    def _cut(self) -> None:
        # Line by line into a new file: constant memory, and a kill leaves the old log intact.
        with atomic_replace(self._path) as beside, open(self._path, "rb") as old, open(beside, "wb") as new:
            # A last line without a newline may still be a complete record.
            new.writelines(line.rstrip(b"\n") + b"\n" for line in old if self._is_kept(line))

    def _is_kept(self, line: bytes) -> bool:
        """Return whether a line is a record of up to the resumed position; incomplete lines are not."""
        if self._resumed == FROM_NOTHING:
            return False
        try:
            record = json.loads(line)
            # Skips and validations share their step with the records around them, so their own counters decide.
            match record.get("kind"):
                case "skip" if record["skipped_steps"] > self._resumed.skipped_steps:
                    return False
                case "validation" if record["epoch"] > self._resumed.epochs_finished:
                    return False
            return isinstance(record["step"], int) and record["step"] <= self._resumed.step
        # Valid JSON that is not a record, e.g. a number, a list, or deep nesting, is dropped too.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False


def _finite(value: Any) -> Any:
    """Return the value with None for each non-finite number, which JSON cannot represent."""
    match value:
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value
