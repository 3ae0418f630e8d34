"""Memory of a model's state (weights, gradients, optimizer) on device and host, and checks against the budget."""

import dataclasses
from collections.abc import Callable

import torch

from konkanivani.base.config import PRESETS, TextConfig, TrainConfig
from konkanivani.base.errors import ResourceError
from konkanivani.base.units import MIB, budget_text, parse_budget, peak_text
from konkanivani.memory.budget import available_bytes
from konkanivani.memory.devices import DeviceCosts, cpu_costs, cuda_costs
from konkanivani.memory.gpu import measure_context
from konkanivani.memory.plan import model_state_bytes
from konkanivani.memory.tracer import Peak
from konkanivani.memory.weights.placement import Placement
from konkanivani.model.architecture import Architecture, architecture_of
from konkanivani.training.optimizers.build import build_optimizer

LATER_KERNELS = 64 * MIB  # the driver loads a library's kernels when they are first used


def device_costs(device: torch.device) -> DeviceCosts:
    """Return the device's fixed memory costs; the size of the CUDA context is measured if the driver reports it."""
    if device.type == "cpu":
        return cpu_costs()
    context = measure_context(device)
    context = None if context is None else context + LATER_KERNELS
    return cuda_costs(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), context)


def state_bytes(config: TrainConfig, architecture: Architecture) -> int:
    """Return the bytes of the model's weights, gradients and optimizer state."""
    # On the meta device: only the sizes of the tensors are needed.
    model = architecture.build_without_values()
    return model_state_bytes(model, build_optimizer(model, config.optimizer).tensors)


def check_state(config: TrainConfig, architecture: Architecture, costs: DeviceCosts, budget: int) -> None:
    """Raise a ResourceError if the model's state alone, gradients included, exceeds the budget."""
    state = state_bytes(config, architecture) + costs.among_ranks
    beside = costs.workspace + costs.context
    if state + beside > budget:
        raise ResourceError(
            f"The weights, gradients and optimizer of this model need {state / MIB:.0f} MiB, and {costs.name} "
            f"needs another {beside / MIB:.0f} MiB: more than the budget of {budget / MIB:.0f} MiB. "
            f"{_largest_preset(config, budget - beside)}"
        )


def _largest_preset(config: TrainConfig, room: int) -> str:
    """Return a sentence that suggests the largest preset whose state fits into `room` bytes."""
    if config.pretrained.pretrained is not None:
        return "Use --freeze encoder or --lora_rank 32, a smaller model, or a larger budget."
    # PRESETS are in descending order of size.
    for name, shape in PRESETS.items():
        architecture = architecture_of(dataclasses.replace(config, model=shape), TextConfig().vocab_size)
        state = state_bytes(config, architecture)
        if state <= room:
            return f"Use --preset {name}, which needs {state / MIB:.0f} MiB, or a larger budget."
    return "No preset is small enough. Use a larger budget."


def fits(
    config: TrainConfig,
    architecture: Architecture,
    costs: DeviceCosts,
    budget: int,
    trace: Callable[[Placement], Peak],
    placement: Placement,
) -> bool:
    """Return whether a traced step fits the budget; with prefetch, also whether its copies fit into host memory."""
    # A trace costs seconds: reject by the size of the state first.
    if placement.is_on_card and state_bytes(config, architecture) + costs.beside > budget:
        return False
    peak = trace(placement)
    return peak.bytes + costs.beside <= budget and not (placement.prefetch and peak.host > host_budget(config))


def host_budget(config: TrainConfig) -> int:
    """Return the bytes that may be used in host memory: --host_budget, or the available memory."""
    asked = config.memory.host_budget
    return parse_budget(asked) if asked else available_bytes(torch.device("cpu"))


def check_host(host: int, config: TrainConfig, costs: DeviceCosts, placement: Placement) -> None:
    """Raise a ResourceError if `host` bytes of offloaded state exceed the host budget."""
    if costs.is_cuda and not placement.is_on_card and host > (most := host_budget(config)):
        limit = "--host_budget" if config.memory.host_budget else "free memory"
        raise ResourceError(
            f"The weights, gradients and optimizer state in host memory need {peak_text(host)}, more than the "
            f"{budget_text(most)} of {limit}. Use --lora_rank 32 or --freeze encoder, a smaller model, or close "
            "other programs."
        )
