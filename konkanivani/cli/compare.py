"""Fine-tune or train several models on the same data, one after another, and print a table of results.

    konkanivani compare \\
        --pretrained whisper-tiny whisper-base --presets minimal --language mr \\
        --train_manifest train.jsonl --test_manifest test.jsonl \\
        --train_subset 20 --folder comparison

All other flags are the trainer's (konkanivani train --help lists them) and apply to each run; --language applies
only to --pretrained models, --vocab_size only to --presets. The same command resumes an interrupted comparison. The
table shows the error of a model that failed.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from konkanivani.checkpoints.run_lock import FolderUse, RunLock
from konkanivani.child_process import CommandRunner
from konkanivani.command_line import ignore_lost_output, read_flags, with_new_name
from konkanivani.config import TrainConfig, TuningConfig
from konkanivani.console import MIB, parse_share, say, table_lines
from konkanivani.data.manifest import Rejections, read_manifest, read_recordings
from konkanivani.errors import ErrorCollector, ReportedByOtherRank, UsageError
from konkanivani.files import atomic_write, check_own_file, digest_of_file
from konkanivani.flags import NATIVE_ONLY_FLAGS, parse_args
from konkanivani.hub import is_hub_name
from konkanivani.rules import settings_of


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


# --------------------
# Candidates of a model comparison: names, trainer flags, and checks before the first one is trained.


# Flags of a single run, which a comparison sets for each candidate itself.
OF_ONE_RUN = frozenset(("preset", "checkpoint_dir", "log_dir", "resume", "fresh", "init_from", "dry_run"))
PRETRAINED_DEFAULTS = frozenset(("language", "task", *(leaf.name for leaf in dataclasses.fields(TuningConfig))))


@dataclass(frozen=True)
class Flag:
    """A flag of a command line: its current name, and its words as typed."""

    name: str
    words: tuple[str, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """Return the flag's values, given as separate words or after "="."""
        _, equals, value = self.words[0].partition("=")
        return ((value,) if equals else ()) + self.words[1:]


def flags_in(arguments: Sequence[str]) -> list[Flag]:
    """Split a command line into flags in their order; words before the first flag form a flag with an unknown name."""
    flags: list[Flag] = []
    for word in arguments:
        if word.startswith("--") or not flags:
            # Former names of flags are mapped to the current ones.
            name = with_new_name(word).partition("=")[0].removeprefix("--").replace("-", "_")
            flags.append(Flag(name, (word,)))
        else:
            flags[-1] = dataclasses.replace(flags[-1], words=(*flags[-1].words, word))
    return flags


@dataclass(frozen=True)
class Candidate:
    """A model to train: its name in the comparison, and its trainer flags.

    `source` is the path of the Whisper folder, or the name of the preset.
    """

    name: str
    source: str
    flags: tuple[str, ...]

    @property
    def config(self) -> TrainConfig:
        """Parse the flags; raises a UsageError if they are invalid."""
        return parse_args(list(self.flags)).config


def choose_candidates(pretrained: Sequence[str], presets: Sequence[str], flags: Sequence[Flag]) -> list[Candidate]:
    """Return one candidate per folder and preset, each with the flags that apply to it.

    If both kinds are compared, flags of one kind are passed only to that kind. Raises a UsageError if there is no
    model, a folder is missing, or a flag belongs to a single run.
    """
    if not (pretrained or presets):
        # Report a mistyped flag first: it may have been meant to name the models.
        parse_args(list(_words(flags, frozenset())))
        raise UsageError("No models to compare: give --pretrained with folders, or --presets.")
    if single := sorted({flag.name for flag in flags} & OF_ONE_RUN):
        raise UsageError(
            f"{', '.join('--' + name for name in single)}: only for a single run. Omit it: --presets selects "
            "the presets, all runs are in --folder, and an interrupted comparison resumes automatically."
        )
    if absent := [path for path in pretrained if not (Path(path).is_dir() or is_hub_name(path))]:
        raise UsageError(
            f"--pretrained {' '.join(absent)}: not found. Give folders of Whisper models, or names on the hub."
        )
    is_mixed = bool(pretrained and presets)
    chosen = [("--pretrained", path, NATIVE_ONLY_FLAGS) for path in pretrained]
    chosen += [("--preset", preset, PRETRAINED_DEFAULTS) for preset in presets]
    return [
        Candidate(name, source, (flag, source, *_words(flags, of_others if is_mixed else frozenset())))
        for name, (flag, source, of_others) in zip(distinct_names(pretrained, presets), chosen, strict=True)
    ]


def _words(flags: Sequence[Flag], left_out: frozenset[str]) -> tuple[str, ...]:
    return tuple(word for flag in flags if flag.name not in left_out for word in flag.words)


def distinct_names(folders: Sequence[str], presets: Sequence[str]) -> list[str]:
    """Return the shortest path suffixes that distinguish the models; presets keep their name.

    Raises a UsageError if a model is given twice.
    """
    paths = [*(Path(os.path.abspath(folder)) for folder in folders), *(Path("preset", name) for name in presets)]
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise UsageError(f"{', '.join(twice)}: given twice. Give each model only once.")
    parts = [[part for part in path.parts if part != "/"] or ["model"] for path in paths]
    depths = [1] * len(parts)
    # Each pass deepens the ambiguous names by one path component, so that the total number of components bounds the
    # passes.
    for _ in range(sum(map(len, parts))):
        names = ["-".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        depths = [depth + (names.count(name) > 1) for name, depth in zip(names, depths, strict=True)]
    if len(set(names)) < len(names):
        raise UsageError(f"{', '.join(names)}: the folders have the same name. Rename or move one of them.")
    return names


def check_data(config: TrainConfig) -> None:
    """Check all manifests and raise one error for all that are missing or unusable; list rejected rows on stderr."""
    data = config.data
    problems = ErrorCollector()
    if data.train_manifest is None or data.test_manifest is None:
        raise UsageError("Give a --train_manifest for training and a --test_manifest for the comparison.")
    rejections = Rejections(None, parse_share(data.max_rejected, "--max_rejected"))
    # stdout is reserved for the result table.
    with contextlib.redirect_stdout(sys.stderr):
        for path in filter(None, (data.train_manifest, data.valid_manifest, data.test_manifest)):
            with problems.collect():
                rejections.begin(read_manifest(path, data.audio_roots))
    for path in filter(None, (config.augment.rir_manifest, config.augment.noise_manifest)):
        with problems.collect():
            read_recordings(path, data.audio_roots)
    problems.raise_all()


def conditions_of(config: TrainConfig) -> dict[str, str]:
    """Return everything that determines a run's result, by display name: flags, and digests of the manifests."""
    conditions = {f"--{setting.name}": repr(setting.value) for setting in settings_of(config)}
    for part in ("train_manifest", "valid_manifest", "test_manifest"):
        if path := getattr(config.data, part):
            conditions[f"what --{part} holds"] = digest_of_file(Path(path))
    return conditions


# --------------------
# Result of one model of a comparison: a file in the model's folder and a row of the table.


RECORD = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """Result of a training run. Error rates are shares, by the best decoding method; a failed run has only a reason.

    `minutes` is the time of all training steps without validation; `times_real_time` is seconds of audio per second of
    training.
    """

    name: str
    source: str
    exit_code: int = 0
    reason: str | None = None
    trained_parameters: int | None = None
    parameters: int | None = None
    decode: str | None = None
    wer: float | None = None
    cer: float | None = None
    minutes: float | None = None
    seconds_per_step: float | None = None
    times_real_time: float | None = None
    peak_memory_mib: float | None = None
    checkpoint_mib: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """Record in a model's folder: the conditions of its training, the trainer's JSON line, and the outcome.

    `outcome` is None during training and after an interruption.
    """

    conditions: Mapping[str, str]
    summary: Mapping[str, object] | None = None
    outcome: Outcome | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether the model was trained successfully and need not be trained again."""
        return self.outcome is not None and self.outcome.exit_code == 0

    def differences(self, conditions: Mapping[str, str]) -> list[str]:
        """Return the names of the conditions that differ from this record.

        After a failure only the model itself has to be the same: a retry may use other flags.
        """
        # A condition that the record of an older version lacks counts as different.
        names = sorted(name for name in conditions if self.conditions.get(name) != conditions[name])
        has_failed = self.outcome is not None and not self.is_finished
        return [name for name in names if not has_failed or name in ("--pretrained", "--preset")]


def write_record(folder: Path, record: RunRecord) -> None:
    """Write the record atomically into the model's folder, which is created if needed."""
    with atomic_write(folder / RECORD) as partial:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(folder: Path) -> RunRecord | None:
    """Return the folder's record; None if it is missing or unreadable, in which case the run is resumed."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        outcome = record["outcome"] and Outcome(**record["outcome"])
        return RunRecord(dict(record["conditions"]), record["summary"], outcome)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def outcome_of(name: str, source: str, summary: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a successful run from its JSON line, its log and its checkpoint."""
    # The suffix of a second decoding method, for example "test_wer_joint" next to "test_wer" (greedy).
    methods = [key.removeprefix("test_wer_") for key in summary if key.startswith("test_wer_")]
    by = f"_{methods[0]}" if methods else ""
    steps = _logged_steps(Path(summary["tensorboard"], "log.jsonl"))
    seconds = sum(step["seconds"] for step in steps)
    # Weighted by time, because steps differ in length.
    audio_seconds = sum(step["audio_seconds_per_second"] * step["seconds"] for step in steps)
    # The log also has the steps before a resume.
    peaks = [phase["peak_mib"] or 0.0 for step in steps for phase in step["memory"]]
    return Outcome(
        name,
        source,
        trained_parameters=summary["trained_parameters"],
        parameters=summary["parameters"],
        decode=methods[0] if methods else "greedy",
        wer=summary[f"test_wer{by}"],
        cer=summary[f"test_cer{by}"],
        minutes=seconds / 60 if steps else None,
        seconds_per_step=seconds / len(steps) if steps else None,
        times_real_time=audio_seconds / seconds if seconds else None,
        peak_memory_mib=max([summary["peak_memory_mib"], *peaks]),
        checkpoint_mib=os.path.getsize(summary["checkpoint"]) / MIB,
    )


def _logged_steps(path: Path) -> list[Mapping[str, Any]]:
    """Return the log's step records; an empty list if the log is unreadable, for example after the disk was full."""
    try:
        with open(path, encoding="utf-8") as file:
            return [record for record in map(json.loads, file) if record["kind"] == "step"]
    except (OSError, ValueError):
        return []


def table_of(outcomes: Sequence[Outcome]) -> str:
    """Return the table as text, one line per model; a failed model has the first sentence of its error."""
    names = max(len(name) for name in (HEADS[0], *(outcome.name for outcome in outcomes)))
    head, *lines = table_lines([HEADS, *(_cells(outcome) for outcome in outcomes)])
    for number, outcome in enumerate(outcomes):
        if outcome.reason is not None:
            # A sentence ends before a capital letter: full stops in paths and numbers do not count.
            first_sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", outcome.reason, maxsplit=1)[0]
            lines[number] = f"{outcome.name.ljust(names)}  failed: {first_sentence}"
    return "\n".join([head, *lines])


HEADS = (
    *("model", "trained, M", "of, M", "WER %", "CER %", "by", "minutes", "s/step", "x real time", "peak MiB"),
    "checkpoint MiB",
)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    def number(value: float | None, digits: int, unit: float = 1.0) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    return (
        outcome.name,
        number(outcome.trained_parameters, 1, 1e6),
        number(outcome.parameters, 1, 1e6),
        number(outcome.wer, 1, 0.01),
        number(outcome.cer, 1, 0.01),
        outcome.decode or "-",
        number(outcome.minutes, 1),
        number(outcome.seconds_per_step, 2),
        number(outcome.times_real_time, 1),
        number(outcome.peak_memory_mib, 0),
        number(outcome.checkpoint_mib, 0),
    )


# --------------------
# Comparison of models that are trained in sequence on the same data, each in its own folder.


REPORT = "comparison.json"


def check_conditions(conditions: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Raise a UsageError if the folder has a run of one of the models, by name, under different conditions."""
    for name in conditions:
        earlier = read_record(folder / name)
        if changed := earlier.differences(conditions[name]) if earlier else []:
            raise UsageError(
                f"{folder / name} contains a run with different {', '.join(changed)}, so its result is not "
                "comparable. Use the same flags as before, or another --folder."
            )


def compare(
    candidates: Sequence[Candidate], conditions: Mapping[str, Mapping[str, str]], folder: Path, runner: CommandRunner
) -> list[Outcome]:
    """Train the models that are not finished, and write the report after each one.

    Raises Interrupted after a signal, once the trainer has saved and exited.
    """
    outcomes: list[Outcome] = []
    for number, candidate in enumerate(candidates, start=1):
        runner.check()
        model_folder = folder / candidate.name
        beginning = f"Model {number} of {len(candidates)}, {candidate.name}"
        earlier = read_record(model_folder)
        if earlier is not None and earlier.outcome is not None and earlier.is_finished:
            say(f"{beginning}: already trained.", sys.stderr)
            outcome = earlier.outcome
        else:
            say(f"{beginning}: training in {model_folder}.", sys.stderr)
            outcome = _train(candidate, conditions[candidate.name], model_folder, runner)
        outcomes.append(outcome)
        with atomic_write(folder / REPORT) as partial:
            partial.write_text(report_of(outcomes) + "\n", encoding="utf-8")
    return outcomes


def report_of(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as one line of JSON."""
    return json.dumps({"models": [dataclasses.asdict(outcome) for outcome in outcomes]}, ensure_ascii=False)


def _train(candidate: Candidate, conditions: Mapping[str, str], place: Path, runner: CommandRunner) -> Outcome:
    record = RunRecord(conditions)
    write_record(place, record)
    folders = ("--checkpoint_dir", str(place / "checkpoints"), "--log_dir", str(place / "logs"))
    ended = runner.run("train", [*candidate.flags, *folders, "--resume", "auto"])
    if ended.exit_code == 0:
        # The trainer prints its JSON line last.
        summary = json.loads(ended.output[-1])
        outcome = outcome_of(candidate.name, candidate.source, summary)
        write_record(place, dataclasses.replace(record, summary=summary, outcome=outcome))
    else:
        # An interrupted run has no outcome, so that the next call resumes it: raise before a failure is recorded.
        runner.check()
        outcome = Outcome(candidate.name, candidate.source, ended.exit_code, ended.reason)
        write_record(place, dataclasses.replace(record, outcome=outcome))
    return outcome


# --------------------
# The command.


COMPARING = FolderUse("comparison", "comparing models in", "--folder")
OWN = [leaf.name for leaf in dataclasses.fields(Flags)]


def read_own_flags(flags_on_command_line: list[Flag], arguments: list[str]) -> Flags:
    """Parse this script's flags; a flag that is given several times has the values of all."""
    words = []
    for name in OWN:
        matching = [flag for flag in flags_on_command_line if flag.name == name]
        if matching:
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
