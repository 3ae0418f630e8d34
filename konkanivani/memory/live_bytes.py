"""The peak of live tensor bytes on a device that keeps no such count itself (a CPU)."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation returns while this mode is on, until it is freed.

    `live` and `peak` are bytes, each storage rounded up to a multiple of `rounding`, as an allocator hands it out.
    Views and in-place results share a storage and count once; tensors of another device than `place`, where one is
    given, do not count, nor do kernels' own workspaces. What existed before must be given to `count`.
    """

    def __init__(self, rounding: int = 1, place: torch.device | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._rounding, self._place = rounding, place
        self._sizes: dict[int, int] = {}
        self._counting = threading.RLock()  # a storage may be freed by another thread, or while this one counts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operation goes through a wrapper of PyTorch's compiler

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts the storages of these tensors, unless they are counted already."""
        for tensor in tensors:
            if self._place is not None and tensor.device != self._place:
                continue
            storage = tensor.untyped_storage()
            size = -(-storage.nbytes() // self._rounding) * self._rounding
            with self._counting:
                if storage._cdata in self._sizes:
                    continue
                self._sizes[storage._cdata] = size
                self.live += size
                self.peak = max(self.peak, self.live)
            # PyTorch keeps a storage's Python object for as long as C++ (autograd, say) holds the storage.
            weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def restart_peak(self) -> int:
        """The peak so far, in bytes; from here on it is counted anew."""
        peak, self.peak = self.peak, self.live
        return peak

    def _forget(self, address: int) -> None:
        with self._counting:
            self.live -= self._sizes.pop(address)

    def __torch_dispatch__(
        self, operation: Callable, types: tuple, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        result = operation(*args, **(kwargs or {}))
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        self.count(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result
