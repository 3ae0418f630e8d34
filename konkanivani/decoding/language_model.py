"""A language model of tokens, for the beam search. Placeholder signature until the branch lm is merged."""

from typing import Protocol

import torch


class LanguageModel(Protocol):
    def initial(self, rows: int) -> torch.Tensor: ...

    def score(self, states: torch.Tensor) -> torch.Tensor: ...

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor: ...
