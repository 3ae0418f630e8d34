"""Shapes to which micro-batches are padded, so that few shapes occur in a run and each can be captured once.

B utterances, S samples, U tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from konkanivani.data.batching import Batch, EpochPlanner, SizeLimit, cut_sizes
from konkanivani.lengths import SAMPLE_RATE

MAX_SHAPES = 32
"""Each captured shape takes memory and time at the start of a stage."""
MAX_PADDING = 0.04  # of the frames that micro-batches have already: other epochs, with other batches, have up to 0.06
EPOCHS = 4  # from which the shapes are chosen
MIN_SHARE = 0.02  # of the frames; rarer numbers of utterances get no shapes of their own
# Of the utterances by dummy ones: beyond, computing them takes longer than launching a step without graphs. An
# estimate, not measured on a card yet.
MAX_GROWTH = 2
STEP_SAMPLES = 8 * 160  # lengths of shapes are multiples of 80 ms


@dataclass(frozen=True, order=True)
class GridShape:
    """Shape of a padded micro-batch: S samples, B utterances, and U + 1 decoder positions."""

    samples: int
    utterances: int
    positions: int

    def fits(self, utterances: int, samples: int, tokens: int) -> bool:
        """Return whether a micro-batch can be padded to this shape, by dummy utterances too."""
        if not utterances <= self.utterances <= MAX_GROWTH * utterances:
            return False
        return samples <= self.samples and tokens < self.positions


@dataclass(frozen=True)
class ShapeGrid:
    """Shapes of a run in ascending order; other micro-batches are not captured."""

    shapes: tuple[GridShape, ...]

    def shape_of(self, batch: Batch) -> GridShape | None:
        """Return the shape that a batch is padded to, or None."""
        return self.shape_for(batch.size, max(batch.sample_lengths), max(batch.token_lengths))

    def shape_for(self, utterances: int, samples: int, tokens: int) -> GridShape | None:
        """Return the smallest shape that a micro-batch fits into, by the fewest dummy utterances; or None."""
        fitting = [shape for shape in self.shapes if shape.fits(utterances, samples, tokens)]
        return min(fitting, key=lambda shape: (shape.utterances, shape), default=None)


@dataclass(frozen=True)
class MicroBatchSizes:
    """Sizes of M micro-batches, each (M,): utterances, samples of the longest utterance, and tokens of that with most.

    With `has_fixed_length`, features have the same length whatever the speech.
    """

    utterances: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray
    has_fixed_length: bool = False


def micro_batch_sizes(
    planner: EpochPlanner,
    tokens: np.ndarray,
    limits: tuple[SizeLimit, ...],
    speeds: Sequence[float] = (1.0,),
    has_fixed_length: bool = False,
) -> MicroBatchSizes:
    """Return the sizes of some epochs' micro-batches, at random speeds, for utterances with these tokens (N,)."""
    generator = np.random.default_rng(planner.seed)
    rows = []
    for epoch in range(EPOCHS):
        seconds = planner.durations / generator.choice(np.asarray(speeds), len(planner.durations))
        for global_batch in planner.plan_epoch(epoch):
            ordered = global_batch[np.argsort(seconds[global_batch], kind="stable")]
            start = 0
            for size in cut_sizes(seconds[ordered].tolist(), limits):
                part = ordered[start : start + size]
                rows.append((size, round(seconds[part[-1]] * SAMPLE_RATE), tokens[part].max()))
                start += size
    utterances, samples, most = np.array(rows, dtype=np.int64).T
    return MicroBatchSizes(utterances, samples, most, has_fixed_length)


def choose_grid(sizes: MicroBatchSizes, longest: int) -> ShapeGrid:
    """Return the fewest shapes that add at most `MAX_PADDING` to the frames, or else `MAX_SHAPES` shapes.

    The last shape of each number of utterances has `longest` samples or more, since later epochs combine other
    utterances.
    """
    samples = np.full_like(sizes.samples, longest) if sizes.has_fixed_length else sizes.samples
    numbers, places = np.unique(sizes.utterances, return_inverse=True)
    frames = np.bincount(places, weights=sizes.utterances * samples)
    frequent = [number for number, share in zip(numbers, frames / frames.sum(), strict=True) if share >= MIN_SHARE]
    groups = [BestEdges(samples[sizes.utterances == number], longest) for number in frequent[:MAX_SHAPES]]
    chosen = _share_out(groups, frequent)
    shapes = [
        GridShape(edge, int(number), 2 + _most_tokens(sizes, samples, edge))
        for group, number, count in zip(groups, frequent, chosen, strict=True)
        for edge in group.edges(count)
    ]
    return ShapeGrid(tuple(sorted(shapes)))


def _most_tokens(sizes: MicroBatchSizes, samples: np.ndarray, edge: int) -> int:
    """Return the most tokens of any micro-batch of up to `edge` samples."""
    inside = sizes.tokens[samples <= edge]
    return int(inside.max()) if len(inside) else 0


def _share_out(groups: list[BestEdges], numbers: list[int]) -> list[int]:
    """Return the number of shapes of each group: add the shape that saves most until padding is small enough."""
    counts = [1] * len(groups)
    total = sum(number * group.total for group, number in zip(groups, numbers, strict=True))

    def padding(place: int, count: int) -> float:
        return numbers[place] * groups[place].padding(count)

    while sum(counts) < MAX_SHAPES and sum(map(padding, range(len(groups)), counts)) > MAX_PADDING * total:
        gains = [padding(place, count) - padding(place, count + 1) for place, count in enumerate(counts)]
        best = int(np.argmax(gains))
        if gains[best] <= 0:
            break
        counts[best] += 1
    return counts


class BestEdges:
    """Lengths of the micro-batches of one size, and the best edges for any number of shapes."""

    def __init__(self, samples: np.ndarray, longest: int) -> None:
        steps = -(-samples // STEP_SAMPLES)
        self._last = -(-max(longest, int(samples.max())) // STEP_SAMPLES)
        weights = np.bincount(steps, minlength=self._last + 1).astype(np.float64)
        lengths = np.bincount(steps, weights=samples, minlength=self._last + 1)
        # Sums over all lengths of up to n steps: their number, and their samples.
        self._numbers = np.cumsum(weights)
        self._samples = np.cumsum(lengths)
        self.total = float(samples.sum())
        # _costs[k][n]: least padding of all lengths of up to n steps with k + 1 edges, the last at n.
        ends = np.arange(self._last + 1)
        self._costs = [self._numbers * ends * STEP_SAMPLES - self._samples]
        self._before: list[np.ndarray] = []

    def padding(self, count: int) -> float:
        """Return the least padding in samples per utterance slot with `count` edges."""
        self._extend(count)
        return float(self._costs[count - 1][-1])

    def edges(self, count: int) -> list[int]:
        """Return the best edges in samples, ascending."""
        self._extend(count)
        place = self._last
        places = [place]
        for before in reversed(self._before[: count - 1]):
            place = int(before[place])
            places.append(place)
        return [edge * STEP_SAMPLES for edge in sorted(set(places)) if edge > 0]

    def _extend(self, count: int) -> None:
        """Compute the costs of up to `count` edges: the best place of the last edge but one, for each last edge."""
        ends = np.arange(self._last + 1)
        # between[m, n]: padding of the lengths of more than m and up to n steps, at the edge n.
        numbers = self._numbers[None, :] - self._numbers[:, None]
        samples = self._samples[None, :] - self._samples[:, None]
        between = np.where(ends[:, None] <= ends[None, :], numbers * ends[None, :] * STEP_SAMPLES - samples, np.inf)
        while len(self._costs) < count:
            totals = self._costs[-1][:, None] + between
            self._before.append(totals.argmin(axis=0))
            self._costs.append(totals.min(axis=0))


@dataclass(frozen=True)
class Padding:
    """Effect of a grid on M micro-batches: the share of frames that it adds, and of frames in shapes that it lacks."""

    added_frames: float
    added_tokens: float
    uncaptured: float


def measure_padding(grid: ShapeGrid, sizes: MicroBatchSizes) -> Padding:
    """Return how many frames and decoder positions the grid adds to these micro-batches."""
    added_frames = 0
    added_tokens = 0
    uncaptured = 0
    for number, samples, tokens in zip(sizes.utterances, sizes.samples, sizes.tokens, strict=True):
        shape = grid.shape_for(number, samples, tokens)
        if shape is not None:
            before = shape.samples if sizes.has_fixed_length else samples
            added_frames += shape.utterances * shape.samples - number * before
            added_tokens += shape.utterances * shape.positions - number * (tokens + 1)
        else:
            uncaptured += number * samples
    frames = float((sizes.utterances * sizes.samples).sum())
    positions = float((sizes.utterances * (sizes.tokens + 1)).sum())
    return Padding(float(added_frames / frames), float(added_tokens / positions), float(uncaptured / frames))
