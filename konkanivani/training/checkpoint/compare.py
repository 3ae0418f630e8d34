"""Comparison of two checkpoints of a run."""

import math

import torch

from konkanivani.base.console import count
from konkanivani.base.errors import CheckpointError
from konkanivani.training.checkpoint.checkpoint import Checkpoint


def differences(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the names of all tensors and numbers that are not bitwise equal in two checkpoints."""
    values = _values(one)
    theirs = _values(other)
    names = sorted(values.keys() | theirs.keys())
    return [name for name in names if not (name in values and name in theirs and _same(values[name], theirs[name]))]


def _values(checkpoint: Checkpoint) -> dict[str, object]:
    return {f"{part}/{name}": value for part, state in checkpoint.states.items() for name, value in state.items()}


def _same(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one == other
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    # Compared as bytes: torch.equal on floats treats NaN as different and -0.0 as equal to 0.0.
    return same_kind and torch.equal(*(t.detach().cpu().reshape(-1).view(torch.uint8) for t in (one, other)))


def relative_difference(one: Checkpoint, other: Checkpoint) -> float:
    """Return the norm of the difference of two models' weights, relative to the norm of the first one's."""
    others = _weights(other)
    pairs = [(value, others[name]) for name, value in _weights(one).items()]
    apart = sum(float((value.double() - theirs.double()).square().sum()) for value, theirs in pairs)
    return math.sqrt(apart / sum(float(value.double().square().sum()) for value, _ in pairs))


def _weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the weights of the model by name; raise a CheckpointError if one is not a tensor."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in checkpoint.states["model"].items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"The checkpoint's weight {name!r:.80} is not a tensor. Use another checkpoint.")
        weights[name] = value
    return weights


def check_equal(one: Checkpoint, other: Checkpoint, what: str) -> None:
    """Raise a CheckpointError if two states differ in any bit."""
    found = differences(one, other)
    if found:
        raise CheckpointError(
            f"{what}: {count(len(found), 'value', 'differs/differ')}, first {found[0]}. Check the disk and memory of "
            "this machine; if they are fine, report this as a bug."
        )
