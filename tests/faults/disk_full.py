"""Full or read-only disks, failing operations in the middle of a run, and folders in use by another trainer."""

import contextlib
import errno
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.errors import CheckpointError
from tests.conftest import read_log
from tests.faults.faulty_runs import Fault, FinishedRun, run_with_faults, start_with_faults, wait_for_run
from tests.faults.resumed_runs import ResumeBench, Settings, last_checkpoint, run_differences

SETTINGS = Settings()
# Global batches 4 to 6: the save at step 4 fails, the one at step 6 has disk space again.
FIRST_FULL, LAST_FULL = 4, 6
DISK_BYTES = 2**26  # enough for the disk check at startup; the ballast takes the space later
SHARES = (0.0, 0.0001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.9999)
# Create the partial file, write it, link the old checkpoint to its second name, rename the new one. A refused link
# falls back to a copy, and fsync on the folder may be impossible: these two are not failures.
OPERATIONS = [("open", 1), ("fsync", 1), ("replace", 1), ("replace", 2)]


@dataclass(frozen=True)
class FullDisk:
    """Checkpoint folder in which one save fails: `fault` for a folder and a checkpoint size in bytes."""

    name: str
    is_mounted: bool
    share: float = 0.0
    operation: tuple[str, int] | None = None

    def faults(self, folder: Path, size: int) -> list[Fault]:
        free = int(self.share * size)
        if self.operation:
            # The saves at steps 2 and 4 have equally many calls each; the first has no `previous` to create.
            name, number = self.operation
            return [("disk_error_at_save", name, number, 2)]
        if self.name == "read-only":
            return [("read_only", str(folder), FIRST_FULL, LAST_FULL)]
        if self.is_mounted:
            return [("ballast", str(folder), free, FIRST_FULL, LAST_FULL)]
        return [("file_limit", free, FIRST_FULL, LAST_FULL)]


FULL_DISKS = [
    *(FullDisk(f"no file beyond {share:.2%} of a checkpoint", False, share) for share in SHARES),
    *(FullDisk(f"disk space for {share:.2%} of a checkpoint", True, share) for share in SHARES),
    *(FullDisk(f"{name} {number} refused", False, operation=(name, number)) for name, number in OPERATIONS),
    FullDisk("read-only", False),
]


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a small disk at `folder`; raise PermissionError if this process may not mount one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        raise PermissionError(errno.EPERM, "a disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_with_full_disk(
    bench: ResumeBench, directory: Path, case: FullDisk, more: Sequence[Fault], *flags: str
) -> FinishedRun:
    size = (bench.undisturbed(SETTINGS) / "checkpoints" / LAST).stat().st_size
    faults = [*case.faults(directory / "checkpoints", size), *more]
    return run_with_faults((*bench.flags(SETTINGS, directory, 0), *flags), directory / f"output{len(more)}.txt", faults)


def full_disk_findings(bench: ResumeBench, case: FullDisk, directory: Path) -> list[str]:
    """Return the errors around one failed save: the old checkpoint must stay and resume, and training must continue."""
    results = []
    for name in ("killed", "alone"):
        run = directory / name
        disk = small_disk(run / "checkpoints", DISK_BYTES) if case.is_mounted else contextlib.nullcontext()
        with disk:
            results += (_kill_after_failed_save if name == "killed" else _run_to_the_end)(bench, case, run)
    return results


def _kill_after_failed_save(bench: ResumeBench, case: FullDisk, run: Path) -> list[str]:
    """Kill the run right after the failed save, then check the files and resume."""
    killed = run_with_full_disk(bench, run, case, [("kill", "after the save of a global batch", FIRST_FULL)])
    if killed.code != -9:
        return [f"it ended with {killed.code} before it was killed: {killed.output[-600:]}"]
    results = []
    try:
        if last_checkpoint(run).step != FIRST_FULL - 2:
            results.append(f"the last checkpoint is of step {last_checkpoint(run).step}")
    except CheckpointError as error:
        results.append(f"the old checkpoint is gone: {error}")
    results += [f"{path.name} is left" for path in (run / "checkpoints").glob("*.partial")]
    (run / "checkpoints").chmod(0o755)
    (run / "checkpoints" / "ballast").unlink(missing_ok=True)
    return results + _ignore_lost_records(case, bench.resume_errors(run))


def _run_to_the_end(bench: ResumeBench, case: FullDisk, run: Path) -> list[str]:
    """Let the run finish: expect one warning, continued training and a successful next save."""
    ended = run_with_full_disk(bench, run, case, [])
    warnings = ended.output.count("Training continues; the previous checkpoint is kept")
    # The output file is also limited, so at the smallest sizes the warning may be missing.
    has_warning = case.share > 0.01 or not case.name.startswith("no file beyond")
    if ended.code or warnings > 1 or warnings < has_warning or "Traceback" in ended.output:
        return [f"it ended with {ended.code} after {warnings} warnings: {ended.output[-600:]}"]
    return _ignore_lost_records(case, run_differences(bench.undisturbed(SETTINGS), run))


def _ignore_lost_records(case: FullDisk, differences: list[str]) -> list[str]:
    """Ignore missing log records if no file may grow: the run reports them."""
    is_log_full = case.name.startswith("no file beyond")
    return [difference for difference in differences if not (is_log_full and "the log has" in difference)]


def three_failures_findings(bench: ResumeBench, share: float, directory: Path) -> list[str]:
    """Return the errors if three saves in a row fail: exit code 6 and an unchanged old checkpoint."""
    size = int(share * (bench.undisturbed(SETTINGS) / "checkpoints" / LAST).stat().st_size)
    ended = run_with_faults(
        bench.flags(SETTINGS, directory, 0), directory / "output.txt", [("file_limit", size, FIRST_FULL, 99)]
    )
    warnings = ended.output.count("Training continues; the previous checkpoint is kept")
    if ended.code != 6 or warnings != 2 or "Traceback" in ended.output:
        return [f"it ended with {ended.code} after {warnings} warnings: {ended.output[-600:]}"]
    step = last_checkpoint(directory).step
    result = [] if step == FIRST_FULL - 2 else [f"the last checkpoint is of step {step}"]
    return result + bench.resume_errors(directory)


def full_log_findings(bench: ResumeBench, directory: Path) -> list[str]:
    """Return the errors if the disk of the logs is full for a while: only records may be missing."""
    with small_disk(directory / "runs", DISK_BYTES):
        faults = [("ballast", str(directory / "runs"), 0, FIRST_FULL, 9)]
        ended = run_with_faults(bench.flags(SETTINGS, directory, 0), directory / "output.txt", faults)
        if ended.code or "records were lost" not in ended.output or "Traceback" in ended.output:
            return [f"it ended with {ended.code}: {ended.output[-600:]}"]
        steps = [record["step"] for record in read_log(directory)]
        result = [] if steps[-1] == 17 and len(steps) < 17 else [f"the log holds the steps {steps}"]
        differences = run_differences(bench.undisturbed(SETTINGS), directory)
        return result + [difference for difference in differences if "the log has" not in difference]


def two_trainers_findings(bench: ResumeBench, directory: Path) -> list[str]:
    """Return the errors if a second trainer starts in a folder: it must name the process id of the first."""
    flags, first_output = bench.flags(SETTINGS, directory, 0), directory / "first.txt"
    lock = directory / "checkpoints" / ".lock"
    run = start_with_faults(flags, first_output)
    first = str(run.pid)
    while not (lock.exists() and lock.read_text() == first):
        assert run.poll() is None
        time.sleep(0.01)
    second_output = directory / "second.txt"
    second = run_with_faults((*flags, "--resume", "auto"), second_output)
    ended = wait_for_run(run, first_output)
    result = [] if second.code == 6 else [f"the second ended with {second.code}: {second.output[-600:]}"]
    if f"Process {first} is already training in" not in second.output:
        result.append(f"the second does not name the first: {second.output[-600:]}")
    if ended.code:
        result.append(f"the first ended with {ended.code}: {ended.output[-600:]}")
    return result + run_differences(bench.undisturbed(SETTINGS), directory)
