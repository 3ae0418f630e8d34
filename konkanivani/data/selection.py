"""Subset of a manifest that a run uses, with normalised transcripts."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from konkanivani.data.manifest import Manifest
from konkanivani.data.token_counts import TokenCounts
from konkanivani.data.utterance import Utterance


@dataclass(frozen=True)
class Selection:
    """Lazily read utterances of a manifest at the indices `places` (N,), with normalised text.

    `counts` covers the whole manifest. `is_whole` means all utterances in the manifest's order.
    """

    manifest: Manifest
    places: np.ndarray
    counts: TokenCounts
    normalize: Callable[[str], str]
    is_whole: bool = False

    @property
    def durations(self) -> np.ndarray:
        """Return the durations (N,) in seconds, float64."""
        # The manifest's durations may be memory-mapped; indexing would copy them.
        return self.manifest.durations if self.is_whole else self.manifest.durations[self.places]

    @property
    def tokens(self) -> np.ndarray:
        """Return the number of tokens of each transcript (N,)."""
        return self.counts.tokens[self.places]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Utterance:
        utterance = self.manifest[int(self.places[number])]
        return dataclasses.replace(utterance, text=self.normalize(utterance.text))

    def __iter__(self) -> Iterator[Utterance]:
        return (self[number] for number in range(len(self)))

    def part(self, numbers: np.ndarray) -> "Selection":
        """Return the selection of the utterances with these indices."""
        return dataclasses.replace(self, places=self.places[numbers], is_whole=False)
