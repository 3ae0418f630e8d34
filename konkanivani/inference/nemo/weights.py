"""Conversion of NeMo tensors to this project's model; all names and shapes are checked before any conversion.

V tokens of this project's tokenizer, D model dimension, K kernel size.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from konkanivani.base.errors import ResourceError
from konkanivani.inference.nemo.archive import refused
from konkanivani.inference.nemo.names import BATCH_NORM, LEFT, Source, sources
from konkanivani.inference.nemo.settings import NemoSettings
from konkanivani.training.checkpoint.archive import load_tensors
from konkanivani.training.checkpoint.checkpoint import check_finite

NEVER = -1e4  # logit of a token that the file lacks: its probability is 0
NORM_EPSILON = 1e-5  # default of torch.nn.BatchNorm1d, which NeMo uses

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def read_tensors(file: BinaryIO, path: Path) -> Tensors:
    """Return the file's tensors by their own names.

    Raises a CheckpointError if they are damaged or were not written by torch.save.
    """
    try:
        return load_tensors(file)
    except MemoryError:
        raise ResourceError(f"The model {path} cannot be read: not enough memory. Free some.") from None
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise refused(path, f"its weights are damaged or not plain tensors ({reason:.200})") from None


def take_weights(
    found: Tensors, ours: Mapping[str, torch.Tensor], settings: NemoSettings, rows: Sequence[int | None], path: Path
) -> Tensors:
    """Return the weights of this project's model in fp32.

    Args:
        found: tensors of the file. They are removed as they are converted, so that no tensor exists twice.
        ours: state dict of the model, without values.
        rows: row of the file's CTC head for each token of this project, None for a token that the file lacks. The
            file's last row, for the blank, is the first of `rows`.

    Raises a CheckpointError if a tensor is missing, unknown, not finite, or has another shape.
    """
    needed = sources(ours, settings.model)
    head = [f"{settings.head}.{leaf}" for leaf in ("weight", "bias")]
    shapes = _shapes(needed.values())
    blank = rows[0]
    if blank is None:
        raise ValueError("the first of the rows is the blank's, which every file has")
    shapes |= {head[0]: (blank + 1, settings.model.d_model, 1), head[1]: (blank + 1,)}
    _check(found, shapes, path)
    # Free unused tensors, such as an RNNT decoder, before new ones are made.
    for name in found.keys() - shapes.keys():
        del found[name]
    weights = {}
    places = set()
    for name, source in needed.items():
        made = _made(found, source, ours[name].shape)
        memory = made.untyped_storage()
        # Biases may share memory in the file. Copy them, and views of larger tensors, so that each weight has its own
        # memory and no more than it needs.
        weights[name] = made.clone() if memory.data_ptr() in places or memory.nbytes() > made.nbytes else made
        places.add(memory.data_ptr())
    # NeMo's CTC head is a convolution with kernel size 1: (V, D, 1).
    weights["ctc_head.weight"] = _rows(found[head[0]].float().flatten(1), rows, 0.0)
    weights["ctc_head.bias"] = _rows(found[head[1]].float(), rows, NEVER)
    check_finite(str(path), weights)  # folding divides by the root of a variance, which may be negative
    return weights


def _shapes(needed: Collection[Source]) -> Shapes:
    """Return the shape of every tensor that the encoder is made of, by its name in the file."""
    shapes = {name: source.shape for source in needed for name in source.names}
    norms = {source.norm: source.shape[:1] for source in needed if source.norm}
    return shapes | {f"{norm}.{leaf}": shape for norm, shape in norms.items() for leaf in BATCH_NORM}


def _check(found: Tensors, shapes: Shapes, path: Path) -> None:
    """Raise a CheckpointError that names a missing, misshapen, non-floating-point, non-finite or unknown tensor."""
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            raise refused(path, f"it has no tensor {name}, which its configuration requires")
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            kind = f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            raise refused(path, f"its tensor {name} is {kind}, but its configuration requires {shape} of floats")
    unknown = sorted(name for name in found if name not in shapes and not LEFT.fullmatch(name))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        reason = f"it has a tensor {unknown[0]!r:.120}{more} that its configuration does not use"
        raise refused(path, reason, "Use another model, or a newer version")
    check_finite(str(path), {name: found[name] for name in shapes})


def _made(found: Tensors, source: Source, shape: torch.Size) -> torch.Tensor:
    """Return one converted tensor; a BatchNorm is folded into the convolution before it, with fixed statistics.

    y = (conv(x) - mean) / sqrt(variance + 1e-5) * weight + bias is a convolution with scaled kernel and bias.
    """
    parts = [found.pop(name).float() for name in source.names]
    if source.norm is None:
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(shape)
    # Fold in float64 and round once.
    weight, bias, mean, variance = (found[f"{source.norm}.{leaf}"].double() for leaf in BATCH_NORM)
    scale = weight / (variance + NORM_EPSILON).sqrt()
    # Kernel (D, 1, K); otherwise the bias, which is 0 if the convolution has none.
    if len(shape) == 3:
        return (parts[0].double() * scale[:, None, None]).float()
    return (((parts[0].double() if parts else 0.0) - mean) * scale + bias).float()


def _rows(head: torch.Tensor, rows: Sequence[int | None], otherwise: float) -> torch.Tensor:
    """Return the given rows of a tensor, filled with `otherwise` for None."""
    made = head[torch.tensor([row or 0 for row in rows])]
    made[torch.tensor([row is None for row in rows])] = otherwise
    return made
