"""Construction of the optimizer that `--optimizer` names."""

import torch

from konkanivani.base.config import OptimizerConfig, TuningConfig
from konkanivani.training.optimizer import AdamW, Optimizer, parameter_groups
from konkanivani.training.optimizers.adafactor import Adafactor
from konkanivani.training.optimizers.adamw8bit import AdamW8bit

WHOLE = TuningConfig()  # all layers are trained, with the same learning rate
KINDS = {"adamw": AdamW, "adamw8bit": AdamW8bit, "adafactor": Adafactor}


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig, tuning: TuningConfig = WHOLE) -> Optimizer:
    """Return an optimizer over the trainable parameters of `model`."""
    return KINDS[config.optimizer](parameter_groups(model, config, tuning))
