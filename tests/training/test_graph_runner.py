"""Training by captured micro-batches: out of memory, interruption, frozen stages, other batch sizes, resumed runs."""

import copy
import dataclasses

import pytest
import torch

from konkanivani.config import TuningConfig
from konkanivani.data.shape_grid import ShapeGrid
from konkanivani.ops.capturable import BetweenGraphs
from konkanivani.ops.graph_backends import OperatorRecorder, RecorderBackend
from konkanivani.training.graphs import GraphedGradient, gradient_addresses
from konkanivani.training.optimizer_state import OptimizerState
from konkanivani.training.step import StepGradient, StepParts, train_step
from tests.invariants.parts import max_relative_difference
from tests.training.graph_parts import GRID, graphed, parts_of, spoken_batch

BOUND = 1e-9
NO_SHAPE = ShapeGrid(())
PAIRS = ShapeGrid(tuple(shape for shape in GRID.shapes if shape.utterances == 2))  # for micro-batches of two


def trained(parts: StepParts, steps: range = range(3), size: int = 2) -> dict[str, torch.Tensor]:
    """Return the weights after these steps, each on other utterances."""
    for step in steps:
        report = train_step(parts, spoken_batch(step, size), step)
        assert report is not None and not report.is_skipped
    return weights_of(parts)


def weights_of(parts: StepParts) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in parts.model.named_parameters()}


def eager() -> StepParts:
    """Return parts with the same dropout whose micro-batches are never captured."""
    return graphed(parts_of("conformer"), NO_SHAPE)[0]


class OutOfMemoryInjector:
    """Replacement of a function that runs out of memory at its n-th call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int) -> None:
        self.calls = 0
        function = getattr(owner, name)

        def failing(*args: object) -> object:
            self.calls += 1
            if self.calls == at:
                raise RuntimeError("CUDA error: out of memory")
            return function(*args)

        monkeypatch.setattr(owner, name, failing)


def test_weights_after_some_steps_equal_those_without_graphs():
    parts, gradient, _ = graphed(parts_of("conformer"), PAIRS)
    assert max_relative_difference(trained(parts), trained(eager())) < BOUND
    assert len(gradient.captured_shapes) == len(PAIRS.shapes) == 2


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (RecorderBackend, "warm_up", 1),
        (RecorderBackend, "begin", 2),
        (RecorderBackend, "end", 2),
        (BetweenGraphs, "compute", 3),  # in the second micro-batch, when the first has added its gradient
        (OperatorRecorder, "replay", 6),
    ],
)
def test_out_of_memory_drops_the_graphs_and_repeats_the_step(owner, name, at, monkeypatch, capsys):
    parts, gradient, _ = graphed(parts_of("conformer"), PAIRS)
    injector = OutOfMemoryInjector(monkeypatch, owner, name, at)
    result = trained(parts)
    assert injector.calls == at, "nothing is captured or replayed afterwards"
    assert not gradient.is_active and gradient.captured_shapes == ()
    assert "CUDA graphs: dropped, training continues without them, with the same result. Out of memory" in (
        capsys.readouterr().out
    )
    assert max_relative_difference(result, trained(eager())) < BOUND
    # No limit is recorded: the micro-batches fit without graphs.
    assert parts.oom_history.sizes() == {}


def test_negative_control_a_partly_added_gradient_is_detected(monkeypatch):
    parts, _, _ = graphed(parts_of("conformer"), PAIRS)
    OutOfMemoryInjector(monkeypatch, BetweenGraphs, "compute", 3)
    monkeypatch.setattr("konkanivani.training.graphs.drop_gradient", lambda parts: None)
    monkeypatch.setattr(type(parts.optimizer), "zero_grad", lambda self: None)
    assert max_relative_difference(trained(parts, range(1)), trained(eager(), range(1))) > 1e-6


def test_error_in_a_capture_leaves_no_recording_open(monkeypatch):
    parts, gradient, _ = graphed(parts_of("conformer"), PAIRS)

    def interrupted(module, inputs):
        raise KeyboardInterrupt

    parts.model.encoder.blocks[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(parts)
    recorder = OperatorRecorder()
    with recorder:
        torch.zeros(2).add_(1)
    assert len(recorder.operations) == 2 and gradient.captured_shapes == ()


def test_signal_between_captures_stops_before_the_step():
    parts, gradient, _ = graphed(parts_of("conformer"), PAIRS)
    before = weights_of(parts)
    asked = []

    def is_interrupted() -> bool:
        asked.append(len(gradient.captured_shapes))
        return len(asked) > 1

    assert train_step(parts, spoken_batch(0, 2), 0, is_interrupted) is None
    assert len(gradient.captured_shapes) == 1 and max_relative_difference(weights_of(parts), before) == 0
    # The same process can continue training.
    assert max_relative_difference(trained(parts), trained(eager())) < BOUND


def test_stage_with_other_trained_parameters_is_captured_again():
    def staged() -> StepParts:
        parts = parts_of("conformer")
        architecture = dataclasses.replace(parts.architecture, tuning=TuningConfig(freeze_steps=2))
        return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, architecture=architecture))

    parts, gradient, backend = graphed(staged(), PAIRS)
    initial = weights_of(parts)
    during = trained(parts, range(2))
    counts = [len(backend.signatures())]
    assert sum(address is not None for address in gradient_addresses(parts)) < 10
    assert [name for name in during if not torch.equal(during[name], initial[name])] != list(during)
    after = trained(parts, range(2, 4))
    counts.append(len(backend.signatures()))
    assert counts[0] < counts[1]
    plain = graphed(staged(), NO_SHAPE)[0]
    assert max_relative_difference(during, trained(plain, range(2))) < BOUND
    assert max_relative_difference(after, trained(plain, range(2, 4))) < BOUND
    assert all(not torch.equal(after[name], initial[name]) for name in after)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_another_batch_size_is_replayed_or_runs_eagerly(size):
    parts, gradient, _ = graphed(parts_of("conformer"))
    trained(parts, range(1), size=2)
    captured = gradient.captured_shapes
    result = trained(parts, range(1, 3), size=size)
    assert gradient.captured_shapes == captured
    plain = eager()
    trained(plain, range(1), size=2)
    assert max_relative_difference(result, trained(plain, range(1, 3), size=size)) < BOUND


def test_resumed_run_continues_with_the_same_weights():
    parts, _, _ = graphed(parts_of("conformer"), PAIRS)
    whole = trained(parts, range(4))
    parts, _, _ = graphed(parts_of("conformer"), PAIRS)
    trained(parts, range(2))
    resumed, _, _ = graphed(parts_of("conformer"), PAIRS)
    resumed.model.load_state_dict(parts.model.state_dict())
    saved = copy.deepcopy(OptimizerState(parts.model, parts.optimizer).state_dict())
    OptimizerState(resumed.model, resumed.optimizer).load_state_dict(saved)
    assert max_relative_difference(trained(resumed, range(2, 4)), whole) == 0


def test_gradient_addresses_do_not_change():
    parts, _, _ = graphed(parts_of("whisper"), PAIRS)
    trained(parts, range(1))
    before = gradient_addresses(parts)
    trained(parts, range(1, 3))
    assert gradient_addresses(parts) == before and any(before)
    # Negative control: without graphs they are freed after each step.
    plain = parts_of("whisper")
    trained(plain, range(1))
    assert not any(gradient_addresses(plain))


def test_loss_scale_grows_in_captured_steps():
    def scaled() -> StepParts:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return dataclasses.replace(parts_of("conformer"), scaler=scaler)

    parts, plain = graphed(scaled(), PAIRS)[0], graphed(scaled(), NO_SHAPE)[0]
    for step in range(5):
        # The scale grows in place, and the graphs read it there.
        reports = [train_step(one, spoken_batch(step, 2), step) for one in (parts, plain)]
        assert reports[0].scale == reports[1].scale and not reports[0].is_skipped
    assert reports[0].scale > 2.0**10
    assert max_relative_difference(weights_of(parts), weights_of(plain)) < BOUND


def scaled_by(exponent: int) -> tuple[StepParts, GraphedGradient]:
    """Return captured parts in half precision, whose loss scale falls by 2**-100 when a gradient overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**exponent, backoff_factor=2.0**-100)
    parts, gradient, _ = graphed(dataclasses.replace(parts_of("whisper, bf16"), scaler=scaler), PAIRS)
    return parts, gradient


def test_overflow_of_the_loss_scale_skips_the_captured_step(monkeypatch):
    parts, gradient = scaled_by(127)
    initial = weights_of(parts)
    spoken = [spoken_batch(step, 2, torch.float32) for step in range(3)]
    report = train_step(parts, spoken[0], 0)
    assert report.is_skipped and gradient.captured_shapes and report.scale == 2.0**127
    assert max_relative_difference(weights_of(parts), initial) == 0
    # The later steps are those of a run that began with the smaller scale.
    other, _ = scaled_by(27)
    for step in (1, 2):
        reports = [train_step(one, spoken[step], step) for one in (parts, other)]
        assert reports[0].scale == reports[1].scale == 2.0**27 and not reports[0].is_skipped
    assert max_relative_difference(weights_of(parts), weights_of(other)) == 0
    # Negative control: if the step were not skipped, the weights would not be finite.
    monkeypatch.setattr(StepGradient, "is_finite", True)
    wrong, _ = scaled_by(127)
    train_step(wrong, spoken[0], 0)
    assert not all(weight.isfinite().all() for weight in weights_of(wrong).values())


@pytest.mark.parametrize(("share", "captures"), [(0.1, True), (0.9, False)])
def test_auto_captures_if_the_device_waits(share, captures, monkeypatch, capsys):
    def busy_share(self, run):
        run()
        return share

    monkeypatch.setattr(RecorderBackend, "busy_share", busy_share)
    gradient = GraphedGradient(RecorderBackend(), PAIRS, is_measured_first=True)
    parts = dataclasses.replace(parts_of("conformer"), compute_gradient=gradient)
    trained(parts, range(4))
    assert gradient.captured_shapes == ()
    result = trained(parts, range(4, 6))
    assert bool(gradient.captured_shapes) == captures
    assert ("not used" in capsys.readouterr().out) != captures
    plain = eager()
    trained(plain, range(4))
    assert max_relative_difference(result, trained(plain, range(4, 6))) < BOUND
