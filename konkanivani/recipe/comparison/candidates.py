"""Candidates of a model comparison: names, trainer flags, and checks before the first one is trained."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.command_line import with_new_name
from konkanivani.base.config import TrainConfig, TuningConfig
from konkanivani.base.errors import ErrorCollector, UsageError
from konkanivani.base.files import digest_of_file
from konkanivani.base.flags import NATIVE_ONLY_FLAGS, parse_args
from konkanivani.base.rules import settings_of
from konkanivani.base.units import parse_share
from konkanivani.data.manifest import read_manifest, read_recordings
from konkanivani.data.rejections import Rejections

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
    found: list[Flag] = []
    for word in arguments:
        if word.startswith("--") or not found:
            # Former names of flags are mapped to the current ones.
            name = with_new_name(word).partition("=")[0].removeprefix("--").replace("-", "_")
            found.append(Flag(name, (word,)))
        else:
            found[-1] = dataclasses.replace(found[-1], words=(*found[-1].words, word))
    return found


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
    if absent := [path for path in pretrained if not Path(path).is_dir()]:
        raise UsageError(f"--pretrained {' '.join(absent)}: not found. Give folders of Whisper models.")
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
    found = {f"--{setting.name}": repr(setting.value) for setting in settings_of(config)}
    for part in ("train_manifest", "valid_manifest", "test_manifest"):
        if path := getattr(config.data, part):
            found[f"what --{part} holds"] = digest_of_file(Path(path))
    return found
