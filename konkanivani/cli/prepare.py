"""Convert a downloaded corpus to train.jsonl, valid.jsonl and test.jsonl; the audio is not copied.

    konkanivani prepare \\
        --format common_voice --source cv-corpus/kok --output data/mine
"""

import contextlib
import os
import re
import shlex
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from konkanivani.command_line import read_flags
from konkanivani.console import parse_share, printable
from konkanivani.corpora.corpus import (
    AudioRoots,
    CheckedUtterance,
    Corpus,
    Leak,
    SplitAssignment,
    SplitBy,
    SplitSummary,
    draw,
    find_leaks,
    read_corpus,
    refuse_without_split,
    resolve_split_by,
    summaries,
)
from konkanivani.corpora.huggingface import DatasetName, find_huggingface_utterances, locate_dataset, parse_dataset_name
from konkanivani.corpora.publishers import (
    find_common_voice_utterances,
    find_csv_utterances,
    find_folder_utterances,
    find_indicvoices_utterances,
    find_ljspeech_utterances,
    find_openslr_utterances,
)
from konkanivani.corpora.tables import SPLITS, RefusedRow, Shares, SourceRows, SourceUtterance, SpeechFolder
from konkanivani.corpora.toolkits import find_kaldi_utterances, find_nemo_utterances
from konkanivani.data.audio.paths import is_named_inside
from konkanivani.data.manifest import write_manifest
from konkanivani.data.text import FormatCharacterCount
from konkanivani.errors import DataError, ResourceError, UsageError, defer_signals, explained
from konkanivani.files import exclusive_lock, without_empty_folders, write_json_lines

FormatName = Literal[
    "common_voice", "csv", "folder", "huggingface", "indicvoices", "kaldi", "ljspeech", "nemo", "openslr"
]
READERS: dict[FormatName, Callable[[SpeechFolder], SourceRows]] = {
    "common_voice": find_common_voice_utterances,
    "csv": find_csv_utterances,
    "folder": find_folder_utterances,
    "huggingface": find_huggingface_utterances,
    "indicvoices": find_indicvoices_utterances,
    "kaldi": find_kaldi_utterances,
    "ljspeech": find_ljspeech_utterances,
    "nemo": find_nemo_utterances,
    "openslr": find_openslr_utterances,
}
REJECTED = "rejected.jsonl"
REPORT = "report.json"
AUDIO = "audio"
TABLES = "tables"  # links to the downloaded files of a data set on the hub


@dataclass(frozen=True)
class Preparation:
    """Input, output and splits (docs/data.md describes the formats)."""

    format: FormatName
    """Format of the corpus."""
    source: Path
    """Folder of the corpus; huggingface: also a name on the hub, NAME:CONFIG@REVISION, such as google/fleurs:mr_in."""
    output: Path
    """Folder for the manifests, rejected.jsonl and report.json; created if missing."""
    table: str = ""
    """csv: table file in --source; other formats: a table to use instead of the standard ones."""
    audio_column: str = ""
    """csv, huggingface: name of the audio column."""
    text_column: str = ""
    """csv, huggingface: name of the transcript column; indicvoices: normalized or verbatim."""
    speaker_column: str = ""
    """csv, huggingface: name of the speaker column."""
    split_column: str = ""
    """csv: name of the column with train, valid or test."""
    channel_column: str = ""
    """csv, huggingface: name of the column with the channel, counted from 0 ("channel"); none: no such column."""
    audio_root: str = ""
    """Folder that contains all audio; files outside of it are rejected (default: --source)."""
    split_by: SplitBy = "default"
    """Keep the corpus's own splits (given), or split by speaker or by utterance; default is the first that works."""
    valid_share: str = "5%"
    """Share of the hours for valid.jsonl, such as 5% or 0.05."""
    test_share: str = "5%"
    """Share of the hours for test.jsonl."""
    seed: int = 0
    """Seed of the random split."""
    max_rejected: str = "1%"
    """Maximum share of unusable rows; more are an error."""
    force: bool = False
    """Overwrite existing manifests in --output."""

    @property
    def root(self) -> Path:
        """Return the folder that must contain all audio."""
        return Path(self.audio_root or self.source)

    @property
    def shares(self) -> Shares:
        """Return the shares of the hours to draw; a UsageError if they are invalid, or leave no training data."""
        shares = Shares(parse_share(self.valid_share, "--valid_share"), parse_share(self.test_share, "--test_share"))
        if shares.valid + shares.test >= 1:
            raise UsageError("--valid_share and --test_share leave no training data. Use smaller ones.")
        return shares


@dataclass(frozen=True)
class RefusalCount:
    """Number of rows that were left out for one kind of reason."""

    kind: str
    rows: int


@dataclass(frozen=True)
class PreparationReport:
    """Result of a preparation, as written to report.json.

    Attributes:
        audio_root: Folder of the audio that is outside of the output ("" if all is inside).
        drawn: Splits that were drawn from the corpus's training part, by `drawn_by`.
        removed_characters: Sentence on the invisible format characters that were removed from the texts ("" if none).
    """

    format: str
    source: str
    split_by: str
    seed: int
    splits: tuple[SplitSummary, ...]
    refused: tuple[RefusalCount, ...]
    leaks: tuple[Leak, ...]
    audio_root: str
    drawn: tuple[str, ...]
    drawn_by: str
    removed_characters: str


def prepare_corpus(task: Preparation) -> PreparationReport:
    """Write the manifests, rejected.jsonl and report.json to the output folder; all manifests or none.

    Raises:
        UsageError: If the output contains some already, or the requested splits are impossible.
        DataError: If the corpus cannot be read, or too much of it is unusable (rejected.jsonl is written then).
        ResourceError: If the disk cannot be written.
    """
    shares = task.shares
    most_rejected = parse_share(task.max_rejected, "--max_rejected")
    with _staging(task) as staged:
        named_task = task
        if (dataset := _remote_dataset(named_task)) is not None:
            tables = locate_dataset(dataset)
            # Links, since the folder in the cache may contain files of other configurations.
            with _convert_write_errors(named_task.output):
                tables.link_into(staged / TABLES)
            task = replace(named_task, source=staged / TABLES)
            named_task = replace(named_task, source=Path(tables.label))
        columns = (task.audio_column, task.text_column, task.speaker_column, task.split_column)
        source = SpeechFolder(task.source, task.table, *columns, staged / AUDIO, task.root, task.channel_column)
        output = task.output.resolve()
        roots = AudioRoots(task.root.resolve(), output, source.embedded_audio, output / AUDIO)
        with _replace_folder_in_errors(task.source, named_task.source):
            corpus = read_corpus(_with_progress(READERS[task.format](source), named_task), roots)
        split_by = resolve_split_by(task.split_by, corpus, str(named_task.source))
        if split_by == "given":
            refuse_without_split(corpus)
        with _convert_write_errors(task.output):
            write_json_lines(staged / REJECTED, (asdict(_printable_row(row)) for row in corpus.refused))
        try:
            _check_damage(named_task, corpus, most_rejected)
        except DataError:
            if _first_unexpected(corpus):  # the message refers to rejected.jsonl
                with _convert_write_errors(task.output):
                    os.replace(staged / REJECTED, task.output / REJECTED)
            raise
        drawn = draw(corpus, split_by, shares, task.seed, str(named_task.source))
        report = _report(named_task, split_by, drawn, corpus.refused)
        with _convert_write_errors(task.output):
            os.replace(staged / REJECTED, task.output / REJECTED)
            _publish(task, staged, drawn.utterances, report)
    return report


@contextlib.contextmanager
def _replace_folder_in_errors(folder: Path, source: Path) -> Iterator[None]:
    """Name `source` in errors instead of `folder`, which may be a temporary folder of links."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(folder), str(source))) from None


def _remote_dataset(task: Preparation) -> DatasetName | None:
    """Return the data set on the Hub that --source names; None if it is a path."""
    if task.format != "huggingface" or task.source.exists():
        return None
    return parse_dataset_name(str(task.source))


def _check_source(task: Preparation) -> None:
    if _remote_dataset(task) is not None:
        if task.audio_root:
            raise UsageError("--audio_root applies to a local --source: omit it.")
        return
    if not task.source.is_dir():
        alternative = ", or a name on the hub such as google/fleurs:mr_in" if task.format == "huggingface" else ""
        raise UsageError(
            f"--source {task.source} is not a folder. Give the folder of the unpacked corpus{alternative}."
        )
    if not task.root.is_dir():
        raise UsageError(f"--audio_root {task.root} is not a folder. Give the folder that contains the audio.")
    source = task.source.resolve()
    output = task.output.resolve()
    # These readers search subfolders of the source, too, for *.json and *.jsonl.
    if output == source or (task.format in ("nemo", "indicvoices") and output.is_relative_to(source)):
        raise UsageError(
            f"--output {task.output} is inside --source, so the manifests would be read as part of the corpus. "
            "Choose a folder outside it."
        )


def _check_output(task: Preparation) -> None:
    """Raise a UsageError if the output contains files that would be lost."""
    names = (*(f"{split}.jsonl" for split in SPLITS), REPORT)
    existing = [name for name in names if os.path.lexists(task.output / name)]
    if existing and not task.force:
        raise UsageError(
            f"{task.output} already contains {' and '.join(existing)}. Choose another --output, or overwrite them "
            "with --force."
        )
    audio = task.output / AUDIO
    report = task.output / REPORT
    # --force replaces only an audio folder that an earlier preparation made.
    is_ours = report.is_file() and '"format": "huggingface"' in report.read_text(encoding="utf-8", errors="replace")
    if task.format == "huggingface" and os.path.lexists(audio) and not (task.force and is_ours):
        raise UsageError(f"{audio} already exists, and audio would be written to it. Choose another --output.")


def _with_progress(rows: SourceRows, task: Preparation) -> Iterator[SourceUtterance | RefusedRow]:
    """Yield the rows with a progress bar on stderr if reading is slow; disk errors become DataErrors."""
    from tqdm import tqdm

    with explained(DataError, f"{task.source} cannot be read as {task.format}", "Check --format and --source."):
        # disable=None: no bar if stderr is not a terminal.
        yield from tqdm(rows, desc="rows", unit="", delay=2, disable=None)


def _check_damage(task: Preparation, corpus: Corpus, most_rejected: float) -> None:
    if corpus.utterances and corpus.damage <= most_rejected:
        return
    first = _first_unexpected(corpus)
    if first is None:
        raise DataError(
            f"{task.source} contains no utterance in the format {task.format}. Check --format and --source."
        )
    first = _printable_row(first)
    listed = ", ".join(f"{count.rows} {count.kind}" for count in _counts(corpus.refused))
    raise DataError(
        f"No manifest was written: {corpus.damage:.1%} of the rows of {task.source} are unusable ({listed}), "
        f"more than --max_rejected {most_rejected:.3g}. The first: {first.file}, row {first.row}: "
        f"{first.reason.rstrip('.')}. All are listed in {task.output / REJECTED}: fix them, or raise "
        "--max_rejected."
    )


def _first_unexpected(corpus: Corpus) -> RefusedRow | None:
    return next((row for row in corpus.refused if not row.is_expected), None)


def _printable_row(row: RefusedRow) -> RefusedRow:
    return replace(
        row, file=printable(row.file), reason=printable(row.reason), audio_filepath=printable(row.audio_filepath)
    )


def _counts(refused: Iterable[RefusedRow]) -> tuple[RefusalCount, ...]:
    return tuple(RefusalCount(kind, rows) for kind, rows in Counter(row.kind for row in refused).most_common())


def _report(
    task: Preparation, split_by: SplitBy, drawn: SplitAssignment, refused: list[RefusedRow]
) -> PreparationReport:
    utterances = drawn.utterances
    output = str(task.output.resolve())
    removed = FormatCharacterCount()
    for checked in utterances:
        removed.add(checked.removed)
    # Only audio outside of the output needs --audio_root.
    is_outside = any(not is_named_inside(u.utterance.audio_filepath, (output,)) for u in utterances)
    return PreparationReport(
        format=task.format,
        source=printable(str(task.source)),
        split_by=split_by,
        seed=task.seed,
        splits=tuple(summaries(utterances)),
        refused=_counts(refused),
        leaks=find_leaks(utterances),
        audio_root=str(task.root.resolve()) if is_outside else "",
        drawn=drawn.parts,
        drawn_by=drawn.unit,
        removed_characters=removed.sentence(),
    )


@contextlib.contextmanager
def _staging(task: Preparation) -> Iterator[Path]:
    """Create a folder in the output, in which all files are made before they are renamed; delete it afterwards.

    Concurrent preparations to one output wait for each other; the remains of a killed one are deleted.
    """
    _check_source(task)
    output = task.output
    # In the output folder, so that it is on the same file system and os.replace is atomic.
    staged = output.resolve() / ".prepare.partial"
    with without_empty_folders([output.absolute()]), contextlib.ExitStack() as stack:
        with _convert_write_errors(output):
            output.mkdir(parents=True, exist_ok=True)
            # Held to the end: two preparations must not mix their files.
            stack.enter_context(exclusive_lock(output))
        try:
            _check_output(task)
            with _convert_write_errors(output):
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir()
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _convert_write_errors(output: Path) -> contextlib.AbstractContextManager[None]:
    advice = "Free disk space there, or choose a writable --output folder."
    return explained(ResourceError, f"The manifests cannot be written to {output}", advice)


def _publish(task: Preparation, staged: Path, utterances: list[CheckedUtterance], report: PreparationReport) -> None:
    """Write all files to the staging folder, then rename them.

    Manifests of an earlier preparation are removed first and train.jsonl comes last: a process that is killed in
    between leaves no training part beside a validation part of another preparation.
    """
    for split in report.splits:
        chosen = [checked.utterance for checked in utterances if checked.split == split.name]
        write_manifest(staged / f"{split.name}.jsonl", chosen)
    write_json_lines(staged / REPORT, [asdict(report)])
    names = [f"{split}.jsonl" for split in reversed(SPLITS)]
    with defer_signals():
        for name in names:
            (task.output / name).unlink(missing_ok=True)
        if (staged / AUDIO).is_dir():
            # A folder that is not empty cannot be replaced; the old one is deleted together with the staging folder.
            if (task.output / AUDIO).is_dir():
                os.rename(task.output / AUDIO, staged / "outdated")
            os.rename(staged / AUDIO, task.output / AUDIO)
        os.replace(staged / REPORT, task.output / REPORT)
        for name in names:
            if (staged / name).exists():
                os.replace(staged / name, task.output / name)


# --------------------
# The command, and its summary.


Flags = Preparation
# Folder names that are too common to name a run.
COMMON_NAMES = ("corpus", "data", "manifest", "manifests", "out", "output", "prepared", "splits")
MAX_NAME = 30  # characters of up to 4 bytes: name and parent's name must fit in a file name of 255 bytes


def describe(report: PreparationReport, output: Path) -> str:
    """Return a summary of the prepared corpus, ending with the command that trains on it."""
    drawn = f"; {' and '.join(report.drawn)} drawn from its training part, by {report.drawn_by}" if report.drawn else ""
    lines = [f"{report.source} as {report.format}, split by {report.split_by}{drawn}:"]
    for split in report.splits:
        length = f"{split.hours:.2f} h" if split.hours >= 1 else f"{60 * split.hours:.1f} minutes"
        speakers = f"speakers: {split.speakers or 'unknown'}"
        lines.append(f"  {split.name}.jsonl  utterances: {split.utterances}, {length}, {speakers}")
    for count in report.refused:
        lines.append(f"  skipped: {count.rows} ({count.kind})")
    if report.refused:
        lines.append(f"  listed with row and reason in {output / REJECTED}")
    if report.removed_characters:
        lines.append(f"  {report.removed_characters}")
    for leak in report.leaks:
        if leak.count:
            lines.append(f"  in two splits: {leak.count} × the same {leak.what}, such as")
            lines.extend(f"    {example}" for example in leak.examples)
    return "\n".join([*lines, *_next_step(report, output)])


def _next_step(report: PreparationReport, output: Path) -> list[str]:
    names = {split.name for split in report.splits}
    if "train" not in names:
        return [
            (
                "The corpus has no training part. Run again with --split_by speaker or utterance and --force to make "
                "new splits."
            )
        ]
    if "valid" not in names:
        return [
            (
                "There is no validation part. Run again with --valid_share 5% --force to draw one (needs at least "
                "three utterances)."
            )
        ]
    name = _run_name(output)
    flags = " ".join(
        f"--{s.name}_manifest {shlex.quote(os.path.abspath(output / s.name))}.jsonl" for s in report.splits
    )
    if report.audio_root:  # the audio is not copied, so it is outside of the manifests' folder
        flags += f" --audio_roots {shlex.quote(report.audio_root)}"
    return [
        "Train on it:",
        f"./run_training_memory_optimized.sh {flags} --checkpoint_dir {shlex.quote(f'checkpoints/{name}')} "
        f"--run_name {shlex.quote(name)}",
    ]


def _run_name(output: Path) -> str:
    """Return a run name from the output folder; a common folder name is prefixed with its parent's name."""
    *_, parent, name = ("", "", *(_file_name_of(part) for part in Path(os.path.abspath(output)).parts))
    if name.lower() in COMMON_NAMES:
        name = "-".join(filter(None, (parent, name)))
    return name or parent or "mine"


def _file_name_of(part: str) -> str:
    """Return the name with only letters, digits, marks, `.`, `_` and `-`; a vowel sign belongs to its letter."""
    # L letters, M combining marks such as vowel signs, N digits.
    letters = (c if c in "._" or unicodedata.category(c)[0] in "LMN" else "-" for c in part)
    return re.sub("-+", "-", "".join(letters)).strip("-.")[:MAX_NAME].rstrip("-.")


def main(arguments: list[str]) -> str:
    """Prepare the corpus that the command line names; return a summary."""
    task = read_flags(Preparation, arguments, description=__doc__)
    return describe(prepare_corpus(task), task.output)
