"""Where a model's weights are: on the card, in half precision there, or on the host, from where blocks fetch them.

A trained weight that is away from the card is a tensor of the host, its *master*: autograd brings its gradient home,
where clipping, AdamW, checkpoints and resuming find it as any other. What a block multiplies by in its place lies on
the card as long as the block runs, in the forward pass and again where the block is recomputed (the idea: Pudipeddi et
al., 2020; Rajbhandari et al., 2021). What is fetched equals what is not, bit for bit, with a card's own rounding to
half precision where a run is in half precision; in full precision halved weights are rounded ones.
"""

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch.func import functional_call

from konkanivani.memory.weights.fetching import WeightPrefetcher, is_matrix, on_own_pages, type_on_card
from konkanivani.model.blocks import BlockRunner

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """Placement of the weights: the first `offloaded_blocks` blocks on the host, the others on the GPU.

    With `half_precision` the weights on the GPU are in half precision and their fp32 masters on the host. With
    `prefetch` the next block's weights are copied while the current block computes, from copies in the compute
    precision: less time, one more block on the GPU, and in half precision two more bytes per weight on the host.
    """

    offloaded_blocks: int = 0
    half_precision: bool = False
    prefetch: bool = False

    @property
    def is_on_card(self) -> bool:
        """Whether all weights are on the card, and nothing is to be brought."""
        return not self.offloaded_blocks and not self.half_precision

    def describe(self, blocks: int) -> str:
        """For a person, of a model of so many blocks."""
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


def choose_placement(asked: str, blocks: int, is_half: bool, fits: Callable[[Placement], bool]) -> Placement:
    """What is asked for, or, where that is auto, the fastest that fits: the fewest blocks fetched, the first ones.

    Those hide their transfer best: an encoder's, and it is the decoder of which every generated token needs all. In
    full precision nothing is halved, since that would round. All is fetched where nothing fits. Where there is room,
    what is fetched comes ahead: hidden by a card's second stream, and on a CPU without recomputing attention for it.
    """
    everything = Placement(offloaded_blocks=blocks)
    if asked in ("card", "half") or (asked == "auto" and fits(ON_CARD)):
        return Placement(half_precision=asked == "half")
    least = blocks if asked == "host" else 0 if is_half else 1
    some = [Placement(count, half_precision=is_half) for count in range(least, blocks)]
    chosen = [*some, everything][bisect.bisect_left(some, True, key=fits)]
    prefetch = dataclasses.replace(chosen, prefetch=True)
    return prefetch if chosen.offloaded_blocks and fits(prefetch) else chosen


class OffloadedWeights:
    """A model's weights in their places, not all of them on the card.

    Where blocks are halved, what is no matrix stays there: it is small.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        placement: Placement,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        host: torch.device = HOST,
    ) -> None:
        """Moves the weights; `host` is another place than a CPU only in a trace, where a CPU is the card."""
        self.placement, self._device, self._amp_dtype = placement, device, amp_dtype
        self._at_hand: set[torch.nn.Module] = set()
        self._halves: dict[torch.Tensor, torch.Tensor] = {}
        _move(model, _away(model, placement), device, host)
        offloaded_blocks, others = (
            model.blocks[: placement.offloaded_blocks],
            model.blocks[placement.offloaded_blocks :],
        )
        if amp_dtype is not None and placement.prefetch:
            self._add_halves(offloaded_blocks, amp_dtype, host)
        if placement.half_precision:
            self._add_halves(others, torch.float16 if amp_dtype is None else amp_dtype, device)
        if placement.prefetch and device.type == "cuda":
            self._give_own_pages(offloaded_blocks)
        sources = [
            {name: self._halves.get(w, w).detach() for name, w in b.named_parameters()} for b in offloaded_blocks
        ]
        trains = [any(weight.requires_grad for weight in block.parameters()) for block in offloaded_blocks]
        self._fetcher = WeightPrefetcher(sources, device, amp_dtype, placement.prefetch, trains)
        self.refresh()

    @property
    def copies(self) -> list[torch.Tensor]:
        """What lies, from step to step, on the card in the place of masters, and on the host beside them."""
        return list(self._halves.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over what the masters are by now: before each window, and before anything is recognised."""
        self._fetcher.forget()
        for master, half in self._halves.items():
            half.copy_(master)

    def _add_halves(self, blocks: list[torch.nn.Module], dtype: torch.dtype, place: torch.device) -> None:
        for block in blocks:
            self._halves |= {w: torch.empty_like(w, dtype=dtype, device=place) for w in matrices(block)}

    def _give_own_pages(self, blocks: list[torch.nn.Module]) -> None:
        for weight in (weight for block in blocks for weight in block.parameters()):
            if weight in self._halves:
                self._halves[weight] = on_own_pages(self._halves[weight])
            else:
                weight.data = on_own_pages(weight.detach())

    def around(self, run_block: BlockRunner) -> BlockRunner:
        """The block runner, with the weights that each block needs brought to the card while it runs."""
        return lambda block, *inputs: run_block(self._with_weights(block), *inputs)

    def _with_weights(self, block: torch.nn.Module) -> "torch.nn.Module | OffloadedBlock":
        is_fetched = block.number < self.placement.offloaded_blocks
        if block in self._at_hand or not (is_fetched or self.placement.half_precision):
            return block
        keeps_attention = block.keeps_attention and self.placement.prefetch
        return OffloadedBlock(block, self._brought, block.number, is_fetched, keeps_attention)

    def _brought(self, block: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What is multiplied by in the block's weights' places, on the card; its gradients are the weights'."""
        masters = dict(block.named_parameters())
        if block.number < self.placement.offloaded_blocks:
            brought = self._fetcher.get(block.number)
        else:
            brought = {name: self._halves[weight] for name, weight in masters.items() if weight in self._halves}
        return {name: self._in_place_of(masters[name], copy) for name, copy in brought.items()}

    def _in_place_of(self, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        copy = _MasterGradient.apply(master, copy) if master.requires_grad else copy
        return copy if self._amp_dtype else copy.to(master.dtype)

    @contextlib.contextmanager
    def at_hand(self, model: torch.nn.Module) -> Iterator[None]:
        """While it lasts the whole decoder is on the card: each generated token needs all of it. Without gradients."""
        decoder = getattr(model, "decoder", None)
        if decoder is None:
            yield
            return
        away = _away(model, self.placement)
        places = [
            (module, name, weight)
            for module in decoder.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight in away
        ]
        in_slices = set(model.sliced_weights)
        self._at_hand = set(decoder.blocks)
        try:
            for module, name, weight in places:
                brought = self._halves.get(weight, weight)
                dtype = weight.dtype if weight in in_slices else type_on_card(weight, self._amp_dtype)
                module._parameters[name] = brought.to(self._device, dtype, copy=brought is weight)
            yield
        finally:
            for module, name, weight in places:
                module._parameters[name] = weight
            self._at_hand = set()


@dataclass(frozen=True)
class OffloadedBlock:
    """A block that runs with weights that are brought; what is fetched has to be recomputed, or it would stay.

    Where weights come ahead there is room, and `keeps_attention` is that of a block on the card.
    """

    block: torch.nn.Module
    brought: Callable[[torch.nn.Module], dict[str, torch.Tensor]]
    number: int
    is_fetched: bool
    keeps_attention: bool

    def __call__(self, *inputs: object) -> torch.Tensor:
        return functional_call(self.block, self.brought(self.block), inputs)


class _MasterGradient(torch.autograd.Function):
    """What is multiplied by in the place of a master, to which the gradient goes home."""

    @staticmethod
    def forward(ctx, master: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        ctx.device, ctx.dtype = master.device, master.dtype
        return half.view_as(half)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.device, ctx.dtype), None


def matrices(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The module's matrices, which are nearly all of it."""
    return [weight for weight in module.parameters() if is_matrix(weight)]


def _away(model: torch.nn.Module, placement: Placement) -> set[torch.nn.Parameter]:
    """The weights whose place is the host; what is sliced goes with the last block."""
    offloaded_blocks, others = model.blocks[: placement.offloaded_blocks], model.blocks[placement.offloaded_blocks :]
    away = {weight for block in offloaded_blocks for weight in block.parameters()}
    if placement.half_precision:
        away |= {weight for block in others for weight in matrices(block)}
    return away if others and not placement.half_precision else away | set(model.sliced_weights)


def _move(model: torch.nn.Module, away: Set[torch.nn.Parameter], device: torch.device, host: torch.device) -> None:
    """Moves the weights of a model that lies on a CPU to their places."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            place = host if weight in away else device
            if weight.device != place:
                setattr(module, name, torch.nn.Parameter(weight.detach().to(place), weight.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
