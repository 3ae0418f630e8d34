"""Runs begun as a command line begins them."""

from konkanivani.base.console import Report, silent
from konkanivani.base.flags import ask
from konkanivani.recipe.start import Start, resolve_start


def begin_run(arguments: list[str], report: Report = silent) -> Start:
    """What a training run of these arguments begins with."""
    return resolve_start(ask(arguments), report)
