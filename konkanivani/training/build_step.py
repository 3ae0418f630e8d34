"""Construction of a training step's parts from the settings of a run."""

import zlib
from dataclasses import dataclass

import torch

from konkanivani.config import AUTO, TrainConfig
from konkanivani.distributed import ALONE, Topology, choose_precision
from konkanivani.flags import resolve
from konkanivani.lengths import SECONDS
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.recovery import OomHistory
from konkanivani.memory.weights import HOST, ON_CARD, OffloadedWeights, Placement
from konkanivani.models.architecture import Architecture
from konkanivani.models.front_end import FeatureExtractor
from konkanivani.ops.capturable import make_capturable
from konkanivani.ops.graph_backends import CudaGraphBackend, GraphBackend
from konkanivani.ops.passes import ALL_PASSES, Passes, optimize
from konkanivani.randomness import derive_seed
from konkanivani.training.bfloat16 import store_in_bf16
from konkanivani.training.gradient import local_gradient, sharded_gradient, summed_gradient
from konkanivani.training.graphs import GraphedGradient
from konkanivani.training.optimizer_state import RateSchedule, shard_model
from konkanivani.training.optimizers import build_optimizer
from konkanivani.training.step import ComputeGradient, ForwardPass, StepParts

AT_ONCE = 2  # default number of concurrent micro-batches: saves a third of a step on two cores (docs/experiments.md)


@dataclass(frozen=True)
class StateLayout:
    """Location of weights, gradients and optimizer state: whole or sharded over ranks, on the GPU or offloaded."""

    topology: Topology = ALONE
    sharded: bool = False
    placement: Placement = ON_CARD
    host: torch.device = HOST
    """Source device of fetched weights; the meta device during tracing."""


WHOLE = StateLayout()


def build_forward(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    front_end: FeatureExtractor | None = None,
    layout: StateLayout = WHOLE,
    passes: Passes = ALL_PASSES,
) -> ForwardPass:
    """Return the forward pass with a model initialised from the seed and the `passes` applied."""
    config = resolve(config)  # remaining automatic settings that do not depend on the corpus
    torch.manual_seed(derive_seed(config.run.seed, "weights"))
    model = architecture.build()
    if config.memory.weight_dtype == "bf16":
        store_in_bf16(model)
    optimize(model, passes)
    placement = layout.placement
    is_on_card = layout.placement.is_on_card
    if layout.sharded:
        shard_model(model, layout.topology, device)
    elif device.type != "cpu" and is_on_card:
        model.to(device)
    amp_dtype = choose_precision(config.memory, device)
    return ForwardPass(
        architecture=architecture,
        model=model,
        front_end=front_end or architecture.build_front_end(config.augment).to(device),
        recompute=RecomputePolicy(config.memory.gradient_checkpointing),
        device=device,
        amp_dtype=amp_dtype,
        objective=architecture.objective(config.loss),
        weights=None if is_on_card else OffloadedWeights(model, placement, device, amp_dtype, layout.host),
        concurrent_micro_batches=choose_concurrency(config, device, layout.sharded) if is_on_card else 1,
    )


def choose_concurrency(config: TrainConfig, device: torch.device, is_sharded: bool) -> int:
    """Return the number of concurrent micro-batches: more than one only on an unsharded CPU run with enough threads."""
    if device.type != "cpu" or is_sharded:
        # Sharded weights are gathered collectively inside the forward pass, in an order that threads would mix up.
        return 1
    setting = config.data.concurrent_micro_batches
    return min(AT_ONCE if setting == AUTO else setting, torch.get_num_threads())


def build_step_parts(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    total_steps: int,
    front_end: FeatureExtractor | None = None,
    layout: StateLayout = WHOLE,
    passes: Passes = ALL_PASSES,
) -> StepParts:
    """Return all parts of a training step, with a model initialised from the seed."""
    forward = build_forward(config, architecture, device, front_end, layout, passes)
    return StepParts(
        forward=forward,
        optimizer=build_optimizer(forward.model, config.optimizer, architecture.tuning),
        scaler=torch.amp.GradScaler(device.type, enabled=forward.amp_dtype == torch.float16),
        schedule=config.optimizer,
        rates=RateSchedule.of_length(total_steps),
        seed=config.run.seed,
        oom_history=OomHistory(memory_conditions(config, architecture, device)),
        monitor=MemoryMonitor(device, config.memory.empty_cache_interval),
        compute_gradient=choose_gradient(config, forward, layout),
        topology=layout.topology,
    )


def choose_gradient(config: TrainConfig, forward: ForwardPass, layout: StateLayout) -> ComputeGradient:
    """Return the function that computes gradients; if it captures CUDA graphs, make the model capturable.

    Graphs need a single process and weights that stay on the GPU.
    """
    if layout.sharded:
        return sharded_gradient
    if not layout.topology.is_single_process:
        return summed_gradient
    if config.memory.cuda_graphs == "off" or forward.weights is not None:
        return local_gradient
    # The shapes to capture are chosen from durations; no text model has been tried.
    if forward.architecture.framing.unit != SECONDS:
        return local_gradient
    backend = new_graph_backend(forward.device)
    if backend is None:
        return local_gradient
    make_capturable(forward.model)
    return GraphedGradient(backend, is_measured_first=config.memory.cuda_graphs == AUTO)


def new_graph_backend(device: torch.device) -> GraphBackend | None:
    """Return the backend that captures on this device, or None; tests replace it by the recorder."""
    return CudaGraphBackend(device) if device.type == "cuda" else None


def memory_conditions(config: TrainConfig, architecture: Architecture, device: torch.device) -> int:
    """Return a hash of the device's memory, the budget and all settings that determine a step's computation."""
    size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    memory = config.memory
    concurrent_micro_batches = choose_concurrency(config, device, is_sharded=False)
    precision = memory.mixed_precision, memory.amp_dtype
    step: tuple[object, ...] = (architecture, config.loss, precision, memory.gradient_checkpointing)
    step = *step, concurrent_micro_batches
    # The default is left out, so that stored OOM histories and plans stay valid.
    if memory.weights != AUTO or memory.host_budget is not None:
        step = *step, memory.weights, memory.host_budget
    if memory.cuda_graphs != "off":
        step = *step, memory.cuda_graphs
    if memory.weight_dtype != "fp32":
        step = *step, memory.weight_dtype
    # Also left out by default: checkpoints from before --optimizer keep their plan.
    if config.optimizer.optimizer != "adamw":
        step = *step, config.optimizer.optimizer
    return zlib.crc32(repr((device.type, size, memory.memory_budget, step)).encode())
