"""Every random number of a run is a function of (seed, step) or of (seed, epoch, utterance).

So nothing of a generator's state has to be saved: a resumed run draws what the undisturbed one would have drawn.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("what dropout draws from in this thread", default=None)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is the same on every machine; SHA-256 over the parts."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seeds the default generators of every device for one optimizer step (dropout draws from them).

    Each rank draws its own masks; the first one those of a process alone.
    """
    torch.manual_seed(derive_seed(seed, "step", step, *((rank,) if rank else ())))


def utterance_generator(seed: int, epoch: int, utterance_id: str, purpose: str) -> torch.Generator:
    """A CPU generator that belongs to one utterance in one epoch, for one purpose (`speed`, `specaugment`)."""
    return torch.Generator().manual_seed(derive_seed(seed, epoch, purpose, utterance_id))


@contextlib.contextmanager
def dropout_seed(seed: int) -> Iterator[None]:
    """Dropout on a CPU draws from a generator of its own here, in this thread alone, instead of from torch's default.

    So what one micro-batch draws does not depend on what others draw beside it.
    """
    token = _GENERATOR.set(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def dropout_generator() -> torch.Generator | None:
    """What dropout on a CPU draws from in this thread; None for torch's default generator."""
    return _GENERATOR.get()
