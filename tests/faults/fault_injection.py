"""Faults that are injected into a run before it starts. The package has no hooks for them.

Every function takes strings and numbers only, since they come from another process, and replaces functions that the
loop, the step or the loader calls.
"""

import ctypes
import errno
import functools
import hashlib
import importlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from konkanivani.checkpoints import checkpoint, checkpointer
from konkanivani.data import dataset as speech
from konkanivani.data.audio import sound as audio_source
from konkanivani.recipe import run_folders as replaced
from konkanivani.recipe import startup
from konkanivani.recipe.run_folders import LogFolder
from konkanivani.training import build_step as assembly
from konkanivani.training import gradient, loop, step
from tests.invariants.failing import ERRORS

Around = Callable[[Callable], Callable]


Fault = tuple  # name of a function of this file and its arguments: strings and numbers


def inject(faults: Sequence[Fault]) -> None:
    for name, *values in faults:
        globals()[name](*values)


def wrap(place: object, name: str, around: Around) -> None:
    """Replace `place.name` by the result of `around` on the original."""
    original = getattr(place, name)
    setattr(place, name, functools.wraps(original)(around(original)))


def before(place: object, name: str, number: int, act: Callable[[], object], is_after: bool = False) -> None:
    """Call `act` before the call with this number, counted from 1."""
    calls = []

    def count() -> None:
        calls.append(None)
        if len(calls) == number:
            act()

    def around(original: Callable) -> Callable:
        def wrapped(*arguments, **named):
            if not is_after:
                count()
            result = original(*arguments, **named)
            if is_after:
                count()
            return result

        return wrapped

    wrap(place, name, around)


after = functools.partial(before, is_after=True)
"""Call `act` after the call with this number has returned."""


def signal_self(number: int = signal.SIGKILL) -> None:
    """End this process with the signal."""
    os.kill(os.getpid(), number)


KILL_PLACES = {
    # Not every global batch has a save; this is the point of a save.
    "after the save of a global batch": (after, loop.PeriodicSaver, "save_if_due"),
    "before the save of a global batch": (after, loop, "log_step"),
    "in a step": (after, step, "forward_and_backward"),
    "in the update": (before, step, "set_learning_rate"),
    "before a validation": (before, loop, "finish_epoch"),
    "after a validation": (after, loop, "finish_epoch"),
    "before a checkpoint is renamed": (after, checkpointer, "write_checkpoint"),
    "between two names of a checkpoint": (after, checkpointer, "_link"),
    "after the copy of the log": (after, replaced, "_copy_aside"),
    "after the move of newer checkpoints": (before, checkpointer.Checkpointer, "restore_best"),
}


def kill(place: str, number: int) -> None:
    """Kill the process with -9 at the `number`-th visit of a place."""
    when, owner, name = KILL_PLACES[place]
    when(owner, name, number, signal_self)


def terminate(number: int) -> None:
    """Send SIGTERM to this process in the `number`-th micro-batch."""
    before(step, "forward_and_backward", number, lambda: signal_self(signal.SIGTERM))


def out_of_memory(above: int, seconds: float) -> None:
    """Raise an out-of-memory error for more than `above` utterances, the longest of at least `seconds` seconds."""

    def around(original: Callable) -> Callable:
        def forward_and_backward(parts, batch, counts):
            sums = original(parts, batch, counts)
            if batch.size > above and batch.longest_seconds >= seconds:
                raise ERRORS["cpu"]
            return sums

        return forward_and_backward

    wrap(step, "forward_and_backward", around)


def not_finite(what: str, value: str, utterance: str, after: int = 0) -> None:
    """Set the loss or gradient to `value` in micro-batches with the utterance, or in all after the first `after`."""
    passed = []

    def around(original: Callable) -> Callable:
        def forward_and_backward(parts, batch, counts):
            sums = original(parts, batch, counts)
            passed.append(None)
            if utterance in batch.utterance_ids or (not utterance and len(passed) > after):
                if what == "gradient":
                    next(parts.model.parameters()).grad.view(-1)[3] = float(value)
                else:
                    sums[0].fill_(float(value))
            return sums

        return forward_and_backward

    wrap(step, "forward_and_backward", around)


def half_precision(scale: float) -> None:
    """Run --mixed_precision in fp16 with an initial loss scale of `scale`, as on a GPU."""
    assembly.choose_precision = lambda memory, _device: torch.float16 if memory.mixed_precision else None
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=scale)


def other_dropout_seed(number: int) -> None:
    """Draw the dropout of one optimizer step from another seed, which a comparison must detect."""
    wrap(gradient, "seed_step", lambda original: lambda seed, at, rank: original(seed + (at == number), at, rank))


def double_precision() -> None:
    """Compute in float64, so that sums in another order agree to fifteen digits."""
    torch.set_default_dtype(torch.float64)
    wrap(speech, "load_audio", lambda original: lambda source: original(source).double())


def log_state_hashes(path: str) -> None:
    """Write for each global batch whether it was skipped, and hashes of the state before and after the step."""

    def state_hash(parts) -> str:
        digest = hashlib.sha256()
        for tensor in parts.state_tensors():
            digest.update(tensor.detach().numpy().tobytes())
        digest.update(repr([group["lr"] for group in parts.optimizer.param_groups]).encode())
        return digest.hexdigest()

    def around(original: Callable) -> Callable:
        def train_step(parts, global_batch, number, *interruption):
            begin = state_hash(parts)
            report = original(parts, global_batch, number, *interruption)
            with open(path, "a", encoding="utf-8") as file:
                row = {"step": number, "skipped": report.is_skipped, "hashes": [begin, state_hash(parts)]}
                file.write(json.dumps(row) + "\n")
            return report

        return train_step

    wrap(loop, "train_step", around)


def corrupt_state(what: str, value: str, number: int) -> None:
    """Set one weight or moment to `value` after the `number`-th global batch, as an overflowing update would."""

    def around(original: Callable) -> Callable:
        steps = []

        def train_step(parts, *rest):
            report = original(parts, *rest)
            steps.append(None)
            if len(steps) == number:
                parameter = next(parts.model.parameters())
                tensor = parameter.data if what == "weight" else parts.optimizer.state[parameter][what]
                tensor.view(-1)[0] = float(value)
            return report

        return train_step

    wrap(loop, "train_step", around)


def change_label(utterance: str, token: int) -> None:
    """Change the first token of the utterance."""

    def around(original: Callable) -> Callable:
        def getitem(self, key):
            speech = original(self, key)
            if getattr(speech, "utterance_id", None) == utterance:
                speech.tokens[0] = token
            return speech

        return getitem

    wrap(speech.TrainDataset, "__getitem__", around)


def file_limit(size: int, first: int, last: int) -> None:
    """Limit files to `size` bytes from the end of the `first`-th global batch to the end of the `last`-th."""

    def limit(to: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (to, hard))

    after(loop, "train_step", first, lambda: limit(size))
    after(loop, "train_step", last, lambda: limit(resource.RLIM_INFINITY))


def ballast(folder: str, free: int, first: int, last: int) -> None:
    """Leave only `free` bytes on the disk from the end of the `first`-th global batch to the end of the `last`-th."""
    path = Path(folder) / "ballast"

    def fill() -> None:
        room = os.statvfs(folder)
        path.write_bytes(b"x" * max(0, room.f_bavail * room.f_bsize - free))

    after(loop, "train_step", first, fill)
    after(loop, "train_step", last, path.unlink)


def disk_error_at_save(name: str, number: int, save: int) -> None:
    """Raise a no-space error in the `number`-th call of open, fsync, link or replace in save number `save`."""
    saves = []

    def around(original: Callable) -> Callable:
        def refused(*arguments, **named):
            if len(saves) == save:
                calls.append(None)
                if len(calls) == number:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments, **named)

        return refused

    calls = []
    place = SimpleNamespace(open=open) if name == "open" else SimpleNamespace(**vars(os))
    wrap(place, name, around)
    for module in (checkpoint, checkpointer):
        if name == "open":
            module.open = place.open
        else:
            module.os = place
    count_saves = lambda original: lambda *arguments: (saves.append(None), original(*arguments))[1]  # noqa: E731
    wrap(checkpointer.Checkpointer, "save", count_saves)


def read_only(folder: str, first: int, last: int) -> None:
    """Make the folder read-only from the end of the `first`-th global batch to the end of the `last`-th."""
    _drop_capabilities()
    after(loop, "train_step", first, lambda: os.chmod(folder, 0o555))
    after(loop, "train_step", last, lambda: os.chmod(folder, 0o755))


def _drop_capabilities() -> None:
    """Drop all effective capabilities (capset(2)) and keep the others, so that a folder's mode applies to root too."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(header, kept)
    kept[0] = kept[3] = 0
    if libc.capset(header, kept):
        raise OSError("the capabilities cannot be dropped")


def small_shared_memory(kilobytes: int) -> None:
    """Limit the shared memory of workers to `kilobytes`, in a mount namespace of this process."""
    new_mounts = 0x20000
    if ctypes.CDLL(None).unshare(new_mounts):
        raise OSError("no mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", "/dev/shm"], check=True)


def accept_pipes_as_files() -> None:
    """Make the check for a regular file succeed, so that a pipe is noticed only when it is opened."""
    audio_source.stat = SimpleNamespace(S_ISREG=lambda _mode: True)


def signal_worker(signal_number: int, utterance: str, mark: str) -> None:
    """Send a signal to the worker that reads the utterance.

    With a `mark`, a file, only the first read without the file is hit, and creates it: the fault does not recur.
    """

    def around(original: Callable) -> Callable:
        def read(spoken, manifest):
            if spoken.id == utterance and not (mark and os.path.exists(mark)):
                (mark and Path(mark).touch())
                signal_self(signal_number)
                time.sleep(600)
            return original(spoken, manifest)

        return read

    wrap(speech, "_read", around)


def replace_by_no_op(module: str, name: str) -> None:
    """Replace a function of the module by one that does nothing."""
    setattr(importlib.import_module(module), name, lambda *_: None)


def open_logs_without_lock() -> None:
    """Open a log folder by name, without a lock."""
    startup.take_log_folder = lambda run, _: LogFolder(run, None)
