"""Capture and replay of a thread's operators: CUDA graphs, and their twin on a CPU, a recorder of operators.

The recorder shows that a step can be captured. It records each operator with its tensors. A replay runs the operators
on the current contents of the same storages and writes the results to the storages of the first run. A replay on other
contents equals the eager step, bit for bit, only if nothing of the data went through Python.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Replay = Callable[[], None]
"""Function that runs captured operators on the current contents of their tensors."""


class CaptureError(RuntimeError):
    """A step cannot be captured, because its operators depend on the data."""


class GraphBackend(Protocol):
    """Capture and replay of the operators of a thread."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run a step as it will be captured, without capturing, in the memory of the graphs."""

    def begin(self) -> None:
        """Start a graph."""

    def end(self) -> Replay:
        """Complete the graph and return the function that replays it."""

    def abort(self) -> None:
        """Discard a graph that is not complete, after an error; does nothing without one."""

    def drop(self) -> None:
        """Free the memory of all graphs, which are not used any more."""

    def busy_share(self, run: Callable[[], None]) -> float:
        """Return the share of the wall time of `run` in which the device computes."""


# --------------------
# CUDA graphs. Not yet run on a GPU.


class CudaGraphBackend:
    """`GraphBackend` of a CUDA device.

    All graphs are captured on one stream and share one pool of memory. That is safe because they are replayed one after
    another, and gradients, static inputs and summed losses are never freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.MemPool()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: torch.cuda.CUDAGraph | None = None
        self._context = contextlib.ExitStack()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run a step in the pool, on the stream of the captures.

        If memory runs out, it does here, outside of a capture: a failed capture would leak its pool (pytorch#190348).
        """
        with self._on_stream(), torch.cuda.use_mem_pool(self._pool, self._device):
            run()

    def begin(self) -> None:
        """Start a graph."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        self._context.enter_context(torch.cuda.stream(self._stream))
        self._open = graph
        # thread_local: the loader's thread pins memory meanwhile.
        graph.capture_begin(self._pool.id, "thread_local")  # type: ignore[arg-type]

    def end(self) -> Replay:
        """Complete the graph."""
        graph = self._open
        if graph is None:
            raise CaptureError("no graph is open")
        graph.capture_end()
        self._open = None
        self._context.close()
        self._graphs.append(graph)
        return graph.replay

    def abort(self) -> None:
        """Discard the open graph."""
        if self._open is None:
            return
        # The capture is invalid after most errors, and ending it raises once more.
        with contextlib.suppress(RuntimeError):
            self._open.capture_end()
        self._open = None
        self._context.close()

    def drop(self) -> None:
        """Free the memory of all graphs."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.MemPool()
        gc.collect()
        torch.cuda.empty_cache()

    def busy_share(self, run: Callable[[], None]) -> float:
        """Return the share of the wall time of `run` in which a kernel runs, from PyTorch's profiler."""
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - started
        kernels = sum(event.self_device_time_total for event in profile.key_averages())
        return kernels * 1e-6 / seconds

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the block on the stream of the captures, ordered with the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


# --------------------
# Recorder of dispatched operators.


# Operators that hand a number of the data to Python, or make a tensor of Python's numbers.
READS = {"_local_scalar_dense", "is_nonzero", "equal"}
CONSTANTS = {"lift_fresh", "lift_fresh_copy", "lift"}
# Operators whose result has no contents yet.
UNFILLED = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Operation:
    """One recorded operator; `outputs` are the results to be written again."""

    operator: Callable
    args: tuple
    kwargs: dict
    outputs: tuple[torch.Tensor, ...]

    def run(self) -> None:
        """Run the operator on the current contents."""
        results = _tensors(self.operator(*self.args, **self.kwargs))
        for output, result in zip(self.outputs, results, strict=bool(self.outputs)):
            output.copy_(result)

    def signature(self) -> str:
        """Return the operator with its numbers and the shapes of its tensors."""
        return f"{self.operator}({_describe(self.args)}, {_describe(self.kwargs)})"


class OperatorRecorder(TorchDispatchMode):
    """Mode that records and runs operators; raises CaptureError for one that a graph cannot contain."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, operator: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        _check(operator, args, kwargs)
        result = operator(*args, **kwargs)
        kind = _kind(operator)
        if kind != "view":
            outputs = () if kind == "in place" else _tensors(result)
            self.operations.append(Operation(operator, args, kwargs, outputs))
        return result

    def replay(self) -> None:
        """Run all operators again, on the current contents of their tensors."""
        with torch.no_grad():
            for operation in self.operations:
                operation.run()

    def poison(self) -> None:
        """Overwrite all results, so that a replay that does not compute one of them shows."""
        with torch.no_grad():
            for operation in self.operations:
                for output in operation.outputs:
                    output.fill_(math.nan if output.is_floating_point() else 0)


class RecorderBackend:
    """`GraphBackend` on a CPU. As on a GPU, results are valid only after a replay."""

    def __init__(self) -> None:
        self._open: OperatorRecorder | None = None
        self._complete: list[OperatorRecorder] = []

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run a step as it will be captured."""
        run()

    def begin(self) -> None:
        """Start a recording."""
        self._open = OperatorRecorder()
        self._open.__enter__()

    def end(self) -> Replay:
        """Complete the recording."""
        recorder = self._open
        if recorder is None:
            raise CaptureError("no recording is open")
        self._open = None
        recorder.__exit__(None, None, None)
        self._complete.append(recorder)
        return recorder.replay

    def abort(self) -> None:
        """Discard the open recording."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def drop(self) -> None:
        """Forget all recordings."""
        self._complete.clear()

    def busy_share(self, run: Callable[[], None]) -> float:
        """Run; a CPU never waits for its host."""
        run()
        return 1.0

    def poison(self) -> None:
        """Overwrite the results of all recordings."""
        for recorder in self._complete:
            recorder.poison()

    def signatures(self) -> list[str]:
        """Return all recorded operators with their numbers and shapes."""
        return [operation.signature() for recorder in self._complete for operation in recorder.operations]


def _check(operator: Callable, args: tuple, kwargs: dict) -> None:
    name = operator.overloadpacket.__name__  # type: ignore[attr-defined]
    tags = operator.tags  # type: ignore[attr-defined]
    is_dynamic = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    # The result of an index has the shape of the indices, unless they are masks.
    if name in ("index", "index_put", "index_put_"):
        is_dynamic = any(tensor is not None and tensor.dtype == torch.bool for tensor in args[1])
    if name in READS or is_dynamic:
        raise CaptureError(f"the host reads the result of {operator}, which a graph cannot contain")
    if name in CONSTANTS:
        raise CaptureError(f"{operator} makes a tensor of Python's numbers, which a graph would repeat")
    if torch.Tag.nondeterministic_seeded in tags and not _is_without_dropout(operator, args, kwargs):
        raise CaptureError(f"{operator} draws from a generator, whose state a graph would repeat")


def _is_without_dropout(operator: Callable, args: tuple, kwargs: dict) -> bool:
    """Return whether an attention operator has a dropout of 0, so that it draws nothing."""
    arguments = operator._schema.arguments  # type: ignore[attr-defined]
    arguments_of_call = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in arguments}
    return (defaults | arguments_of_call).get("dropout_p") == 0


def _kind(operator: Callable) -> str:
    """Return whether an operator writes to its arguments, returns views of them, or makes new tensors."""
    schema = operator._schema  # type: ignore[attr-defined]
    name = operator.overloadpacket.__name__  # type: ignore[attr-defined]
    if schema.is_mutable:
        return "in place"
    if name in UNFILLED or any(result.alias_info is not None for result in schema.returns):
        return "view"
    return "new"


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return tuple(item for item in result if isinstance(item, torch.Tensor))
    return ()


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_describe(item)}" for name, item in value.items())
    return repr(value)
