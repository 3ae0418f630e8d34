"""The optimizer that is asked for."""

import torch

from konkanivani.base.config import OptimizerConfig
from konkanivani.model.asr import trained_parameters
from konkanivani.training.optimizer import AdamW, Optimizer
from konkanivani.training.optimizers.adafactor import Adafactor
from konkanivani.training.optimizers.adamw8bit import AdamW8bit

KINDS = {"adamw": AdamW, "adamw8bit": AdamW8bit, "adafactor": Adafactor}


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer of the parameters of `model` that are trained."""
    return KINDS[config.optimizer](trained_parameters(model), config.learning_rate, config.weight_decay)
