"""Runs begun as a command line begins them."""

from konkanivani.base.config import TrainConfig
from konkanivani.base.console import Report, silent
from konkanivani.base.flags import parse_args
from konkanivani.recipe.start import Start, resolve_start


def begin_run(arguments: list[str], report: Report = silent) -> Start:
    """What a training run of these arguments begins with."""
    return resolve_start(parse_args(arguments), report)


def parse_flags(arguments: list[str], stored: TrainConfig | None = None) -> TrainConfig:
    """The configuration that a command line asks for, over a checkpoint's if there is one."""
    asked = parse_args(arguments)
    return asked.merge_into_checkpoint(stored) if stored else asked.config
