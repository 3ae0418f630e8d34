"""Optimizer step: preallocated optimizer state, skipped and interrupted steps, loss scaling, schedule."""

import dataclasses
import gc
import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from konkanivani.config import OptimizerConfig
from konkanivani.data.batching import Cursor
from konkanivani.errors import NumericsError
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.training.loop import MAX_SKIPS_IN_A_ROW, check_numerics, freeze_gc
from konkanivani.training.optimizer_state import Optimizer, OptimizerState, learning_rate
from konkanivani.training.optimizers import build_optimizer
from konkanivani.training.run import TrainState
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import double_parts, global_batch, relative_difference, speeches


def weights_of(parts: StepParts) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parts.model.parameters()]


def all_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_update_equals_torch_adamw(decay):
    def updated(build: Callable[[torch.nn.Linear], Optimizer | torch.optim.AdamW]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        optimizer = build(layer)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        return [layer.weight.detach(), layer.bias.detach()]

    def by_torch(layer: torch.nn.Linear) -> torch.optim.AdamW:
        groups = [{"params": [layer.weight], "weight_decay": decay}, {"params": [layer.bias], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), fused=True)

    ours = updated(lambda layer: build_optimizer(layer, OptimizerConfig(learning_rate=1e-2, weight_decay=decay)))
    assert all_equal(ours, updated(by_torch))
    other = updated(lambda layer: build_optimizer(layer, OptimizerConfig(learning_rate=2e-2, weight_decay=decay)))
    assert not all_equal(ours, other)


def test_parameter_without_a_gradient_is_unchanged():
    layer = torch.nn.Linear(5, 3)
    optimizer, before = build_optimizer(layer, OptimizerConfig()), layer.bias.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.bias, before) and optimizer.state[layer.bias]["step"] == 0
    assert optimizer.state[layer.weight]["step"] == 1


def test_update_allocates_no_state():
    parts = double_parts()
    before = {name: t.data_ptr() for name, t in OptimizerState(parts.model, parts.optimizer).state_dict().items()}
    train_step(parts, global_batch(speeches(2), 1), step=0)
    after = {name: t.data_ptr() for name, t in OptimizerState(parts.model, parts.optimizer).state_dict().items()}
    assert before == after


TRAIN = """
import sys
from konkanivani.config import OptimizerConfig
from konkanivani.planning.sizes import checkpoint_bytes
from konkanivani.training.step import train_step
from tests.invariants.parts import double_parts, global_batch, speeches
{before}
for kind in ("adamw", "adamw8bit"):
    parts = double_parts(optimizer=OptimizerConfig(optimizer=kind))
    checkpoint_bytes(parts.architecture, OptimizerConfig(optimizer=kind))
    train_step(parts, global_batch(speeches(2), 1), step=0)
print(*(name in sys.modules for name in ("torch._dynamo", "triton", "sympy", "torch.distributed.fsdp")))
"""


@pytest.mark.parametrize(
    ("before", "loaded"),
    [("", "False False False False"), ("import torch\ntorch.optim.AdamW([torch.ones(1)])", "True")],
)
def test_step_does_not_import_the_pytorch_compiler(before, loaded, torch_only_parent):
    """It takes 100 MB, and sympy and FSDP 3 s of CPU time; the negative control imports torch's own optimizer class."""
    ended = torch_only_parent.run_program(TRAIN.format(before=before))
    assert ended.stdout.strip().startswith(loaded), ended.stdout + ended.stderr


def test_weight_decay_applies_to_matrices_only():
    optimizer = build_optimizer(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), OptimizerConfig())
    decayed, free = optimizer.param_groups
    assert [p.dim() for p in decayed["params"]] == [2] and decayed["weight_decay"] == 0.01
    assert [p.dim() for p in free["params"]] == [1, 1, 1] and free["weight_decay"] == 0


def test_steps_reduce_the_loss():
    parts = double_parts()
    batch = global_batch(speeches(4, augmented=False), 2)
    losses = [train_step(parts, batch, step).loss for step in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_non_finite_step_changes_only_its_counter():
    parts = double_parts()
    train_step(parts, global_batch(speeches(2), 1), step=0)
    spoken = speeches(3, seed=1)
    poisoned = [*spoken[:2], dataclasses.replace(spoken[2], waveform=spoken[2].waveform * float("inf"))]
    before = weights_of(parts), [t.clone() for t in OptimizerState(parts.model, parts.optimizer).state_dict().values()]
    report = train_step(parts, global_batch(poisoned, 1), step=1)
    assert report.is_skipped
    assert all_equal(before[0], weights_of(parts))
    assert all_equal(before[1], list(OptimizerState(parts.model, parts.optimizer).state_dict().values()))
    state = TrainState(step=1)
    state.advance(Cursor(0, 2), 1.0, report.is_skipped, report.splits)
    assert (state.step, state.consumed, state.skipped_steps, state.consecutive_skips) == (1, 2, 1, 1)
    assert not train_step(parts, global_batch(spoken, 1), step=1).is_skipped


def test_interrupted_step_changes_nothing():
    parts = double_parts()
    before, looks = weights_of(parts), itertools.count(1)
    assert train_step(parts, global_batch(speeches(4), 2), 0, lambda: next(looks) == 2) is None
    assert all_equal(before, weights_of(parts))
    assert all(p.grad is None for p in parts.model.parameters())


def test_garbage_collector_ignores_earlier_objects_only_during_training():
    before = []

    def is_walked(thing: list) -> bool:
        return any(thing is each for each in gc.get_objects())

    gc.unfreeze()  # undo the freeze of the pytest process
    with pytest.raises(NumericsError), freeze_gc():
        since = []
        assert is_walked(since) and not is_walked(before)
        raise NumericsError("The gradients are not finite.")
    assert is_walked(before)
    gc.freeze()
    with freeze_gc():  # objects frozen by the caller stay frozen
        pass
    assert not is_walked(before)


def test_25_skips_in_a_row_or_a_vanishing_loss_scale_end_the_run():
    run = type("Run", (), {})()
    keeper = type("Keeper", (), {"newest_before": lambda _self, _step: "somewhere"})()
    run.storage = type("Storage", (), {"checkpointer": keeper})()
    run.step = dataclasses.replace(double_parts(), scaler=torch.amp.GradScaler("cpu", enabled=True))
    report = train_step(double_parts(), global_batch(speeches(2), 1), 0)
    run.state = TrainState(consecutive_skips=MAX_SKIPS_IN_A_ROW - 1)
    check_numerics(run, report)
    with pytest.raises(NumericsError, match="loss scale"):
        check_numerics(run, dataclasses.replace(report, scale=9e-6))
    run.state = TrainState(consecutive_skips=MAX_SKIPS_IN_A_ROW)
    with pytest.raises(NumericsError, match="somewhere"):
        check_numerics(run, report)


def test_scaled_gradients_give_the_same_update_and_overflow_halves_scale():
    plain = double_parts()
    scaled = dataclasses.replace(double_parts(), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    batch = global_batch(speeches(4), 2)
    one, other = train_step(plain, batch, 0), train_step(scaled, batch, 0)
    assert abs(one.gradient_norm - other.gradient_norm) < 1e-9 * one.gradient_norm
    # The scale is a power of two, so nothing is rounded.
    assert all_equal(weights_of(plain), weights_of(scaled))
    broken = [dataclasses.replace(s, waveform=s.waveform * float("nan")) for s in speeches(2)]
    assert train_step(scaled, global_batch(broken, 1), 1).scale == 1024.0 and scaled.scaler.get_scale() == 512.0


def test_ctc_runs_in_full_precision_under_autocast():
    forward = double_parts().forward
    spoken = [dataclasses.replace(s, waveform=s.waveform.float()) for s in speeches(2)]
    forward = dataclasses.replace(
        forward, amp_dtype=torch.bfloat16, model=forward.model.float(), front_end=forward.front_end.float()
    )
    output, sums = forward(global_batch(spoken, 2).micro_batches[0])
    with forward.autocast():
        assert forward.model.ctc_head(output.encoded).dtype == torch.bfloat16
    assert [summed.dtype for summed in sums] == [torch.float32] * 2


@pytest.mark.parametrize("schedule", ["cosine", "inverse_sqrt"])
def test_learning_rate_warms_up_to_the_peak_and_falls(schedule):
    config = OptimizerConfig(learning_rate=2e-3, warmup_steps=10, schedule=schedule)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(2e-4) and max(rates) == pytest.approx(2e-3, rel=0.05)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    if schedule == "cosine":
        assert rates[-1] == pytest.approx(2e-5)


def test_training_forward_has_no_cache_argument():
    assert not any("cache" in name for name in inspect.signature(KonkaniVaniASR.forward).parameters)


def with_intermediate(parts: StepParts, weight: float) -> StepParts:
    """Return step parts with this weight of the CTC loss on the middle block."""
    objective = dataclasses.replace(parts.forward.objective, intermediate_ctc=weight)
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, objective=objective))


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.9])
def test_intermediate_ctc_equals_the_formula_of_the_paper(weight):
    """(1 - w) CTC of the last block + w CTC of the middle one, both with the encoder's norm and the one head."""
    parts = with_intermediate(double_parts(), weight)
    (batch,) = global_batch(speeches(3), 3).micro_batches
    model, made = parts.model.train(), []
    model.encoder.packs = False  # keeps one row per utterance in the output of the block
    model.encoder.blocks[0].register_forward_hook(lambda *hooked: made.append(hooked[2]))
    output, sums = parts.forward(batch)
    expected = 0.0
    for share, hidden in ((1 - weight, output.encoded), (weight, model.encoder.norm(made[0]))):
        scores = model.ctc_head(hidden).log_softmax(dim=-1).transpose(0, 1)
        lengths = output.encoded_lengths, batch.token_lengths
        expected = expected + share * F.ctc_loss(scores, batch.tokens, *lengths, reduction="sum")
    assert len(model.encoder.blocks) == 2 and sums[0].item() == pytest.approx(expected.item(), rel=1e-9)


def test_intermediate_ctc_is_not_used_in_validation():
    (batch,) = global_batch(speeches(3, augmented=False), 3).micro_batches
    results = []
    for weight in (0.0, 0.5):
        parts = with_intermediate(double_parts(), weight)
        parts.model.eval()
        results.append(parts.forward(batch)[1][0].item())
        parts.model.train()
        results.append(parts.forward(batch)[1][0].item())
    assert results[0] == results[1] == results[2] != results[3]


def test_micro_batch_size_does_not_change_a_step_with_intermediate_ctc():
    weights = []
    for batch_size in (1, 4):
        parts = with_intermediate(double_parts(recompute="always" if batch_size == 1 else "never"), 0.3)
        train_step(parts, global_batch(speeches(4), batch_size), step=0)
        weights.append(torch.cat([p.detach().flatten() for p in parts.model.parameters()]))
    assert relative_difference(*weights) < 1e-9
