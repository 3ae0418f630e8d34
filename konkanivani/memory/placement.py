"""Where a model's weights are: on the card, in half precision there, or on the host, from where blocks fetch them.

A trained weight that is away from the card is a tensor of the host, its *master*: autograd brings its gradient home,
where clipping, AdamW, checkpoints and resuming find it as any other. What a block multiplies by in its place lies on
the card as long as the block runs, in the forward pass and again where the block is recomputed (the idea: Pudipeddi et
al., 2020; Rajbhandari et al., 2021). What is fetched equals what is not, bit for bit, with a card's own rounding to
half precision where a run is in half precision; in full precision halved weights are rounded ones.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch.func import functional_call

from konkanivani.model.blocks import BlockRunner

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """The first `fetched` blocks have their weights on the host, the others on the card, as they are or `halved`.

    Halved, they are there in half precision, and their masters on the host.
    """

    fetched: int = 0
    halved: bool = False

    @property
    def is_on_card(self) -> bool:
        """Whether all weights are on the card, and nothing is to be brought."""
        return not self.fetched and not self.halved

    def describe(self, blocks: int) -> str:
        """For a person, of a model of so many blocks."""
        fetched = f"{min(self.fetched, blocks)} of {blocks} blocks fetched from the host" if self.fetched else ""
        halved = "in half precision on the card" if self.halved and self.fetched < blocks else ""
        return "weights " + (", the others ".join(filter(None, (fetched, halved))) or "on the card")


ON_CARD = Placement()


def choose_placement(asked: str, blocks: int, is_half: bool, fits: Callable[[Placement], bool]) -> Placement:
    """What is asked for, or, where that is auto, the fastest that fits: the fewest blocks fetched, the first ones.

    Those hide their transfer best: an encoder's, and it is the decoder of which every generated token needs all. In
    full precision nothing is halved, since that would round. All is fetched where nothing fits.
    """
    everything = Placement(fetched=blocks)
    if asked != "auto":
        return {"card": ON_CARD, "half": Placement(halved=True), "host": everything}[asked]
    if fits(ON_CARD):
        return ON_CARD
    some = [Placement(count, halved=is_half) for count in range(0 if is_half else 1, blocks)]
    return [*some, everything][bisect.bisect_left(some, True, key=fits)]


class PlacedWeights:
    """A model's weights in their places. Where blocks are halved, what is no matrix stays on the card: it is small."""

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
        if placement.is_on_card:
            return
        _move(model, _away(model, placement), device, host)
        if placement.halved:
            stored = torch.float16 if amp_dtype is None else amp_dtype
            for block in model.blocks[placement.fetched :]:
                self._halves |= {w: torch.empty_like(w, dtype=stored, device=device) for w in matrices(block)}
        self.refresh()

    @property
    def copies(self) -> list[torch.Tensor]:
        """What lies on the card from step to step in the place of masters."""
        return list(self._halves.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over what the masters are by now: before each window, and before anything is recognised."""
        for master, half in self._halves.items():
            half.copy_(master)

    def around(self, run_block: BlockRunner) -> BlockRunner:
        """The block runner, with the weights that each block needs brought to the card while it runs."""
        if self.placement.is_on_card:
            return run_block
        return lambda block, *inputs: run_block(self._with_weights(block), *inputs)

    def _with_weights(self, block: torch.nn.Module) -> "torch.nn.Module | PlacedBlock":
        is_fetched = block.number < self.placement.fetched
        if block in self._at_hand or not (is_fetched or self.placement.halved):
            return block
        return PlacedBlock(block, self._brought, block.number, is_fetched)

    def _brought(self, weight: torch.Tensor) -> torch.Tensor:
        """What is multiplied by in the weight's place, on the card; its gradient is the weight's."""
        half = self._halves.get(weight)
        if half is None:
            in_half = self._amp_dtype is not None and is_matrix(weight)
            return weight.to(self._device, self._amp_dtype if in_half else weight.dtype, copy=True)
        brought = _InPlaceOf.apply(weight, half) if weight.requires_grad else half
        return brought if self._amp_dtype else brought.to(weight.dtype)

    @contextlib.contextmanager
    def at_hand(self, model: torch.nn.Module) -> Iterator[None]:
        """While it lasts the whole decoder is on the card: each generated token needs all of it. Without gradients."""
        decoder = getattr(model, "decoder", None)
        if self.placement.is_on_card or decoder is None:
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
                here = weight.to(self._device, copy=True) if weight in in_slices else self._brought(weight)
                module._parameters[name] = here
            yield
        finally:
            for module, name, weight in places:
                module._parameters[name] = weight
            self._at_hand = set()


@dataclass(frozen=True)
class PlacedBlock:
    """A block that runs with weights that are brought; what is fetched has to be recomputed, or it would stay.

    Recomputed, it keeps nothing, attention's result neither: who brings weights has no memory to spare.
    """

    block: torch.nn.Module
    brought: Callable[[torch.Tensor], torch.Tensor]
    number: int
    is_fetched: bool
    kept: Set[torch._ops.OpOverload] = frozenset()

    def __call__(self, *inputs: object) -> torch.Tensor:
        named = self.block.named_parameters()
        weights = {name: self.brought(w) for name, w in named if self.is_fetched or is_matrix(w)}
        return functional_call(self.block, weights, inputs)


class _InPlaceOf(torch.autograd.Function):
    """What is multiplied by in the place of a master, to which the gradient goes home."""

    @staticmethod
    def forward(ctx, master: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        ctx.device, ctx.dtype = master.device, master.dtype
        return half.view_as(half)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.device, ctx.dtype), None


def is_matrix(weight: torch.Tensor) -> bool:
    """Whether a run in half precision multiplies by it in half precision: no norm, bias or depthwise kernel."""
    return weight.dim() > 1 and weight.shape[1] > 1


def matrices(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The module's matrices, which are nearly all of it."""
    return [weight for weight in module.parameters() if is_matrix(weight)]


def _away(model: torch.nn.Module, placement: Placement) -> set[torch.nn.Parameter]:
    """The weights whose place is the host; what is sliced goes with the last block."""
    fetched, others = model.blocks[: placement.fetched], model.blocks[placement.fetched :]
    away = {weight for block in fetched for weight in block.parameters()}
    if placement.halved:
        away |= {weight for block in others for weight in matrices(block)}
    return away if others and not placement.halved else away | set(model.sliced_weights)


def _move(model: torch.nn.Module, away: Set[torch.nn.Parameter], device: torch.device, host: torch.device) -> None:
    """Moves the weights of a model that lies on a CPU to their places."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            place = host if weight in away else device
            if weight.device != place:
                setattr(module, name, torch.nn.Parameter(weight.detach().to(place), weight.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
