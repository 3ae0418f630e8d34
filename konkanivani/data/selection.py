"""The utterances of a manifest that a run uses, their texts as a model learns them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from konkanivani.data.manifest import Manifest
from konkanivani.data.token_counts import TokenCounts
from konkanivani.data.utterance import Utterance


@dataclass(frozen=True)
class Selection(Sequence[Utterance]):
    """The manifest's utterances at `places` (N,), each read when it is asked for; `counts` are the whole manifest's.

    Where it is all of them in their order (`is_whole`), nothing is copied.
    """

    manifest: Manifest
    places: np.ndarray
    counts: TokenCounts
    normalize: Callable[[str], str]
    is_whole: bool = False

    @property
    def durations(self) -> np.ndarray:
        """(N,) float64 seconds."""
        return self.manifest.durations if self.is_whole else self.manifest.durations[self.places]

    @property
    def tokens(self) -> np.ndarray:
        """(N,) tokens of each transcript."""
        return self.counts.tokens[self.places]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Utterance:
        utterance = self.manifest[int(self.places[number])]
        return dataclasses.replace(utterance, text=self.normalize(utterance.text))

    def part(self, numbers: np.ndarray) -> "Selection":
        """These of its utterances."""
        return dataclasses.replace(self, places=self.places[numbers], is_whole=False)
