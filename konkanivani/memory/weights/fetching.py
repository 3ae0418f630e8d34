"""Brings the weights of blocks from the host to the card, those of the next block while one is worked with.

On CUDA the host's side of it is page-locked and a second stream carries it, so that the transfer hides behind the
block's products (Rajbhandari et al., 2021). Elsewhere the same copies are made in the same order, at once.
"""

import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

Sources = Sequence[Mapping[str, torch.Tensor]]
"""What each fetched block is brought as, by name, on the host: the masters, or their copies in half precision."""


@dataclass(frozen=True)
class _PendingCopy:
    """A block's weights on their way; `arrived` is CUDA's mark that they are all there, None where they are already."""

    number: int
    weights: dict[str, torch.Tensor]
    arrived: torch.cuda.Event | None


class WeightPrefetcher:
    """Copies of blocks' weights on the card, each made when it is asked for or, `prefetch`, one block before."""

    def __init__(
        self,
        sources: Sources,
        device: torch.device,
        amp_dtype: torch.dtype | None,
        prefetch: bool,
        trains: Sequence[bool],
    ) -> None:
        """Matrices come in `amp_dtype`, if any; `trains` says of each block whether the backward pass goes there."""
        self._sources, self._device, self._amp_dtype = sources, device, amp_dtype
        self._ahead, self._trains = prefetch, trains
        self._stream: torch.cuda.Stream | None = None
        self._coming: _PendingCopy | None = None
        self._last = -1
        if device.type == "cuda" and prefetch:
            self._stream = torch.cuda.Stream(device)
            locked = _lock_pages(weight for weights in sources for weight in weights.values())
            # Before the weights are gone: what comes to lie there next would be read as it was.
            weakref.finalize(self, _unlock_pages, locked).atexit = False

    def get(self, number: int) -> dict[str, torch.Tensor]:
        """The block's weights on the card; the next one's are on their way then, in the direction of this pass."""
        found, self._coming = self._coming, None
        self._await(found)
        if found is None or found.number != number:
            found = self._start(number)
            self._await(found)
        following = number + 1 if number > self._last else number - 1
        self._last = number
        if self._ahead and 0 <= following < len(self._sources) and (following > number or self._trains[following]):
            self._coming = self._start(following)
        return found.weights

    def forget(self) -> None:
        """Drops what is on its way: the weights that it is a copy of may have changed."""
        self._await(self._coming)
        self._coming, self._last = None, -1

    def _await(self, coming: _PendingCopy | None) -> None:
        """Has the main stream wait for the copies: before it works with them, or has their memory again."""
        if coming is not None and coming.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(coming.arrived)

    @torch.no_grad()
    def _start(self, number: int) -> _PendingCopy:
        sources = self._sources[number]
        types = {name: type_on_card(source, self._amp_dtype) for name, source in sources.items()}
        if self._stream is None:
            brought = {name: source.to(self._device, types[name], copy=True) for name, source in sources.items()}
            return _PendingCopy(number, brought, None)
        # Memory of the main stream: what that has freed it may still be reading, so the copies wait for it.
        weights = {name: torch.empty_like(s, dtype=types[name], device=self._device) for name, s in sources.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, source in sources.items():
                weights[name].copy_(source, non_blocking=True)
        return _PendingCopy(number, weights, self._stream.record_event())


def type_on_card(weight: torch.Tensor, amp_dtype: torch.dtype | None) -> torch.dtype:
    """In which precision a weight is brought to a run in `amp_dtype`, None in full precision."""
    return amp_dtype if amp_dtype is not None and is_matrix(weight) else weight.dtype


def is_matrix(weight: torch.Tensor) -> bool:
    """Whether a run in half precision multiplies by it in half precision: no norm, bias or depthwise kernel.

    Nor a kernel over frames and bands, which is small, and on a CPU in full precision.
    """
    return weight.dim() in (2, 3) and weight.shape[1] > 1


def on_own_pages(weight: torch.Tensor) -> torch.Tensor:
    """A host tensor's copy that shares no page of memory with anything else, so that its pages can be locked.

    PyTorch's own page-locked memory is handed out in powers of two: up to twice as much.
    """
    pages = mmap.mmap(-1, max(weight.nbytes, 1))
    return torch.frombuffer(pages, dtype=weight.dtype, count=weight.numel()).view(weight.shape).copy_(weight)


def _lock_pages(weights: Iterable[torch.Tensor]) -> list[int]:
    """Has the system keep the tensors' pages in memory, where a card reads them by itself; where it refuses, slower.

    The addresses of those that are locked.
    """
    runtime, locked = torch.cuda.cudart(), []
    for weight in weights:
        if runtime.cudaHostRegister(weight.data_ptr(), weight.nbytes, 0) == runtime.cudaError.success:
            locked.append(weight.data_ptr())
        else:
            with suppress(RuntimeError):  # CUDA tells the next kernel of the refusal: here, and not in a step
                torch.zeros(1, device="cuda")
    return locked


def _unlock_pages(locked: list[int]) -> None:
    torch.cuda.synchronize()
    for address in locked:
        torch.cuda.cudart().cudaHostUnregister(address)
