"""Capture and replay by CUDA graphs. NOT RUN ON A CARD YET.

All graphs are captured on one stream and share one pool of memory. That is safe because they are replayed one after
another, and gradients, static inputs and summed losses are never freed.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import torch

from konkanivani.ops.capturable import CaptureError, Replay


class CudaGraphBackend:
    """`GraphBackend` of a CUDA device."""

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
