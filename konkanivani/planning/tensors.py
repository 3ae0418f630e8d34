"""Tensors without data, and a count of live tensor bytes, from which the planner takes the peaks of a step.

A tensor without data has a shape, a layout and a storage that takes no memory. It is on the traced device or, if its
data would be in host memory beside a GPU, on the traced host.

The result of an operation is computed on the meta device, once per combination of layouts: the blocks of a model are
alike. If the layout depends on a CPU kernel, PyTorch's FakeTensor computes it, which takes a millisecond, ten times as
much as the meta device. Views are computed on the meta tensor that holds the storage.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
# Labels of the traced tensors. The traced GPU need not exist on this machine, and PyTorch refuses CUDA's autograd and
# autocast without one. So the device is labelled `cpu`, whatever it is, and host memory beside a GPU `meta`.
TRACED_DEVICE = torch.device("cpu")
TRACED_HOST = META
# No meta kernel exists for the backward pass of CTC: its result has the layout of the log probabilities.
CTC_BACKWARD = torch.ops.aten._ctc_loss_backward.default
# Convolutions may return channels-last layouts, and a half-precision layer norm chooses the dtype of its statistics.
KERNEL_DEPENDENT = frozenset({torch.ops.aten.convolution.default, torch.ops.aten.native_layer_norm.default})


class Shape(torch.Tensor):
    """A tensor on the GPU or the host without data; `meta` is the meta-device tensor that has its storage."""

    __slots__ = ("meta",)
    meta: torch.Tensor
    # PyTorch's own way to disable __torch_function__; its stub declares a method of other parameters.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of `meta`, which identifies views of the same memory."""
        return self.meta.untyped_storage()

    # The stub of Tensor declares a method of an instance.
    @classmethod
    def __torch_dispatch__(cls, operation: OpOverload, *_others: object) -> object:  # type: ignore[override]
        raise RuntimeError(f"{operation} was called on tensors without data outside of their mode.")


def shape_of(meta: torch.Tensor, device: torch.device = TRACED_DEVICE) -> Shape:
    """Wrap a tensor of the meta device in a Shape that reports `device`."""
    shape = torch.Tensor._make_wrapper_subclass(
        Shape, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=device
    )
    shape.meta = meta
    return shape


class Shapes(TorchDispatchMode):
    """Dispatch mode in which all operations run on shapes and new tensors have no data; must not be entered twice."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode()
        self._kinds: dict[OpOverload, str] = {}
        self._layouts: dict[tuple, object] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise each operation passes through a wrapper of torch.compile

    def from_tensor(self, tensor: torch.Tensor) -> Shape:
        """Return the tensor's shape and layout without its data."""
        with no_dispatch():
            return tensor if isinstance(tensor, Shape) else shape_of(_without_data(tensor), tensor.device)

    def __torch_dispatch__(
        self, operation: OpOverload, types: tuple, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        kwargs = kwargs or {}
        kind = self._kinds.get(operation)
        if kind is None:
            kind = self._kinds[operation] = _kind_of(operation)
        if kind == "in place":
            return args[0]
        if kind == "makes new":
            return self._compute_new(operation, args, kwargs)
        if kind == "view in place":
            # Runs first on the Shape itself, to change its own sizes and strides, then on its meta tensor.
            with no_dispatch():
                operation(*args, **kwargs)
        return _run(operation, args, kwargs)

    def _compute_new(self, operation: OpOverload, args: tuple, kwargs: Mapping) -> object:
        key = (operation, _key_of(args), _key_of(tuple(kwargs.items())))
        layout = self._layouts.get(key)
        if layout is None:
            compute = self._run_on_fakes if operation in KERNEL_DEPENDENT else _run
            result = args[1] if operation is CTC_BACKWARD else compute(operation, args, kwargs)
            layout = self._layouts[key] = _layout_of(result)
        return _from_layout(layout, kwargs.get("device") or _device_of(args))

    def _run_on_fakes(self, operation: OpOverload, args: tuple, kwargs: Mapping) -> object:
        with self._fakes:
            fake_args = [_fake_of(value) for value in args]
            return operation(*fake_args, **{name: _fake_of(value) for name, value in kwargs.items()})


def _kind_of(operation: OpOverload) -> str:
    """Classify an operation by its schema: in place, view in place, writes, makes new, or views."""
    schema = operation._schema
    if torch.Tag.inplace_view in operation.tags:
        return "view in place"
    aliases = [result.alias_info for result in schema.returns]
    if len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write:
        first = schema.arguments[0].alias_info
        return "in place" if first is not None and first.is_write else "writes"
    # The schema of _unsafe_view declares a new tensor, but the result shares the input's storage.
    is_new = all(result is None for result in aliases) and operation is not torch.ops.aten._unsafe_view.default
    return "makes new" if is_new and schema.returns else "views"


def _run(operation: OpOverload, args: tuple, kwargs: Mapping) -> object:
    shape_by_id: dict[int, Shape] = {}
    meta_args = [_to_meta(value, shape_by_id) for value in args]
    result = operation(*meta_args, **{name: _to_meta(value, shape_by_id) for name, value in kwargs.items()})
    return _from_meta(result, shape_by_id, kwargs.get("device") or _device_of(args))


def _device_of(args: Sequence[object]) -> torch.device:
    """Return the device of an operation's tensors; 0-dimensional tensors may be on any device and count last."""
    device = None
    for value in args:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                if tensor.dim():
                    return tensor.device
                device = device or tensor.device
    return device or TRACED_DEVICE


def _to_meta(value: object, shape_by_id: dict[int, Shape]) -> object:
    """Convert an argument for the meta device; `shape_by_id` collects the Shape of each meta tensor."""
    if isinstance(value, Shape):
        shape_by_id[id(value.meta)] = value
        return value.meta
    if isinstance(value, torch.Tensor):
        return _without_data(value)
    if isinstance(value, (list, tuple)):
        return [_to_meta(item, shape_by_id) for item in value]
    if isinstance(value, torch.device):
        return META
    # Without data, no random numbers are drawn.
    return None if isinstance(value, torch.Generator) else value


def _from_meta(value: object, shape_by_id: dict[int, Shape], device: torch.device) -> object:
    if isinstance(value, torch.Tensor):
        return shape_by_id.get(id(value)) if id(value) in shape_by_id else shape_of(value, device)
    return [_from_meta(item, shape_by_id, device) for item in value] if isinstance(value, (list, tuple)) else value


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _key_of(value: object) -> object:
    """Return everything of an argument that the result's layout may depend on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(item) for item in value])
    return None if isinstance(value, torch.Generator) else (type(value), value)


def _fake_of(value: object) -> object:
    """Convert an argument for FakeTensorMode, which has to be active."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return [_fake_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def _layout_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return [_layout_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def _from_layout(layout: object, device: torch.device) -> object:
    if isinstance(layout, tuple):
        size, stride, dtype = layout
        # A new storage for each call: only the layout is cached.
        return shape_of(torch.empty_strided(size, stride, dtype=dtype, device=META), device)
    return [_from_layout(item, device) for item in layout] if isinstance(layout, list) else layout


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
