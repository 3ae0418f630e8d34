"""Recovery from faults with four ways to save a run, each with the same state of 19 MB after every step.

    python benchmarks/measuring/faults/savers.py --folder /tmp/x --kills 3 --flips 10 --seed 0

prints one JSON object per line. peers.py runs it in an environment with SpeechBrain and transformers. Each way saves
and recovers according to its documentation.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

sys.path[0] = str(Path(__file__).resolve().parents[3])  # replaces this folder, whose numbers.py would shadow Python's

import accelerate
import speechbrain
import torch
import transformers
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from konkanivani.training.checkpoint.checkpoint import Checkpoint, load_states
from konkanivani.training.checkpoint.checkpointer import LAST, Checkpointer

WIDTH, STEPS = 1256, 8  # 1.6 M parameters, and two optimizer moments for each
PATIENCE = 120.0  # seconds
OUTCOMES = ("newest, right", "an older one, right", "begins anew", "crashes", "wrong without a word")


@dataclass(frozen=True)
class Recovered:
    """Step from which a resumed run would continue, and the digest of its weights and optimizer state."""

    step: int
    digest: str


# Callback with an event and a state: "begin" precedes the save of a step, "saved" follows it.
Tell = Callable[[str, Recovered], None]


class Saver(Protocol):
    """Way to save and recover a run."""

    name: str

    def train(self, folder: Path, tell: Tell) -> None:
        """Train from the first step and save after each step."""

    def recover(self, folder: Path) -> Recovered | None:
        """Return the recovered state, or None if training would restart from the first step."""

    def newest(self, folder: Path) -> list[Path]:
        """Return the files of the newest checkpoint."""


class Net(torch.nn.Module):
    """Model whose gradient is a function of the input only, so that all runs reach the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(int(x)))
        return {"loss": (self.weight * noise).sum()}


def build() -> tuple[Net, torch.optim.Optimizer]:
    """Return the model and the optimizer before the first step."""
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def digest(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of every bit of the weights and the optimizer state."""
    found = hashlib.blake2b(digest_size=16)
    # Sorted by name: the order of the dictionary may differ after loading.
    moments = [value for state in optimizer.state_dict()["state"].values() for _, value in sorted(state.items())]
    for tensor in (*net.state_dict().values(), *moments):
        found.update(torch.as_tensor(tensor).contiguous().numpy().tobytes())
    return found.hexdigest()


def steps(tell: Tell, save: Callable[[int], None], net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Run the training loop of the three ways that have none of their own."""
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        net(torch.tensor(step))["loss"].backward()
        optimizer.step()
        now = Recovered(step, digest(net, optimizer))
        tell("begin", now)
        save(step)
        tell("saved", now)


class PlainTorch:
    """Overwriting of one file with torch.save."""

    name = f"torch.save over one name, PyTorch {torch.__version__}"

    def train(self, folder: Path, tell: Tell) -> None:
        net, optimizer = build()

        def save(step: int) -> None:
            state = {"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "checkpoint.pt")

        steps(tell, save, net, optimizer)

    def recover(self, folder: Path) -> Recovered | None:
        if not (folder / "checkpoint.pt").exists():
            return None
        net, optimizer = build()
        state = torch.load(folder / "checkpoint.pt")  # noqa: TID251 (the subject of the measurement; the file is trusted)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return Recovered(state["step"], digest(net, optimizer))

    def newest(self, folder: Path) -> list[Path]:
        return [folder / "checkpoint.pt"]


class SpeechBrain:
    """SpeechBrain's Checkpointer, which keeps the two newest checkpoints."""

    name = f"SpeechBrain {speechbrain.__version__} Checkpointer"

    def train(self, folder: Path, tell: Tell) -> None:
        net, optimizer, keeper = self._parts(folder)

        def save(step: int) -> None:
            keeper.save_and_keep_only(meta={"step": step}, end_of_epoch=False, num_to_keep=2)

        steps(tell, save, net, optimizer)

    def recover(self, folder: Path) -> Recovered | None:
        net, optimizer, keeper = self._parts(folder)
        found = keeper.recover_if_possible()
        # None if the folder has no checkpoint.
        return found and Recovered(found.meta["step"], digest(net, optimizer))

    def newest(self, folder: Path) -> list[Path]:
        # A checkpoint is a folder of several files.
        return sorted(max(folder.glob("CKPT+*"), key=lambda path: path.stat().st_mtime_ns).iterdir())

    def _parts(self, folder: Path) -> tuple[Net, torch.optim.Optimizer, SpeechBrainCheckpointer]:
        net, optimizer = build()
        return net, optimizer, SpeechBrainCheckpointer(folder, {"model": net, "optimizer": optimizer})


class _Watcher(TrainerCallback):
    """Callback that reports the saves; without `tell`, it stops the run at its first step and keeps the state."""

    def __init__(self, tell: Tell | None) -> None:
        self.tell, self.found = tell, None

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if self.tell is None:
            self.found = self._now(state, model, optimizer)
            raise StopIteration  # an exception, since the step would run after an ordinary return

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        self.tell("begin", self._now(state, model, optimizer))

    def on_save(self, args, state, control, model=None, optimizer=None, **_):
        self.tell("saved", self._now(state, model, optimizer))

    def _now(self, state, model, optimizer) -> Recovered:
        # accelerate wraps the optimizer.
        return Recovered(state.global_step, digest(model, getattr(optimizer, "optimizer", optimizer)))


class HuggingFace:
    """Hugging Face's Trainer with save_steps 1 and save_total_limit 2."""

    name = f"Hugging Face Trainer (transformers {transformers.__version__}, accelerate {accelerate.__version__})"

    def train(self, folder: Path, tell: Tell) -> None:
        self._trainer(folder, _Watcher(tell)).train()

    def recover(self, folder: Path) -> Recovered | None:
        last, watcher = get_last_checkpoint(str(folder)), _Watcher(None)
        if last is None:
            return None
        try:
            self._trainer(folder, watcher).train(resume_from_checkpoint=last)
        except StopIteration:
            pass
        return watcher.found

    def newest(self, folder: Path) -> list[Path]:
        return sorted(Path(get_last_checkpoint(str(folder))).iterdir())

    def _trainer(self, folder: Path, watcher: _Watcher) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS + 1,
            per_device_train_batch_size=1,
            learning_rate=1e-2,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"x": number} for number in range(2 * STEPS)]
        return Trainer(Net(), arguments, train_dataset=data, callbacks=[watcher])


class Ours:
    """Checkpointer of this trainer, konkanivani/training/checkpoint/checkpointer.py."""

    name = "KonkaniVani"

    def train(self, folder: Path, tell: Tell) -> None:
        net, optimizer = build()

        def save(step: int) -> None:
            # Only names and tensors, as in OptimizerState: a checkpoint that contains lists is rejected.
            of_all = optimizer.state_dict()["state"].items()
            moments = {f"{number}/{name}": value for number, state in of_all for name, value in state.items()}
            states = {"model": net.state_dict(), "optimizer": moments}
            Checkpointer(folder, keep=2).save(Checkpoint("", b"-", 1, step, 0, states))

        steps(tell, save, net, optimizer)

    def recover(self, folder: Path) -> Recovered | None:
        found = Checkpointer(folder, keep=2).read_newest_sound()
        if found is None:
            return None
        net, optimizer = build()
        load_states(found[1], {"model": net})
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in found[1].states["optimizer"].items():
            number, name = key.split("/")
            moments.setdefault(int(number), {})[name] = value
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        return Recovered(found[1].step, digest(net, optimizer))

    def newest(self, folder: Path) -> list[Path]:
        return [folder / LAST]


SAVERS: tuple[Saver, ...] = (PlainTorch(), SpeechBrain(), HuggingFace(), Ours())


@dataclass(frozen=True)
class Reference:
    """Undisturbed run: the digest after each step, and the mean seconds per save."""

    digests: dict[int, str]
    save_seconds: float


def train_and_tell(number: int, folder: Path, said: Path) -> None:
    """Train, and append a line to `said` before and after each save; runs in a separate process."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)

    def tell(what: str, now: Recovered) -> None:
        # Opened for each line, so that no line is in a buffer when the process is killed.
        with open(said, "a", encoding="utf-8") as file:
            file.write(f"{what} {now.step} {now.digest} {time.monotonic()}\n")

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        SAVERS[number].train(folder, tell)


def read_told(said: Path) -> list[tuple[str, int, str, float]]:
    """Return the lines that a training process has written so far: event, step, digest, monotonic seconds."""
    lines = said.read_text(encoding="utf-8").splitlines(keepends=True) if said.exists() else []
    # A line without its end is still being written, or was cut off by the kill.
    rows = [line.split() for line in lines if line.endswith("\n")]
    return [(what, int(step), found, float(when)) for what, step, found, when in rows]


def start(target: Callable, *arguments: object) -> multiprocessing.process.BaseProcess:
    """Start a process, forked from a server that has already imported the toolkits."""
    context = multiprocessing.get_context("forkserver")
    # Importing the toolkits takes seconds, and dozens of processes are started.
    context.set_forkserver_preload(["torch", "speechbrain.utils.checkpoints", "accelerate", "transformers.trainer"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def refer(number: int, folder: Path) -> Reference:
    """Train without faults and return the reference for the other runs."""
    said = folder.with_suffix(".said")
    start(train_and_tell, number, folder, said).join()
    told = read_told(said)
    # Lines alternate between "begin" and "saved".
    pairs = list(zip(told[::2], told[1::2], strict=True))
    return Reference({step: found for _, step, found, _ in told}, sum(b[3] - a[3] for a, b in pairs) / len(pairs))


def judge(found: Recovered | str | None, reference: Reference, saved: int) -> str:
    """Return one of OUTCOMES; `saved` is the last step with a completed save."""
    if found is None:
        return "begins anew"
    if isinstance(found, str):
        return "crashes"
    if reference.digests.get(found.step) != found.digest:
        return "wrong without a word"
    # Above `saved` if the kill came between a save and its line.
    return "newest, right" if found.step >= saved else "an older one, right"


def recover_again_and_again(number: int, folder: Path, asked: Connection) -> None:
    """Answer each received object with the recovered state, or with an error text; runs in a separate process."""
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        while asked.recv():
            try:
                asked.send(SAVERS[number].recover(folder))
            except Exception as error:
                asked.send(f"{type(error).__name__}: {error}"[:200])


class Recoverer:
    """Recovery in a child process, which is replaced if it crashes or hangs."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self._begin()

    def recover(self) -> Recovered | str | None:
        """Return the recovered state, None for a restart, or an error text."""
        self.pipe.send(True)
        try:
            if self.pipe.poll(PATIENCE):
                return self.pipe.recv()
            what = "hangs"
        except EOFError:
            what = "dies"
        self.close()
        self._begin()
        return what

    def close(self) -> None:
        """Kill the child process."""
        self.process.kill()
        self.process.join()

    def _begin(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = start(recover_again_and_again, self.number, self.folder, theirs)
        theirs.close()  # otherwise the death of the child would not raise EOFError here


def kill_while_saving(number: int, folder: Path, reference: Reference, draw: random.Random) -> str:
    """Return the outcome of a SIGKILL at a random time during a save."""
    shutil.rmtree(folder, ignore_errors=True)
    # From the second save on, so that an older checkpoint exists.
    said, save = folder.with_suffix(".said"), draw.randint(2, 5)
    said.unlink(missing_ok=True)
    process = start(train_and_tell, number, folder, said)
    # The line before a save is polled, then the kill comes within the mean time of a save.
    deadline = time.monotonic() + PATIENCE
    while not any(row[:2] == ("begin", save) for row in read_told(said)):
        if not process.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"{SAVERS[number].name} did not come to its save {save}")
        time.sleep(0.001)
    time.sleep(draw.random() * reference.save_seconds)
    process.kill()
    process.join()
    saved = max(step for what, step, _, _ in read_told(said) if what == "saved")
    recoverer = Recoverer(number, folder)
    found = recoverer.recover()
    recoverer.close()
    return judge(found, reference, saved)


@contextmanager
def restored(folder: Path) -> Iterator[None]:
    """Give the files that a recovery has moved aside their original names on exit."""
    yield
    for path in folder.rglob("*.damaged"):
        path.rename(path.with_name(path.name.removesuffix(".damaged")))


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file within the context."""

    def flip(at: Path) -> None:
        with open(at, "r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))

    flip(path)
    yield
    flip(path)


@contextmanager
def halved(path: Path) -> Iterator[None]:
    """Truncate a file to its first half within the context."""
    data = path.read_bytes()
    os.truncate(path, len(data) // 2)
    yield
    path.write_bytes(data)


def damage(number: int, folder: Path, reference: Reference, flips: int, draw: random.Random) -> Iterator[dict]:
    """Yield counts of outcomes for flipped bits and halved files in the newest checkpoint; each fault is undone."""
    files = SAVERS[number].newest(folder)
    sizes = [path.stat().st_size for path in files]
    recoverer = Recoverer(number, folder)

    def outcome() -> str:
        return judge(recoverer.recover(), reference, STEPS)

    found = Counter()
    # A file is chosen with a probability proportional to its size, so that all bits are equally likely.
    for path in draw.choices(files, sizes, k=flips):
        with flipped(path, draw.randrange(8 * path.stat().st_size)), restored(folder):
            found[outcome()] += 1
    yield {"fault": "one bit flipped in the newest checkpoint", **found}
    found = Counter()
    for path in files:
        # `restored` exits first, so that the file has its name again when its content is restored.
        with halved(path), restored(folder):
            found[outcome()] += 1
    yield {"fault": "a file of the newest checkpoint cut to half", **found}
    recoverer.close()


def main() -> None:
    """Print a JSON line for each way and fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--kills", "--flips", "--seed"):
        parser.add_argument(name, type=int, required=True)
    flags = parser.parse_args()
    for number, saver in enumerate(SAVERS):
        draw, folder = random.Random(flags.seed), flags.folder / f"saver_{number}"
        reference = refer(number, folder)
        killed = Counter(
            kill_while_saving(number, flags.folder / "killed", reference, draw) for _ in range(flags.kills)
        )
        rows = [{"fault": "SIGKILL while saving", **killed}, *damage(number, folder, reference, flags.flips, draw)]
        for row in rows:
            print(json.dumps({"saver": saver.name, **row}), flush=True)
        # The next way needs the disk space.
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
