"""Step parts that raise an out-of-memory error under a given condition."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from konkanivani.training.step import StepParts

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total of 3.81 GiB."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 6553600000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError(),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
}

# (number of previous micro-batches, utterances in this one) -> whether it fails
FailCondition = Callable[[int, int], bool]


def fail_at(number: int) -> FailCondition:
    return lambda calls, _size: calls == number


def fail_above(size: int) -> FailCondition:
    """Fail whenever a micro-batch has more than `size` utterances."""
    return lambda _calls, utterances: utterances > size


@dataclass
class FailingFrontEnd:
    """Front end that raises `error` in the forward pass."""

    front_end: Callable
    when: FailCondition
    error: BaseException
    sizes: list[int] = field(default_factory=list)

    def __call__(self, waveforms, sample_lengths, augment_seeds):
        self.sizes.append(len(waveforms))
        if self.when(len(self.sizes) - 1, len(waveforms)):
            raise self.error
        return self.front_end(waveforms, sample_lengths, augment_seeds)


@dataclass
class FailingBackward:
    """`WrapBlock` that raises `error` in the backward pass of a block, after the later blocks got their gradients."""

    blocks: int
    when: FailCondition
    error: BaseException
    place: int = 0
    runs: int = 0

    def __call__(self, _number, block):
        return functools.partial(self._run, block)

    def _run(self, block, x, *others):
        output = block(x, *others)
        number, place = divmod(self.runs, self.blocks)
        self.runs += 1
        if place == self.place and self.when(number, len(x)):
            output.register_hook(self._fail)
        return output

    def _fail(self, _gradient: torch.Tensor) -> None:
        raise self.error


@dataclass(frozen=True)
class FailingChunk:
    """Forward hook that raises `error` on chunks of more than `frames` frames, in the forward or backward pass.

    `axis` is the frame axis of the module's output.
    """

    frames: int
    axis: int
    is_in_backward: bool
    error: BaseException

    def __call__(self, _module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        if output.shape[self.axis] <= self.frames:
            return
        if not self.is_in_backward:
            raise self.error
        if output.requires_grad:
            output.register_hook(self._fail)

    def _fail(self, _gradient: torch.Tensor) -> None:
        raise self.error


def failing_chunks(parts: StepParts, where: str, frames: int, error: BaseException) -> StepParts:
    """Return a step that fails on more than `frames` encoder frames or tokens at once; `where` is a key below."""
    modules = {
        "subsampling": (parts.model.encoder.subsampling.output, 1),
        "ctc": (parts.model.ctc_head, 1),
        "attention": (parts.model.decoder.output, 1),
    }
    name, pass_ = where.split(" ")
    module, axis = modules[name]
    module.register_forward_hook(FailingChunk(frames, axis, pass_ == "backward", error))
    return parts


def failing_forward(parts: StepParts, when: FailCondition, error: BaseException) -> StepParts:
    front_end = FailingFrontEnd(parts.forward.front_end, when, error)
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, front_end=front_end))


def failing_backward(parts: StepParts, when: FailCondition, error: BaseException, place: int = 0) -> StepParts:
    """Return a step with a block whose backward pass fails, by default the first one."""
    runner = FailingBackward(len(parts.model.blocks), when, error, place)
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, recompute=lambda _seconds: runner))
