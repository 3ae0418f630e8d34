"""Shape grids: few shapes, little padding, and a large enough shape for every micro-batch."""

import itertools

import numpy as np
import pytest
import torch

from konkanivani.data.batching import Batch, EpochPlanner, Example, SizeLimit, collate, same_size
from konkanivani.data.shape_grid import (
    MAX_SHAPES,
    STEP_SAMPLES,
    BestEdges,
    GridShape,
    MicroBatchSizes,
    ShapeGrid,
    choose_grid,
    measure_padding,
    micro_batch_sizes,
)
from konkanivani.data.text import OUR_TOKENS
from konkanivani.lengths import SAMPLE_RATE

LIMITS = {"4 x 2": same_size(4), "auto": (SizeLimit(6.0, 8), SizeLimit(10.0, 6), SizeLimit(30.0, 4))}
BOUND = 0.06


def batch_of(samples: list[int], tokens: list[int]) -> Batch:
    """Return a batch of silence with these lengths."""
    sizes = enumerate(zip(samples, tokens, strict=True))
    return collate([Example(str(n), torch.zeros(s), [5] * t, None) for n, (s, t) in sizes], OUR_TOKENS)


def planner_of(seed: int, shortest: float = 0.5) -> EpochPlanner:
    """Return an epoch plan of 1,000 utterances of up to 18 s, distributed like read speech."""
    durations = np.random.default_rng(0).gamma(4.0, 1.2, 1000).clip(shortest, 18.0)
    return EpochPlanner(durations, 8, seed)


def sizes_of(limits: tuple[SizeLimit, ...], seed: int, speeds: tuple[float, ...] = (1.0,)) -> MicroBatchSizes:
    planner = planner_of(seed)
    return micro_batch_sizes(planner, (10 * planner.durations).astype(np.int64), limits, speeds)


@pytest.mark.parametrize("speeds", [(1.0,), (0.9, 1.0, 1.1)])
@pytest.mark.parametrize("limits", LIMITS)
def test_few_shapes_add_little_padding_in_any_epoch(limits, speeds):
    grid = choose_grid(sizes_of(LIMITS[limits], 1, speeds), 20 * SAMPLE_RATE)
    assert 4 < len(grid.shapes) <= MAX_SHAPES
    other = measure_padding(grid, sizes_of(LIMITS[limits], 2, speeds))
    assert 0.01 < other.added_frames < BOUND and other.uncaptured < 0.1
    # Negative control: a single length.
    longest = ShapeGrid((GridShape(20 * SAMPLE_RATE, 4, 1000),))
    assert measure_padding(longest, sizes_of(LIMITS["4 x 2"], 2)).added_frames > 10 * BOUND


@pytest.mark.parametrize("count", [1, 2, 3])
def test_best_edges_equal_those_of_exhaustive_search(count):
    samples = np.random.default_rng(count).integers(1, 12, 30) * STEP_SAMPLES
    sizes = MicroBatchSizes(np.full(30, 2), samples, np.ones(30, dtype=np.int64))
    longest = int(samples.max())
    tried = []
    for edges in itertools.combinations(range(1, longest // STEP_SAMPLES), count - 1):
        shapes = tuple(GridShape(edge * STEP_SAMPLES, 2, 3) for edge in (*edges, longest // STEP_SAMPLES))
        tried.append(measure_padding(ShapeGrid(shapes), sizes).added_frames)
    result = tuple(GridShape(edge, 2, 3) for edge in BestEdges(samples, longest).edges(count))
    assert measure_padding(ShapeGrid(result), sizes).added_frames == pytest.approx(min(tried))


def test_batch_gets_the_smallest_shape_that_fits():
    grid = ShapeGrid((GridShape(16_000, 2, 5), GridShape(32_000, 2, 5), GridShape(32_000, 2, 9)))
    assert grid.shape_of(batch_of([16_000, 9_000], [4, 1])) == grid.shapes[0]
    assert grid.shape_of(batch_of([16_001, 9_000], [4, 1])) == grid.shapes[1]
    assert grid.shape_of(batch_of([9_000, 9_000], [5, 1])) == grid.shapes[2]
    assert grid.shape_of(batch_of([9_000, 9_000, 9_000], [1, 1, 1])) is None
    assert grid.shape_of(batch_of([32_001, 9_000], [1, 1])) is None


def test_smaller_batch_is_padded_with_dummy_utterances():
    grid = ShapeGrid((GridShape(16_000, 2, 5), GridShape(16_000, 6, 5), GridShape(32_000, 2, 5)))
    assert grid.shape_of(batch_of([9_000], [1])) == grid.shapes[0]
    # Shapes with fewer utterances come first, for any length.
    assert grid.shape_of(batch_of([20_000], [1])) == grid.shapes[2]
    assert grid.shape_of(batch_of([9_000] * 3, [1] * 3)) == grid.shapes[1]
    assert ShapeGrid(grid.shapes[1:2]).shape_of(batch_of([9_000] * 2, [1] * 2)) is None
    sizes = MicroBatchSizes(np.array([3]), np.array([12_000]), np.array([2]))
    padding = measure_padding(grid, sizes)
    assert padding.added_frames == pytest.approx((6 * 16_000 - 36_000) / 36_000) and padding.uncaptured == 0
    assert padding.added_tokens == pytest.approx((6 * 5 - 9) / 9)


def test_fixed_length_input_needs_one_shape():
    planner = planner_of(0)
    sizes = micro_batch_sizes(planner, np.full(1000, 20), same_size(4), has_fixed_length=True)
    grid = choose_grid(sizes, 30 * SAMPLE_RATE)
    assert grid.shapes == (GridShape(30 * SAMPLE_RATE, 4, 22),)
    assert measure_padding(grid, sizes).added_frames == 0
