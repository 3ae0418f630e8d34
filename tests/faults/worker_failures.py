"""Audio workers that are killed, hang, or lack shared memory, in a run of the real script."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Corpus, read_log, write_corpus
from tests.faults.faulty_runs import Fault, run_with_faults
from tests.faults.resumed_runs import POISONED as LOST  # any utterance in the middle of an epoch
from tests.faults.resumed_runs import ResumeBench, Settings, last_checkpoint, run_differences

TIMEOUT = 30.0  # seconds, for --loader_timeout: a slow machine needs part of it for the preceding global batches
VALIDATION_UTTERANCE = "audio/valid_003.flac"


@dataclass(frozen=True)
class LostWorker:
    """Loss of a worker. `is_lost_once`: the run must succeed; otherwise the loss repeats, with exit code 6."""

    name: str
    signal_number: int
    is_lost_once: bool
    workers: int = 2
    utterance: str = LOST


LOST_WORKERS = [
    *(
        LostWorker(f"-{number}, {'once' if once else 'always'}, {workers} workers", number, once, workers)
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
        for once in (True, False)
        for workers in (1, 2, 4)
    ),
    *(LostWorker(f"stopped, {workers} workers", signal.SIGSTOP, False, workers) for workers in (1, 2)),
    *(
        LostWorker(f"-9 in validation, {'once' if once else 'always'}", signal.SIGKILL, once, 2, VALIDATION_UTTERANCE)
        for once in (True, False)
    ),
]


def lost_worker_findings(bench: ResumeBench, case: LostWorker, directory: Path) -> list[str]:
    """Return the errors after the loss of a worker."""
    directory.mkdir()
    mark = str(directory / "lost") if case.is_lost_once else ""
    fault = ("signal_worker", int(case.signal_number), case.utterance, mark)
    if case.is_lost_once:
        flags = bench.flags(Settings(), directory, case.workers)
        ended = run_with_faults(flags, directory / "output.txt", [fault])
        if ended.code or ended.output.count("Restarting them once") != 1 or case.utterance not in ended.output:
            return [f"it ended with {ended.code}: {ended.output[-600:]}"]
        return run_differences(bench.undisturbed(Settings()), directory)
    return permanent_loss_findings(bench, directory, [fault], case.workers, case.utterance)


def permanent_loss_findings(
    bench: ResumeBench,
    directory: Path,
    faults: list[Fault],
    workers: int,
    utterance: str,
    corpus: Corpus | None = None,
    code: int = 6,
) -> list[str]:
    """Return the errors: the run must end with `code` in time and name the cause; earlier steps are saved exactly."""
    own = corpus.flags() if corpus else ()
    flags = (*bench.flags(Settings(), directory, workers), *own, "--loader_timeout", str(TIMEOUT))
    ended = run_with_faults(flags, directory / "output.txt", faults)
    has_log = (directory / "runs" / "default" / "log.jsonl").exists()
    steps = [record["step"] for record in read_log(directory)] if has_log else []
    checks = {
        f"it ended with {ended.code}: {ended.output[-800:]}": ended.code == code and "Traceback" not in ended.output,
        "the utterance is not named": utterance in "".join(ended.output.splitlines()[-3:]),
        "the steps before are not saved": bool(steps) and last_checkpoint(directory).step == steps[-1],
    }
    return [finding for finding, is_right in checks.items() if not is_right] + bench.resume_errors(directory)


def pipe_findings(bench: ResumeBench, directory: Path) -> list[str]:
    """Return the errors if an audio file becomes a pipe without a writer.

    It is opened without blocking, so that nothing hangs: the row is rejected like any invalid one.
    """
    directory.mkdir()
    corpus = write_corpus(directory / "tones", {"train": 26, "valid": 5, "test": 5})
    path = corpus.directory / LOST
    path.unlink()
    os.mkfifo(path)
    faults: list[Fault] = [("accept_pipes_as_files",)]
    return permanent_loss_findings(bench, directory, faults, 2, LOST, corpus, code=3)


def shared_memory_findings(bench: ResumeBench, directory: Path, kilobytes: int) -> list[str]:
    """Return the errors if /dev/shm is too small: the run must say so, and equal one that loads without workers."""
    directory.mkdir()
    flags = (*bench.flags(Settings(), directory, 2), "--loader_timeout", str(TIMEOUT))
    ended = run_with_faults(flags, directory / "output.txt", [("small_shared_memory", kilobytes)])
    checks = {
        f"it ended with {ended.code}: {ended.output[-800:]}": ended.code == 0 and "Traceback" not in ended.output,
        "it does not say that shared memory is too small": "--shm-size" in ended.output,
    }
    wrong = [finding for finding, is_right in checks.items() if not is_right]
    return wrong or run_differences(bench.undisturbed(Settings()), directory)
