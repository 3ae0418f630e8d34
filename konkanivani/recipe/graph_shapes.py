"""Shapes of the micro-batches that a run captures with --cuda_graphs, from its utterances."""

import numpy as np

from konkanivani.config import TrainConfig
from konkanivani.console import count
from konkanivani.data.batching import EpochPlanner, SizeLimit
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.shape_grid import choose_grid, measure_padding, micro_batch_sizes
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.recipe.run_data import more_tokens
from konkanivani.training.graphs import GraphedGradient
from konkanivani.training.step import StepParts


def learn_shapes(
    config: TrainConfig, step: StepParts, speech: TrainDataset, planner: EpochPlanner, limits: tuple[SizeLimit, ...]
) -> None:
    """Choose the shapes to capture, from the utterances; with --cuda_graphs, print why nothing is captured."""
    if config.memory.cuda_graphs == "off":
        return
    gradient = step.compute_gradient
    if not isinstance(gradient, GraphedGradient):
        print(
            "CUDA graphs: not used; they need a GPU, one process, speech, and weights on the GPU in full precision.",
            flush=True,
        )
        return
    framing = step.architecture.framing
    has_fixed_length = framing.feature_length(1) == framing.feature_length(SAMPLE_RATE)
    tokens = speech.utterances.tokens.astype(np.int64) + more_tokens(config)
    sizes = micro_batch_sizes(planner, tokens, limits, speech.speeds, has_fixed_length)
    longest = int(np.ceil(planner.durations.max() / min(speech.speeds) * SAMPLE_RATE))
    gradient.grid = choose_grid(sizes, longest)
    padding = measure_padding(gradient.grid, sizes)
    print(
        f"CUDA graphs (not yet run on a GPU by the project): {count(len(gradient.grid.shapes), 'shape')}, "
        f"{padding.added_frames:.1%} more frames; {padding.uncaptured:.1%} of the frames in other shapes, without "
        "graphs. Front end, SpecAugment and CTC run between the graphs.",
        flush=True,
    )
