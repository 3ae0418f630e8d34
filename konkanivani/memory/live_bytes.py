"""Peak of live tensor bytes on devices that do not count it themselves (CPU, traced tensors)."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts each storage returned by an operation until it is freed.

    `live` and `peak` are bytes; each storage is rounded up to a multiple of `rounding`, as in an allocator. Views and
    in-place results share a storage and count once. With `place`, only tensors on that device count. Workspaces inside
    of kernels are not counted. Storages from before the mode have to be passed to `count`.
    """

    def __init__(self, rounding: int = 1, place: torch.device | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._rounding = rounding
        self._place = place
        self._sizes: dict[int, int] = {}
        # Storages may be freed by another thread, or by the garbage collector during a count.
        self._counting = threading.RLock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise each operation passes through a wrapper of torch.compile

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors, unless they are already counted."""
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
            # PyTorch keeps the Python object of a storage alive while C++ (for example autograd) holds the storage.
            weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def restart_peak(self) -> int:
        """Return the peak in bytes since the last call and restart it at the live bytes."""
        peak = self.peak
        self.peak = self.live
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
