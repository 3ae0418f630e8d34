"""Placement of model weights on the GPU or in host memory, and the prefetch of offloaded blocks.

The *master* of an offloaded trained weight is an fp32 tensor in host memory, and a parameter of the model. Autograd
copies its gradient to the host, synchronously, so that clipping, AdamW (which updates it on the host), checkpointing
and resuming handle it like any other weight. A block computes with a copy on the GPU that exists only while the block
runs, in the forward pass and again during recomputation (Pudipeddi et al., 2020; Rajbhandari et al., 2021). Results
equal those without offloading bit for bit, except with half-precision weights and without autocast, where the weights
are rounded.
"""

import bisect
import contextlib
import dataclasses
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.func import functional_call

from konkanivani.models.asr import SpeechNetwork
from konkanivani.models.conformer import RunBlock, WrapBlock

# --------------------
# Transfer of block weights from host memory to the GPU, with prefetch of the next block.
#
# With `Placement.prefetch` on CUDA, the host weights are page-locked and copied in a second stream, so that the
# transfer overlaps with the block's matrix products (Rajbhandari et al., 2021). Otherwise each block's weights are
# copied when the block needs them. The input of a fetched block, which its recomputation starts from, waits in host
# memory for the backward pass, unless memory is left for a prefetch: of a deep model's activations, the blocks' inputs
# are then the largest part.


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
        pending = self._coming
        self._coming = None
        self._await(pending)
        if pending is None or pending.number != number:
            pending = self._start(number)
            self._await(pending)
        # Block numbers ascend in the forward pass and descend in the backward pass. Block 0 of the next micro-batch
        # follows block 0 of a backward pass: nothing is prefetched for block 1 then.
        following = number + 1 if number > self._last else number - 1
        self._last = number
        # The backward pass does not reach blocks below the first trained one.
        if self._ahead and 0 <= following < len(self._sources) and (following > number or self._trains[following]):
            self._coming = self._start(following)
        return pending.weights

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


# --------------------
# Placement of model weights: on the GPU, on the GPU in half precision, or offloaded to host memory per block.


HOST = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """Placement of the weights: the first `offloaded_blocks` blocks on the host, the others on the GPU.

    With `half_precision` the weights on the GPU are in half precision and their fp32 masters on the host. With
    `prefetch` the next block's weights are copied while the current block computes, from page-locked memory (in mixed
    precision from half-precision copies of the masters): less time, one more block on the GPU, and in half precision
    two more bytes per weight on the host. Recomputed Whisper blocks then also keep their attention results, since
    prefetch is chosen only if memory is left.
    """

    offloaded_blocks: int = 0
    half_precision: bool = False
    prefetch: bool = False

    @property
    def is_on_card(self) -> bool:
        """Whether all weights are on the GPU in full precision."""
        return not self.offloaded_blocks and not self.half_precision

    def describe(self, blocks: int) -> str:
        """Describe the placement for the user, for a model of `blocks` blocks."""
        offloaded_blocks = (
            f"{min(self.offloaded_blocks, blocks)} of {blocks} blocks fetched from host memory"
            if self.offloaded_blocks
            else ""
        )
        half_precision = (
            "in half precision on the GPU" if self.half_precision and self.offloaded_blocks < blocks else ""
        )
        return "weights " + (", the rest ".join(filter(None, (offloaded_blocks, half_precision))) or "on the GPU")


ON_CARD = Placement()


def choose_placement(requested: str, blocks: int, is_half: bool, fits: Callable[[Placement], bool]) -> Placement:
    """Return the placement requested by --weights, or for auto the fastest one that fits: fewest offloaded blocks.

    The first blocks are offloaded, because they hide their transfer best: they belong to the encoder, and every
    generated token needs all of the decoder. In full precision, no weights are halved, since that would round them. If
    nothing fits, all blocks are offloaded. Prefetch is used if its copies fit: it hides the transfer in a second CUDA
    stream, and on a CPU it avoids recomputing attention.
    """
    everything = Placement(offloaded_blocks=blocks)
    if requested in ("card", "half") or (requested == "auto" and fits(ON_CARD)):
        return Placement(half_precision=requested == "half")
    # Half-precision weights on the GPU (0 offloaded blocks) are the first reduction; fp32 weights can only be
    # offloaded.
    least = blocks if requested == "host" else 0 if is_half else 1
    some = [Placement(count, half_precision=is_half) for count in range(least, blocks)]
    # Memory decreases with each offloaded block, so that `fits` is monotonic; each evaluation traces a step.
    chosen = [*some, everything][bisect.bisect_left(some, True, key=fits)]
    prefetch = dataclasses.replace(chosen, prefetch=True)
    return prefetch if chosen.offloaded_blocks and fits(prefetch) else chosen


class OffloadedWeights:
    """Weights of a model that are not all on the GPU in full precision.

    In blocks with half-precision weights, parameters other than matrices stay in fp32 on the GPU: they are small.
    """

    def __init__(
        self,
        model: SpeechNetwork,
        placement: Placement,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        host: torch.device = HOST,
    ) -> None:
        """Move the weights to their places.

        Memory is planned without a GPU, on tensors without data: the device type `cpu` then counts as the GPU, and
        `host` is another device type, so that both are counted separately (planning/tracer.py).
        """
        self.placement = placement
        self._device = device
        self._host = host
        self._amp_dtype = amp_dtype
        self._at_hand: set[torch.nn.Module] = set()
        self._halves: dict[torch.Tensor, torch.Tensor] = {}
        _move(model, _offloaded_weights(model, placement), device, host)
        offloaded_blocks = model.blocks[: placement.offloaded_blocks]
        resident_blocks = model.blocks[placement.offloaded_blocks :]
        if amp_dtype is not None and placement.prefetch:
            self._add_halves(offloaded_blocks, amp_dtype, host)
        if placement.half_precision:
            self._add_halves(resident_blocks, torch.float16 if amp_dtype is None else amp_dtype, device)
        # Page-locking covers whole pages, which must not be shared with other data.
        if placement.prefetch and device.type == "cuda":
            self._separate_pages(offloaded_blocks)
        sources = [
            {name: self._halves.get(w, w).detach() for name, w in b.named_parameters()} for b in offloaded_blocks
        ]
        self._trains = [any(weight.requires_grad for weight in block.parameters()) for block in offloaded_blocks]
        self._fetcher = WeightPrefetcher(sources, device, amp_dtype, placement.prefetch, self._trains)
        self.refresh()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Persistent copies of masters: half-precision weights on the GPU, prefetch sources in host memory."""
        return list(self._halves.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Update all copies from the masters; required before each global batch and before recognition."""
        # A prefetched copy is from before the update.
        self._fetcher.forget()
        for master, half in self._halves.items():
            half.copy_(master)

    def _add_halves(self, blocks: list[torch.nn.Module], dtype: torch.dtype, place: torch.device) -> None:
        for block in blocks:
            # Weights that are stored in this format need no copy.
            stored = [weight for weight in matrices(block) if weight.dtype != dtype]
            self._halves |= {weight: torch.empty_like(weight, dtype=dtype, device=place) for weight in stored}

    def _separate_pages(self, blocks: list[torch.nn.Module]) -> None:
        for weight in (weight for block in blocks for weight in block.parameters()):
            if weight in self._halves:
                self._halves[weight] = on_own_pages(self._halves[weight])
            else:
                weight.data = on_own_pages(weight.detach())

    def fetching_inside(self, wrap_block: WrapBlock) -> WrapBlock:
        """Return a `WrapBlock` that also provides each block's weights on the GPU while the block runs."""
        return lambda number, block: wrap_block(number, self._with_weights(number, block))

    def _with_weights(self, number: int, block: RunBlock) -> RunBlock:
        is_fetched = number < self.placement.offloaded_blocks
        if not isinstance(block, torch.nn.Module) or block in self._at_hand:
            return block
        if not (is_fetched or self.placement.half_precision):
            return block
        # Prefetch is chosen only if memory is left: inputs and attention are then kept as in a block on the GPU.
        has_room = self.placement.prefetch
        # The backward pass does not reach blocks below the first trained one.
        offloads_input = is_fetched and not has_room and any(self._trains[: number + 1])
        input_place = self._host if offloads_input else None
        return OffloadedBlock(block, partial(self._fetch_weights, number), is_fetched, has_room, input_place)

    def _fetch_weights(self, number: int, block: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the block's weights on the GPU by name; their gradients flow to the masters."""
        masters = dict(block.named_parameters())
        if number < self.placement.offloaded_blocks:
            provided = self._fetcher.get(number)
        else:
            provided = {name: self._halves[weight] for name, weight in masters.items() if weight in self._halves}
        return {name: self._copy_in_dtype(masters[name], copy) for name, copy in provided.items()}

    def _copy_in_dtype(self, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        copy = _MasterGradient.apply(master, copy) if master.requires_grad else copy
        # Without autocast, a product needs operands of one dtype: convert halved weights back.
        return copy if self._amp_dtype else copy.to(master.dtype)

    @contextlib.contextmanager
    def at_hand(self, model: SpeechNetwork) -> Iterator[None]:
        """Keep the whole decoder on the GPU, since each generated token needs all of it. For inference only."""
        decoder = model.decoder
        if decoder is None:
            yield
            return
        away = _offloaded_weights(model, self.placement)
        # Any, because a plain tensor takes the place of a parameter.
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (module._parameters, name, weight)
            for module in decoder.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight in away
        ]
        in_slices = set(model.sliced_weights)
        self._at_hand = set(decoder.blocks)
        try:
            for parameters, name, weight in places:
                brought = self._halves.get(weight, weight)
                dtype = weight.dtype if weight in in_slices else type_on_card(weight, self._amp_dtype)
                parameters[name] = brought.to(self._device, dtype, copy=brought is weight)
            yield
        finally:
            for parameters, name, weight in places:
                parameters[name] = weight
            self._at_hand = set()


@dataclass(frozen=True)
class OffloadedBlock:
    """A block that runs with copies of its weights on the GPU.

    A fetched block has to be recomputed in the backward pass, or autograd would keep its weights on the GPU.
    """

    block: torch.nn.Module
    provide_weights: Callable[[torch.nn.Module], dict[str, torch.Tensor]]
    is_fetched: bool
    keeps_attention: bool
    """Whether attention's results are kept when the block is recomputed."""
    input_place: torch.device | None = None
    """Device on which the block's input waits for the recomputation; None: the GPU."""

    def __call__(self, *inputs: object) -> torch.Tensor:
        return functional_call(self.block, self.provide_weights(self.block), inputs)


class _MasterGradient(torch.autograd.Function):
    """Identity on the copy of a weight in the forward pass; the gradient goes to the master."""

    @staticmethod
    def forward(ctx, master: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        ctx.device = master.device
        ctx.dtype = master.dtype
        return half.view_as(half)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.device, ctx.dtype), None


def matrices(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the module's matrices, which make up nearly all of its parameters."""
    return [weight for weight in module.parameters() if is_matrix(weight)]


def _offloaded_weights(model: SpeechNetwork, placement: Placement) -> set[torch.Tensor]:
    """Return the weights whose place is the host.

    Weights used by rows or slices (embedding, positions) are among them if all blocks are offloaded or halved.
    """
    offloaded_blocks = model.blocks[: placement.offloaded_blocks]
    resident_blocks = model.blocks[placement.offloaded_blocks :]
    away: set[torch.Tensor] = {weight for block in offloaded_blocks for weight in block.parameters()}
    if placement.half_precision:
        away |= {weight for block in resident_blocks for weight in matrices(block)}
    return away if resident_blocks and not placement.half_precision else away | set(model.sliced_weights)


def _move(model: torch.nn.Module, away: Set[torch.Tensor], device: torch.device, host: torch.device) -> None:
    """Move the weights of a model on the CPU to their devices."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            target = host if weight in away else device
            if weight.device != target:
                setattr(module, name, torch.nn.Parameter(weight.detach().to(target), weight.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
