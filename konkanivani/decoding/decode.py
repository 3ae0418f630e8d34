"""How encoded frames become token ids, as the settings ask for it.

B batch, T' encoder frames, D model width.
"""

from typing import Protocol

import torch

from konkanivani.config import DecodingConfig
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.lengths import Lengths
from konkanivani.model.asr import KonkaniVaniASR


class Decode(Protocol):
    """encoded (B, T', D) with their lengths -> each utterance's token ids, without special tokens.

    The model is in evaluation mode, and stays as it is.
    """

    def __call__(self, model: KonkaniVaniASR, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]: ...


def build_decode(config: DecodingConfig) -> Decode:
    """The decoding that the settings ask for."""
    return greedy_ctc
