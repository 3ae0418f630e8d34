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
from tests.faults.killing import small_run
from tests.faults.long_run import SCRIPT, THREADS, Life, LongRun, Trap, is_dying, members
from tests.patience import PATIENCE

SHELL_SCRIPT = ROOT / "run_training_memory_optimized.sh"
Target = Literal["the process", "its group", "the shell script"]


@dataclass(frozen=True)
class Ending:
    """Process ended by a signal: seconds from the signal to its end, and sentences on errors."""

    seconds: float
    complaints: tuple[str, ...]


def run_to_be_signalled(corpus: Corpus, directory: Path, *more: str) -> LongRun:
    """Return a run that saves by time only, so that a save at a signal is due to it; it validates every epoch."""
    # The shell script has other defaults, which would show in the checkpoints.
    by_any_script = "--concurrent_micro_batches", "1", "--run_name", "default"
    return small_run(corpus, directory, "--valid_manifest", corpus.manifest("valid"), *by_any_script, *more)


def run_to_be_rehearsed(corpus: Corpus, directory: Path) -> LongRun:
    """Return a run that rehearses its costliest batches before the first epoch."""
    planned = ("--batch_size", "auto", "--memory_budget", "3GiB", "--epochs", "1000")
    return LongRun(directory, (*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *planned))


def run_of_preset(corpus: Corpus, directory: Path, preset: str) -> LongRun:
    """Return a run of a preset with the first command's micro-batches: 2 of 4 utterances, concurrently."""
    cut = ("--batch_size", "4", "--gradient_accumulation_steps", "2", "--concurrent_micro_batches", "2")
    flags = ("--preset", preset, "--device", "cpu", *cut)
    manifests = ("--train_manifest", corpus.manifest("train"), "--valid_manifest", corpus.manifest("valid"))
    return LongRun(directory, (*flags, *manifests, "--epochs", "1000", "--keep_checkpoints", "2"))


def end_by_signal(run: LongRun, number: signal.Signals, target: Target, workers: int, delay: float) -> Ending:
    """Start a process and signal it `delay` seconds after its first step; nothing may be lost or remain."""
    life = begin(run, target, workers)
    time.sleep(delay)
    sent = time.monotonic()
    send(life, number, target)
    return _told_to_stop(run, life, number, sent)


def _told_to_stop(run: LongRun, life: Life, number: signal.Signals, sent: float, before: int | None = None) -> Ending:
    """Wait for a signalled process: all its steps must be saved or, with `before`, the steps up to it."""
    code = life.end()
    seconds = time.monotonic() - sent
    found, complaints = run.aftermath(), []
    if code != 128 + number:
        complaints.append(f"the exit code was {code}")
    if found.steps_lost if before is None else not before <= found.saved <= found.logged:
        complaints.append(f"step {found.logged} was logged and step {found.saved} was saved")
    return Ending(seconds, (*complaints, *_complaints(run, life)))


def end_by_two(run: LongRun, number: signal.Signals, workers: int, delay: float) -> Ending:
    """Start a process and send a second signal `delay` seconds after the first; time is measured from the second."""
    before = run.aftermath().saved
    life = begin(run, "its group", workers)
    send(life, number, "its group")
    time.sleep(delay)
    sent = time.monotonic()
    send(life, number, "its group")
    return _told_to_stop(run, life, number, sent, before)  # a save may have been due before the first signal


class IgnoredHangUps:
    """Ignored SIGHUP, as nohup leaves it to the program that it starts."""

    def lay(self, _checkpoints: Path) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@dataclass
class HangingAudio:
    """Audio workers that hang after some recordings, like readers of a server that is down."""

    recordings: int

    def lay(self, _checkpoints: Path) -> None:
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
    `is_rehearsed`, only calls within a rehearsal count: the trace of a plan makes some before.
    """

    function: Literal["konkanivani.training.step.forward_and_backward", "konkanivani.training.validation.recognize"]
    calls: int
    is_rehearsed: bool = False

    def lay(self, checkpoints: Path) -> None:
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


def end_while_a_call_hangs(run: LongRun, number: signal.Signals, trap: HangingCall) -> Ending:
    """Start a process whose main thread is in native code when the signal arrives, and stays there."""
    before = run.logged_step()
    life = run.begin("--num_workers", "0", trap=trap)
    life.wait_until(lambda: run.logged_step() > before and not _has_moved(life), "the call that hangs")
    sent = time.monotonic()
    send(life, number, "the process")
    return _told_to_stop(run, life, number, sent)


def end_while_a_rehearsal_hangs(run: LongRun, signals: int) -> list[str]:
    """Send signals to a process whose rehearsal hangs; return the remaining files of its checkpoint folder."""
    trap = HangingCall("konkanivani.training.step.forward_and_backward", 0, is_rehearsed=True)
    life = run.begin("--num_workers", "0", trap=trap)
    begun = run.checkpoints / "rehearsal.partial"
    life.wait_until(lambda: begun.exists() and not _has_moved(life), "the call that hangs")
    for _ in range(signals):
        send(life, signal.SIGTERM, "the process")
        time.sleep(0.2)
    assert life.end() == 128 + signal.SIGTERM
    return sorted(path.name for path in run.checkpoints.iterdir())


def _has_moved(life: Life) -> bool:
    """Return whether the process used the CPU in the last 0.5 s."""
    before = _ticks(life)
    time.sleep(0.5)
    return _ticks(life) != before


def _ticks(life: Life) -> list[str]:
    return Path(f"/proc/{life.pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def end_while_workers_hang(run: LongRun, number: signal.Signals) -> Ending:
    """Start a process and signal it while it waits for hanging workers, with a timeout longer than the test's."""
    patient = "--loader_timeout", str(2 * PATIENCE)
    life = begin(run, "the process", 2, *patient, trap=HangingAudio(recordings=12))
    logged = -1
    while logged != (logged := run.logged_step()):  # train on the prefetched data
        time.sleep(1.0)
    sent = time.monotonic()
    send(life, number, "the process")
    return _told_to_stop(run, life, number, sent)


def end_by_closing_its_terminal(run: LongRun, workers: int) -> Ending:
    """Start a process and close its terminal after its first step; the shell repeats the signal of the kernel."""
    run.directory.mkdir(parents=True, exist_ok=True)
    before, (terminal, its_end) = run.logged_step(), pty.openpty()
    life = Life(
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *run.arguments("--num_workers", str(workers))],
            **dict.fromkeys(("stdin", "stdout", "stderr"), its_end),
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    )
    os.close(its_end)
    life.wait_until(lambda: _is_read(terminal, run.output) and run.logged_step() > before, "the first step")
    sent = time.monotonic()
    os.close(terminal)
    send(life, signal.SIGHUP, "its group")
    return _told_to_stop(run, life, signal.SIGHUP, sent)


def _is_read(terminal: int, output: Path) -> bool:
    """Copy the terminal output to the file, so that the terminal buffer does not fill up; always return true."""
    with open(output, "ab") as file:
        while select.select([terminal], [], [], 0)[0]:
            file.write(os.read(terminal, 1 << 16))
    return True


def begin(run: LongRun, target: Target, workers: int, *more: str, trap: Trap | None = None) -> Life:
    before, loader = run.logged_step(), ("--num_workers", str(workers), *more)
    life = run.begin_script(SHELL_SCRIPT, *loader) if target == "the shell script" else run.begin(*loader, trap=trap)
    life.wait_until(lambda: run.logged_step() > before, "the first step")
    return life


def send(life: Life, number: signal.Signals, target: Target) -> None:
    """Send the signal to the started process, or to its whole group, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        if target == "its group":
            os.killpg(life.pid, number)
        else:
            os.kill(life.pid, number)


def left_after(life: Life) -> list[int]:
    """Return the processes that remain 2 s after the end: PyTorch workers on their own need 5 s to notice.

    A killed process may need longer to end on a busy machine.
    """
    began = time.monotonic()
    while left := members(life.pid):
        waited = time.monotonic() - began
        if waited > PATIENCE or (waited > 2.0 and not all(map(is_dying, left))):
            break
        time.sleep(0.01)
    return left


def _complaints(run: LongRun, life: Life) -> list[str]:
    found = [f"{name} cannot be read" for name in run.aftermath().unsound]
    if left := left_after(life):
        found.append(f"{len(left)} processes were left behind")
    return found + run.tracebacks()
