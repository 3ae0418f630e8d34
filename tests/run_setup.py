"""Training runs configured as from a command line."""

from konkanivani.config import TrainConfig
from konkanivani.console import Report, silent
from konkanivani.flags import parse_args
from konkanivani.recipe.startup import Start, resolve_start


def begin_run(arguments: list[str], report: Report = silent) -> Start:
    """Return the start of a training run with these arguments."""
    return resolve_start(parse_args(arguments), report)


def parse_flags(arguments: list[str], stored: TrainConfig | None = None) -> TrainConfig:
    """Return the configuration of a command line, merged over the configuration of a checkpoint, if any."""
    arguments_read = parse_args(arguments)
    return arguments_read.merge_into_checkpoint(stored) if stored else arguments_read.config
