"""What goes wrong in a run, put in place before it begins. Nothing of it is in the product.

Every function takes strings and numbers, since they come from another process, and changes what the loop, the step or
the loader calls.
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

from konkanivani.data import dataset as speech
from konkanivani.data.audio import source as audio_source
from konkanivani.recipe import build_step as assembly
from konkanivani.recipe import run_folders as replaced
from konkanivani.recipe import start
from konkanivani.recipe.run_folders import LogFolder
from konkanivani.training import gradient, loop, step
from konkanivani.training.checkpoint import checkpoint, checkpointer
from tests.invariants.failing import ERRORS

Around = Callable[[Callable], Callable]


Fault = tuple  # the name of a function of this file and its arguments: strings and numbers


def inject(faults: Sequence[Fault]) -> None:
    for name, *values in faults:
        globals()[name](*values)


def wrap(place: object, name: str, around: Around) -> None:
    """Replaces what `place` calls `name` by what `around` makes of it."""
    original = getattr(place, name)
    setattr(place, name, functools.wraps(original)(around(original)))


def before(place: object, name: str, number: int, act: Callable[[], object], is_after: bool = False) -> None:
    """Acts before the call of this number, from 1."""
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
"""Acts after the call of this number that has come to its end."""


def die(number: int = signal.SIGKILL) -> None:
    """Ends this process by the signal."""
    os.kill(os.getpid(), number)


KILLED_AT = {
    # Not every window is due; this is where its save would be.
    "after the save of a window": (after, loop.PeriodicSaver, "save_if_due"),
    "before the save of a window": (after, loop, "log_step"),
    "in a step": (after, step, "forward_and_backward"),
    "in the update": (before, step, "set_learning_rate"),
    "before a validation": (before, loop, "finish_epoch"),
    "after a validation": (after, loop, "finish_epoch"),
    "before a checkpoint is renamed": (after, checkpointer, "write_checkpoint"),
    "between two names of a checkpoint": (after, checkpointer, "_link"),
    "behind the log's copy": (after, replaced, "_copy_aside"),
    "behind the newer checkpoints' move": (before, checkpointer.Checkpointer, "restore_best"),
}


def kill(place: str, number: int) -> None:
    """Kills the process with -9 at the `number`-th visit of a place."""
    when, owner, name = KILLED_AT[place]
    when(owner, name, number, die)


def terminate(number: int) -> None:
    """Asks the process to stop in the `number`-th micro-batch."""
    before(step, "forward_and_backward", number, lambda: die(signal.SIGTERM))


def out_of_memory(above: int, seconds: float) -> None:
    """No more than `above` utterances of at least so many seconds fit."""

    def around(original: Callable) -> Callable:
        def forward_and_backward(parts, batch, counts):
            sums = original(parts, batch, counts)
            if batch.size > above and batch.longest_seconds >= seconds:
                raise ERRORS["cpu"]
            return sums

        return forward_and_backward

    wrap(step, "forward_and_backward", around)


def not_finite(what: str, value: str, utterance: str, after: int = 0) -> None:
    """The loss or the gradient of each micro-batch with the utterance is `value`, or of all but the first `after`."""
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
    """--mixed_precision is fp16 with a loss scale that begins at `scale`, as on a card."""
    assembly.choose_precision = lambda memory, _device: torch.float16 if memory.mixed_precision else None
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=scale)


def other_draws(number: int) -> None:
    """One optimizer step draws its dropout from another seed: what a comparison must see."""
    wrap(gradient, "seed_step", lambda original: lambda seed, at, rank: original(seed + (at == number), at, rank))


def double_precision() -> None:
    """All is computed in float64, so that sums in another order are the same to fifteen digits."""
    torch.set_default_dtype(torch.float64)
    wrap(speech, "load_audio", lambda original: lambda source: original(source).double())


def hashed_steps(path: str) -> None:
    """Writes for each window whether it was skipped, and the hashes of all that a step may change before and after."""

    def state_hash(parts) -> str:
        digest = hashlib.sha256()
        for tensor in parts.state_tensors():
            digest.update(tensor.detach().numpy().tobytes())
        digest.update(repr([group["lr"] for group in parts.optimizer.param_groups]).encode())
        return digest.hexdigest()

    def around(original: Callable) -> Callable:
        def train_step(parts, window, number, *interruption):
            begin = state_hash(parts)
            report = original(parts, window, number, *interruption)
            with open(path, "a", encoding="utf-8") as file:
                row = {"step": number, "skipped": report.is_skipped, "hashes": [begin, state_hash(parts)]}
                file.write(json.dumps(row) + "\n")
            return report

        return train_step

    wrap(loop, "train_step", around)


def spoilt_state(what: str, value: str, number: int) -> None:
    """After the `number`-th window, one weight or moment is `value`, as an update that overflows would leave it."""

    def around(original: Callable) -> Callable:
        windows = []

        def train_step(parts, *rest):
            report = original(parts, *rest)
            windows.append(None)
            if len(windows) == number:
                parameter = next(parts.model.parameters())
                tensor = parameter.data if what == "weight" else parts.optimizer.state[parameter][what]
                tensor.view(-1)[0] = float(value)
            return report

        return train_step

    wrap(loop, "train_step", around)


def label(utterance: str, token: int) -> None:
    """The utterance's first token is another number."""

    def around(original: Callable) -> Callable:
        def getitem(self, key):
            speech = original(self, key)
            if getattr(speech, "utterance_id", None) == utterance:
                speech.tokens[0] = token
            return speech

        return getitem

    wrap(speech.TrainDataset, "__getitem__", around)


def file_limit(size: int, first: int, last: int) -> None:
    """No file may grow beyond `size` bytes from the end of the `first`-th window to the end of the `last`-th."""

    def limit(to: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (to, hard))

    after(loop, "train_step", first, lambda: limit(size))
    after(loop, "train_step", last, lambda: limit(resource.RLIM_INFINITY))


def ballast(folder: str, free: int, first: int, last: int) -> None:
    """A file leaves only `free` bytes of the disk from the end of the `first`-th window to the end of the `last`-th."""
    path = Path(folder) / "ballast"

    def fill() -> None:
        room = os.statvfs(folder)
        path.write_bytes(b"x" * max(0, room.f_bavail * room.f_bsize - free))

    after(loop, "train_step", first, fill)
    after(loop, "train_step", last, path.unlink)


def disk_error_at_save(name: str, number: int, save: int) -> None:
    """In the save of number `save`, the `number`-th call of open, fsync, link or replace finds no space."""
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
    """The folder is read-only from the end of the `first`-th window to the end of the `last`-th."""
    _give_up_privileges()
    after(loop, "train_step", first, lambda: os.chmod(folder, 0o555))
    after(loop, "train_step", last, lambda: os.chmod(folder, 0o755))


def _give_up_privileges() -> None:
    """Has a folder's mode count for root too (capset(2), all effective capabilities dropped, the others kept)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(header, kept)
    kept[0] = kept[3] = 0
    if libc.capset(header, kept):
        raise OSError("the capabilities cannot be dropped")


def small_shared_memory(kilobytes: int) -> None:
    """Workers have so much shared memory; in a mount namespace of this process."""
    new_mounts = 0x20000
    if ctypes.CDLL(None).unshare(new_mounts):
        raise OSError("no mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", "/dev/shm"], check=True)


def pipes_pass_for_files() -> None:
    """What stands in place of a file is found out only when it is opened, as where it is put there in between."""
    audio_source.stat = SimpleNamespace(S_ISREG=lambda _mode: True)


def worker(signal_number: int, utterance: str, mark: str) -> None:
    """A worker that reads the utterance gets the signal of that number.

    With a `mark`, a file, only the first that finds no such file is: the fault does not come back.
    """

    def around(original: Callable) -> Callable:
        def read(spoken, manifest):
            if spoken.id == utterance and not (mark and os.path.exists(mark)):
                (mark and Path(mark).touch())
                die(signal_number)
                time.sleep(600)
            return original(spoken, manifest)

        return read

    wrap(speech, "_read", around)


def forget(module: str, name: str) -> None:
    """What this name in the module stands for is not done."""
    setattr(importlib.import_module(module), name, lambda *_: None)


def unowned_logs() -> None:
    """A log folder belongs to whoever has its name, and is not locked."""
    start.take_log_folder = lambda run, _: LogFolder(run, None)
