"""CUDA graphs compute the gradient of the eager step, on a GPU."""

import dataclasses

import pytest
import torch

from konkanivani.ops.graph_backends import CudaGraphBackend
from konkanivani.training.graphs import GraphedGradient
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import relative_difference
from tests.training.graph_parts import GRID, eager_on_grid, parts_of, spoken_batch

pytestmark = pytest.mark.card
BOUND = 1e-7
KINDS = ("conformer", "other parts", "whisper")


def on_gpu(kind: str, recompute: str) -> StepParts:
    """Return the parts of `parts_of` on the GPU."""
    parts = parts_of(kind, recompute)
    device = torch.device("cuda")
    parts.model.to(device)
    parts.forward.front_end.to(device)
    for state in parts.optimizer.state.values():
        for name, tensor in state.items():
            state[name] = tensor.to(device)
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, device=device))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_graphs_equal_steps_on_the_grid(kind, recompute):
    device = torch.device("cuda")
    graphs, eager = on_gpu(kind, recompute), on_gpu(kind, recompute)
    gradient = GraphedGradient(CudaGraphBackend(device), GRID)
    graphs = dataclasses.replace(graphs, compute_gradient=gradient)
    plain = GraphedGradient(CudaGraphBackend(device), GRID)
    plain.run = plain.run_eagerly = lambda parts, batch, counts: eager_on_grid(parts, batch.to(device), counts)
    plain.is_active = False
    plain_parts = dataclasses.replace(eager, compute_gradient=plain)
    for step, size in enumerate((4, 2, 1, 2)):
        full_batch = spoken_batch(step, size)
        reports = [train_step(parts, full_batch, step) for parts in (graphs, plain_parts)]
        assert abs(reports[0].loss / reports[1].loss - 1) < BOUND
    assert len(gradient.captured_shapes) == len(GRID.shapes)
    pairs = zip(graphs.model.parameters(), eager.model.parameters(), strict=True)
    assert max(relative_difference(one, other) for one, other in pairs) < BOUND


def test_new_lengths_reserve_no_more_memory():
    parts = on_gpu("conformer", "never")
    parts = dataclasses.replace(parts, compute_gradient=GraphedGradient(CudaGraphBackend(torch.device("cuda")), GRID))
    for step in range(5):
        train_step(parts, spoken_batch(step, 2), step)
    before = torch.cuda.memory_reserved()
    for step in range(5, 60):
        train_step(parts, spoken_batch(step, 2), step)
    assert torch.cuda.memory_reserved() <= before + 2**21
