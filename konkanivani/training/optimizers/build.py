"""The optimizer that is asked for."""

import torch

from konkanivani.base.config import OptimizerConfig, TuningConfig
from konkanivani.training.optimizer import AdamW, Optimizer, parameter_groups
from konkanivani.training.optimizers.adafactor import Adafactor
from konkanivani.training.optimizers.adamw8bit import AdamW8bit

WHOLE = TuningConfig()  # of a model of which all is trained alike
KINDS = {"adamw": AdamW, "adamw8bit": AdamW8bit, "adafactor": Adafactor}


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig, tuning: TuningConfig = WHOLE) -> Optimizer:
    """The optimizer of the parameters of `model` that are trained."""
    return KINDS[config.optimizer](parameter_groups(model, config, tuning))
