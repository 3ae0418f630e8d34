"""Parameter groups, learning rates, and the state of the optimizer, whole or sharded over ranks.

All optimizer state is allocated in advance. `RateSchedule` covers runs whose length changes when they are resumed.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from konkanivani.checkpoints.checkpoint import Stateful
from konkanivani.config import DEFAULT_RATE, OptimizerConfig, TuningConfig
from konkanivani.distributed import Topology, raise_rank_lost
from konkanivani.errors import CheckpointError
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.models.asr import SpeechNetwork, parameter_count
from konkanivani.models.fine_tuning import VOCAB_DEPENDENT_PREFIXES

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# --------------------
# Sharding of weights, gradients and optimizer state over the ranks with FSDP2, for models too large for one GPU.
#
# Each rank keeps its part of every tensor. The weights of a block are gathered when it runs, forward and backward, and
# freed afterwards; its gradient is reduced and sharded at once (Zhao et al., 2023). Therefore the ranks run in
# lockstep: each makes the same number of passes over a global batch as the rank with the most micro-batches.
# FSDP2 and DTensor take 2 s of CPU time to import, which only a sharded run spends.


def shard_model(model: SpeechNetwork, topology: Topology, device: torch.device) -> None:
    """Shard the weights of a model on the CPU over the ranks' devices, in place, one FSDP unit per block.

    Layers outside of the blocks (embedding, heads, norms) are gathered once per pass and kept until its backward pass
    ends.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (topology.world_size,))
    # Blocks first: the call on the whole model then only takes the parameters that are left.
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in _shards(model):
        # Sum, not average: the losses are divided by the counts of the whole global batch.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def bytes_per_rank(model: SpeechNetwork, world_size: int) -> int:
    """Return an upper bound of the bytes per rank of sharded weights, gradients and moments in fp32.

    The bound consists of this rank's part of all four tensors per weight; the weights and gradients outside of the
    blocks, unsharded; and six copies of the largest block: the weights of two blocks (one is prefetched), each in the
    buffer of the collective and unpacked, one gradient, and its copy on the way into two reductions.
    """
    blocks = [parameter_count(block) for block in model.blocks]
    everything = parameter_count(model)
    between = everything - sum(blocks)
    return STATE_BYTES * -(-everything // world_size) + 4 * (2 * between + 6 * max(blocks))


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether the weights of the model are sharded over the ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported when a model is sharded
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def _shards(model: torch.nn.Module) -> "list[FSDPModule]":
    if not is_sharded(model):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def full_weights(model: torch.nn.Module) -> Iterator[None]:
    """Gather all weights on every rank for the duration of the block; only without gradients.

    All ranks enter and leave together, but may run the model any number of times in between. Needs memory for the whole
    weights. Does nothing for a model that is not sharded.
    """
    for part in _shards(model):
        part.set_reshard_after_forward(False, recurse=False)
        with raise_rank_lost():
            # set_reshard_after_forward(False) keeps the weights gathered after each forward pass of the block.
            part.unshard()
    try:
        yield
    finally:
        for part in _shards(model):
            part.reshard()
            # The root stays gathered between forward and backward, as fully_shard sets it by default.
            part.set_reshard_after_forward(part is not model, recurse=False)


class FullState:
    """Wrapper of a part with sharded tensors that saves and loads the state_dict of a single-process run.

    All ranks call both methods; only the first rank receives the whole tensors, on the CPU.
    """

    def __init__(self, part: Stateful, topology: Topology) -> None:
        self._part = part
        self._topology = topology

    def state_dict(self) -> dict[str, object]:
        """Return the state with its tensors gathered one by one; ranks other than the first get empty tensors."""
        return {name: self._gather(value) for name, value in self._part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, object]) -> object:
        """Load this rank's shards of the whole tensors, which every rank passes."""
        own = self._part.state_dict()
        return self._part.load_state_dict({name: _shard_like(value, own.get(name)) for name, value in state.items()})

    def _gather(self, value: object) -> object:
        from torch.distributed.tensor import DTensor

        if not isinstance(value, DTensor):
            return value
        with raise_rank_lost():
            full_tensor = value.full_tensor()
        # full_tensor() is a collective, so all ranks call it and all but the first drop the result at once.
        return full_tensor.cpu() if self._topology.is_first else full_tensor.new_empty(0, device="cpu")


def _shard_like(value: object, like: object) -> object:
    """Return this rank's shard of a whole tensor if `like` is sharded and has its shape, else `value`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not (isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape):
        return value
    value = value.to(like.device, like.dtype)
    # src_data_rank=None: every rank has the tensor, so no scatter is needed.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


# --------------------
# Checkpoint state of a model whose frozen weights stay in a pretrained model folder.


class TrainedPart:
    """Trainable weights of a model as a `Stateful` part of a checkpoint; the frozen ones are not saved."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Fixed here: during the first --freeze_steps, a step disables the gradients of most of them for a while, and a
        # signal may save in that time.
        self._names = [name for name, weight in model.named_parameters() if weight.requires_grad]

    def _trained_weights(self) -> dict[str, torch.nn.Parameter]:
        weights = dict(self._model.named_parameters())
        return {name: weights[name] for name in self._names}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trainable weights by their names in the model."""
        return {name: weight.detach() for name, weight in self._trained_weights().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into the model; raise RuntimeError if names or shapes differ."""
        trained = self._trained_weights()
        if trained.keys() != state.keys():
            raise RuntimeError(f"its weights do not match the trained part: {sorted(trained.keys() ^ state.keys())[0]}")
        # In-place copies keep the parameter objects that the optimizer holds.
        with torch.no_grad():
            for name, weight in trained.items():
                if weight.shape != state[name].shape:
                    raise RuntimeError(f"its {name} has a different shape")
                weight.copy_(state[name])


# --------------------
# AdamW, the base class of all optimizers, and the learning rate as a pure function of the step.


MAX_WARMUP_STEPS = 500
MOMENTS = "exp_avg", "exp_avg_sq"
BETAS = (0.9, 0.98)
EPSILON = 1e-8
Group = dict[str, Any]  # parameter group in the layout of torch.optim


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `total_steps`.

    Linear warm-up to the peak over `warmup_steps` (at least 1, at most a third of the run), then a half cosine down to
    a hundredth of the peak at the last step, or peak x sqrt(warmup_steps / (step + 1)), which has no end.
    """
    warmup = resolve_warmup(config, total_steps)
    if step < warmup:
        return peak_rate(config) * (step + 1) / warmup
    if config.schedule == "inverse_sqrt":
        return peak_rate(config) * math.sqrt(warmup / (step + 1))
    # Clamped: a run with a kept schedule may be longer than `total_steps`.
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    return peak_rate(config) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def peak_rate(config: OptimizerConfig) -> float:
    """Return the peak learning rate; the default if `auto` has not been resolved from the amount of speech."""
    return DEFAULT_RATE if isinstance(config.learning_rate, str) else config.learning_rate


def resolve_warmup(config: OptimizerConfig, total_steps: int) -> int:
    """Return the warm-up steps: the flag, at most a third of the run; auto: a tenth of the run, at most 500."""
    if isinstance(config.warmup_steps, str):
        return max(1, min(MAX_WARMUP_STEPS, total_steps // 10))
    return max(1, min(config.warmup_steps, total_steps // 3))


class Optimizer:
    """Base class: parameter groups, weight decay on matrices only, and state per parameter.

    State and workspace are allocated in the constructor, because an update that allocates could run out of memory
    halfway. `param_groups` and `state` have the layout of torch.optim, as GradScaler expects.
    """

    def __init__(self, groups: list[Group]) -> None:
        self.param_groups = groups
        self.state = {parameter: self.new_state(parameter) for group in groups for parameter in group["params"]}
        self.workspace: list[torch.Tensor] = []
        self.keeps_gradients = False
        """Whether gradients stay allocated, as captured steps need, which add to them."""

    def new_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the initial state of a parameter; `step` counts its updates."""
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Free all gradients, or set those that stay allocated to zero."""
        if self.keeps_gradients:
            torch._foreach_zero_([parameter.grad for parameter in self.state if parameter.grad is not None])
            return
        for parameter in self.state:
            parameter.grad = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that stay allocated between steps."""
        return [tensor for state in self.state.values() for tensor in state.values()] + self.workspace


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with PyTorch's fused kernel.

    Calls the kernel without the class of torch.optim, whose import loads PyTorch's compiler: more than 100 MB and more
    than a second, unused in a run.
    """

    def new_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return both moments, in the memory format of the parameter."""
        return super().new_state(parameter) | {kind: self._zeros(parameter) for kind in MOMENTS}

    @staticmethod
    def _zeros(parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return zeros with the strides of the parameter, which the fused kernel expects."""
        if parameter.is_meta:  # zeros_like would import sympy for its strides: a second of CPU time
            return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            self.update(group, [parameter for parameter in group["params"] if parameter.grad is not None])

    def update(self, group: Group, parameters: list[torch.nn.Parameter]) -> None:
        """Update parameters of a group, whose moments are not quantized."""
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        first, second = MOMENTS
        tensors: list[torch.Tensor] = [*parameters]
        adamw(
            tensors,
            [gradient_of(parameter) for parameter in parameters],
            [state[first] for state in states],
            [state[second] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            maximize=False,
        )


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter that has one."""
    if parameter.grad is None:
        raise ValueError("The parameter has no gradient.")
    return parameter.grad


def parameter_groups(model: torch.nn.Module, config: OptimizerConfig, tuning: TuningConfig) -> list[Group]:
    """Return the groups of trainable parameters of `model`: matrices with weight decay first, then the others without.

    A group's `factor` multiplies the learning rate; its `later` is set if --freeze_steps keeps it frozen at first.
    """
    later = set(non_head_parameters(model))
    groups: dict[tuple[float, bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = tuning.encoder_factor if name.startswith("encoder.") else 1.0
            is_later = bool(tuning.freeze_steps) and parameter in later
            # Biases and norm weights, which have one dimension, get no weight decay.
            groups.setdefault((factor, is_later, parameter.dim() < 2), []).append(parameter)
    rate = peak_rate(config)
    decay = config.weight_decay

    def by_decay_delay_and_factor(group: tuple[float, bool, bool]) -> tuple[bool, bool, float]:
        factor, is_later, is_flat = group
        return is_flat, is_later, factor

    return [
        {
            "params": groups[factor, is_later, is_flat],
            "lr": rate,
            "weight_decay": 0.0 if is_flat else decay,
            "factor": factor,
            "later": is_later,
        }
        # A fixed order, since each group's update is one launch. Checkpoints store the state by parameter name.
        for factor, is_later, is_flat in sorted(groups, key=by_decay_delay_and_factor)
    ]


def non_head_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trainable parameters that do not depend on the vocabulary, which --freeze_steps keeps frozen at first.

    The others are the heads and the decoder's embedding.
    """
    named = model.named_parameters()
    return [weight for name, weight in named if weight.requires_grad and not name.startswith(VOCAB_DEPENDENT_PREFIXES)]


def delayed_warmup_factor(config: OptimizerConfig, tuning: TuningConfig, step: int, total_steps: int) -> float:
    """Return the warm-up factor of parameter groups that stay frozen for the first `freeze_steps`.

    They warm up over the same number of steps as the other groups, from the end of the freeze.
    """
    first = tuning.freeze_steps or 0
    if not first:
        return 1.0
    return min(1.0, max(0, step + 1 - first) / resolve_warmup(config, total_steps))


def set_learning_rate(optimizer: Optimizer, rate: float, delayed_warmup: float = 1.0) -> None:
    """Set the learning rate of every parameter group; `delayed_warmup` is the warm-up factor of `later` groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"] * (delayed_warmup if group["later"] else 1.0)


@dataclass(frozen=True)
class RateSchedule:
    """The length of a run in optimizer steps, and the length that its learning rates are computed for.

    Both are equal until a run is resumed with another length (`--continue_schedule`). Every field is a plain number and
    is saved in the checkpoint, so that a run that is stopped again after such a change keeps its rates.

    Args:
        run_steps: steps of the whole run.
        planned_steps: steps for which warm-up and decay are computed.
        head_only_planned_steps: the same for the warm-up of the layers that --freeze_steps leaves frozen at first.
        uncapped_steps: steps of the whole run without --max_steps.
        steps_per_epoch: steps of one epoch of the corpus as it is now.
        ramp_first: first step (0-based) of a linear ramp from `ramp_rate` to the schedule, `ramp_steps` long.
    """

    run_steps: int
    planned_steps: int
    head_only_planned_steps: int
    uncapped_steps: int
    steps_per_epoch: int
    ramp_first: int = 0
    ramp_steps: int = 0
    ramp_rate: float = 0.0

    @classmethod
    def of_length(cls, steps: int, uncapped_steps: int | None = None, steps_per_epoch: int = 1) -> "RateSchedule":
        """Return the schedule of a new run of this length."""
        return cls(steps, steps, steps, steps if uncapped_steps is None else uncapped_steps, steps_per_epoch)

    def rate(self, config: OptimizerConfig, step: int) -> float:
        """Return the learning rate of optimizer step `step` (0-based)."""
        done = step - self.ramp_first + 1
        if not 1 <= done <= self.ramp_steps:
            return learning_rate(config, step, self.planned_steps)
        # The ramp ends at the rate that the schedule has in its last step, so the transition is continuous.
        target = learning_rate(config, self.ramp_first + self.ramp_steps - 1, self.planned_steps)
        return self.ramp_rate + (target - self.ramp_rate) * done / self.ramp_steps

    def delayed_warmup_factor(self, config: OptimizerConfig, tuning: TuningConfig, step: int) -> float:
        """Return the warm-up factor of the layers that --freeze_steps leaves frozen at first."""
        return delayed_warmup_factor(config, tuning, step, self.head_only_planned_steps)

    def state_dict(self) -> dict[str, int | float]:
        """Return every number by its name."""
        return dataclasses.asdict(self)


def read_schedule(state: Mapping[str, object]) -> RateSchedule:
    """Return the schedule of a checkpoint's state; raise a CheckpointError if it is not one."""
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(RateSchedule):
        name = field.name
        value = state.get(name)
        # type() is exact, because a bool is an int.
        if type(value) is not field.type or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise CheckpointError(
                f"The checkpoint's schedule of the learning rate has {name} {value!r:.40}. Use another checkpoint."
            )
        numbers[name] = value
    return RateSchedule(**numbers)


def change_length(
    old: RateSchedule, old_config: OptimizerConfig, config: OptimizerConfig, run_steps: int, step: int
) -> RateSchedule:
    """Return the schedule of a run that has made `step` steps and now has `run_steps`, by --continue_schedule.

    - keep: the old schedule to its end, then its final rate (inverse_sqrt has no end).
    - stretch: the schedule of the new length.
    - warm: the same after a linear ramp from the latest rate, over the number of warm-up steps.
    """
    if config.continue_schedule == "keep":
        return dataclasses.replace(old, run_steps=run_steps)
    if config.continue_schedule == "stretch":
        fresh = RateSchedule.of_length(run_steps)
        return dataclasses.replace(fresh, uncapped_steps=old.uncapped_steps, steps_per_epoch=old.steps_per_epoch)
    return dataclasses.replace(
        old,
        run_steps=run_steps,
        planned_steps=run_steps,
        ramp_first=step,
        # A ramp longer than the rest of the run would never reach the schedule.
        ramp_steps=min(resolve_warmup(config, run_steps), run_steps - step),
        ramp_rate=old.rate(old_config, step - 1),
    )


class OptimizerState:
    """Optimizer state by parameter name, as a `Stateful` part of a checkpoint.

    Loading copies into the existing tensors, so it allocates nothing and keeps the memory layout of the fused kernel.
    Each tensor is removed from the loaded state after its copy.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self._tensors = {
            f"{name}/{kind}": tensor
            for name, parameter in model.named_parameters()
            # Frozen parameters have no state.
            if parameter in optimizer.state
            for kind, tensor in optimizer.state[parameter].items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors themselves, not copies, by `parameter/moment`."""
        return dict(self._tensors)

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Copy all tensors; raise a CheckpointError if names or shapes do not match this optimizer."""
        if state.keys() != self._tensors.keys():
            raise CheckpointError(
                "The checkpoint's optimizer state belongs to another model. Use --init_from to load only its weights."
            )
        for name, tensor in self._tensors.items():
            # pop() frees the stored tensor after its copy.
            stored = state.pop(name)
            if not isinstance(stored, torch.Tensor) or stored.shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint's optimizer state has a different shape at {name}. Use another checkpoint."
                )
            tensor.copy_(stored)
