"""Optimizers with smaller state: comparison with reference implementations, rejected settings, and the invariants."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers

from konkanivani.checkpoints.checkpoint import Checkpoint, load_states, read_checkpoint, write_checkpoint
from konkanivani.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from konkanivani.errors import UsageError
from konkanivani.flags import config_from_text, config_to_text, contradictions
from konkanivani.memory.devices import cuda_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import parameter_count
from konkanivani.planning import tracer as tracer_module
from konkanivani.planning.sizes import checkpoint_bytes, needs_sharding, state_bytes
from konkanivani.planning.tensors import LiveBytes
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import build_tracer
from konkanivani.training import optimizers as adafactor
from konkanivani.training import optimizers as adamw8bit
from konkanivani.training.build_step import StateLayout, build_step_parts, memory_conditions
from konkanivani.training.optimizer_state import Optimizer, OptimizerState
from konkanivani.training.optimizers import BLOCK, KINDS, Codebook, build_optimizer, dynamic_shares
from konkanivani.training.step import StepParts, train_step
from tests.conftest import parameter_grid
from tests.invariants.failing import ERRORS, fail_at, failing_backward, failing_forward
from tests.invariants.parts import (
    MODEL,
    PLACEMENTS,
    double_parts,
    global_batch,
    measured_peak,
    relative_difference,
    speeches,
)
from tests.run_setup import parse_flags
from tests.tracers import ONLY_TENSORS, VOCAB_SIZE, tracer_of
from tests.training.test_host_synchronization import HostReads

SMALLER = ["adamw8bit", "adafactor"]
WIDE = dataclasses.replace(MODEL, d_model=32)  # some matrices have 4096 elements
CPU = torch.device("cpu")
RATE, DECAY = 1e-2, 0.1


def config_of(kind: str, model: ModelConfig = WIDE) -> TrainConfig:
    one_after_another = DataConfig(concurrent_micro_batches=1)
    return TrainConfig(model=model, data=one_after_another, optimizer=OptimizerConfig(optimizer=kind))


def parts_of(kind: str, model: ModelConfig = WIDE, placement: Placement = ON_CARD) -> StepParts:
    config = config_of(kind, model)
    architecture, layout = architecture_of(config, VOCAB_SIZE), StateLayout(placement=placement)
    return build_step_parts(config, architecture, CPU, 100, layout=layout)


def float64_parts(kind: str) -> StepParts:
    return double_parts(WIDE, optimizer=OptimizerConfig(optimizer=kind))


def global_batch_of(step: int, seed: int = 0):
    spoken = speeches(4, seed=100 * seed + step, augmented=False)
    return global_batch([dataclasses.replace(speech, waveform=speech.waveform.float()) for speech in spoken], 2)


def state_of(parts: StepParts) -> dict[str, torch.Tensor]:
    tensors = dict(parts.model.named_parameters()) | OptimizerState(parts.model, parts.optimizer).state_dict()
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differing(one: StepParts, other: StepParts) -> list[str]:
    mine, theirs = state_of(one), state_of(other)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def network(seed: int = 0) -> torch.nn.Sequential:
    """Return a network with a matrix of several slices and an odd size, vectors, and kernels."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(91, 67), torch.nn.LayerNorm(67), torch.nn.Conv1d(67, 67, 3, groups=67))


def updated(build, steps: int = 5) -> torch.nn.Sequential:
    """Return the network after updates by fixed gradients of very different sizes."""
    net = network()
    optimizer, generator = build(net), torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in net.parameters():
            size = 10.0 ** torch.randint(-3, 0, (len(parameter),), generator=generator)
            shape = (-1, *[1] * (parameter.dim() - 1))
            parameter.grad = torch.randn(parameter.shape, generator=generator) * size.view(shape)
        optimizer.step()
    return net


def project_optimizer(kind: str):
    config = OptimizerConfig(learning_rate=RATE, weight_decay=DECAY, optimizer=kind)
    return lambda net: build_optimizer(net, config)


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest relative difference between the parameters of two networks."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(relative_difference(mine.double(), theirs.double()) for mine, theirs in pairs)


@pytest.mark.parametrize("is_signed", [True, False])
def test_quantization_levels_are_those_of_the_paper(is_signed):
    shares = np.array(dynamic_shares(is_signed))
    assert len(shares) == len(set(shares)) == 256 and {0.0, 1.0} <= set(shares) and (np.diff(shares) > 0).all()
    assert (shares < 0).sum() == (127 if is_signed else 0)
    for power in range(7):  # the number of steps doubles with each power of ten
        between = (shares > 10.0 ** (power - 7)) & (shares < 10.0 ** (power - 6))
        assert between.sum() == 2 ** (power if is_signed else power + 1)


def quantize_and_dequantize(numbers: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers (blocks, 256) after quantization to 8 bits and back, and their codes."""
    book, workspace, again = Codebook(is_signed, numbers), torch.empty(numbers.shape), torch.empty_like(numbers)
    codes, largest = torch.empty(numbers.shape, dtype=torch.uint8), torch.empty(len(numbers))
    book.quantize(numbers, codes, largest, workspace)
    book.dequantize(codes, largest, workspace, again)
    return again, codes


def numbers_of(is_signed: bool) -> torch.Tensor:
    torch.manual_seed(0)
    numbers = torch.randn(64, BLOCK) * 10.0 ** torch.randint(-12, 3, (64, 1)) * 10.0 ** -(5 * torch.rand(64, BLOCK))
    return numbers if is_signed else numbers.abs()


@pytest.mark.parametrize("is_signed", [True, False])
def test_number_is_quantized_to_the_nearest_level_of_its_block(is_signed):
    numbers, shares = numbers_of(is_signed), np.array(dynamic_shares(is_signed))
    again, codes = quantize_and_dequantize(numbers, is_signed)
    exact = numbers.double().numpy()
    largest = np.abs(exact).max(1, keepdims=True)
    nearest = np.abs((exact / largest)[..., None] - shares).argmin(-1)
    if not is_signed:
        nearest = np.maximum(nearest, 1)  # positive numbers are never rounded to 0
    assert (codes.numpy() == nearest).mean() > 0.98 and np.abs(codes.numpy().astype(int) - nearest).max() <= 1
    # Half of the quantization step, plus the truncated mantissa.
    place = np.searchsorted(shares, exact / largest).clip(1, 255)
    bound = (shares[place] - shares[place - 1]) * (0.5 if is_signed else np.where(place == 1, 1, 0.5))
    error = np.abs(again.double().numpy() - exact) / largest
    assert (error <= bound + np.abs(exact / largest) / 1024 + 1e-7).all()
    others, _ = quantize_and_dequantize(numbers, not is_signed)  # negative control
    assert (np.abs(others.double().numpy() - exact) / largest > 1.5 * bound + 1e-3).any()


def test_quantization_keeps_zeros_and_positive_numbers_above_zero():
    numbers = torch.zeros(3, BLOCK)
    numbers[1, ::2], numbers[2, 0], numbers[2, 1] = 1.0, 1.0, 1e-30
    again, _ = quantize_and_dequantize(numbers, is_signed=False)
    assert torch.equal(again == 0, numbers == 0)
    signed, _ = quantize_and_dequantize(numbers, is_signed=True)
    assert torch.equal(signed[:2] == 0, numbers[:2] == 0) and signed[2, 1] == 0  # negative control


def reference_adamw8bit(net: torch.nn.Sequential):
    """Return a step function with rounded moments and the AdamW formula in float64."""
    moments = {parameter: [torch.zeros_like(parameter) for _ in range(2)] for parameter in net.parameters()}
    steps = []

    def rounded(moment: torch.Tensor, is_signed: bool) -> torch.Tensor:
        if moment.numel() < 4096:
            return moment.float()
        blocks = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
        return quantize_and_dequantize(blocks.float(), is_signed)[0].flatten()[: moment.numel()].view(moment.shape)

    @torch.no_grad()
    def step() -> None:
        steps.append(1)
        for parameter, stored in moments.items():
            first, second = (moment.double() for moment in stored)
            weight, gradient = parameter.double(), parameter.grad.double()
            first = 0.9 * first + 0.1 * gradient
            second = 0.98 * second + 0.02 * gradient**2
            weight *= 1 - RATE * DECAY * (parameter.dim() > 1)
            mean, square = first / (1 - 0.9 ** len(steps)), second / (1 - 0.98 ** len(steps))
            parameter.copy_(weight - RATE * mean / (square.sqrt() + 1e-8))
            moments[parameter] = [rounded(first, True), rounded(second, False)]

    return type("ByHand", (), {"step": staticmethod(step)})


def test_8_bit_update_equals_adamw_on_rounded_moments():
    net = updated(project_optimizer("adamw8bit"))
    by_hand, whole = updated(reference_adamw8bit), updated(project_optimizer("adamw"))
    assert distance(by_hand, net) < 1e-5
    small = [name for name, parameter in whole.named_parameters() if parameter.numel() < adamw8bit.SMALLEST]
    assert len(small) == 5
    assert all(torch.equal(whole.get_parameter(name), net.get_parameter(name)) for name in small)
    assert 1e-4 < distance(whole, net) < 1e-1  # negative control: the moments are rounded


def test_first_8_bit_update_equals_adamw(monkeypatch):
    """The moments are rounded only after the update."""
    assert distance(updated(project_optimizer("adamw"), 1), updated(project_optimizer("adamw8bit"), 1)) == 0


def test_slice_size_does_not_change_8_bit_updates(monkeypatch):
    whole = updated(project_optimizer("adamw8bit"))
    monkeypatch.setattr(adamw8bit, "MAX_BLOCKS", 5)
    assert distance(whole, updated(project_optimizer("adamw8bit"))) == 0


def reference_adafactor(net: torch.nn.Sequential):
    """Return a step function of the paper's algorithm in float64, with each tensor as a matrix of rows."""
    means, steps = {parameter: (0.0, 0.0) for parameter in net.parameters()}, []

    @torch.no_grad()
    def step() -> None:
        steps.append(1)
        keep = 1 - len(steps) ** -0.8
        for parameter, (row, column) in means.items():
            gradient = parameter.grad.double().flatten(1) if parameter.dim() > 1 else parameter.grad.double()[None]
            square = gradient**2 + 1e-16
            row = keep * row + (1 - keep) * square.mean(1, keepdim=True)
            column = keep * column + (1 - keep) * square.mean(0, keepdim=True)
            means[parameter] = row, column
            change = gradient / (row * column / row.mean()).sqrt()
            change /= max(1.0, change.square().mean().sqrt())
            weight = parameter.double() * (1 - RATE * DECAY * (parameter.dim() > 1))
            parameter.copy_(weight - RATE * change.view(parameter.shape))

    return type("ByHand", (), {"step": staticmethod(step)})


def groups_of(net: torch.nn.Sequential) -> list[dict]:
    """Return the parameter groups for other optimizers: weight decay on matrices only."""
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def adafactor_of_transformers(net: torch.nn.Sequential):
    settings = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    return transformers.Adafactor(groups_of(net), lr=RATE, eps=(1e-16, 1.0), **settings)


def adafactor_of_torch(net: torch.nn.Sequential):
    """Its steps are scaled by the size of the weights, at least 1; here the weights are smaller."""
    return torch.optim.Adafactor(groups_of(net), lr=RATE, eps=(1e-8, 1.0))


@pytest.mark.parametrize("build", [reference_adafactor, adafactor_of_transformers, adafactor_of_torch])
def test_adafactor_equals_reference_implementations(build):
    mine, theirs = updated(project_optimizer("adafactor")), updated(build)
    # The others factor a kernel by its last two axes; torch scales the step of a norm by a factor above 1.
    same = {reference_adafactor: 3, adafactor_of_transformers: 2, adafactor_of_torch: 1}[build]
    mine, theirs = mine[:same], theirs[:same]
    assert distance(theirs, mine) < 1e-6
    assert distance(theirs, updated(project_optimizer("adamw"))[: len(theirs)]) > 1e-2  # negative control


def test_slice_size_does_not_change_adafactor_updates(monkeypatch):
    whole = updated(project_optimizer("adafactor"))
    monkeypatch.setattr(adafactor, "MAX_ELEMENTS", 300)
    assert 0 < distance(whole, updated(project_optimizer("adafactor"))) < 1e-6


def test_adafactor_update_is_clipped():
    """After gradients grow a hundredfold, the size of each update stays at the learning rate."""
    net = torch.nn.Linear(20, 30, bias=False)
    optimizer = build_optimizer(net, OptimizerConfig(learning_rate=RATE, weight_decay=0.0, optimizer="adafactor"))
    for size in (1e-3, 1e-3, 1e-3, 1e-1):
        net.weight.grad, before = size * torch.ones_like(net.weight), net.weight.detach().clone()
        optimizer.step()
        assert float((net.weight.detach() - before).square().mean().sqrt()) == pytest.approx(RATE, rel=1e-3)


def bytes_allocated_by_update(optimizer: Optimizer, net: torch.nn.Module) -> int:
    """Return the additional bytes at the peak of an update."""
    live = LiveBytes()
    live.count([*net.parameters(), *(parameter.grad for parameter in net.parameters()), *optimizer.tensors])
    before = live.live
    with live:
        optimizer.step()
    return live.peak - before


@pytest.mark.parametrize("kind", KINDS)
def test_update_allocates_no_memory(kind):
    net = network()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = project_optimizer(kind)(net)
    assert [bytes_allocated_by_update(optimizer, net) for _ in range(2)] == [0, 0]
    monitored = transformers.Adafactor(net.parameters(), lr=RATE, relative_step=False)  # negative control
    monitored.tensors = []
    assert bytes_allocated_by_update(monitored, net) > 4 * 67 * 91


@pytest.mark.parametrize("kind", KINDS)
def test_planned_state_bytes_equal_the_real_ones(kind):
    config = config_of(kind, ModelConfig())
    architecture = architecture_of(config, VOCAB_SIZE)
    parts = build_step_parts(config, architecture, CPU, 100)
    counts = sum(tensor.dim() == 0 for tensor in parts.optimizer.tensors)
    taken = sum(tensor.nbytes for tensor in [*parts.model.parameters(), *parts.optimizer.tensors])
    trained = parameter_count(parts.model)
    assert state_bytes(config, architecture) == taken + 4 * trained - 4 * counts
    assert state_bytes(config, architecture) / trained == pytest.approx(
        {"adamw": 16, "adamw8bit": 10.3, "adafactor": 8.1}[kind], abs=0.1
    )


@pytest.mark.parametrize("kind, policy", parameter_grid(SMALLER, ["never", "always"]))
def test_planned_peak_bounds_the_measured_one(kind, policy):
    model = ModelConfig(d_model=128, encoder_layers=1, decoder_layers=1)
    config, recompute = config_of(kind, model), RecomputePolicy(policy)
    measured = measured_peak(parts_of(kind, model).recomputing(recompute), global_batch_of(0))
    planned = tracer_of(config).trace_global_batch(global_batch_of(0), recompute).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured
    others = tracer_of(config_of("adamw", model)).trace_global_batch(global_batch_of(0), recompute).bytes
    assert others > 1.02 * measured  # negative control


@pytest.mark.parametrize("kind", SMALLER)
def test_estimated_checkpoint_size_bounds_the_real_one(kind, tmp_path):
    parts = parts_of(kind, ModelConfig(encoder_layers=2, decoder_layers=1))
    config = config_of(kind, parts.architecture.model)
    states = {"model": parts.model.state_dict(), "optimizer": OptimizerState(parts.model, parts.optimizer).state_dict()}
    write_checkpoint(tmp_path / "one.pt", Checkpoint(config_to_text(config), b"tokens", VOCAB_SIZE, 1, 7, states))
    size = (tmp_path / "one.pt").stat().st_size
    assert size <= checkpoint_bytes(parts.architecture, config.optimizer) < size + 1.5 * 2**20
    assert checkpoint_bytes(parts.architecture) > 1.3 * size  # negative control: the size for AdamW


@pytest.mark.parametrize("kind", SMALLER)
def test_update_does_not_synchronize_with_the_device(kind):
    net = network()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    with HostReads() as mode:
        project_optimizer(kind)(net).step()
    assert set(mode.found) <= ({"_local_scalar_dense"} if kind == "adamw8bit" else set())  # fused, on a CPU


def trained(kind: str, steps: range, parts: StepParts | None = None) -> StepParts:
    parts = parts or parts_of(kind)
    for step in steps:
        assert not train_step(parts, global_batch_of(step), step).is_skipped
    return parts


@pytest.mark.parametrize("kind", KINDS)
def test_run_resumed_from_a_file_continues_bit_for_bit(kind, tmp_path):
    undisturbed = trained(kind, range(3))
    first, path = trained(kind, range(2)), tmp_path / "checkpoint.pt"
    states = {"model": first.model.state_dict(), "optimizer": OptimizerState(first.model, first.optimizer).state_dict()}
    write_checkpoint(path, Checkpoint("", b"tokens", 1, 3, 0, states))

    def resumed(*parts_loaded: str) -> StepParts:
        parts = parts_of(kind)
        stateful = {"model": parts.model, "optimizer": OptimizerState(parts.model, parts.optimizer)}
        load_states(read_checkpoint(path), {name: stateful[name] for name in parts_loaded})
        return trained(kind, range(2, 3), parts)

    assert not differing(undisturbed, resumed("model", "optimizer"))
    assert differing(undisturbed, resumed("model"))  # negative control


@pytest.mark.parametrize(("kind", "failing"), [("adamw8bit", failing_forward), ("adafactor", failing_backward)])
def test_step_split_after_out_of_memory_equals_the_unsplit_step(kind, failing):
    whole, parts = float64_parts(kind), failing(float64_parts(kind), fail_at(1), ERRORS["cuda"])
    for step in range(2):
        reports = [train_step(each, global_batch(speeches(4, seed=step), 2), step) for each in (whole, parts)]
        assert reports[0].splits == 0 and reports[1].splits == (step == 0)
    other = float64_parts(kind)
    train_step(other, global_batch(speeches(4, seed=0), 2), 0)

    def furthest(one: StepParts) -> float:
        pairs = zip(state_of(whole).values(), state_of(one).values(), strict=True)
        return max(relative_difference(theirs, mine) for theirs, mine in pairs if mine.is_floating_point())

    assert furthest(parts) < 1e-9
    assert furthest(other) > 1e-3  # negative control


@pytest.mark.parametrize("kind", SMALLER)
def test_non_finite_step_changes_nothing(kind):
    parts = trained(kind, range(2))
    before, spoken = state_of(parts), speeches(3, seed=1)
    spoken = [dataclasses.replace(speech, waveform=math.inf * speech.waveform.float()) for speech in spoken]
    assert train_step(parts, global_batch(spoken, 1), 2).is_skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(parts).items())
    assert not train_step(parts, global_batch_of(2), 2).is_skipped
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state_of(parts).items())


@pytest.mark.parametrize("kind", SMALLER)
def test_scaled_gradients_give_the_unscaled_update(kind):
    plain, scaled = parts_of(kind), parts_of(kind)
    scaled = dataclasses.replace(scaled, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    for parts in (plain, scaled):
        trained(kind, range(2), parts)
    assert not differing(plain, scaled)  # a power of two rounds nothing


@pytest.mark.parametrize("kind", SMALLER)
def test_weights_on_the_host_get_the_same_update(kind):
    assert not differing(trained(kind, range(2)), trained(kind, range(2), parts_of(kind, placement=Placement(99))))


def test_resume_rejects_another_optimizer_and_old_checkpoints_have_adamw():
    stored = parse_flags(["--optimizer", "adafactor"])
    assert parse_flags(["--resume", "auto"], stored).optimizer.optimizer == "adafactor"
    other = parse_flags(["--resume", "auto", "--optimizer", "adamw"], stored)
    assert contradictions(stored, other) == ["--optimizer is adamw here and adafactor in the checkpoint"]
    older = "".join(line for line in config_to_text(stored).splitlines(True) if not line.startswith("--optimizer "))
    assert config_from_text(older).optimizer.optimizer == "adamw"


def test_sharding_supports_only_adamw():
    with pytest.raises(UsageError, match="--shard always supports only AdamW"):
        parse_flags(["--optimizer", "adamw8bit", "--shard", "always"])
    assert parse_flags(["--shard", "always"]).memory.shard == "always"
    for kind in KINDS:  # auto: never, even if one rank cannot store the state
        config = config_of(kind)
        is_sharded = needs_sharding(config, architecture_of(config, VOCAB_SIZE), ONLY_TENSORS, budget=1)
        assert is_sharded == (kind == "adamw")


def test_memory_conditions_depend_on_the_optimizer():
    conditions = [memory_conditions(config_of(kind), architecture_of(config_of(kind), 9), CPU) for kind in KINDS]
    assert len(set(conditions)) == len(KINDS)


@pytest.mark.parametrize(("kind", "place"), parameter_grid(KINDS, ("card", "host")))
def test_tracing_one_parameter_of_each_layout_gives_the_peak_of_all(kind, place, monkeypatch):
    """This also holds for an update that allocates memory, unlike the updates of the project."""
    config = config_of(kind)
    architecture = architecture_of(config, VOCAB_SIZE)
    build, updates = type(build_optimizer(architecture.build(), config.optimizer)), []

    def traced() -> Peak:
        tracer = build_tracer(config, architecture, cuda_costs("a card", (7, 5)), PLACEMENTS[place])
        return tracer.trace(BatchShape(2, 2.0, 10), RecomputePolicy("always"))

    step = build.step

    def allocating(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.empty(1_000, *parameter.shape, device=parameter.device)  # freed with the next parameter
                updates.append(parameter)
        step(self)

    plain = traced()
    monkeypatch.setattr(build, "step", allocating)
    short = traced()
    count = len(updates)
    monkeypatch.setattr(tracer_module, "_distinct_parameters", lambda parameters: parameters)
    assert traced() == short and 2 * count < len(updates) - count
    assert short != plain  # negative control: a peak within the update is detected
