"""Invariant 11: a step with concurrent micro-batches on a CPU equals the step with consecutive ones, bit for bit.

In fp32 with dropout, one thread per operator in both cases, for any order in which micro-batches finish.
"""

import dataclasses
import itertools
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from konkanivani.config import DataConfig, LossConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.data.batching import Batch, Example, GlobalBatch, collate, order_for_concurrency
from konkanivani.data.text import OUR_TOKENS
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import LossCounts, LossSums, Objective
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training import step
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.gradient import OrderedAccumulation, map_ordered
from konkanivani.training.optimizer_state import OptimizerState
from konkanivani.training.step import StepParts, StepReport, train_step
from tests.conftest import parameter_grid
from tests.invariants.failing import ERRORS, fail_above, failing_forward
from tests.invariants.parts import (
    KINDS,
    MODEL,
    VOCAB_SIZE,
    are_equal,
    double_parts,
    global_batch,
    relative_difference,
    speeches,
    with_dropout,
)
from tests.timeouts import PROCESS_TIMEOUT

BOUND = 1e-9
CPU = torch.device("cpu")
SPOKEN = speeches(5)  # five micro-batches of one utterance: an uneven split over two threads

pytestmark = pytest.mark.usefixtures("two_threads")


def parts_of(
    concurrent_micro_batches: int, recompute: str = "never", model: ModelConfig = MODEL, loss: LossConfig | None = None
) -> StepParts:
    config = TrainConfig(
        model=with_dropout(model, 0.3),
        data=DataConfig(concurrent_micro_batches=concurrent_micro_batches),
        memory=MemoryConfig(gradient_checkpointing=recompute),
        loss=loss or LossConfig(),
    )
    return build_step_parts(config, architecture_of(config, VOCAB_SIZE), CPU, 100)


def global_batch_of(batch_size: int = 1) -> GlobalBatch:
    """Return the utterances in fp32, ordered for two concurrent threads."""
    spoken = [dataclasses.replace(speech, waveform=speech.waveform.float()) for speech in SPOKEN]
    batch = global_batch(spoken, batch_size)
    return dataclasses.replace(batch, micro_batches=order_for_concurrency(batch.micro_batches, 2))


def train_steps(parts: StepParts, threads: int = 2, steps: int = 3) -> dict[str, torch.Tensor]:
    """Return the losses, weights and optimizer state after some steps."""
    torch.set_num_threads(threads)
    reports = [train_step(parts, global_batch_of(), number) for number in range(steps)]
    torch.set_num_threads(2)
    assert all(isinstance(report, StepReport) and not report.splits for report in reports)
    losses = {"losses": torch.tensor([[r.ctc_loss, r.attention_loss, r.gradient_norm] for r in reports])}
    return {
        **losses,
        **dict(parts.model.named_parameters()),
        **OptimizerState(parts.model, parts.optimizer).state_dict(),
    }


def delay_micro_batch(monkeypatch: pytest.MonkeyPatch, number: int, seconds: float = 0.5) -> None:
    """Delay the start of a micro-batch."""
    late, forward_and_backward = global_batch_of().micro_batches[number].utterance_ids, step.forward_and_backward

    def with_delay(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        if batch.utterance_ids == late:
            time.sleep(seconds)
        return forward_and_backward(parts, batch, counts)

    monkeypatch.setattr(step, "forward_and_backward", with_delay)


@pytest.mark.parametrize(
    "kind, recompute", parameter_grid(["conformer", "transformer", "other parts"], ["always", "never"])
)
def test_concurrent_step_is_bitwise_equal_with_dropout(kind, recompute):
    model = KINDS[kind]
    one_by_one = train_steps(parts_of(1, recompute, model), threads=1)
    assert are_equal(train_steps(parts_of(2, recompute, model)), one_by_one)


def test_concurrent_recomputation_draws_the_same_masks():
    assert are_equal(train_steps(parts_of(2, "always")), train_steps(parts_of(2, "never")))


def test_single_micro_batch_is_halved_for_concurrency_utterance_is_not():
    parts, (whole,) = parts_of(2), global_batch(list(SPOKEN), len(SPOKEN)).micro_batches
    halves = parts.forward.plan((whole,))
    assert halves.concurrent_micro_batches == 2 and sorted(batch.size for batch in halves.micro_batches) == [2, 3]
    assert {name for batch in halves.micro_batches for name in batch.utterance_ids} == set(whole.utterance_ids)
    assert parts_of(1).forward.plan((whole,)).micro_batches == (whole,)
    (short, *_) = global_batch(list(SPOKEN), 1).micro_batches
    alone = parts.forward.plan((short,))
    assert alone.concurrent_micro_batches == 1 and alone.micro_batches == (short,)


@pytest.mark.parametrize("number", range(5))
def test_delay_of_any_micro_batch_changes_nothing(monkeypatch, number):
    expected = train_steps(parts_of(1), threads=1, steps=1)
    delay_micro_batch(monkeypatch, number)
    assert are_equal(train_steps(parts_of(2), steps=1), expected)


def test_negative_control_unordered_accumulation_changes_result(monkeypatch):
    expected = train_steps(parts_of(1), threads=1, steps=1)
    monkeypatch.setattr(OrderedAccumulation, "_wait", lambda self, index, gradient=None: None)
    delay_micro_batch(monkeypatch, 0, seconds=3.0)
    assert not are_equal(train_steps(parts_of(2), steps=1), expected)


def test_negative_control_shared_generator_changes_dropout_masks(monkeypatch):
    expected = train_steps(parts_of(1), threads=1, steps=1)
    monkeypatch.setattr("konkanivani.models.conformer.dropout_generator", lambda: None)
    assert not are_equal(train_steps(parts_of(2), steps=1), expected)


def test_head_with_zero_loss_weight_is_supported():
    loss = LossConfig(ctc_weight=1.0)
    assert are_equal(train_steps(parts_of(2, loss=loss)), train_steps(parts_of(1, loss=loss), threads=1))


def test_gradients_of_parameters_used_by_some_pieces_are_added():
    """Add gradients from each piece to its own parameter and to a shared one."""
    weights = [torch.nn.Parameter(torch.ones(())) for _ in range(4)]

    def work(piece: tuple[int, float]) -> float:
        number, scale = piece
        loss = scale * weights[0] * (weights[number] if number else 1.0)
        loss.backward()
        return float(loss.detach())

    results = list(map_ordered(2, work, list(enumerate([1.0, 2.0, 3.0, 4.0])), nullcontext, weights))
    assert results == [1.0, 2.0, 3.0, 4.0] and [float(w.grad) for w in weights] == [10.0, 2.0, 3.0, 4.0]
    assert not any(w._backward_hooks or w._post_accumulate_grad_hooks for w in weights)


def test_concurrency_is_limited_to_thread_count():
    busy, most = set(), []

    def work(number: int) -> int:
        busy.add(number)
        most.append(len(busy))
        time.sleep(0.05)
        busy.discard(number)
        return torch.get_num_threads()

    assert list(map_ordered(9, work, range(8), nullcontext, [])) == [1] * 8 and max(most) == 2


@pytest.mark.parametrize("number", range(5))
def test_error_in_one_micro_batch_stops_all_and_is_raised(monkeypatch, number):
    parts, forward_and_backward = parts_of(2), step.forward_and_backward
    broken = global_batch_of().micro_batches[number].utterance_ids

    def failing(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        if batch.utterance_ids == broken:
            raise ValueError("this one")
        return forward_and_backward(parts, batch, counts)

    monkeypatch.setattr(step, "forward_and_backward", failing)
    with pytest.raises(ValueError, match="this one"):
        train_step(parts, global_batch_of(), 0)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parts.model.parameters())
    assert [t.name for t in threading.enumerate() if t.name.startswith("micro-batch")] == []


def double_parts_of(concurrent_micro_batches: int) -> StepParts:
    parts = double_parts()
    return dataclasses.replace(
        parts, forward=dataclasses.replace(parts.forward, concurrent_micro_batches=concurrent_micro_batches)
    )


def test_out_of_memory_disables_concurrency_and_is_remembered(capsys):
    expected = double_parts_of(1)
    reference = [train_step(expected, global_batch(SPOKEN, 2), number) for number in range(2)]
    parts, free_slot = double_parts_of(2), threading.Semaphore(1)
    gradients = step.forward_and_backward

    def fail_if_concurrent(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        if not free_slot.acquire(blocking=False):
            raise ERRORS["cpu"]
        try:
            time.sleep(0.2)
            return gradients(parts, batch, counts)
        finally:
            free_slot.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "forward_and_backward", fail_if_concurrent)
        reports = [train_step(parts, global_batch(SPOKEN, 2), number) for number in range(2)]
    assert [report.splits for report in reports] == [1, 0]
    assert "one micro-batch at a time" in capsys.readouterr().out
    for mine, theirs in zip(reports, reference, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=BOUND, abs=0)
    for one, other in zip(expected.model.parameters(), parts.model.parameters(), strict=True):
        assert relative_difference(one, other) < BOUND
    resumed = double_parts_of(2)
    resumed.oom_history.load_state_dict(parts.oom_history.state_dict())
    plan = resumed.forward.plan(global_batch(SPOKEN, 2).micro_batches)
    assert resumed.oom_history.fit_to_memory(plan).concurrent_micro_batches == 1


def test_micro_batch_that_does_not_fit_alone_is_split():
    parts = failing_forward(double_parts_of(2), fail_above(1), ERRORS["cpu"])
    report, reference = (
        train_step(parts, global_batch(SPOKEN, 2), 0),
        train_step(double_parts_of(1), global_batch(SPOKEN, 2), 0),
    )
    assert report.splits == 2 and report.loss == pytest.approx(reference.loss, rel=BOUND, abs=0)


@pytest.mark.parametrize("checks", range(5))
def test_interrupted_step_leaves_no_gradients(checks):
    parts, counter = parts_of(2), itertools.count(1)
    assert train_step(parts, global_batch_of(), 0, lambda: next(counter) > checks) is None
    assert all(parameter.grad is None for parameter in parts.model.parameters())


def peak_before_backward(parts: StepParts, concurrent_micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the peak of live bytes, threads included, once all concurrent micro-batches finished the forward pass."""
    live, total, held_bytes = LiveBytes(), Objective.total, []
    met = threading.Barrier(concurrent_micro_batches, action=lambda: held_bytes.append(live.live))

    def wait(*given: object) -> torch.Tensor:
        met.wait(PROCESS_TIMEOUT)
        return total(*given)

    monkeypatch.setattr(Objective, "total", wait)
    live.count(parts.state_tensors())
    with live:
        train_step(parts, dataclasses.replace(global_batch_of(), micro_batches=global_batch_of().micro_batches[:4]), 0)
    monkeypatch.setattr(Objective, "total", total)
    assert len(held_bytes) == 4 // concurrent_micro_batches and live.peak > live.live
    return max(held_bytes)


def test_memory_of_all_threads_is_counted(monkeypatch):
    one = peak_before_backward(parts_of(1), 1, monkeypatch)
    assert one < peak_before_backward(parts_of(2), 2, monkeypatch) < 2 * one


def batch_of(*samples: int) -> Batch:
    return collate([Example(str(n), torch.zeros(n), [4], None) for n in samples], OUR_TOKENS)


@pytest.mark.parametrize(
    ("concurrent_micro_batches", "order"),
    [(1, [10, 40, 20, 30]), (2, [30, 40, 20, 10]), (3, [20, 30, 40, 10]), (8, [10, 20, 30, 40])],
)
def test_micro_batches_are_ordered_by_cost_for_concurrency(concurrent_micro_batches, order):
    given = tuple(batch_of(n) for n in (10, 40, 20, 30))
    ordered = order_for_concurrency(given, concurrent_micro_batches)
    assert [sum(batch.sample_lengths) for batch in ordered] == order
    assert order_for_concurrency(ordered, concurrent_micro_batches) == ordered
