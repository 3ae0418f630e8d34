"""Seeds and generators: every random number of a run is a function of (seed, step) or (seed, epoch, utterance).

No generator state is saved: a resumed run draws the same numbers as an uninterrupted one.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

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
