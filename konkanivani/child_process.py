"""Child processes: commands (`konkanivani.train`, `konkanivani.plan`, the comparison of models), and tracing workers.

The child of a command has its own signal handlers, which save and end the process, and its own CUDA context, whose
memory is free again when it ends: neither suits a notebook's kernel. A notebook's kernel also must not fork after it
has used CUDA or traced a model, as PyTorch's autograd then fails in the forked process.
"""

import contextlib
import gc
import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from konkanivani.config import TrainConfig
from konkanivani.errors import (
    CheckpointError,
    DataError,
    Interrupted,
    KonkaniVaniError,
    NumericsError,
    ResourceError,
    UsageError,
    defer_signals,
    stopping_signals,
)
from konkanivani.flags import command_words
from konkanivani.worker_processes import WorkerPool, begin_worker, request_parent_death_signal, worker_pool

KEPT_LINES = 50  # of each output stream
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
KILLED = 128 + signal.SIGKILL
KILLED_TEXT = "Killed (SIGKILL), perhaps by the system for lack of memory."
LINE_OF_BAR = re.compile(r"\s*\d+%\|")  # a progress bar of tqdm
# A warning of Python, whose source line follows indented, such as "a.py:3: UserWarning: text".
LINE_OF_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")


@dataclass(frozen=True)
class ProcessResult:
    """Result of a training process: exit code and the last lines of stdout and stderr."""

    exit_code: int
    output: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def is_interrupted(self) -> bool:
        """Return whether a signal stopped the run."""
        # Exit code 1: Ctrl-C while the interpreter starts, before it has a handler.
        in_start = self.exit_code == 1 and any(line.startswith("KeyboardInterrupt") for line in self.errors)
        return self.exit_code in INTERRUPTED or in_start

    @property
    def reason(self) -> str:
        """Return the last error of a failed run in one line, for a table."""
        if self.exit_code == KILLED:
            return KILLED_TEXT
        lines = [line for line in self.errors if line.strip() and not LINE_OF_BAR.match(line)]
        start = len(lines) - 1
        # Keep an indented list with the lines around it.
        while start > 0 and "  " in (lines[start][:2], lines[start - 1][:2]):
            start -= 1
        last_lines = lines[max(0, start) :]
        # Of a traceback, only the exception itself.
        if last_lines and last_lines[0].startswith("Traceback"):
            last_lines = last_lines[-1:]
        return " ".join(line.strip() for line in last_lines) or f"Exit code {self.exit_code}, without a message."

    @property
    def message(self) -> str:
        """Return all errors of a failed run, a line each: its lines on stderr after the last progress bar.

        Warnings are left out. Of a mistyped value, whose error is printed in a box, only the sentence is returned.
        """
        error_lines: list[str] = []
        for line in self.errors:
            if LINE_OF_BAR.match(line) or LINE_OF_WARNING.match(line):
                # Errors end the run: lines before a progress bar or a warning are not errors.
                error_lines = []
            elif line.strip() and (error_lines or not line.startswith("  ")):
                error_lines.append(line)
        if any(line.startswith("Traceback") for line in error_lines) or self.exit_code == KILLED or not error_lines:
            return self.reason
        if error_lines[0].startswith("╭"):
            inside = [line.strip("│ ") for line in error_lines[1:]]
            rule = next((number for number, line in enumerate(inside) if set(line) <= set("─╰╯")), len(inside))
            return " ".join(inside[:rule])
        return "\n".join(error_lines)


class CommandRunner:
    """Runner of `konkanivani COMMAND`, one process at a time.

    A process has its own session, so that Ctrl-C reaches only this process, which forwards it once. A training run then
    saves and exits; it also does if this process is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._signal_number = 0

    def install(self) -> None:
        """Install handlers that forward stop signals."""
        for number in stopping_signals():
            signal.signal(number, self._forward_signal)

    @contextlib.contextmanager
    def forwarding_interrupts(self) -> Iterator[None]:
        """Forward Ctrl-C, or the interrupt of a notebook, to the process; no KeyboardInterrupt is raised in the block.

        Outside of the main thread this has no effect: Python raises KeyboardInterrupt in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A handler, because KeyboardInterrupt may also be raised before the process is known or while it is joined.
        before = signal.signal(signal.SIGINT, self._forward_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self._signal_number:
            raise Interrupted("Stopped by a signal; run the same command again to resume.", self._signal_number)

    def run(self, command: str, arguments: Sequence[str], *, is_result_shown: bool = True) -> ProcessResult:
        """Run the command to its end and forward its output to stderr; that on stdout only if `is_result_shown`."""
        process = subprocess.Popen(
            [sys.executable, "-m", "konkanivani", command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            preexec_fn=_prepare_child,
        )
        last_lines = deque[str](maxlen=KEPT_LINES), deque[str](maxlen=KEPT_LINES)
        copies = (process.stdout, last_lines[0], is_result_shown), (process.stderr, last_lines[1], True)
        threads = [threading.Thread(target=copy_output, args=copy, daemon=True) for copy in copies]
        with defer_signals():  # threads inherit the blocked mask, so that signals reach the main thread only
            # Deferred, so that a signal is sent once: two would end the process without saving.
            self._process = process
            if self._signal_number:  # it arrived before the process existed
                process.send_signal(self._signal_number)
            for thread in threads:
                thread.start()
        code = process.wait()
        for thread in threads:
            thread.join()
        output, errors = map(tuple, last_lines)
        # A negative code is the signal that ended the process; shells report 128 + signal.
        return ProcessResult(code if code >= 0 else 128 - code, output, errors)

    def _forward_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal_number = self._signal_number or number
        if self._process is not None:
            self._process.send_signal(number)


def _prepare_child() -> None:
    request_parent_death_signal(signal.SIGTERM)
    # Until `prepare_process`: while the interpreter starts, a KeyboardInterrupt can be lost in a callback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def copy_output(stream: io.TextIOWrapper, last_lines: deque[str], is_shown: bool = True) -> None:
    """Keep the last lines of a stream, and copy all to stderr if `is_shown`."""
    # Carriage returns must stay: with them a progress bar redraws its line instead of adding one.
    stream.reconfigure(newline="")
    for line in stream:
        last_lines.append(line.rstrip("\r\n"))
        if not is_shown:
            continue
        # The copy continues without a reader of stderr: a full pipe would block the run.
        with contextlib.suppress(OSError, ValueError):
            print(line, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class TrainingSummary:
    """Result of a training run.

    Args:
        is_interrupted: Ctrl-C or a signal stopped the run, which has saved; train again with `resume="auto"`.
        checkpoint: the best checkpoint by validation, or the last one; None if interrupted before the first one.
        tensorboard: folder of the run's logs; None if interrupted.
        steps, epochs, parameters: of the model; None if interrupted.
        best_valid_score: lowest validation score, if there is a validation manifest.
        test_wer, test_cer: greedy decoding of the test manifest, as fractions; None without one.
        scores: all numbers of the run's last line, by name, such as test_wer_joint and peak_memory_mib.
    """

    is_interrupted: bool
    checkpoint: Path | None
    tensorboard: Path | None = None
    steps: int | None = None
    epochs: int | None = None
    parameters: int | None = None
    best_valid_score: float | None = None
    test_wer: float | None = None
    test_cer: float | None = None
    scores: dict[str, float | None] | None = None


ERRORS = {error.exit_code: error for error in (UsageError, DataError, CheckpointError, NumericsError, ResourceError)}
ERRORS[KILLED] = ResourceError


def run_command(command: str, arguments: Sequence[str], *, is_result_shown: bool = True) -> ProcessResult:
    """Run `konkanivani COMMAND` in a child process that gets Ctrl-C; raise the error that ended it, if any."""
    runner = CommandRunner()
    with runner.forwarding_interrupts():
        ended = runner.run(command, arguments, is_result_shown=is_result_shown)
    if ended.exit_code and not ended.is_interrupted:
        raise ERRORS.get(ended.exit_code, KonkaniVaniError)(ended.message)
    return ended


def train(config: TrainConfig) -> TrainingSummary:
    """Train as `konkanivani train` does with these settings, in a child process, and return the results.

    If `config.model` is left at its default, the model has the shape of `config.run.preset`. A setting that equals the
    default of TrainConfig counts as not given, as `dataclasses.replace` passes all fields: a pretrained model or a
    checkpoint may replace it, and only the command line can then set it to that value.

    The output of the run appears on stderr. Ctrl-C saves a checkpoint and returns; a second one ends the run at once.
    Raises the errors of the command: UsageError, DataError, CheckpointError, NumericsError, ResourceError. A run that
    crashes raises their base class, KonkaniVaniError.
    """
    if config.run.dry_run:
        raise UsageError("A dry run has no summary: use konkanivani train --dry_run, or leave dry_run at False.")
    ended = run_command("train", command_words(config))
    if ended.is_interrupted:
        latest = Path(config.run.checkpoint_dir) / "checkpoint_last.pt"
        return TrainingSummary(True, latest if latest.is_file() else None)
    return summary_of(ended.output)


def summary_of(lines: Sequence[str]) -> TrainingSummary:
    """Return the summary in the last line that a run printed; raise a ResourceError if there is none."""
    record = None
    with contextlib.suppress(ValueError, IndexError):
        record = json.loads(lines[-1])
    if not isinstance(record, dict) or "checkpoint" not in record:
        raise ResourceError("The run ended without a summary. Look at its output above.")
    numeric = [name for name, value in record.items() if value is None or isinstance(value, (int, float))]
    return TrainingSummary(
        is_interrupted=False,
        checkpoint=Path(record["checkpoint"]),
        tensorboard=Path(record["tensorboard"]),
        steps=record["steps"],
        epochs=record["epochs"],
        parameters=record["parameters"],
        best_valid_score=record["best_valid_score"],
        test_wer=record["test_wer"],
        test_cer=record["test_cer"],
        scores={name: record[name] for name in numeric},
    )


# --------------------
# Workers that trace steps for a memory plan.


def two_processes() -> AbstractContextManager[WorkerPool]:
    """Return a pool of two forked workers: tracing is single-threaded Python, so that two of them halve the time."""
    return worker_pool(2, _prepare_worker)


def _prepare_worker() -> None:
    """Prepare a forked worker: use one thread, and freeze the garbage collector's objects."""
    import torch

    begin_worker()
    # OpenMP's threads do not survive the fork, and waiting for them would deadlock.
    torch.set_num_threads(1)
    # Inherited objects are never freed, so the garbage collector need not scan them.
    gc.freeze()
