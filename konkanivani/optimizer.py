"""AdamW with its state allocated beforehand, and the learning rate as a pure function of the step."""

import math
from collections.abc import Mapping

import torch

from konkanivani.config import OptimizerConfig
from konkanivani.errors import CheckpointError

STATE_BYTES = 16  # a parameter's weight, gradient and two moments in fp32


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (0-based) of `total_steps`.

    Linear warm-up to the peak over `warmup_steps` (at most a third of the run), then half a cosine down to a
    hundredth of the peak at the last step, or peak x sqrt(warmup_steps / step) without an end.
    """
    warmup = max(1, min(config.warmup_steps, total_steps // 3))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * math.sqrt(warmup / (step + 1))
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    return config.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over `model`, weight decay on matrices only, both moments and the step count already allocated.

    A first step that allocates could run out of memory half done; this one cannot.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every parameter group the rate of the coming update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class OptimizerState:
    """The optimizer's moments and step counts under their parameters' names, for the checkpoint.

    Loading copies into the tensors that exist, so it allocates nothing and keeps the fused layout.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._tensors = {
            f"{name}/{kind}": tensor
            for name, parameter in model.named_parameters()
            for kind, tensor in optimizer.state[parameter].items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by `parameter/moment`."""
        return dict(self._tensors)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Copies every tensor in; a CheckpointError where names or shapes are not this optimizer's."""
        if state.keys() != self._tensors.keys():
            raise CheckpointError(
                "The checkpoint's optimizer is of another model. Use --init_from to take its weights."
            )
        for name, tensor in self._tensors.items():
            stored = state[name]
            if not isinstance(stored, torch.Tensor) or stored.shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint's optimizer has another shape at {name}. Use another checkpoint."
                )
            tensor.copy_(stored)
