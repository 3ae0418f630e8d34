"""A captured and replayed micro-batch equals the eager one bit for bit."""

import dataclasses

import pytest
import torch

from konkanivani.data.shape_grid import ShapeGrid
from konkanivani.models.asr import LossCounts
from konkanivani.training import graphs
from konkanivani.training.gradient import accumulate
from konkanivani.training.graphs import CapturedMicroBatch, StaticInputs
from tests.conftest import parameter_grid
from tests.invariants.parts import relative_difference
from tests.training.graph_parts import (
    GRID,
    MODELS,
    eager_gradients,
    gradients_of,
    graphed,
    parts_of,
    spoken_batch,
    task_of,
)

BOUND = 1e-9
pad_into = graphs._pad_into
ONE_SHAPE = ShapeGrid(GRID.shapes[-1:])


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors differ in any bit."""
    assert one.keys() == other.keys() and len(one) > 5
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def replayed_gradients(parts, gradient, backend, cut, step):
    """Return the gradients of a step's micro-batches, computed by graphs only, before clipping."""
    task = task_of(parts, cut, step)
    if not gradient.captured_shapes:
        gradient(task)
        backend.poison()
    totals = accumulate(dataclasses.replace(task, forward_and_backward=gradient.run), task.plan)
    assert totals is not None
    return gradients_of(parts)


@pytest.mark.parametrize(("kind", "recompute"), parameter_grid(MODELS, ("never", "always")))
def test_replay_equals_the_eager_step_bit_for_bit(kind, recompute):
    parts, gradient, backend = graphed(parts_of(kind, recompute))
    eager = parts_of(kind, recompute)
    is_half = parts.forward.amp_dtype is not None
    for step, size in enumerate((4, 2, 1)):  # 1, 2 and 4 micro-batches
        batch = spoken_batch(step, size, torch.float32 if is_half else torch.float64)
        result = replayed_gradients(parts, gradient, backend, batch, step)
        assert differing(result, eager_gradients(eager, batch, step)) == []
        tight = eager_gradients(eager, batch, step, on_grid=False)
        farthest = max(relative_difference(result[name], tight[name]) for name in tight)
        assert farthest < (0.05 if is_half else BOUND)


TWO_AND_FOUR = ShapeGrid(tuple(shape for shape in GRID.shapes if shape.utterances > 1 and shape.samples == 32_000))


@pytest.mark.parametrize("kind", MODELS)
def test_dummy_utterances_add_nothing_to_the_gradient(kind, monkeypatch):
    parts, gradient, backend = graphed(parts_of(kind), TWO_AND_FOUR)
    is_half = parts.forward.amp_dtype is not None
    full_batch = spoken_batch(5, 3, torch.float32 if is_half else torch.float64)
    assert [batch.size for batch in full_batch.micro_batches] == [3, 1]
    used = [gradient.grid.shape_of(batch).utterances for batch in full_batch.micro_batches]
    result = replayed_gradients(parts, gradient, backend, full_batch, 0)
    tight = eager_gradients(parts_of(kind), full_batch, on_grid=False)
    assert used == [4, 2] and len(gradient.captured_shapes) == 2
    assert max(relative_difference(result[name], tight[name]) for name in tight) < (0.05 if is_half else BOUND)
    if not is_half:
        # Negative control: with a token as their target, dummy utterances have a loss.
        monkeypatch.setattr(graphs, "_pad_into", lambda buffer, values, _: pad_into(buffer, values, 0))
        wrong = replayed_gradients(parts, gradient, backend, full_batch, 0)
        assert (
            parts.model.decoder is None or max(relative_difference(wrong[name], tight[name]) for name in tight) > 1e-3
        )


def test_dropout_is_independent_of_recomputation_batching_and_padding():
    cuts = [spoken_batch(0, size) for size in (4, 1)]
    results = [
        eager_gradients(parts_of("conformer", recompute), cut, on_grid=on_grid)
        for recompute in ("never", "always")
        for cut in cuts
        for on_grid in (False, True)
    ]
    assert max(relative_difference(results[0][name], other[name]) for other in results for name in other) < BOUND
    # Negative control: another step has other masks.
    other = eager_gradients(parts_of("conformer"), cuts[0], step=1)
    assert max(relative_difference(results[0][name], other[name]) for name in other) > 1e-3


def test_all_shapes_of_a_length_launch_the_same_operators():
    parts, gradient, backend = graphed(parts_of("conformer", "always"), ONE_SHAPE)
    signatures = []
    for seed in range(2):
        gradient.drop(parts)
        gradient(task_of(parts, spoken_batch(seed, 4)))
        signatures.append(backend.signatures())
    assert signatures[0] == signatures[1] and len(signatures[0]) > 300
    assert "aten.add_.Tensor" in " ".join(signatures[0])  # gradients are accumulated in place


def read_data(module, inputs):
    """Forward pre-hook that reads a number of the data."""
    return inputs if inputs[0].sum().item() != 0 else None


def add_host_tensor(module, inputs):
    """Forward pre-hook that adds a tensor created from a number on the host."""
    return inputs[0] + torch.tensor([0.0]), *inputs[1:]


def add_noise(module, inputs):
    """Forward pre-hook that adds noise from a generator."""
    return inputs[0] + 0 * torch.rand_like(inputs[0]), *inputs[1:]


@pytest.mark.parametrize(
    ("hook", "reason"), [(read_data, "reads"), (add_host_tensor, "Python"), (add_noise, "generator")]
)
def test_negative_control_a_step_a_graph_would_freeze_runs_eagerly(hook, reason, capsys):
    results = []
    for grid in (GRID, ShapeGrid(())):
        parts, gradient, _ = graphed(parts_of("conformer"), grid)
        parts.model.encoder.blocks[1].register_forward_pre_hook(hook)
        gradient(task_of(parts, spoken_batch(0, 4)))
        results.append(gradients_of(parts))
        assert gradient.captured_shapes == ()
    dropped = capsys.readouterr().out
    assert "CUDA graphs: dropped" in dropped and reason in dropped
    assert differing(*results) == []
    # The recording was closed: operators run as usual.
    assert torch.zeros(1).item() == 0


def test_negative_control_divisors_from_python_are_frozen(monkeypatch):
    monkeypatch.setattr(StaticInputs, "counts", LossCounts(7.0, 4.0))
    parts, gradient, backend = graphed(parts_of("conformer"))
    batch = spoken_batch(0, 4)
    result = replayed_gradients(parts, gradient, backend, batch, 0)
    monkeypatch.undo()
    assert len(differing(result, eager_gradients(parts_of("conformer"), batch))) > 50


def test_negative_control_a_branch_on_the_lengths_is_frozen(monkeypatch):
    lengths = []
    fill = CapturedMicroBatch.fill
    monkeypatch.setattr(
        CapturedMicroBatch,
        "fill",
        lambda self, parts, batch, counts: (lengths.append(batch), fill(self, parts, batch, counts)),
    )

    def branching(module, inputs):
        return (2 * inputs[0], *inputs[1:]) if lengths and lengths[-1].size == 4 else inputs

    both = [parts_of("conformer"), parts_of("conformer")]
    for parts in both:
        parts.model.encoder.blocks[1].register_forward_pre_hook(branching)
    parts, gradient, backend = graphed(both[0])
    full_batch = spoken_batch(0, 4)
    result = replayed_gradients(parts, gradient, backend, full_batch, 0)
    assert len(differing(result, eager_gradients(both[1], full_batch))) > 50
