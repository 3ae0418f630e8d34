"""Transfer of block weights from host memory to the GPU, with prefetch of the next block.

On CUDA, the host weights are page-locked and copied in a second stream, so that the transfer overlaps with the block's
matrix products (Rajbhandari et al., 2021). On other devices, the same copies are made synchronously in the same order.
"""

import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

Sources = Sequence[Mapping[str, torch.Tensor]]
"""Source tensors in host memory of each offloaded block by name: the masters, or their half-precision copies."""


@dataclass(frozen=True)
class _PendingCopy:
    """Weights of a block in transfer; `arrived` is the CUDA event of its completion, None if they are already there."""

    number: int
    weights: dict[str, torch.Tensor]
    arrived: torch.cuda.Event | None


class WeightPrefetcher:
    """Source of block weights on the GPU, each copied when it is requested or, with `prefetch`, one block earlier."""

    def __init__(
        self,
        sources: Sources,
        device: torch.device,
        amp_dtype: torch.dtype | None,
        prefetch: bool,
        trains: Sequence[bool],
    ) -> None:
        """Create a prefetcher; `trains` states for each block whether the backward pass reaches it.

        Matrices are copied in `amp_dtype`, if any.
        """
        self._sources = sources
        self._device = device
        self._amp_dtype = amp_dtype
        self._ahead = prefetch
        self._trains = trains
        self._stream: torch.cuda.Stream | None = None
        self._coming: _PendingCopy | None = None
        self._last = -1
        if device.type == "cuda" and prefetch:
            self._stream = torch.cuda.Stream(device)
            locked = _lock_pages(weight for weights in sources for weight in weights.values())
            # Unlock the pages before the weights are freed: CUDA would otherwise read stale data of whatever is
            # allocated there next.
            weakref.finalize(self, _unlock_pages, locked).atexit = False

    def get(self, number: int) -> dict[str, torch.Tensor]:
        """Return the block's weights on the GPU and start the copy of the next block in the direction of this pass."""
        found = self._coming
        self._coming = None
        self._await(found)
        if found is None or found.number != number:
            found = self._start(number)
            self._await(found)
        # Block numbers ascend in the forward pass and descend in the backward pass.
        following = number + 1 if number > self._last else number - 1
        self._last = number
        # The backward pass does not reach blocks below the first trained one.
        if self._ahead and 0 <= following < len(self._sources) and (following > number or self._trains[following]):
            self._coming = self._start(following)
        return found.weights

    def forget(self) -> None:
        """Discard a pending copy, because its source weights may have changed."""
        self._await(self._coming)
        self._coming = None
        self._last = -1

    def _await(self, coming: _PendingCopy | None) -> None:
        """Make the main stream wait for the copies before it uses the weights or reuses their memory."""
        if coming is not None and coming.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(coming.arrived)

    @torch.no_grad()
    def _start(self, number: int) -> _PendingCopy:
        sources = self._sources[number]
        types = {name: type_on_card(source, self._amp_dtype) for name, source in sources.items()}
        if self._stream is None:
            brought = {name: source.to(self._device, types[name], copy=True) for name, source in sources.items()}
            return _PendingCopy(number, brought, None)
        # Allocated in the main stream, which may still be reading freed memory: the copies have to wait for it.
        weights = {name: torch.empty_like(s, dtype=types[name], device=self._device) for name, s in sources.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, source in sources.items():
                weights[name].copy_(source, non_blocking=True)
        return _PendingCopy(number, weights, self._stream.record_event())


def type_on_card(weight: torch.Tensor, amp_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a weight on the GPU; `amp_dtype` is None in full precision."""
    return amp_dtype if amp_dtype is not None and is_matrix(weight) else weight.dtype


def is_matrix(weight: torch.Tensor) -> bool:
    """Return whether mixed precision multiplies by this weight in half precision: no norm, bias or depthwise kernel.

    A kernel over frames and bands (4 dimensions) is small, and on a CPU in full precision, so that it is no matrix
    either.
    """
    return weight.dim() in (2, 3) and weight.shape[1] > 1


def on_own_pages(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a host tensor on memory pages of its own, so that they can be page-locked.

    PyTorch's pinned memory is allocated in powers of two: up to twice as much.
    """
    pages = mmap.mmap(-1, max(weight.nbytes, 1))  # a mapping of length 0 is an error
    return torch.frombuffer(pages, dtype=weight.dtype, count=weight.numel()).view(weight.shape).copy_(weight)


def _lock_pages(weights: Iterable[torch.Tensor]) -> list[int]:
    """Page-lock the tensors, so that the GPU can read them directly; return the addresses of the locked ones.

    If the system refuses, the copies are slower.
    """
    runtime = torch.cuda.cudart()
    locked = []
    for weight in weights:
        if runtime.cudaHostRegister(weight.data_ptr(), weight.nbytes, 0) == runtime.cudaError.success:
            locked.append(weight.data_ptr())
        else:
            with suppress(RuntimeError):  # a refusal is reported by the next kernel: trigger it here, not in a step
                torch.zeros(1, device="cuda")
    return locked


def _unlock_pages(locked: list[int]) -> None:
    torch.cuda.synchronize()
    for address in locked:
        torch.cuda.cudart().cudaHostUnregister(address)
