"""Data sets of Hugging Face: folders on disk, and downloads from the Hub."""

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from konkanivani.corpora.tables import (
    RefusedRow,
    SourceRows,
    SourceUtterance,
    SpeechFolder,
    as_text,
    channel_column,
    choose_columns,
    split_of_path,
)
from konkanivani.data.audio.files import parse_channel_cell
from konkanivani.errors import DataError, ResourceError, UsageError, explained
from konkanivani.files import atomic_replace, cache_folder, visible_files
from konkanivani.hub import MAIN, Listing, RemoteFile, Repository, check_revision, is_hub_name, is_plain

# --------------------
# Local data sets of `datasets`: a folder of save_to_disk (Arrow) or a folder of Parquet files. Nothing is decoded,
# downloaded or cached; audio that the tables store as bytes is written to files unchanged.
# Sources: https://huggingface.co/docs/datasets/loading (local files, load_from_disk) and …/audio_load (decode=False)


AUDIO_COLUMNS = ("audio", "audio_filepath")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized", "verbatim")
SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
MAGICS: dict[str, tuple[bytes, ...]] = {
    ".flac": (b"fLaC",),
    ".wav": (b"RIFF",),
    ".ogg": (b"OggS",),
    ".mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"),
}


@dataclass(frozen=True)
class DatasetPart:
    """A table of the data set: file or folder, split, columns, and its rows, which are loaded lazily."""

    path: Path
    split: str
    columns: tuple[str, ...]
    rows: Iterable[dict[str, object]]


def find_huggingface_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the rows of all tables.

    Raises:
        DataError: If a table cannot be read.
        ResourceError: If `datasets` is not installed, or embedded audio cannot be written.
    """
    for part in _parts(source):
        wanted = (
            (source.audio_column, AUDIO_COLUMNS, True),
            (source.text_column, TEXT_COLUMNS, True),
            (source.speaker_column, SPEAKER_COLUMNS, False),
            channel_column(source),
        )
        columns = choose_columns(part.path, part.columns, wanted)
        rows = iter(part.rows)
        # Advance by hand, so that the guard covers reading a row, but not writing its audio.
        for number in count(1):
            with _convert_reader_errors(f"{part.path} cannot be read completely", "Download it again."):
                row = next(rows, None)
            if row is None:
                break
            yield _utterance(source, part, columns, number, row)


@contextmanager
def _convert_reader_errors(failure: str, advice: str) -> Iterator[None]:
    """Convert any exception of pyarrow, json or datasets, which they raise on foreign files, into a DataError."""
    try:
        yield
    except Exception as error:
        # Messages of pyarrow may span many lines.
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise DataError(f"{failure}: {reason}. {advice}") from None


def _parts(source: SpeechFolder) -> Iterator[DatasetPart]:
    is_saved = any((source.path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    part = None
    for part in _saved_parts(source) if is_saved else _parquet_parts(source):
        yield part
    if part is None:
        raise DataError(
            f"{source.path} is neither a folder written by save_to_disk nor one with Parquet files. Use the "
            "folder of a downloaded data set as --source."
        )


@contextmanager
def _installed() -> Iterator[None]:
    """Convert the ImportError of a missing package."""
    try:
        yield
    except ImportError:
        raise ResourceError(
            "--format huggingface needs the package `datasets`, which is not installed. Install it with "
            ".venv/bin/python -m pip install datasets."
        ) from None


def _saved_parts(source: SpeechFolder) -> Iterator[DatasetPart]:
    with _installed():
        import datasets

    with _convert_reader_errors(f"{source.path} cannot be loaded as a saved data set", "Save it again."):
        loaded = datasets.load_from_disk(str(source.path))
    splits = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [("", loaded)]
    for name, table in splits:
        for column, feature in table.features.items():
            # With decode=False, a row contains the bytes or the path, not decoded samples.
            if isinstance(feature, datasets.Audio):
                table = table.cast_column(column, datasets.Audio(decode=False))
        path = source.path / name if name else source.path
        yield DatasetPart(path, split_of_path([name]), tuple(table.column_names), table)


def _parquet_parts(source: SpeechFolder) -> Iterator[DatasetPart]:
    with _installed():
        # A dependency of `datasets`, whose own import takes seconds and is not needed here.
        import pyarrow.parquet

    tables = (path for path in visible_files(source.path) if path.name.endswith(".parquet"))
    for path in sorted(path for path in tables if path.is_file()):
        with _convert_reader_errors(f"{path} cannot be read as Parquet", "Download it again."):
            file = pyarrow.parquet.ParquetFile(path)
        # The file's name (train-00000-of-…) counts before its folders, the innermost first.
        split = split_of_path(reversed(path.relative_to(source.path).parts))
        batches = file.iter_batches(batch_size=16)  # a row may contain megabytes of audio
        yield DatasetPart(
            path, split, tuple(file.schema_arrow.names), (row for batch in batches for row in batch.to_pylist())
        )


def _utterance(
    source: SpeechFolder, part: DatasetPart, columns: list[str], number: int, row: dict[str, object]
) -> SourceUtterance | RefusedRow:
    file = source.name_of(part.path)
    audio_column, text_column, speaker_column, channel = columns
    audio = row[audio_column]
    content, named = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(content, bytes) and content:
        # The path in the row is not used: it may repeat, or point out of the folder.
        path = source.embedded_audio / f"{_stem(file)}-{number:07d}{_suffix(content, as_text(named))}"
        advice = "Free disk space there, or choose a writable --output folder."
        with explained(ResourceError, f"The audio of the data set cannot be written to {path}", advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    elif isinstance(named, str) and named:
        path = source.path / named
    else:
        return RefusedRow(file, number, "missing audio", f"its column {audio_column} contains no audio")
    text = as_text(row[text_column])
    speaker = as_text(row.get(speaker_column))
    utterance = SourceUtterance(file, number, path, text, speaker=speaker, split=part.split)
    try:
        return replace(utterance, channel=parse_channel_cell(row.get(channel), channel))
    except ValueError as error:
        return utterance.refused("channel", str(error))


def _stem(file: str) -> str:
    """Return the start of the audio files' names for a Parquet file; it differs for each path."""
    name = file.removesuffix(".parquet")
    if re.fullmatch(r"[A-Za-z0-9/-]+", name):
        return name.strip("/").replace("/", "_")
    # Paths that differ only in the replaced characters, such as two words in Devanagari, must not collide.
    stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"{stem or 'row'}-{zlib.crc32(file.encode()):08x}"


def _suffix(content: bytes, named: str) -> str:
    """Return the suffix for a file of these bytes: by their magic number, else the suffix of the name in the row."""
    suffix_in_row = os.path.splitext(named)[1].lower()
    suffix_of_content = next((suffix for suffix, magic in MAGICS.items() if content.startswith(magic)), "")
    return suffix_of_content or (suffix_in_row if re.fullmatch(r"\.[a-z0-9]{1,5}", suffix_in_row) else ".audio")


# --------------------
# Data sets on the Hub: download the Parquet files of one configuration. It is chosen as `datasets` does: by the card's
# `configs`, else by folder or file names. A repository without Parquet files has a branch to which the Hub itself
# converts it; code of a data set is never run.
# Sources: https://huggingface.co/docs/hub/datasets-manual-configuration and .../docs/dataset-viewer/parquet


CONFIG_NAME = re.compile(r"[\w.-]{1,100}")
CONVERTED = "refs/convert/parquet"  # the branch with the Hub's own conversion, CONFIG/SPLIT/NNNN.parquet
PARTIAL = "partial-"  # prefix of a split that is truncated: the Hub converts only the first gigabytes
MAX_NAMED = 10  # configurations in a message


@dataclass(frozen=True)
class DatasetName:
    """Name, configuration ("" for the default) and revision of a data set on the Hub."""

    name: str
    config: str = ""
    revision: str | None = None


@dataclass(frozen=True)
class Tables:
    """Parquet files of a configuration in the cache, by path relative to a folder of their own."""

    dataset: DatasetName
    commit: str
    files: Mapping[str, Path]

    @property
    def label(self) -> str:
        """Name, configuration and commit, as a later --source."""
        config = f":{self.dataset.config}" if self.dataset.config else ""
        return f"{self.dataset.name}{config}@{self.commit}"

    def link_into(self, folder: Path) -> None:
        """Create `folder` with a link to each file."""
        for name, path in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.resolve())


def parse_dataset_name(text: str) -> DatasetName | None:
    """Return the parts of NAME[:CONFIG][@REVISION], or None if `text` does not have this form."""
    rest, at, revision = text.partition("@")
    name, colon, config = rest.partition(":")
    if not is_hub_name(name) or (at and not revision) or (colon and not CONFIG_NAME.fullmatch(config)):
        return None
    return DatasetName(name, config, revision or None)


def locate_dataset(dataset: DatasetName) -> Tables:
    """Return the Parquet files of the data set, downloaded unless they are complete in the cache.

    Raises:
        UsageError: There is no such data set, revision or configuration, or it has no Parquet files.
        CheckpointError: A file differs from the listing, or has a name outside of the folder.
        ResourceError: The Hub cannot be reached or denies access, or the disk is full.
    """
    check_revision(dataset.revision)
    repository = Repository(dataset.name, dataset.revision or MAIN, "dataset")
    return repository.from_cache_or_hub(
        lambda: _read_record(repository, dataset), lambda: _download_tables(repository, dataset)
    )


def _download_tables(repository: Repository, dataset: DatasetName) -> Tables:
    """Download the files that `_choose` returns, and store their names for later use without a network."""
    repository, listing, chosen = _choose(repository, dataset)
    repository.fetch(listing.commit, chosen.values())
    names = {link: file.name for link, file in chosen.items()}
    tables = _tables(repository, dataset, listing.commit, names)
    for revision in {dataset.revision, listing.commit}:
        _write_record(DatasetName(dataset.name, dataset.config, revision), listing.commit, names)
    return tables


def _choose(repository: Repository, dataset: DatasetName) -> tuple[Repository, Listing, dict[str, RemoteFile]]:
    """Return the repository, its listing, and the Parquet files of the configuration by the path of their link."""
    listing = repository.listing()
    declared = _declared_configs(listing.configs)
    chosen = _files_of_config(repository, listing, declared, dataset.config)
    if not chosen and dataset.revision is None:
        with contextlib.suppress(UsageError):  # the Hub has not converted this data set
            converted = Repository(dataset.name, CONVERTED, "dataset")
            listing = converted.listing()
            declared = {_first_folder(name): [] for name in _parquet(listing) if "/" in name}
            chosen = _files_of_config(converted, listing, {}, dataset.config or _default_config(declared))
            repository = converted
    if not chosen:
        raise _no_tables_error(repository, dataset, sorted(declared))
    partial = [name for name in chosen if any(part.startswith(PARTIAL) for part in Path(name).parts)]
    if partial:
        raise repository.refused(f"the hub has converted only a part of it ({partial[0]})", "Download it by hand")
    return repository, listing, chosen


def _parquet(listing: Listing) -> list[str]:
    return sorted(name for name in listing.files if name.endswith(".parquet"))


def _first_folder(name: str) -> str:
    return name.partition("/")[0]


def _default_config(names: Mapping[str, object]) -> str:
    """Return the configuration to use if none is given: the only one, or "default"."""
    return next(iter(names)) if len(names) == 1 else "default"


def _declared_configs(configs: object) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of split ("" if not declared) and file pattern of each configuration in a card."""
    declared: dict[str, list[tuple[str, str]]] = {}
    for entry in configs if isinstance(configs, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("config_name"), str):
            folder = entry.get("data_dir")
            prefix = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("/.") else ""
            pairs = _patterns(entry.get("data_files"), "") or ([("", "**")] if prefix else [])
            declared[entry["config_name"]] = [(split, prefix + pattern) for split, pattern in pairs]
    return declared


def _patterns(data_files: object, split: str) -> list[tuple[str, str]]:
    """Return pairs of split and pattern of `data_files`: a pattern, a list, or entries of split and path."""
    if isinstance(data_files, str):
        return [(split, data_files.removeprefix("./"))]
    if isinstance(data_files, dict):
        name = data_files.get("split")
        return _patterns(data_files.get("path"), name if isinstance(name, str) else "")
    if isinstance(data_files, list):
        return [pair for entry in data_files for pair in _patterns(entry, split)]
    return []


def _files_of_config(
    repository: Repository, listing: Listing, declared: Mapping[str, list[tuple[str, str]]], config: str
) -> dict[str, RemoteFile]:
    """Return the Parquet files of a configuration, each in a folder of its declared split."""
    names = _parquet(listing)
    config = config or (_default_config(declared) if declared else "")
    if declared.get(config):
        pairs = declared[config]
        split_by_name = {name: split for split, pattern in pairs for name in names if _matches(name, pattern)}
        # The reader takes the split from the file's name or the innermost folder that names one.
        links = {
            f"{split}/{number:05d}.parquet" if split else name: name
            for number, (name, split) in enumerate(split_by_name.items())
        }
    elif config and config != "default":
        links = {name: name for name in names if _belongs_to(name, config)}
    elif declared and config not in declared:
        links = {}
    else:
        links = {name: name for name in names}
    if any(not is_plain(link) for link in links):
        raise repository.refused("its card declares a split whose name is outside of the folder")
    return {link: listing.files[name] for link, name in links.items()}


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path matches a pattern of a card, in which `*` stays within a folder and `**` does not."""
    # fnmatch alone would let the pattern *.parquet take the files of all folders, and so of other configurations.
    parts = name.split("/")
    # Numbers of parts that the pattern can match so far. A set, since a search by recursion would be exponential.
    matched = {0}
    for part in pattern.split("/"):
        if part == "**":
            matched = set(range(min(matched, default=len(parts) + 1), len(parts) + 1))
        else:
            matched = {n + 1 for n in matched if n < len(parts) and fnmatch.fnmatchcase(parts[n], part)}
    return len(parts) in matched


def _belongs_to(name: str, config: str) -> bool:
    *folders, file = name.split("/")
    return config in folders or file.startswith((f"{config}-", f"{config}."))


def _no_tables_error(repository: Repository, dataset: DatasetName, configs: list[str]) -> UsageError:
    at = f"{dataset.name} on {repository.endpoint}"
    if configs and dataset.config not in configs:
        more = ", ..." if len(configs) > MAX_NAMED else ""
        listed = f"{', '.join(configs[:MAX_NAMED])}{more}"
        problem = f"no configuration {dataset.config}" if dataset.config else "several configurations"
        return UsageError(f"{at} has {problem}. Give one of {listed}, such as {dataset.name}:{configs[0]}.")
    of_config = f" of the configuration {dataset.config}" if dataset.config else ""
    return UsageError(
        f"{at} has no Parquet files{of_config}, and code of data sets is not run. Download it by hand and "
        "give its folder."
    )


# --------------------
# Record of the files of each configuration, for use without a network.


def _record_path(dataset: DatasetName) -> Path | None:
    folder = cache_folder()
    key = hashlib.sha256(repr(dataset).encode()).hexdigest()
    return None if folder is None else folder / "hub" / f"{key}.json"


def _write_record(dataset: DatasetName, commit: str, names: Mapping[str, str]) -> None:
    path = _record_path(dataset)
    with contextlib.suppress(OSError):  # only for later use without a network
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replace(path) as partial:
                partial.write_text(json.dumps({"commit": commit, "files": dict(names)}), encoding="utf-8")


def _read_record(repository: Repository, dataset: DatasetName) -> Tables | None:
    """Return the files that an earlier call has chosen, or None unless all are in the cache."""
    path = _record_path(dataset)
    if path is None:
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        tables = _tables(repository, dataset, record["commit"], record["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tables if all(file.is_file() for file in tables.files.values()) else None


def _tables(repository: Repository, dataset: DatasetName, commit: str, names: Mapping[str, str]) -> Tables:
    snapshot = repository.snapshot(commit)
    return Tables(dataset, commit, {link: snapshot / name for link, name in names.items()})
