"""The sizes of micro-batches that did not fit, kept beside the checkpoints where they could not go into one.

Ranks that share a model's weights end when one of them runs out of memory, with their state as it was steps ago. The
next start reads here what to cut beforehand. Each rank writes a file of its own, on its own machine if need be.
"""

import json
from pathlib import Path

from konkanivani.base.errors import CheckpointError, ResourceError
from konkanivani.base.files import atomic_write
from konkanivani.memory.recovery import OomHistory


def write_sizes(directory: Path, rank: int, oom_history: OomHistory) -> None:
    """Writes what a rank remembers; a ResourceError where the folder cannot be written."""
    with atomic_write(_path(directory, rank)) as partial:
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(oom_history.state_dict()), encoding="utf-8")


def read_sizes(directory: Path, conditions: int) -> dict[int, int]:
    """What any rank wrote under these conditions, the fewest utterances by whole seconds; damaged files are nothing."""
    known = OomHistory(conditions)
    for path in sorted(directory.glob(_path(directory, "*").name)):
        found = OomHistory(conditions)
        try:
            found.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
            known.learn(found.sizes())
        except (OSError, ValueError, AttributeError, CheckpointError, ResourceError):
            continue
    return known.sizes()


def forget_sizes(directory: Path) -> None:
    """Removes what any rank wrote."""
    for path in directory.glob(_path(directory, "*").name):
        path.unlink(missing_ok=True)


def _path(directory: Path, rank: int | str) -> Path:
    return directory / f"did_not_fit_{rank}.json"
