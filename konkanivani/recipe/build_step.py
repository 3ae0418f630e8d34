"""The parts of a training step, built from their settings."""

import zlib

import torch

from konkanivani.base.amount import resolve
from konkanivani.base.config import AUTO, TrainConfig
from konkanivani.base.device import choose_precision
from konkanivani.base.distributed import ALONE, Topology
from konkanivani.base.randomness import derive_seed
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.recovery import OomHistory
from konkanivani.memory.weights.placement import HOST, ON_CARD, PlacedWeights, Placement
from konkanivani.model.architecture import Architecture
from konkanivani.model.front_end import FeatureExtractor
from konkanivani.training.forward import ForwardPass
from konkanivani.training.gradient import local_gradient, sharded_gradient, summed_gradient
from konkanivani.training.optimizers.build import build_optimizer
from konkanivani.training.sharding import shard_model
from konkanivani.training.step import StepParts

AT_ONCE = 2  # micro-batches side by side where nobody says how many: half of a step's time on two cores (docs/LOG.md)


def build_forward(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    front_end: FeatureExtractor | None = None,
    sharded_over: Topology | None = None,
    placement: Placement = ON_CARD,
    host: torch.device = HOST,
) -> ForwardPass:
    """The model, freshly initialised from the seed, behind its front end; its weights sharded over ranks if given.

    A front end that is given takes the place of the model's own, and `host` that of a CPU, as in a trace.
    """
    config = resolve(config)  # what no amount of speech has decided
    torch.manual_seed(derive_seed(config.run.seed, "weights"))
    model = architecture.build()
    if sharded_over is not None:
        shard_model(model, sharded_over, device)
    elif device.type != "cpu" and placement.is_on_card:  # a trace's tensors cannot be moved
        model.to(device)
    amp_dtype = choose_precision(config.memory, device)
    return ForwardPass(
        architecture=architecture,
        model=model,
        front_end=front_end or architecture.build_front_end(config.augment).to(device),
        recompute=RecomputePolicy(config.memory.gradient_checkpointing),
        monitor=MemoryMonitor(device, config.memory.empty_cache_interval),
        device=device,
        amp_dtype=amp_dtype,
        objective=architecture.objective(config.loss),
        weights=None if placement.is_on_card else PlacedWeights(model, placement, device, amp_dtype, host),
        at_once=choose_at_once(config, device, is_sharded=sharded_over is not None) if placement.is_on_card else 1,
    )


def choose_at_once(config: TrainConfig, device: torch.device, is_sharded: bool) -> int:
    """How many micro-batches are run side by side: on a CPU that has as many threads, where no rank waits inside."""
    if device.type != "cpu" or is_sharded:
        return 1
    asked = config.data.micro_batches_at_once
    return min(AT_ONCE if asked == AUTO else asked, torch.get_num_threads())


def build_step_parts(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    total_steps: int,
    front_end: FeatureExtractor | None = None,
    topology: Topology = ALONE,
    sharded: bool = False,
    placement: Placement = ON_CARD,
    host: torch.device = HOST,
) -> StepParts:
    """Everything that a step works with, freshly initialised from the seed; `sharded`: sharded over the ranks."""
    forward = build_forward(config, architecture, device, front_end, topology if sharded else None, placement, host)
    return StepParts(
        forward=forward,
        optimizer=build_optimizer(forward.model, config.optimizer, architecture.tuning),
        scaler=torch.amp.GradScaler(device.type, enabled=forward.amp_dtype == torch.float16),
        schedule=config.optimizer,
        total_steps=total_steps,
        seed=config.run.seed,
        splits=OomHistory(memory_conditions(config, architecture, device)),
        compute_gradient=sharded_gradient if sharded else local_gradient if topology.is_alone else summed_gradient,
        topology=topology,
    )


def memory_conditions(config: TrainConfig, architecture: Architecture, device: torch.device) -> int:
    """A number that changes with the device's size, the budget and everything that says what a step computes."""
    size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    memory, at_once = config.memory, choose_at_once(config, device, is_sharded=False)
    precision = memory.mixed_precision, memory.amp_dtype
    step = architecture, config.loss, precision, memory.gradient_checkpointing, at_once
    if memory.weights != AUTO or memory.host_budget is not None:  # else the plan of a run of before goes on
        step = *step, memory.weights, memory.host_budget
    if config.optimizer.optimizer != "adamw":
        step = *step, config.optimizer.optimizer
    return zlib.crc32(repr((device.type, size, memory.memory_budget, step)).encode())
