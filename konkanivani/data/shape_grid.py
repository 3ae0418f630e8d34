"""Shapes to which micro-batches are padded, so that few shapes occur in a run and each can be captured once.

B utterances, S samples, U tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from konkanivani.data.batching import Batch

MAX_SHAPES = 32
"""Each captured shape takes memory and a second at the start of a stage."""


@dataclass(frozen=True, order=True)
class GridShape:
    """Shape of a padded micro-batch: S samples, B utterances, and U + 1 decoder positions."""

    samples: int
    utterances: int
    positions: int

    def fits(self, batch: Batch) -> bool:
        """Return whether the batch can be padded to this shape."""
        if batch.size != self.utterances:
            return False
        return max(batch.sample_lengths) <= self.samples and max(batch.token_lengths) < self.positions


@dataclass(frozen=True)
class ShapeGrid:
    """Shapes of a run in ascending order; other micro-batches are not captured."""

    shapes: tuple[GridShape, ...]

    def shape_of(self, batch: Batch) -> GridShape | None:
        """Return the smallest shape that the batch fits into, or None."""
        return next((shape for shape in self.shapes if shape.fits(batch)), None)
