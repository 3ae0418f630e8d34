"""Fine-tune or train several models on the same data, one after another, and print a table of results.

    konkanivani compare \\
        --pretrained whisper-tiny whisper-base --presets minimal --language mr \\
        --train_manifest train.jsonl --test_manifest test.jsonl \\
        --train_subset 20 --folder comparison

All other flags are the trainer's (konkanivani train --help lists them) and apply to each run; --language applies
only to --pretrained models, --vocab_size only to --presets. The same command resumes an interrupted comparison. The
table shows the error of a model that failed.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from konkanivani.checkpoints.run_lock import FolderUse, RunLock
from konkanivani.command_line import ignore_lost_output, read_flags
from konkanivani.console import say
from konkanivani.errors import ReportedByOtherRank
from konkanivani.files import check_own_file
from konkanivani.recipe.comparison import (
    REPORT,
    CommandRunner,
    Flag,
    check_conditions,
    check_data,
    choose_candidates,
    compare,
    conditions_of,
    flags_in,
    report_of,
    table_of,
)

COMPARING = FolderUse("comparison", "comparing models in", "--folder")


@dataclass(frozen=True)
class Flags:
    """Models and output."""

    pretrained: tuple[str, ...] = ()
    """Folders of Whisper models; the name of the folder is the name in the table."""
    presets: tuple[Literal["original", "optimized", "minimal"], ...] = ()
    """Presets to train from scratch."""
    folder: Path = Path("comparison")
    """Output folder: one subfolder per model, and comparison.json."""
    json: bool = False
    """Print one line of JSON instead of a table; rates are fractions."""


OWN = [field.name for field in fields(Flags)]


def read_own_flags(flags_on_command_line: list[Flag], arguments: list[str]) -> Flags:
    """Parse this script's flags; a flag that is given several times has the values of all."""
    words = []
    for name in OWN:
        matching = [flag for flag in flags_on_command_line if flag.name == name]
        if matching:  # no newer syntax: an old Python must parse this file to reach bootstrap's message
            words += [f"--{name}", *(value for flag in matching for value in flag.values)]
    return read_flags(Flags, ["--help"] if {"-h", "--help"} & set(arguments) else words, Flags(), description=__doc__)


def check_report(folder: Path) -> None:
    """Raise UsageError if the folder's report is another program's file."""
    check_own_file(folder / REPORT, "--folder", "comparison", '{"models":')


def main(arguments: list[str]) -> str:
    """Run the comparison and return its report; if every model fails, print it and exit with the first exit code."""
    flags_on_command_line = flags_in(arguments)
    flags = read_own_flags(flags_on_command_line, arguments)
    candidates = choose_candidates(
        flags.pretrained, flags.presets, [flag for flag in flags_on_command_line if flag.name not in OWN]
    )
    configs = {candidate.name: candidate.config for candidate in candidates}
    check_data(configs[candidates[0].name])
    conditions = {name: conditions_of(config) for name, config in configs.items()}
    check_conditions(conditions, flags.folder)
    if flags.folder.is_dir():
        check_report(flags.folder)  # before the lock, which is a file in the folder
    runner = CommandRunner()
    _lock = RunLock(flags.folder, COMPARING)
    # Again, under the lock: another process may have written the file meanwhile.
    check_report(flags.folder)
    runner.install()
    # A closed terminal or a full disk for the output must not end hours of training.
    with ignore_lost_output():
        outcomes = compare(candidates, conditions, flags.folder, runner)
    text = report_of(outcomes) if flags.json else table_of(outcomes)
    if all(outcome.exit_code for outcome in outcomes):
        say(text)
        # The table has the errors already: only the exit code is left.
        raise ReportedByOtherRank(outcomes[0].exit_code)
    return text
