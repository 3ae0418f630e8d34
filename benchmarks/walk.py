#!/usr/bin/env python3
"""Count the calls of a training run from the script to the loop, to the first feed-forward layer and to the gradient.

    python3 benchmarks/walk.py

Trains a tiny model on noise for three steps and traces calls of the project's functions (sys.setprofile). Counted are
the calls from the script's `main` to the loop, the calls from the loop's step to the first product of a feed-forward
module and to `.backward()`, and the files that the third step executes until its update. With `--plain` no passes are
applied to the model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import contextlib
import io
import json
import tempfile
import threading
from dataclasses import dataclass, field
from types import FrameType

from konkanivani.command_line import read_flags, run_script

ROOT = Path(__file__).resolve().parent.parent
OURS = (str(ROOT / "konkanivani"), str(ROOT / "training_scripts"))
STEP = 3
PRODUCTS = ("linear", "_linear_pointwise")
TINY = "--d_model 16 --encoder_layers 1 --decoder_layers 1 --attention_heads 2 --subsampling_channels 4"
QUICK = "--epochs 1 --batch_size 2 --gradient_accumulation_steps 2 --num_workers 0 --device cpu --tokenizer_type char"


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    concurrent_micro_batches: int = 1
    """Concurrent micro-batches."""
    plain: bool = False
    """No passes over the built model."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""


def is_in_feed_forward(frame: FrameType | None) -> bool:
    """Return whether the frame was called by a feed-forward module."""
    while frame is not None:
        kinds = type(frame.f_locals.get("self")).__mro__
        if any(kind.__name__ == "FeedForward" for kind in kinds):
            return True
        frame = frame.f_back
    return False


def own_calls(frame: FrameType | None, above: str) -> list[str]:
    """Return the project's functions on the stack, from the frame up to the one named `above`, outermost first."""
    names = []
    while frame is not None and frame.f_code.co_name != above:
        if frame.f_code.co_filename.startswith(OURS):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


@dataclass
class Walk:
    """Calls that the profile function has recorded, in all threads of the run."""

    to_loop: list[str] = field(default_factory=list)
    to_feed_forward: list[str] = field(default_factory=list)
    to_backward: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    steps: int = 0
    is_in_step: bool = False

    def see(self, frame: FrameType, event: str, called: object) -> None:
        """Record one call."""
        if event == "c_call" and not self.to_feed_forward and getattr(called, "__name__", "") in PRODUCTS:
            names = own_calls(frame, above="train")
            self.to_feed_forward = names if is_in_feed_forward(frame) else []
        if event != "call":
            return
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "backward" and file.endswith("torch/_tensor.py") and not self.to_backward:
            self.to_backward = own_calls(frame.f_back, above="train")
        if not file.startswith(OURS):
            return
        if name == "train" and file.endswith("loop.py"):
            self.to_loop = own_calls(frame.f_back, above="main")
        elif name == "train_step":
            self.steps += 1
            self.is_in_step = self.steps == STEP
        elif name == "set_learning_rate":  # called after the gradient is complete
            self.is_in_step = False
        if self.is_in_step:
            self.files.add(file)
            self.functions.add((file, name))


def write_corpus(folder: Path) -> Path:
    """Write noise recordings for three steps and return their manifest."""
    import numpy as np
    import soundfile

    rows = []
    for number in range(4 * STEP):
        noise = 0.1 * np.random.default_rng(number).standard_normal(16_000)
        soundfile.write(folder / f"{number}.wav", noise, 16_000)
        rows.append({"audio_filepath": f"{number}.wav", "text": "one two", "duration": 1.0})
    manifest = folder / "train.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return manifest


def walk(flags: Flags) -> Walk:
    """Trace one run."""
    from konkanivani.cli import train
    from konkanivani.training import build_step

    if flags.plain:
        build_step.optimize = lambda model, passes: None
    seen = Walk()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = f"--train_manifest {write_corpus(folder)} --checkpoint_dir {folder}/checkpoints --log_dir {folder}/runs"
        given += f" --concurrent_micro_batches {flags.concurrent_micro_batches} {TINY} {QUICK}"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # threading.setprofile covers threads that start later, sys.setprofile this one.
            threading.setprofile(seen.see)
            sys.setprofile(seen.see)
            try:
                train.main(given.split())
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return seen


def report(flags: Flags) -> str:
    """Return the counts as text or JSON."""
    seen = walk(flags)
    hops = {"script_to_loop": len(seen.to_loop) + 1, "step_to_backward": len(seen.to_backward)}
    hops["step_to_feed_forward"] = len(seen.to_feed_forward)
    counts = hops | {"files_in_a_step": len(seen.files), "functions_in_a_step": len(seen.functions)}
    if flags.json:
        return json.dumps(counts)
    files = ", ".join(sorted(Path(file).relative_to(ROOT).as_posix() for file in seen.files))
    to_loop = " -> ".join(["main", *seen.to_loop, "train"])
    return (
        f"From the script to the loop {hops['script_to_loop']} calls: {to_loop}.\n"
        f"From the step to the gradient {hops['step_to_backward']}: {' -> '.join(seen.to_backward)} -> .backward().\n"
        f"To the first feed-forward product {hops['step_to_feed_forward']}: {' -> '.join(seen.to_feed_forward)}.\n"
        f"A step until its update: {len(seen.functions)} functions in {len(seen.files)} files: {files}."
    )


if __name__ == "__main__":
    sys.exit(run_script(lambda: report(read_flags(Flags, sys.argv[1:]))))
