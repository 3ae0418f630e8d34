#!/usr/bin/env python3
"""Count the calls of a training run, or the operators of a step that launch kernels.

    python3 benchmarks/walk.py
    python3 benchmarks/walk.py kernels
    python3 benchmarks/walk.py kernels --models whisper-tiny --per_operator

Calls: trains a tiny model on noise for three steps and traces calls of the project's functions (sys.setprofile). It
counts the calls from the script's `main` to the loop, the calls from the loop's step to the first product of a
feed-forward module and to `.backward()`, and the files that the third step executes until its update. With `--plain` no
passes are applied to the model.

Kernels: this trainer's Whisper and native steps, and transformers'. One step: forward and backward pass of each
micro-batch, loss scale, clipping, AdamW; features are given. Counted are the operators that PyTorch dispatches, without
views and without those in `WITHOUT_KERNEL`. The step runs on a CPU, with the decisions of a GPU: no oneDNN, packing or
masks of one byte, norms in fp32 under autocast. An operator may launch several kernels (a sum over 51,865 columns, a
list of tensors), on both sides alike. Windows are of one second, which changes no count. A line of JSON per step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Literal
from unittest import mock

import numpy as np
import soundfile
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring.common import VOCABULARY, build_global_batch, build_speech, take_features_as_given
from benchmarks.peers.whisper_toolkits import Transformers, WhisperTerms
from konkanivani.cli import train
from konkanivani.command_line import read_flags, run_script
from konkanivani.config import PRESETS, DataConfig, LossConfig, MemoryConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.errors import UsageError
from konkanivani.models.architecture import Architecture, architecture_of
from konkanivani.models.conformer import Dropout
from konkanivani.models.twin import replace_modules
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.ops.passes import ALL_PASSES, ROOMY_PASSES
from konkanivani.training import build_step
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

# --------------------
# Calls of the project's functions.

ROOT = Path(__file__).resolve().parent.parent
OURS = (str(ROOT / "konkanivani"), str(ROOT / "training_scripts"))
STEP = 3
PRODUCTS = ("linear", "_linear_pointwise")
TINY = "--d_model 16 --encoder_layers 1 --decoder_layers 1 --attention_heads 2 --subsampling_channels 4"
QUICK = "--epochs 1 --batch_size 2 --gradient_accumulation_steps 2 --num_workers 0 --device cpu --tokenizer_type char"


@dataclass(frozen=True)
class CallFlags:
    """Flags of the count of calls."""

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
    rows = []
    for number in range(4 * STEP):
        noise = 0.1 * np.random.default_rng(number).standard_normal(16_000)
        soundfile.write(folder / f"{number}.wav", noise, 16_000)
        rows.append({"audio_filepath": f"{number}.wav", "text": "one two", "duration": 1.0})
    manifest = folder / "train.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return manifest


def walk(flags: CallFlags) -> Walk:
    """Trace one run."""
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


def count_calls(flags: CallFlags) -> str:
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


# --------------------
# Operators that launch kernels.

WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "promote_types"),
    *("_record_function_enter_new", "_record_function_exit"),
    # A GPU's fused AdamW does not read the step on the host.
    "_local_scalar_dense",
}
"""Operators without a kernel, besides views (whose result the schema declares as an alias of an argument)."""
# The twins of these passes run PyTorch's kernels on a GPU.
CPU_PASSES = {"packing": False, "fast_depthwise": False, "masked_dropout": False}
CARD_PASSES = {
    "scarce": dataclasses.replace(ALL_PASSES, **CPU_PASSES),
    "ample": dataclasses.replace(ROOMY_PASSES, **CPU_PASSES),
}
FEATURE_FRAMES = 100
Model = Literal["whisper-tiny", "whisper-base", "original", "minimal"]
Precision = Literal["full", "half"]
Checkpointing = Literal["always", "never"]
Memory = Literal["scarce", "ample"]


@dataclass(frozen=True)
class KernelFlags:
    """Flags of the count of kernels."""

    models: tuple[Model, ...] = ("whisper-tiny", "whisper-base", "original")
    """Models to count; beside those of Whisper, transformers'."""
    precision: tuple[Precision, ...] = ("half", "full")
    """Autocast (to bf16, with a loss scale), or full precision."""
    checkpointing: tuple[Checkpointing, ...] = ("always", "never")
    """Recompute all blocks, or none."""
    memory: tuple[Memory, ...] = ("scarce", "ample")
    """Passes of this trainer: those that save memory, or those of a plan with memory to spare."""
    utterances: int = 4
    """Utterances of a step (native models: twice as many)."""
    micro_batches: int = 4
    """Micro-batches of a step."""
    per_operator: bool = False
    """Print the count of each operator too."""


class LaunchCounter(TorchDispatchMode):
    """Mode that counts the operators that launch kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if has_kernel(operator):
            self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def has_kernel(operator: OpOverload) -> bool:
    """Return whether an operator launches a kernel: it is neither a view nor in `WITHOUT_KERNEL`."""
    aliases = [result.alias_info for result in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and operator.overloadpacket.__name__ not in WITHOUT_KERNEL


class CardDropout(Dropout):
    """Dropout as on a GPU: one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, self.p, True)[0]


@contextlib.contextmanager
def as_on_a_card(model: torch.nn.Module) -> Iterator[None]:
    """Make the decisions of a GPU in the block: no oneDNN, and norms in fp32 under autocast."""

    def cast(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.float() for tensor in inputs) if torch.is_autocast_enabled("cpu") else inputs

    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    hooks = [norm.register_forward_pre_hook(cast) for norm in norms]
    try:
        with mock.patch("konkanivani.ops.products.is_onednn_preferred", lambda: False):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def launches(model: torch.nn.Module, step: Callable[[], object]) -> Counter[str]:
    """Return the operators of one more step by name; the first steps allocate state."""
    with as_on_a_card(model), LaunchCounter() as counter:
        step()
    return counter.counts


@dataclass(frozen=True)
class Case:
    """A step to count."""

    model: Model
    precision: Precision
    checkpointing: Checkpointing
    memory: Memory
    utterances: int
    micro_batches: int

    @property
    def is_half(self) -> bool:
        """Whether the step runs under autocast."""
        return self.precision == "half"

    @property
    def terms(self) -> WhisperTerms:
        """Workload of Whisper: the labels of 5 to 28 s of speech, in a window of a second."""
        return WhisperTerms(
            size="tiny" if self.model == "whisper-tiny" else "base",
            train="all",
            utterances=self.utterances,
            together=self.utterances // self.micro_batches,
            shortest=5.0,
            longest=28.0,
            tokens_per_second=16.0,
            device="cpu",
            mixed_precision=self.is_half,
            audio_context="window",
            window_seconds=FEATURE_FRAMES // 100,
        )


def our_launches(case: Case) -> Counter[str]:
    """Return the operators of this trainer's step."""
    parts = build_parts(case)
    batch = native_batch(case) if not case.model.startswith("whisper") else whisper_batch(case.terms)
    train_step(parts, batch, 0)
    return launches(parts.model, lambda: train_step(parts, batch, 1))


def build_parts(case: Case) -> StepParts:
    """Return the step as a GPU runs it."""
    memory = MemoryConfig(mixed_precision=case.is_half, gradient_checkpointing=case.checkpointing)
    config = TrainConfig(data=DataConfig(concurrent_micro_batches=1), memory=memory)
    architecture: Architecture
    if case.model.startswith("whisper"):
        # Without smoothing, as transformers.
        config = dataclasses.replace(config, loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0))
        architecture = WhisperArchitecture(case.terms.shape)
    else:
        config = dataclasses.replace(config, model=PRESETS[case.model])
        architecture = architecture_of(config, VOCABULARY)
    device = torch.device("cpu")
    parts = build_step_parts(
        config, architecture, device, 1000, take_features_as_given, passes=CARD_PASSES[case.memory]
    )
    replace_modules(parts.model, {Dropout: CardDropout})
    return dataclasses.replace(parts, scaler=torch.amp.GradScaler("cpu", enabled=case.is_half))


def whisper_batch(terms: WhisperTerms) -> GlobalBatch:
    """Return a step's utterances, with features (T, F) as waveforms."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(FEATURE_FRAMES, terms.shape.mel_bins, generator=generator)
    examples = [
        Example(str(number), features, [number] * (labels - 1), None) for number, labels in enumerate(terms.labels)
    ]
    return split_into_micro_batches(examples, same_size(terms.together), terms.special)


def native_batch(case: Case) -> GlobalBatch:
    """Return twice as many utterances of 3 to 12 s, as features."""
    return build_global_batch(build_speech(2 * case.utterances), case.micro_batches)


class FixedFeatures(Transformers):
    """Step of transformers with given features."""

    def features_of(self, waveform: torch.Tensor) -> torch.Tensor:
        """Return features (1, F, T) that do not depend on the waveform."""
        return torch.ones(1, self.terms.shape.mel_bins, FEATURE_FRAMES)


def their_launches(case: Case) -> Counter[str]:
    """Return the operators of transformers' step."""
    step = FixedFeatures(case.terms)
    step.scaler = torch.amp.GradScaler("cpu", enabled=case.is_half)
    if case.checkpointing == "never":
        step.model.gradient_checkpointing_disable()
    return launches(step.model, step.step)


def count_kernels(flags: KernelFlags) -> str:
    """Count the steps of all models and print them."""
    if flags.utterances % flags.micro_batches:
        raise UsageError("--micro_batches must divide --utterances.")
    if any(model.startswith("whisper") for model in flags.models) and not importlib.util.find_spec("transformers"):
        raise UsageError("Package transformers is not installed. Run: pip install -e .[test].")
    for model in flags.models:
        for settings in itertools.product(flags.precision, flags.checkpointing, flags.memory):
            print_counts(Case(model, *settings, flags.utterances, flags.micro_batches), flags.per_operator)
    return ""


def print_counts(case: Case, per_operator: bool) -> None:
    """Print the launches of both sides as a line of JSON."""
    ours = our_launches(case)
    line: dict[str, object] = {**asdict(case), "launches": ours.total()}
    theirs: Counter[str] = Counter()
    if case.model.startswith("whisper"):
        theirs = their_launches(case)
        line |= {"transformers": theirs.total(), "ratio": round(ours.total() / theirs.total(), 3)}
    if per_operator:
        names = sorted({*ours, *theirs}, key=lambda name: theirs[name] - ours[name])
        line["operators"] = {name: [ours[name], theirs[name]] for name in names}
    print(json.dumps(line), flush=True)


def main(arguments: list[str]) -> str:
    """Return the report of the count that the first argument names; without it, of the calls."""
    if arguments[:1] == ["kernels"]:
        return count_kernels(read_flags(KernelFlags, arguments[1:]))
    return count_calls(read_flags(CallFlags, arguments))


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(sys.argv[1:])))
