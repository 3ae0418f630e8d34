"""Result of one model of a comparison: a file in the model's folder and a row of the table."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from konkanivani.base.console import table_lines
from konkanivani.base.files import atomic_write
from konkanivani.base.units import MIB

KEPT = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """Result of a training run. Error rates are shares, by the best decoding method; a failed run has only a reason.

    `minutes` is the time of all training steps without validation; `times_real_time` is seconds of audio per second of
    training.
    """

    name: str
    source: str
    exit_code: int = 0
    reason: str | None = None
    trained_parameters: int | None = None
    parameters: int | None = None
    decode: str | None = None
    wer: float | None = None
    cer: float | None = None
    minutes: float | None = None
    seconds_per_step: float | None = None
    times_real_time: float | None = None
    peak_memory_mib: float | None = None
    checkpoint_mib: float | None = None


@dataclass(frozen=True)
class Kept:
    """Record in a model's folder: the conditions of its training, the trainer's JSON line, and the outcome.

    `outcome` is None during training and after an interruption.
    """

    conditions: Mapping[str, str]
    summary: Mapping[str, object] | None = None
    outcome: Outcome | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether the model was trained successfully and need not be trained again."""
        return self.outcome is not None and self.outcome.exit_code == 0

    def differences(self, conditions: Mapping[str, str]) -> list[str]:
        """Return the names of the conditions that differ from this record.

        After a failure only the model itself has to be the same: a retry may use other flags.
        """
        # A condition that the record of an older version lacks counts as different.
        names = sorted(name for name in conditions if self.conditions.get(name) != conditions[name])
        has_failed = self.outcome is not None and not self.is_finished
        return [name for name in names if not has_failed or name in ("--pretrained", "--preset")]


def write_kept(folder: Path, kept: Kept) -> None:
    """Write the record atomically into the model's folder, which is created if needed."""
    with atomic_write(folder / KEPT) as partial:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dataclasses.asdict(kept), ensure_ascii=False) + "\n", encoding="utf-8")


def read_kept(folder: Path) -> Kept | None:
    """Return the folder's record; None if it is missing or unreadable, in which case the run is resumed."""
    try:
        found = json.loads((folder / KEPT).read_text(encoding="utf-8"))
        outcome = found["outcome"] and Outcome(**found["outcome"])
        return Kept(dict(found["conditions"]), found["summary"], outcome)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def outcome_of(name: str, source: str, summary: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a successful run from its JSON line, its log and its checkpoint."""
    # The suffix of a second decoding method, for example "test_wer_joint" next to "test_wer" (greedy).
    way = [key.removeprefix("test_wer_") for key in summary if key.startswith("test_wer_")]
    by = f"_{way[0]}" if way else ""
    steps = _logged_steps(Path(summary["tensorboard"], "log.jsonl"))
    seconds = sum(step["seconds"] for step in steps)
    # Weighted by time, because steps differ in length.
    spoken = sum(step["audio_seconds_per_second"] * step["seconds"] for step in steps)
    # The log also has the steps before a resume.
    peaks = [phase["peak_mib"] or 0.0 for step in steps for phase in step["memory"]]
    return Outcome(
        name,
        source,
        trained_parameters=summary["trained_parameters"],
        parameters=summary["parameters"],
        decode=way[0] if way else "greedy",
        wer=summary[f"test_wer{by}"],
        cer=summary[f"test_cer{by}"],
        minutes=seconds / 60 if steps else None,
        seconds_per_step=seconds / len(steps) if steps else None,
        times_real_time=spoken / seconds if seconds else None,
        peak_memory_mib=max([summary["peak_memory_mib"], *peaks]),
        checkpoint_mib=os.path.getsize(summary["checkpoint"]) / MIB,
    )


def _logged_steps(path: Path) -> list[Mapping[str, Any]]:
    """Return the log's step records; an empty list if the log is unreadable, for example after the disk was full."""
    try:
        with open(path, encoding="utf-8") as file:
            return [record for record in map(json.loads, file) if record["kind"] == "step"]
    except (OSError, ValueError):
        return []


def table_of(outcomes: Sequence[Outcome]) -> str:
    """Return the table as text, one line per model; a failed model has the first sentence of its error."""
    names = max(len(name) for name in (HEADS[0], *(outcome.name for outcome in outcomes)))
    head, *lines = table_lines([HEADS, *(_cells(outcome) for outcome in outcomes)])
    for number, outcome in enumerate(outcomes):
        if outcome.reason is not None:
            # A sentence ends before a capital letter: full stops in paths and numbers do not count.
            first_sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", outcome.reason, maxsplit=1)[0]
            lines[number] = f"{outcome.name.ljust(names)}  failed: {first_sentence}"
    return "\n".join([head, *lines])


HEADS = (
    *("model", "trained, M", "of, M", "WER %", "CER %", "by", "minutes", "s/step", "x real time", "peak MiB"),
    "checkpoint MiB",
)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    def number(value: float | None, digits: int, unit: float = 1.0) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    return (
        outcome.name,
        number(outcome.trained_parameters, 1, 1e6),
        number(outcome.parameters, 1, 1e6),
        number(outcome.wer, 1, 0.01),
        number(outcome.cer, 1, 0.01),
        outcome.decode or "-",
        number(outcome.minutes, 1),
        number(outcome.seconds_per_step, 2),
        number(outcome.times_real_time, 1),
        number(outcome.peak_memory_mib, 0),
        number(outcome.checkpoint_mib, 0),
    )
