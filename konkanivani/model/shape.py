"""The recogniser without values: names, shapes and sizes of its weights, in no memory."""

from collections.abc import Callable

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from konkanivani.base.config import ModelConfig
from konkanivani.model.asr import KonkaniVaniASR


def model_without_values(config: ModelConfig, vocab_size: int, mel_bins: int) -> KonkaniVaniASR:
    """The model on the device `meta`, for its shapes, or for weights that are there already to be assigned to it."""
    with torch.device("meta"), _Unfilled():
        return KonkaniVaniASR(config, vocab_size, mel_bins)


class _Unfilled(TorchFunctionMode):
    """Leaves tensors without values unfilled: torch imports its compiler to fill nothing, 116 MiB, a second of it."""

    FILLS = (init.uniform_, init.normal_, init.kaiming_uniform_, torch.Tensor.zero_, torch.Tensor.fill_)

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return None if function in self.FILLS else function(*args, **(kwargs or {}))
