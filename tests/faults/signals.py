"""Signals to a training run and a closing terminal: exit code, time to exit, and remaining files and processes."""

import contextlib
import ctypes
import fcntl
import importlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from konkanivani.data import dataset as speech
from konkanivani.data.audio.files import AudioSource
from tests.conftest import ROOT, TINY_MODEL, Corpus
from tests.faults.long_run import SCRIPT, THREADS, InjectedFault, LongRun, TrainingProcess, is_dying, processes_in_group
from tests.faults.repeated_kills import small_endless_run
from tests.timeouts import PROCESS_TIMEOUT

SHELL_SCRIPT = ROOT / "run_training_memory_optimized.sh"
Target = Literal["the process", "its group", "the shell script"]


@dataclass(frozen=True)
class SignalResult:
    """Process ended by a signal: seconds from the signal to its end, and sentences on errors."""

    seconds: float
    errors: tuple[str, ...]


def run_for_signals(corpus: Corpus, directory: Path, *more: str) -> LongRun:
    """Return a run that saves by time only, so that a save is caused by the signal; it validates every epoch."""
    # The shell script has other defaults, which would show in the checkpoints.
    independent_of_script = "--concurrent_micro_batches", "1", "--run_name", "default"
    return small_endless_run(
        corpus, directory, "--valid_manifest", corpus.manifest("valid"), *independent_of_script, *more
    )


def run_for_rehearsal(corpus: Corpus, directory: Path) -> LongRun:
    """Return a run that rehearses its most expensive batches before the first epoch."""
    planned = ("--batch_size", "auto", "--memory_budget", "3GiB", "--epochs", "1000")
    return LongRun(directory, (*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *planned))


def preset_run(corpus: Corpus, directory: Path, preset: str) -> LongRun:
    """Return a run of a preset with the first command's micro-batches: 2 of 4 utterances, concurrently."""
    cut = ("--batch_size", "4", "--gradient_accumulation_steps", "2", "--concurrent_micro_batches", "2")
    flags = ("--preset", preset, "--device", "cpu", *cut)
    manifests = ("--train_manifest", corpus.manifest("train"), "--valid_manifest", corpus.manifest("valid"))
    return LongRun(directory, (*flags, *manifests, "--epochs", "1000", "--keep_checkpoints", "2"))


def stop_by_signal(run: LongRun, number: signal.Signals, target: Target, workers: int, delay: float) -> SignalResult:
    """Start a process and signal it `delay` seconds after its first step; no step may be lost, no process remain."""
    trainer = start_until_first_step(run, target, workers)
    time.sleep(delay)
    sent = time.monotonic()
    send_signal(trainer, number, target)
    return _check_stopped(run, trainer, number, sent)


def _check_stopped(
    run: LongRun, trainer: TrainingProcess, number: signal.Signals, sent: float, before: int | None = None
) -> SignalResult:
    """Wait for a signalled process: all its steps must be saved or, with `before`, the steps up to it."""
    code = trainer.wait()
    seconds = time.monotonic() - sent
    end_state, errors = run.end_state(), []
    if code != 128 + number:
        errors.append(f"the exit code was {code}")
    if end_state.steps_lost if before is None else not before <= end_state.saved <= end_state.logged:
        errors.append(f"step {end_state.logged} was logged and step {end_state.saved} was saved")
    return SignalResult(seconds, (*errors, *_file_and_process_errors(run, trainer)))


def stop_by_second_signal(run: LongRun, number: signal.Signals, workers: int, delay: float) -> SignalResult:
    """Start a process and send a second signal `delay` seconds after the first; time is measured from the second."""
    before = run.end_state().saved
    trainer = start_until_first_step(run, "its group", workers)
    send_signal(trainer, number, "its group")
    time.sleep(delay)
    sent = time.monotonic()
    send_signal(trainer, number, "its group")
    return _check_stopped(run, trainer, number, sent, before)  # a save may have been due before the first signal


class IgnoredSighup:
    """Ignored SIGHUP, as nohup leaves it to the program that it starts."""

    def install(self, _checkpoints: Path) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@dataclass
class HangingAudio:
    """Audio workers that hang after some recordings, like readers of a server that is down."""

    recordings: int

    def install(self, _checkpoints: Path) -> None:
        """Wrap the function that reads audio for the loader."""
        load = speech.load_audio

        def hang_after_some(source: AudioSource) -> torch.Tensor:
            self.recordings -= 1
            if self.recordings < 0:
                time.sleep(3600)
            return load(source)

        speech.load_audio = hang_after_some


@dataclass
class HangingCall:
    """Call that hangs in native code of the main thread after `calls` calls, so that no Python signal handler runs.

    The call has returned its result before: the gradient of the micro-batch, or the recognized batch. If
    `is_rehearsed`, only calls within a rehearsal count: the tracer of a plan makes some before it.
    """

    function: Literal["konkanivani.training.step.forward_and_backward", "konkanivani.training.validation.recognize"]
    calls: int
    is_rehearsed: bool = False

    def install(self, checkpoints: Path) -> None:
        """Replace the function."""
        module, _, name = self.function.rpartition(".")
        module = importlib.import_module(module)
        function = getattr(module, name)

        def hang_after_some(*arguments: object, **named: object) -> object:
            result = function(*arguments, **named)
            self.calls -= not self.is_rehearsed or (checkpoints / "rehearsal.partial").exists()
            if self.calls < 0:
                mutex = ctypes.create_string_buffer(256)  # all zeros: an unlocked mutex
                for _ in range(2):  # the second lock waits for the first; a signal does not interrupt it
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
            return result

        setattr(module, name, hang_after_some)


def stop_during_hanging_call(run: LongRun, number: signal.Signals, fault: HangingCall) -> SignalResult:
    """Signal a process whose main thread hangs in native code."""
    before = run.logged_step()
    trainer = run.start("--num_workers", "0", fault=fault)
    trainer.wait_until(lambda: run.logged_step() > before and not _has_used_cpu(trainer), "the call that hangs")
    sent = time.monotonic()
    send_signal(trainer, number, "the process")
    return _check_stopped(run, trainer, number, sent)


def stop_during_hanging_rehearsal(run: LongRun, signals: int) -> list[str]:
    """Send signals to a process whose rehearsal hangs; return the remaining files of its checkpoint folder."""
    fault = HangingCall("konkanivani.training.step.forward_and_backward", 0, is_rehearsed=True)
    trainer = run.start("--num_workers", "0", fault=fault)
    begun = run.checkpoints / "rehearsal.partial"
    trainer.wait_until(lambda: begun.exists() and not _has_used_cpu(trainer), "the call that hangs")
    for _ in range(signals):
        send_signal(trainer, signal.SIGTERM, "the process")
        time.sleep(0.2)
    assert trainer.wait() == 128 + signal.SIGTERM
    return sorted(path.name for path in run.checkpoints.iterdir())


def _has_used_cpu(trainer: TrainingProcess) -> bool:
    """Return whether the process used the CPU in the last 0.5 s."""
    before = _cpu_ticks(trainer)
    time.sleep(0.5)
    return _cpu_ticks(trainer) != before


def _cpu_ticks(trainer: TrainingProcess) -> list[str]:
    return Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def stop_while_workers_hang(run: LongRun, number: signal.Signals) -> SignalResult:
    """Start a process and signal it while it waits for hanging workers, with a timeout longer than the test's."""
    patient = "--loader_timeout", str(2 * PROCESS_TIMEOUT)
    trainer = start_until_first_step(run, "the process", 2, *patient, fault=HangingAudio(recordings=12))
    logged = -1
    while logged != (logged := run.logged_step()):  # train on the prefetched data
        time.sleep(1.0)
    sent = time.monotonic()
    send_signal(trainer, number, "the process")
    return _check_stopped(run, trainer, number, sent)


def stop_by_closing_terminal(run: LongRun, workers: int) -> SignalResult:
    """Start a process and close its terminal after its first step; the shell repeats the signal of the kernel."""
    run.directory.mkdir(parents=True, exist_ok=True)
    before, (terminal, its_end) = run.logged_step(), pty.openpty()
    trainer = TrainingProcess(
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *run.arguments("--num_workers", str(workers))],
            **dict.fromkeys(("stdin", "stdout", "stderr"), its_end),
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    )
    os.close(its_end)
    trainer.wait_until(lambda: _drain_terminal(terminal, run.output) and run.logged_step() > before, "the first step")
    sent = time.monotonic()
    os.close(terminal)
    send_signal(trainer, signal.SIGHUP, "its group")
    return _check_stopped(run, trainer, signal.SIGHUP, sent)


def _drain_terminal(terminal: int, output: Path) -> bool:
    """Copy the terminal output to the file, so that the terminal buffer does not fill up; always return true."""
    with open(output, "ab") as file:
        while select.select([terminal], [], [], 0)[0]:
            file.write(os.read(terminal, 1 << 16))
    return True


def start_until_first_step(
    run: LongRun, target: Target, workers: int, *more: str, fault: InjectedFault | None = None
) -> TrainingProcess:
    before, loader = run.logged_step(), ("--num_workers", str(workers), *more)
    trainer = (
        run.start_script(SHELL_SCRIPT, *loader) if target == "the shell script" else run.start(*loader, fault=fault)
    )
    trainer.wait_until(lambda: run.logged_step() > before, "the first step")
    return trainer


def send_signal(trainer: TrainingProcess, number: signal.Signals, target: Target) -> None:
    """Send the signal to the started process, or to its whole group, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):  # it may have exited already
        if target == "its group":
            os.killpg(trainer.pid, number)
        else:
            os.kill(trainer.pid, number)


def remaining_processes(trainer: TrainingProcess) -> list[int]:
    """Return the processes that remain 2 s after the end: orphaned PyTorch workers would need 5 s to notice.

    A killed process may need longer to end on a busy machine.
    """
    began = time.monotonic()
    while left := processes_in_group(trainer.pid):
        waited = time.monotonic() - began
        if waited > PROCESS_TIMEOUT or (waited > 2.0 and not all(map(is_dying, left))):
            break
        time.sleep(0.01)
    return left


def _file_and_process_errors(run: LongRun, trainer: TrainingProcess) -> list[str]:
    results = [f"{name} cannot be read" for name in run.end_state().invalid_files]
    if left := remaining_processes(trainer):
        results.append(f"{len(left)} processes were left behind")
    return results + run.tracebacks()
