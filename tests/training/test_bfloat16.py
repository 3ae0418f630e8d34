"""Weights in bf16 without masters: unbiased rounding, optimizers, exact resume, placement, plans, rejected settings."""

import dataclasses
import math

import pytest
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, load_states, read_checkpoint, write_checkpoint
from konkanivani.config import MemoryConfig, OptimizerConfig, TrainConfig
from konkanivani.errors import UsageError
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.architecture import architecture_of
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.model import T5Shape
from konkanivani.planning.sizes import checkpoint_bytes, needs_sharding, state_bytes
from konkanivani.planning.tensors import LiveBytes
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.training import optimizers
from konkanivani.training.bfloat16 import SMALLEST, StochasticRounding, in_bf16
from konkanivani.training.build_step import StateLayout, build_step_parts, memory_conditions
from konkanivani.training.optimizer_state import OptimizerState
from konkanivani.training.optimizers import BF16_KINDS, build_optimizer
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import PLACEMENTS, are_equal, measured_peak
from tests.pretrained_parts import MODES, state_of
from tests.run_setup import parse_flags
from tests.t5.parts import CPU, global_batch, pairs, t5_config
from tests.tracers import ONLY_TENSORS

every_kind = pytest.mark.parametrize("kind", BF16_KINDS)
SHAPE = T5Shape(64, 16, 4, 2, 2, 128, 300)
COUNT = 100_003  # elements of a tensor, not a multiple of 4
# Between two bf16 numbers, near one of them, of either sign, tiny, large, and with a carry into the exponent.
NUMBERS = (1 + 0.3 * 2**-7, -1 - 0.9 * 2**-7, 3e-30, -7.1e20, 1.998)


def rounded(number: float, step: int, tensor: int = 0, first: int = 0) -> torch.Tensor:
    """Return many roundings of a number in one update."""
    target = torch.empty(COUNT, dtype=torch.bfloat16)
    numbers = torch.full((COUNT,), number)
    StochasticRounding(COUNT, CPU).round_into(target, numbers, torch.tensor(float(step)), tensor, first)
    return target


def deviations(number: float, result: torch.Tensor) -> float:
    """Return the distance of the mean of roundings from the number, in standard deviations of the mean."""
    exact = float(torch.tensor(number))
    lower, upper = bf16_neighbours(exact)
    share = (exact - lower) / (upper - lower)
    deviation = (upper - lower) * math.sqrt(share * (1 - share) / result.numel())
    return abs(float(result.double().mean()) - exact) / deviation


def bf16_neighbours(number: float) -> tuple[float, float]:
    """Return the bf16 numbers below and above an fp32 number."""
    pattern = torch.tensor(number).view(torch.int32) & -(2**16)
    return tuple(sorted(float(bits.view(torch.float32)) for bits in (pattern, pattern + 2**16)))


@pytest.mark.parametrize("number", NUMBERS)
def test_rounding_is_unbiased_over_elements_and_over_updates(number):
    result = rounded(number, step=1)
    assert set(result.double().tolist()) == set(bf16_neighbours(number))
    assert deviations(number, result) < 4
    one_element = torch.stack([rounded(number, step)[7] for step in range(1, 400)])
    assert deviations(number, one_element) < 4
    # Negative controls: rounding to the nearest number, and the same random bits in every update.
    nearest = torch.full((COUNT,), number).to(torch.bfloat16)
    assert deviations(number, nearest) > 20
    assert deviations(number, one_element[:1].expand(399)) > 4


def test_rounding_keeps_bf16_numbers():
    for number in (0.0, -0.0, 1.5, -(2.0**-100)):
        assert (rounded(number, step=1) == number).all()


def test_random_bits_differ_by_update_tensor_slice_and_position():
    number = 1 + 0.5 * 2**-7
    first = rounded(number, 1)
    assert torch.equal(first, rounded(number, 1))
    others = (
        rounded(number, 2),
        rounded(number, 1, tensor=1),
        rounded(number, 1, first=4),
        first.roll(1),
        first.roll(4),
    )
    for other in others:
        assert abs((first == other).double().mean() - 0.5) < 0.01


def layer(dtype: torch.dtype) -> torch.nn.Linear:
    """Return a layer of 128 x 600 weights near 1, more than a slice of 2^16, with a bias in fp32."""
    torch.manual_seed(0)
    result = torch.nn.Linear(600, 128)
    with torch.no_grad():
        result.weight.copy_((1 + 0.1 * torch.randn(128, 600)).to(torch.bfloat16))
    result.weight = torch.nn.Parameter(result.weight.detach().to(dtype))
    return result


def updated(dtype: torch.dtype, kind: str, steps: int = 100) -> torch.Tensor:
    """Return the weights after updates by gradients of random size around 1, at a rate far below bf16's resolution."""
    module = layer(dtype)
    config = OptimizerConfig(learning_rate=1e-4, weight_decay=0.0, optimizer=kind)
    optimizer = build_optimizer(module, config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in module.parameters():
            drawn = torch.rand(parameter.shape, generator=generator) + 0.5
            parameter.grad = drawn.to(torch.bfloat16).to(parameter.dtype)
        optimizer.step()
    return module.weight.detach().float()


@every_kind
def test_small_updates_add_up(kind, monkeypatch):
    monkeypatch.setattr(optimizers, "SLICE", 2**16)
    monkeypatch.setattr(optimizers, "MAX_ELEMENTS", 2**16)
    before = layer(torch.float32).weight.detach()
    exact = updated(torch.float32, kind) - before
    result = updated(torch.bfloat16, kind) - before
    assert exact.mean() < -0.009
    assert abs(result.mean() / exact.mean() - 1) < 0.02
    # Of one weight, the deviation is sqrt(100 updates x 1e-4 x a step of 2^-7) = 0.009.
    assert (result - exact).abs().max() < 0.08

    def nearest(self, target, numbers, step, tensor, first):
        target.copy_(numbers)

    monkeypatch.setattr(StochasticRounding, "round_into", nearest)  # negative control
    assert (updated(torch.bfloat16, kind) - before).mean().abs() < 0.2 * exact.mean().abs()


@every_kind
def test_update_allocates_no_memory(kind):
    module = layer(torch.bfloat16)
    optimizer = build_optimizer(module, OptimizerConfig(optimizer=kind))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with LiveBytes() as live:
        live.count([*module.parameters(), *optimizer.tensors, *(p.grad for p in module.parameters())])
        before = live.live
        live.restart_peak()
        optimizer.step()
        assert live.restart_peak() <= before + 64  # numbers without a dimension


def config_of(kind: str, weight_dtype: str = "bf16") -> TrainConfig:
    """Return the settings of a step in mixed precision."""
    config = t5_config(half=True, rate=1e-2)
    memory = dataclasses.replace(config.memory, amp_dtype="bf16", weight_dtype=weight_dtype)
    return dataclasses.replace(config, memory=memory, optimizer=dataclasses.replace(config.optimizer, optimizer=kind))


def parts_of(kind: str, weight_dtype: str = "bf16", mode: str = "full", placement: Placement = ON_CARD) -> StepParts:
    """Return the parts of a T5 step, most of whose weights are in bf16."""
    architecture = T5Architecture(SHAPE, MODES[mode])
    layout = StateLayout(placement=placement)
    return build_step_parts(config_of(kind, weight_dtype), architecture, CPU, 100, layout=layout)


def trained(parts: StepParts, steps: range) -> list[float]:
    """Train and return the losses."""
    return [train_step(parts, global_batch(pairs(4, seed=step % 3), 2), step).loss for step in steps]


@every_kind
def test_training_loss_follows_fp32(kind):
    parts = parts_of(kind)
    stored = [parameter for parameter in parts.model.parameters() if in_bf16(parameter)]
    assert sum(p.numel() for p in stored) > 0.9 * sum(p.numel() for p in parts.model.parameters())
    assert (
        all(p.numel() >= SMALLEST for p in stored) and parts.optimizer.state[stored[0]]["step"].dtype == torch.float32
    )
    losses, exact = trained(parts, range(15)), trained(parts_of(kind, "fp32"), range(15))
    assert losses[0] == pytest.approx(exact[0], rel=1e-2) and exact[-1] < 0.7 * exact[0]
    # Mean of one pass over the three batches: the loss of a single step depends on the order of additions of a CPU.
    assert sum(losses[-3:]) == pytest.approx(sum(exact[-3:]), rel=0.1)


@pytest.mark.parametrize("mode", ["encoder", "LoRA"])
def test_frozen_weights_are_unchanged_and_lora_weights_are_fp32(mode):
    parts = parts_of("adamw", mode=mode)
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    trained(parts, range(2))
    for name, parameter in parts.model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad
        assert not ("low_rank" in name and in_bf16(parameter))


@every_kind
def test_run_resumed_from_a_file_continues_bit_for_bit(kind, tmp_path):
    undisturbed, first = parts_of(kind), parts_of(kind)
    trained(undisturbed, range(4))
    trained(first, range(2))
    states = {"model": first.model.state_dict(), "optimizer": OptimizerState(first.model, first.optimizer).state_dict()}
    write_checkpoint(tmp_path / "one.pt", Checkpoint("", b"tokens", 1, 3, 0, states))

    def resumed(shift: int) -> dict[str, torch.Tensor]:
        parts = parts_of(kind)
        stateful = {"model": parts.model, "optimizer": OptimizerState(parts.model, parts.optimizer)}
        load_states(read_checkpoint(tmp_path / "one.pt"), stateful)
        for state in parts.optimizer.state.values():
            state["step"].add_(shift)
        trained(parts, range(2, 4))
        weights = dict(parts.model.named_parameters())
        return {name: weight.detach() for name, weight in weights.items() if in_bf16(weight)}

    actual = resumed(0)
    expected = {name: weight for name, weight in state_of(undisturbed).items() if name in actual}
    assert are_equal(actual, expected)
    assert not are_equal(resumed(7), expected)  # negative control: the random bits of other updates


@pytest.mark.parametrize("place", ["host", "prefetched", "partly on host"])
def test_placement_of_bf16_weights_changes_no_result(place):
    on_card, elsewhere = parts_of("adamw"), parts_of("adamw", placement=PLACEMENTS[place])
    assert trained(on_card, range(2)) == trained(elsewhere, range(2))
    assert are_equal(state_of(on_card), state_of(elsewhere))
    assert not elsewhere.forward.weights.copies  # bf16 weights need no halves


@every_kind
def test_plan_counts_two_bytes_per_bf16_number(kind):
    architecture = T5Architecture(dataclasses.replace(SHAPE, d_model=128, feedforward_dim=512, encoder_layers=3))
    config = config_of(kind)
    output = [dataclasses.replace(one, waveform=torch.arange(2, 66), tokens=[9] * 50) for one in pairs(4)]
    parts = build_step_parts(config, architecture, CPU, 100)
    measured = measured_peak(parts, global_batch(output, 2))
    planned = build_tracer(config, architecture, ONLY_TENSORS).trace(BatchShape(2, 64.0, 50), RecomputePolicy("never"))
    assert 0.999 * measured <= planned.bytes <= 1.05 * measured
    in_full = config_of(kind, "fp32")
    # Without the workspaces, which do not grow with the model.
    workspaces = [
        sum(t.nbytes for t in build_step_parts(c, architecture, CPU, 100).optimizer.workspace)
        for c in (config, in_full)
    ]
    states = [state_bytes(c, architecture) - extra for c, extra in zip((config, in_full), workspaces, strict=True)]
    assert states[0] == pytest.approx(0.5 * states[1], rel=0.03)
    assert memory_conditions(config, architecture, CPU) != memory_conditions(in_full, architecture, CPU)


@every_kind
def test_checkpoint_bytes_equal_size_of_bf16_checkpoint(kind, tmp_path):
    architecture = T5Architecture(dataclasses.replace(SHAPE, d_model=256, feedforward_dim=1024))
    config = config_of(kind)
    parts = build_step_parts(config, architecture, CPU, 100)
    states = {"model": parts.model.state_dict(), "optimizer": OptimizerState(parts.model, parts.optimizer).state_dict()}
    write_checkpoint(tmp_path / "one.pt", Checkpoint("", b"tokens", 300, 3, 0, states))
    size = (tmp_path / "one.pt").stat().st_size
    assert size <= checkpoint_bytes(architecture, config.optimizer, "bf16") < size + 1.5 * 2**20
    assert checkpoint_bytes(architecture, config.optimizer) > 1.7 * size  # negative control: weights in fp32


REJECTED = {
    "without mixed precision": ([], "needs products in bf16"),
    "fp16": (["--mixed_precision", "--amp_dtype", "fp16", "--device", "cuda"], "needs products in bf16"),
    "adamw8bit": (["--optimizer", "adamw8bit"], "does not support --optimizer adamw8bit"),
    "masters": (["--weights", "half"], "--weights half keeps fp32 masters"),
    "sharded": (["--shard", "always"], "--shard always needs weights in fp32"),
    "graphs": (["--cuda_graphs", "on"], "--cuda_graphs needs weights in fp32"),
}
HALF = ["--mixed_precision", "--amp_dtype", "bf16"]


@pytest.mark.parametrize("case", REJECTED)
def test_settings_that_contradict_bf16_weights_are_rejected(case):
    words, sentence = REJECTED[case]
    given = words if "needs products" in sentence else [*HALF, *words]
    with pytest.raises(UsageError, match=sentence):
        parse_flags(["--weight_dtype", "bf16", *given])
    assert parse_flags(["--weight_dtype", "bf16", *HALF]).memory.weight_dtype == "bf16"  # negative control


def test_bf16_weights_are_not_sharded_by_default():
    config = TrainConfig(memory=MemoryConfig(mixed_precision=True, amp_dtype="bf16", weight_dtype="bf16"))
    assert not needs_sharding(config, architecture_of(config, 40), ONLY_TENSORS, budget=1)


def test_large_linear_weights_are_bf16_and_all_others_fp32():
    """Convolutions, norms and the plain embedding stay in fp32."""
    config = TrainConfig(memory=MemoryConfig(mixed_precision=True, amp_dtype="bf16", weight_dtype="bf16"))
    model = build_step_parts(config, architecture_of(config, 40), CPU, 10).model
    for name, parameter in model.named_parameters():
        is_layer = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
        assert in_bf16(parameter) == (is_layer and name.endswith("weight") and parameter.numel() >= SMALLEST)
