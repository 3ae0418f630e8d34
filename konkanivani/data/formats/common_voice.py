"""Mozilla Common Voice as downloaded: a folder clips/ of MP3 files with the tables train.tsv, dev.tsv and test.tsv.

A quotation mark in a sentence is a literal character. Only tables that pandas has rewritten put sentences of several
lines in quotes; such rows are joined again (`torn_rows`). Source: https://github.com/common-voice/cv-dataset
"""

from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.base.files import visible_entries
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_named
from konkanivani.data.formats.tables import as_seconds, read_records
from konkanivani.data.formats.torn_rows import mend_rows

GIVEN = ("train.tsv", "dev.tsv", "test.tsv")


def find_common_voice_utterances(source: SpeechFolder) -> Found:
    """Yield the rows of train.tsv, dev.tsv and test.tsv, or of the table given by `--table`.

    Raises:
        DataError: If the source is not a corpus of one language, or contains none of the tables.
    """
    folder = _language_folder(source)
    durations = folder / "clip_durations.tsv"  # only in newer releases
    clips = read_records(durations) if durations.exists() else ()
    milliseconds = ((record["clip"], as_seconds(record["duration[ms]"])) for record in clips)
    # A duration of 0 or an unreadable one is treated as unknown.
    seconds = {clip: value / 1000 for clip, value in milliseconds if value}
    names = (source.table,) if source.table else GIVEN
    tables = [folder / name for name in names if (folder / name).exists()]
    if not tables:
        raise DataError(f"{folder} contains none of {', '.join(names)}. Check --table and --source.")
    for table in tables:
        split = "" if source.table else split_named(table.name)
        yield from _read_table(source, table, folder / "clips", split, seconds)


def _read_table(source: SpeechFolder, table: Path, clips: Path, split: str, seconds: dict[str, float]) -> Found:
    for record in mend_rows(read_records(table)):
        file = source.name_of(table)
        if not {"path", "sentence"} <= set(record.columns):
            raise DataError(f"{table} has no columns path and sentence. Check --format and --source.")
        name = record["path"]
        if record.flaw or not name:
            reason = record.flaw or "it has no clip name"
            yield RefusedRow(file, record.row, "broken row", reason, name)
            continue
        clip = name if name.endswith(".mp3") else f"{name}.mp3"  # the first releases omit the suffix
        text = record["sentence"]
        speaker = record["client_id"]
        found = FoundUtterance(file, record.row, clips / clip, text, speaker=speaker, split=split)
        # No offset: the duration is the file's, and is compared with its header later.
        yield found.lasting(None, seconds.get(clip))


def _language_folder(source: SpeechFolder) -> Path:
    """Return the folder with clips/ and the tables: `source.path`, or the only such folder in it (cv-corpus-…/kok)."""
    wanted = source.table or "train.tsv"
    folders = [f for f in (source.path, *visible_entries(source.path)) if (f / "clips").is_dir()]
    if len(folders) == 1:
        return folders[0]
    found = f"{len(folders)} folders with clips/" if folders else "no folder clips/"
    raise DataError(
        f"{source.path} is not a Common Voice corpus of one language: it contains {found}. Use the folder of "
        f"the language as --source, with clips/ and {wanted} in it."
    )
