"""Sizes of micro-batches that ran out of memory, stored in the checkpoint folder.

With sharded weights, all ranks exit if one of them runs out of memory; the newest checkpoint then predates the failure
and does not contain it. The restarted run reads these files and uses smaller micro-batches. Each rank writes its own
file, because ranks may be on different machines.
"""

import json
from pathlib import Path

from konkanivani.base.errors import CheckpointError, ResourceError
from konkanivani.base.files import atomic_write
from konkanivani.memory.recovery import OomHistory


def write_sizes(directory: Path, rank: int, oom_history: OomHistory) -> None:
    """Write a rank's out-of-memory history; raises a ResourceError if the folder is not writable."""
    with atomic_write(_path(directory, rank)) as partial:
        # Within atomic_write, which turns an OSError into a ResourceError.
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(oom_history.state_dict()), encoding="utf-8")


def read_sizes(directory: Path, conditions: int) -> dict[int, int]:
    """Return the limits of all ranks under these conditions: whole seconds to the fewest utterances that failed."""
    known = OomHistory(conditions)
    for path in sorted(directory.glob(_path(directory, "*").name)):
        found = OomHistory(conditions)
        try:
            found.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
            known.learn(found.sizes())
        except (OSError, ValueError, AttributeError, CheckpointError, ResourceError):
            # A damaged file is ignored: without its limits, the run fails and records them again.
            continue
    return known.sizes()


def forget_sizes(directory: Path) -> None:
    """Delete the histories of all ranks."""
    for path in directory.glob(_path(directory, "*").name):
        path.unlink(missing_ok=True)


def _path(directory: Path, rank: int | str) -> Path:
    return directory / f"did_not_fit_{rank}.json"
