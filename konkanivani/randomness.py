"""Seeds and generators: every random number of a run is a function of (seed, step) or (seed, epoch, utterance).

No generator state is saved: a resumed run draws the same numbers as an uninterrupted one.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # increment of SplitMix64 (Steele et al., 2014): 2^64 divided by the golden ratio

# A context variable is local to a thread, and torch's default CPU generator is global.
_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("dropout_generator", default=None)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed, the same on every machine: the first 8 bytes of SHA-256 over the parts, shifted."""
    # The separator keeps (1, 23) and (12, 3) apart.
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    # 63 bits fit the signed seed of manual_seed. Python's hash() would differ between processes.
    return int.from_bytes(digest[:8], "little") >> 1


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed the default generators of all devices for one optimizer step; dropout draws from them.

    Each rank draws its own masks; rank 0 draws those that a single process draws.
    """
    torch.manual_seed(derive_seed(seed, "step", step, *((rank,) if rank else ())))


def utterance_generator(seed: int, epoch: int, utterance_id: str, purpose: str) -> torch.Generator:
    """Return a CPU generator for one utterance in one epoch and one purpose (`speed`, `specaugment`)."""
    return torch.Generator().manual_seed(derive_seed(seed, epoch, purpose, utterance_id))


@contextlib.contextmanager
def dropout_seed(seed: int) -> Iterator[None]:
    """Make dropout on the CPU draw from a separate generator in the block, in this thread only.

    The draws of a micro-batch are then independent of the micro-batches that run concurrently.
    """
    with _drawing_from(torch.Generator().manual_seed(seed)):
        yield


@contextlib.contextmanager
def block_dropout(number: int) -> Iterator[None]:
    """Make dropout on the CPU draw from a generator of block `number`, seeded from the micro-batch's seed.

    The masks of a block then depend on no other block, and are those of runs that older versions began.
    """
    counters = mask_counters()
    if counters is not None:
        with counted_dropout(MaskCounters(counters.row_seeds, number)):
            yield
        return
    masks = dropout_generator()
    if masks is None:
        yield
        return
    with dropout_seed(derive_seed(masks.initial_seed(), number)):
        yield


@contextlib.contextmanager
def dropout_state(state: torch.Tensor) -> Iterator[None]:
    """Make dropout on the CPU draw from a separate generator that continues from `state`, in this thread only."""
    generator = torch.Generator()
    generator.set_state(state)
    with _drawing_from(generator):
        yield


@contextlib.contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    token = _GENERATOR.set(generator)
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def dropout_generator() -> torch.Generator | None:
    """Return the generator of CPU dropout in this thread; None: torch's default generator."""
    return _GENERATOR.get()


# --------------------
# Dropout without a generator: bits are a hash of their position, as in counter-based generators (Salmon et al., 2011).


class MaskCounters:
    """Counters of the dropout masks of one block.

    A mask is a function of an utterance's seed, the number of the block, the number of the mask in the block, the frame
    and the channel. It depends neither on padding nor on the other utterances, and no generator's state has to be
    saved for a recomputation or read in a captured step.
    """

    def __init__(self, row_seeds: torch.Tensor, block: int = 0, masks: int = 0) -> None:
        """`row_seeds` (B,) is int64 on the model's device; `masks` counts the masks that the block has drawn."""
        self.row_seeds = row_seeds
        self.block = block
        self.masks = masks

    def copy(self) -> "MaskCounters":
        """Return counters that continue from the same mask, for a recomputation."""
        return MaskCounters(self.row_seeds, self.block, self.masks)

    def draw_bits(self, frames: int, channels: int) -> torch.Tensor:
        """Return the next mask's random 16-bit integers (B, frames, channels)."""
        # 64 bits serve four channels.
        groups = -(-channels // 4)
        # The site's stream starts at a hash of its number, so that the streams of two sites do not overlap.
        site = signed(mixed((self.block << 32) + self.masks + 1))
        self.masks += 1
        device = self.row_seeds.device
        numbers = torch.arange(frames * groups, device=device).mul_(signed(GOLDEN)).view(1, frames, groups)
        bits = numbers + (self.row_seeds ^ site)[:, None, None]
        mix_in_place(bits, torch.empty_like(bits))
        return bits.view(torch.int16)[..., :channels]


_COUNTERS: ContextVar[MaskCounters | None] = ContextVar("mask_counters", default=None)


@contextlib.contextmanager
def counted_dropout(counters: MaskCounters) -> Iterator[None]:
    """Make `CountedDropout` draw its masks with these counters in the block, in this thread only."""
    token = _COUNTERS.set(counters)
    try:
        yield
    finally:
        _COUNTERS.reset(token)


def mask_counters() -> MaskCounters | None:
    """Return the counters of this thread's dropout masks; None: masks are drawn from a generator."""
    return _COUNTERS.get()


def mix_in_place(bits: torch.Tensor, workspace: torch.Tensor) -> None:
    """Apply SplitMix64's finaliser to int64 numbers; `workspace` has their shape."""
    for places, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        # Numbers without a sign: zeros are shifted in from the left.
        torch.bitwise_right_shift(bits, places, out=workspace).bitwise_and_(2 ** (64 - places) - 1)
        bits ^= workspace
        if factor is not None:
            bits *= signed(factor)


def mixed(number: int) -> int:
    """Return SplitMix64's hash of a number, in 64 bits without a sign."""
    number = number * GOLDEN & MASK_64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK_64
    return number ^ number >> 31


def signed(number: int) -> int:
    """Return the int64 with the bits of a 64-bit number without a sign."""
    return number - 2**64 if number >= 2**63 else number
