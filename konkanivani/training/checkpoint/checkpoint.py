"""Checkpoint file: named stateful parts in one verified file.

A checkpoint has torch's zip format and contains tensors, strings, bytes (as a uint8 tensor) and plain numbers only.
Reading checks the CRC of every record first, because torch.load does not, and refuses content that torch.save never
writes.
"""

import contextlib
import errno
import os
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from konkanivani.base.errors import CheckpointError, ResourceError
from konkanivani.base.line_endings import conversion_hint
from konkanivani.training.checkpoint.archive import first_number, load_archive

PRETRAINED_STATE = "pretrained"  # key of the description of a pretrained model in `states`
FORMAT = 2  # in format 1 the layer norm that is now at the input of a block was at its output
DAMAGE = (None, errno.EINVAL, errno.EIO)  # errno of a read error that is caused by the content of the file


class OtherVersionError(CheckpointError):
    """A checkpoint of another version of this trainer, valid as far as this version can check."""


class Stateful(Protocol):
    """A part of the training run whose state is saved, with the state_dict protocol of torch."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file.

    Args:
        config: text of `config_to_text`.
        plan_digest: digest of the epoch plan (order of the data); if it differs on resumption, the epoch is restarted.
        states: state by name of the part.
    """

    config: str
    tokenizer: bytes
    vocab_size: int
    step: int
    plan_digest: int
    states: dict[str, dict[str, object]]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write and fsync `path`; on failure remove the file and raise a ResourceError."""
    record = {"format": FORMAT} | vars(checkpoint)
    record["tokenizer"] = torch.frombuffer(bytearray(checkpoint.tokenizer), dtype=torch.uint8)
    record["states"] = {name: dict(state) for name, state in checkpoint.states.items()}
    try:
        with open(path, "wb") as file:
            torch.save(record, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # a full disk raises either
        with contextlib.suppress(OSError):  # read-only file system
            path.unlink(missing_ok=True)
        if error.__context__ is not None and not isinstance(error.__context__, Exception):
            # A signal handler's exception, which torch's zip writer replaces by an error of its own.
            raise error.__context__ from None
        # The message of torch's own error names source lines of PyTorch, not the cause.
        reasons = (getattr(each, "strerror", None) for each in (error, error.__context__))
        reason = next(filter(None, reasons), str(error).splitlines()[0])
        named = str(path).removesuffix(".partial")
        raise ResourceError(
            f"The checkpoint {named} could not be written: {reason}. Free disk space, or repair the folder."
        ) from None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the verified checkpoint at `path`, with its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or not a checkpoint of this version.
        ResourceError: the file cannot be read now (permissions, not enough memory).
    """
    path = Path(path)
    check_is_there(path)
    try:
        return _parse_record(load_archive(path), path)
    except CheckpointError:
        raise
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno in DAMAGE:
            raise _damaged(path, error) from None
        # The file may be valid, so the caller must not rename it to *.damaged.
        reason = error.strerror or error if isinstance(error, OSError) else "not enough memory"
        raise ResourceError(f"The checkpoint {path} cannot be read: {reason}. Fix that and start again.") from None
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        raise _damaged(path, error) from None


def read_step(path: Path) -> int | None:
    """Return the step of the checkpoint at `path` without reading its tensors; None if it cannot be read."""
    try:
        return first_number(path, "step")
    except Exception:  # a damaged zip or pickle can raise nearly anything
        return None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return CheckpointError(
        f"The checkpoint {path} is damaged or not a KonkaniVani checkpoint "
        f"({reason:.300}){conversion_hint(path)}. Use another one, or --resume auto for the newest valid one."
    )


def check_is_there(path: Path) -> None:
    """Raise a CheckpointError if there is no file at `path`, or a file of another program."""
    advice = "Give the path of a checkpoint_*.pt file."
    if path.suffix == ".nemo":
        advice = f"It is a NeMo file: convert it with import_asr.py {path} {path.with_suffix('.pt')}."
    elif path.suffix == ".safetensors" and path.is_file() and not zipfile.is_zipfile(path):
        advice = (
            "It is a safetensors file: use a bundle with transcribe.py; here give the checkpoint it was exported from."
        )
    elif path.is_file():
        return
    elif (path / "config.json").is_file():
        advice = f"It is a model folder: use --pretrained {path} for a Whisper model, import_asr.py for others."
    elif path.is_dir():
        advice = f"It is a folder: give one of its files, or --checkpoint_dir {path} --resume auto to resume training."
    raise CheckpointError(f"There is no checkpoint at {path}. {advice}")


def _parse_record(record: object, path: Path) -> Checkpoint:
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CheckpointError(f"The file {path} is not a KonkaniVani checkpoint. Give the path of one.")
    if record["format"] != FORMAT:
        age = "newer" if record["format"] > FORMAT else "older"
        raise OtherVersionError(
            f"The checkpoint {path} has format {record['format']}, of another, {age} version; this version "
            f"reads format {FORMAT}. Use the version that wrote it, or another checkpoint."
        )
    tokenizer = record["tokenizer"]
    states = record["states"]
    sound = (
        isinstance(record["config"], str)
        and isinstance(tokenizer, torch.Tensor)
        and tokenizer.dtype == torch.uint8
        and tokenizer.dim() == 1
        and all(type(record[name]) is int for name in ("vocab_size", "step", "plan_digest"))
        and 0 < record["vocab_size"] < 2**31
        and 0 <= record["step"] < 2**63
        and isinstance(states, dict)
        and all(isinstance(state, dict) for state in states.values())
    )
    if not sound:
        raise CheckpointError(f"The checkpoint {path} has missing or invalid fields. Use another one.")
    kept = {field.name: record[field.name] for field in fields(Checkpoint)}
    return Checkpoint(**kept | {"tokenizer": tokenizer.numpy().tobytes()})


def check_states(checkpoint: Checkpoint, known: Collection[str]) -> None:
    """Raise a CheckpointError if the checkpoint has a state of an unknown part, which the next save would lose."""
    unknown = sorted(set(checkpoint.states) - set(known))
    if unknown:
        raise CheckpointError(
            f"The checkpoint has a state of {unknown[0]!r:.80}, which this version does not support. Resume "
            "with the version that wrote it, or start a new run from its weights with --init_from."
        )


def load_states(checkpoint: Checkpoint, stateful: Mapping[str, Stateful]) -> None:
    """Load the state of every part; raise a CheckpointError if one is missing or does not fit.

    Tensors are removed from the checkpoint as soon as their part is loaded: a large model does not fit in memory twice.
    """
    for name, part in stateful.items():
        if name == "splits" and name not in checkpoint.states:
            continue  # written by an older version without an OOM history
        if name not in checkpoint.states:
            raise CheckpointError(
                f"The checkpoint has no {name} state (averaged checkpoints have none), so it cannot be "
                "resumed. Start a new run from its weights with --init_from."
            )
        try:
            if name == "scaler" and not checkpoint.states[name]:
                continue  # saved without loss scaling, resumed with it
            part.load_state_dict(state := checkpoint.states[name])
            for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
                del state[key]
        except (RuntimeError, TypeError, AttributeError) as error:
            # The first line of Module.load_state_dict's error is generic; the second names missing or unexpected keys.
            reason = (str(error) or type(error).__name__).splitlines()[:2][-1].strip().rstrip(".")
            raise CheckpointError(
                f"The checkpoint's {name} cannot be loaded: {reason:.200}. Use another checkpoint, or the version that "
                "wrote it."
            ) from None


def model_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the model weights in a checkpoint; raise a CheckpointError if one of them is not a tensor."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.states["model"].items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError("The checkpoint contains no model weights. Use another one.")
        weights[name] = tensor
    return weights


def check_finite(name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise a CheckpointError, which names the file `name`, if a weight is not a finite number."""
    for tensor_name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"The weights {tensor_name} of {name} are not finite numbers. Use another model.")
