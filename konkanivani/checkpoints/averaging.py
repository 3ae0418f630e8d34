"""Average and comparison of checkpoints.

Averaging the last checkpoints of a run: Vaswani et al., 2017, section 6.1; Izmailov et al., 2018.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE, PROVENANCE_STATE, Checkpoint, model_weights
from konkanivani.checkpoints.checkpointer import epochs_in
from konkanivani.console import count
from konkanivani.errors import CheckpointError
from konkanivani.flags import config_from_text
from konkanivani.rules import settings_of

# --------------------
# Comparison of two checkpoints of a run.


def differences(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Return the names of all tensors and numbers that are not bitwise equal in two checkpoints."""
    first_values = _state_values(first)
    second_values = _state_values(second)
    names = sorted(first_values.keys() | second_values.keys())
    return [
        name
        for name in names
        if not (
            name in first_values and name in second_values and _is_identical(first_values[name], second_values[name])
        )
    ]


def _state_values(checkpoint: Checkpoint) -> dict[str, object]:
    return {f"{part}/{name}": value for part, state in checkpoint.states.items() for name, value in state.items()}


def _is_identical(first: object, second: object) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return first == second
    same_kind = first.dtype == second.dtype and first.shape == second.shape
    # Compared as bytes: torch.equal on floats treats NaN as different and -0.0 as equal to 0.0.
    return same_kind and torch.equal(*(t.detach().cpu().reshape(-1).view(torch.uint8) for t in (first, second)))


def relative_difference(first: Checkpoint, second: Checkpoint) -> float:
    """Return the norm of the difference of two models' weights, relative to the norm of the first one's."""
    second_weights = _weights(second)
    pairs = [(value, second_weights[name]) for name, value in _weights(first).items()]
    apart = sum(float((value.double() - second_value.double()).square().sum()) for value, second_value in pairs)
    return math.sqrt(apart / sum(float(value.double().square().sum()) for value, _ in pairs))


def _weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the weights of the model by name; raise a CheckpointError if one is not a tensor."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in checkpoint.states["model"].items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"The checkpoint's weight {name!r:.80} is not a tensor. Use another checkpoint.")
        weights[name] = value
    return weights


def check_equal(first: Checkpoint, second: Checkpoint, description: str) -> None:
    """Raise a CheckpointError if two states differ in any bit."""
    unequal = differences(first, second)
    if unequal:
        raise CheckpointError(
            f"{description}: {count(len(unequal), 'value', 'differs/differ')}, first {unequal[0]}. Check the disk and "
            "memory of this machine; if they are fine, report this as a bug."
        )


# --------------------
# Average of several checkpoints' weights, which often has a lower error rate than each of them.


PROGRESS = "progress"
# Settings outside of the group `model` that have to be equal too.
EQUAL_SETTINGS = ("audio_context", "lora_rank", "lora_alpha", "lora_targets")


@dataclass(frozen=True)
class NamedCheckpoint:
    """Checkpoint with its name in messages."""

    name: str
    checkpoint: Checkpoint


def average_checkpoints(checkpoints: Iterable[NamedCheckpoint], allow_different_runs: bool = False) -> Checkpoint:
    """Return the newest checkpoint, without training state, with the mean of all models' weights.

    Sums are in float64. `checkpoints` may be a generator: the first, the newest and two more are in memory at most.
    Raises a CheckpointError if there is none, or if one differs from the first in shape, origin, tokenizer or (unless
    allowed) run. LoRA's matrices A and B are averaged apart, and mean(B) mean(A) is not mean(B A): the difference is
    mean((B - mean(B)) (A - mean(A))), of second order for neighbouring epochs of one run. Two runs start from other
    random matrices A, so that nothing bounds it: LoRA checkpoints of different runs are refused even if allowed.
    """
    sums: dict[str, torch.Tensor] = {}
    first: NamedCheckpoint | None = None
    newest: NamedCheckpoint | None = None
    first_run: Checkpoint | None = None
    count = 0
    for entry in checkpoints:
        # The first checkpoint's counters are kept to compare runs, not its weights.
        run = dataclasses.replace(entry.checkpoint, states={PROGRESS: entry.checkpoint.states.get(PROGRESS, {})})
        first_run = first_run or run
        entry = _without_optimizer_state(entry)
        model = model_weights(entry.checkpoint)
        if first is None or newest is None:
            first = newest = entry
            # Integer buffers are not averaged.
            sums = {name: tensor.double() for name, tensor in model.items() if tensor.is_floating_point()}
        else:
            if reasons := _reasons_against_averaging(first.checkpoint, entry.checkpoint, allow_different_runs):
                raise CheckpointError(
                    f"{first.name} and {entry.name} cannot be averaged: {'; '.join(reasons)}. Average checkpoints of "
                    "one run."
                )
            if not allow_different_runs and (reason := different_runs(first_run, run)):
                raise CheckpointError(
                    f"{first.name} and {entry.name} are from different runs: {reason}. Average checkpoints of "
                    "one run, or use --allow_different_runs."
                )
            for name, total in sums.items():
                total += model[name]
        if entry.checkpoint.step > newest.checkpoint.step:
            newest = entry
        count += 1
    if newest is None:
        raise CheckpointError("No checkpoint to average. Give the paths of checkpoint_*.pt files.")
    model = {
        # Round to the checkpoint's dtype once, after the division.
        name: (sums[name] / count).to(tensor.dtype) if name in sums else tensor
        for name, tensor in model_weights(newest.checkpoint).items()
    }
    return dataclasses.replace(newest.checkpoint, states={**newest.checkpoint.states, "model": {**model}})


def different_runs(first: Checkpoint, second: Checkpoint) -> str | None:
    """Return why two checkpoints are of different runs, or None if nothing shows it.

    A checkpoint holds no run id. The seed and the mean loss of the first epoch stay the same when a run is resumed,
    also in another folder; two runs have the same loss only if they computed the same steps.
    """
    seeds = [config_from_text(checkpoint.config).run.seed for checkpoint in (first, second)]
    if seeds[0] != seeds[1]:
        return f"--seed is {seeds[0]} and {seeds[1]}"
    losses = [_counter(checkpoint, "first_loss") for checkpoint in (first, second)]
    # 0 before the first epoch ends, and in checkpoints of older versions.
    if all(losses) and losses[0] != losses[1]:
        return f"the mean loss of their first epoch is {losses[0]:.6g} and {losses[1]:.6g}"
    audio = [_counter(checkpoint, "audio_seconds") for checkpoint in (first, second)]
    skips = [_counter(checkpoint, "skipped_steps") for checkpoint in (first, second)]
    # Skipped steps consume audio without advancing the step.
    if first.step == second.step and all(audio) and skips[0] == skips[1] and audio[0] != audio[1]:
        return f"their step {first.step} was reached after {audio[0]:g} and {audio[1]:g} s of audio"
    return None


def _counter(checkpoint: Checkpoint, name: str) -> float:
    """Return a counter of the training run, or 0 if the checkpoint holds none."""
    value = checkpoint.states.get(PROGRESS, {}).get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def newest_epochs(directory: str | Path, count: int) -> list[Path]:
    """Return the newest `count` epoch checkpoints of a folder, oldest first.

    Raises a CheckpointError if the folder has fewer.
    """
    epochs = epochs_in(Path(directory))
    if len(epochs) < count:
        raise CheckpointError(
            f"{directory} contains {len(epochs)} epoch checkpoints, not {count}. Use a smaller --last, or train "
            "with a larger --keep_checkpoints."
        )
    return epochs[:count][::-1]


def _without_optimizer_state(named: NamedCheckpoint) -> NamedCheckpoint:
    """Return the checkpoint without its optimizer state, which is twice the size of the model."""
    model = named.checkpoint.states.get("model")
    if not model or not all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
        raise CheckpointError(f"The checkpoint {named.name} contains no model weights. Use another one.")
    weights = [tensor for tensor in model_weights(named.checkpoint).values() if tensor.is_floating_point()]
    if not all(torch.isfinite(tensor).all() for tensor in weights):
        raise CheckpointError(f"The checkpoint {named.name} contains weights that are not finite. Leave it out.")
    states = {
        name: state
        for name, state in named.checkpoint.states.items()
        if name in ("model", PRETRAINED_STATE, PROVENANCE_STATE)
    }
    return dataclasses.replace(named, checkpoint=dataclasses.replace(named.checkpoint, states=states))


def _reasons_against_averaging(first: Checkpoint, second: Checkpoint, allow_different_runs: bool) -> list[str]:
    """Return reasons not to average two models: different settings of the shape, tokens or tensors."""
    if first.states.get(PRETRAINED_STATE) != second.states.get(PRETRAINED_STATE):
        return ["they started from different models"]
    configs = [config_from_text(checkpoint.config) for checkpoint in (first, second)]
    reasons = [
        f"--{first_setting.name} is {first_setting.value} in one and {second_setting.value} in the other"
        for first_setting, second_setting in zip(*map(settings_of, configs), strict=True)
        if first_setting.value != second_setting.value
        # Dropout does not change the shape of a model.
        and (
            first_setting.name in EQUAL_SETTINGS or (first_setting.group == "model" and first_setting.name != "dropout")
        )
    ]
    if allow_different_runs and any(config.tuning.lora_rank for config in configs):
        reasons.append(
            "--allow_different_runs does not apply to runs with --lora_rank, whose low-rank matrices only have a "
            "useful average within a run"
        )
    if first.tokenizer != second.tokenizer or first.vocab_size != second.vocab_size:
        reasons.append(f"their tokenizers differ ({first.vocab_size} and {second.vocab_size} tokens)")
    if not reasons and _shapes_and_dtypes(first) != _shapes_and_dtypes(second):
        reasons.append("their weights have different names, shapes or dtypes")
    return reasons


def _shapes_and_dtypes(checkpoint: Checkpoint) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model_weights(checkpoint).items()}
