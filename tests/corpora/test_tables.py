"""Tables of spreadsheets and pandas: UTF-16, `sep=;`, headers in any case, multi-line cells."""

import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from konkanivani.corpora.tables import Record, mend_rows
from konkanivani.data.manifest import read_manifest
from tests.cli.test_prepare_data import (  # noqa: F401 - fixtures
    COLUMNS,
    NO_REJECTION_LIMIT,
    Table,
    prepare,
    read_rejected,
    table,
    twelve_recordings,
)
from tests.conftest import checked
from tests.corpora.test_formats import CV_HEAD, SPLITS, audio_bytes, sentence, split_of, write_sentence, write_table


def read_texts(directory: Path) -> set[str]:
    paths = [directory / "out" / f"{split}.jsonl" for split in SPLITS]
    return {u.text for path in paths if path.exists() for u in read_manifest(path, (str(directory),))}


def write_bytes(spoken: Table, content: bytes) -> None:
    (spoken.corpus / "mine.csv").write_bytes(content)


def table_text(spoken: Table, mark: str, head: tuple[str, ...] = COLUMNS, first: str = "", end: str = "\r\n") -> str:
    return first + end.join(mark.join(cells) for cells in [head, *spoken.rows]) + end


def assign_splits(spoken: Table) -> None:
    for number, row in enumerate(spoken.rows):
        row[3] = split_of(number)


ENCODINGS: dict[str, Callable[[Table], bytes]] = {
    "UTF-16, as Excel's Unicode text": lambda t: b"\xff\xfe" + table_text(t, "\t").encode("utf-16-le"),
    "UTF-16, big-endian": lambda t: b"\xfe\xff" + table_text(t, ";").encode("utf-16-be"),
    "UTF-16, sep": lambda t: b"\xff\xfe" + table_text(t, ";", first="sep=;\r\n").encode("utf-16-le"),
    "sep of semicolons": lambda t: table_text(t, ";", first="sep=;\r\n").encode(),
    "byte order mark before sep": lambda t: b"\xef\xbb\xbf" + table_text(t, ",", first="SEP=,\n").encode(),
    "sep of tabs": lambda t: table_text(t, "\t", first='"sep=\t"\n').encode(),
    "sep of vertical bars": lambda t: table_text(t, "|", first="sep=|\r").encode(),
    "capitalised header": lambda t: table_text(t, ",", ("Audio", "Text", "Speaker", "Split")).encode(),
    "capitals and blanks": lambda t: (
        "\ufeff" + table_text(t, ";", (" AUDIO ", "TEXT\t", "Speaker ", " SPLIT"))
    ).encode(),
    "blanks everywhere": lambda t: table_text(t, " , ").encode(),
}


@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_spreadsheet_encodings_and_separators_are_read(encoding_name, table):  # noqa: F811
    assign_splits(table)
    write_bytes(table, ENCODINGS[encoding_name](table))
    done = prepare(table.directory, "csv", "--table", "mine.csv")
    assert done.returncode == 0 and read_rejected(table.directory) == [], done.stderr
    assert "split by given" in done.stdout
    assert read_texts(table.directory) == {row[1] for row in table.rows}
    assert {u.speaker for u in table.utterances("train")} == {row[2] for row in table.rows}


def test_row_numbers_include_the_sep_line(table):  # noqa: F811
    table.rows[5][1] = ""
    write_bytes(table, table_text(table, ";", first="sep=;\r\n").encode())
    assert prepare(table.directory, "csv", "--table", "mine.csv", *NO_REJECTION_LIMIT).returncode == 0
    assert [row["row"] for row in read_rejected(table.directory)] == [8]


@pytest.mark.parametrize(
    "head, flags, message",
    [
        (("audio", "AUDIO", "Text"), (), ""),
        (("Audio", "AUDIO", "Text"), (), "2 columns 'audio'"),
        (("Clip", "note", "Words"), ("--audio_column", "clip", "--text_column", " WORDS "), ""),
        (("clip", "Clip", "Words"), ("--audio_column", "Clip", "--text_column", "words"), "12 missing audio"),
        (("Audio", "note", "Text"), ("--speaker_column", "WHO"), "no column 'WHO'"),
    ],
)
def test_exact_column_name_wins_and_ambiguous_case_is_rejected(head, flags, message, table):  # noqa: F811
    table.rows[:] = [[row[0], f"x{row[0]}", row[1]] for row in table.rows]
    write_bytes(table, table_text(table, ",", head).encode())
    done = prepare(table.directory, "csv", "--table", "mine.csv", "--split_by", "utterance", *flags)
    assert (done.returncode == 0) == (not message) and message in done.stderr, done.stderr


@pytest.mark.parametrize("encoding_name", ["no byte order mark", "odd length", "lone surrogate"])
def test_malformed_utf16_table_is_rejected(encoding_name, table):  # noqa: F811
    whole = table_text(table, "\t").encode("utf-16-le")
    contents = {
        "no byte order mark": (whole, "looks like UTF-16 without a byte order mark"),
        "odd length": (b"\xff\xfe" + whole + b"x", "starts as UTF-16"),
        "lone surrogate": (b"\xff\xfe" + whole + "\ud800x".encode("utf-16-le", "surrogatepass"), "starts as UTF-16"),
    }
    content, message = contents[encoding_name]
    write_bytes(table, content)
    done = prepare(table.directory, "csv", "--table", "mine.csv")
    assert done.returncode == 3 and message in done.stderr and "Save it as UTF-8" in done.stderr, done.stderr
    assert not table.output.exists()


def test_utf16_transcripts_are_read_and_broken_one_is_skipped(tmp_path):
    for number in range(6):
        write_sentence(tmp_path / "corpus" / f"{number}.wav", number)
        (tmp_path / "corpus" / f"{number}.txt").write_text(sentence(number), encoding="utf-16")
    (tmp_path / "corpus" / "3.txt").write_bytes(b"\xff\xfe\x00")
    assert prepare(tmp_path, "folder", *NO_REJECTION_LIMIT).returncode == 0
    assert [(row["file"], row["kind"]) for row in read_rejected(tmp_path)] == [("3.txt", "no transcript")]
    assert read_texts(tmp_path) == {sentence(number) for number in (0, 1, 2, 4, 5)}


def test_ljspeech_id_may_be_a_path(tmp_path):
    names = ("wavs/a0.wav", "wavs/a1", "a2", "a3.wav", "more/a4", "wavs/a5")
    for number, name in enumerate(names):
        folder = tmp_path / "corpus" / ("" if "/" in name else "wavs")
        write_sentence(folder / f"{name.removesuffix('.wav')}.wav", number)
    write_sentence(tmp_path / "corpus" / "wavs" / "wavs" / "a5.wav", 50)  # ids are looked up in wavs/ first
    write_table(tmp_path / "corpus" / "metadata.csv", (), [(n, sentence(i)) for i, n in enumerate(names)], "|")
    done = prepare(tmp_path, "ljspeech")
    assert done.returncode == 0 and read_rejected(tmp_path) == [], done.stderr
    listed = [json.loads(line) for path in (tmp_path / "out").glob("t*.jsonl") for line in path.open(encoding="utf-8")]
    assert not [row for row in listed if row["text"] == sentence(5) and "wavs/wavs" not in row["audio_filepath"]]
    write_table(tmp_path / "corpus" / "metadata.csv", (), [("wavs/b0.wav", "एक"), ("/", "दोन"), ("b1", "तीन")], "|")
    done = prepare(tmp_path, "ljspeech", "--force")
    assert done.returncode == 3 and "corpus/wavs/b0.wav cannot be read" in done.stderr
    assert "corpus/wavs/b1.wav" in read_rejected(tmp_path)[2]["reason"]


# Rows that are split by line breaks


def write_common_voice(folder: Path, rows: list[tuple[object, ...]]) -> None:
    """Write a Common Voice corpus with these rows as train.tsv, with the minimal quoting of pandas."""
    for number in range(6):
        write_sentence(folder / "clips" / f"{number}.mp3", number, 32_000)
    with open(folder / "train.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([CV_HEAD, *rows])


def cv_rows(**replaced: str) -> list[tuple[object, ...]]:
    texts = {f"t{number}": sentence(number) for number in range(6)} | replaced
    return [(f"s{n}", f"{n}.mp3", f"x{n}", texts[f"t{n}"], "", 2, 0, "twenties") for n in range(6)]


SPLIT_FLAGS = ("--split_by", "utterance", "--valid_share", "0", "--test_share", "0", "--table", "train.tsv")


def test_multi_line_sentences_written_by_pandas_are_read(tmp_path):
    write_common_voice(
        tmp_path / "corpus", cv_rows(t1="एक\nदोन", t2='"हय," म्हणालो\n\n"ना"\nम्हणाली', t3="तीन\r\nचार", t5='घर\n"बरें"')
    )
    done = prepare(tmp_path, "common_voice", *SPLIT_FLAGS)
    assert done.returncode == 0 and read_rejected(tmp_path) == [], done.stderr
    assert read_texts(tmp_path) == {
        sentence(0), "एक दोन", '"हय," म्हणालो "ना" म्हणाली', "तीन चार", sentence(4), 'घर "बरें"',
    }  # fmt: skip


def test_row_with_ambiguous_end_is_skipped_naming_both_rows(tmp_path):
    rows = cv_rows()
    # A short row opens a quotation mark that the next row closes: where the first row ends is ambiguous.
    rows[2] = (*rows[2][:3], '"' + str(rows[2][3]))
    rows[3] = (*rows[3][:3], str(rows[3][3]) + '"', *rows[3][4:])
    write_common_voice(tmp_path / "corpus", [])
    write_table(tmp_path / "corpus" / "train.tsv", CV_HEAD, rows)
    checked(prepare(tmp_path, "common_voice", *SPLIT_FLAGS, *NO_REJECTION_LIMIT))
    (row,) = read_rejected(tmp_path)
    assert row["row"] == 4 and "it opens a quote that row 5 closes" in row["reason"], row
    assert len(read_texts(tmp_path)) == 5


def test_unpaired_quotation_marks_are_kept(tmp_path):
    write_common_voice(tmp_path / "corpus", [])
    replaced = {"t0": '"एक', "t1": 'दोन"', "t2": '"तीन" म्हणून', "t3": '"', "t4": '""', "t5": '"चार'}
    rows = cv_rows(**{name: f"{text} {number}" for number, (name, text) in enumerate(replaced.items())})
    rows[5] = rows[5][:4]  # a short row with an unclosed quotation mark
    write_table(tmp_path / "corpus" / "train.tsv", CV_HEAD, rows)
    done = prepare(tmp_path, "common_voice", *SPLIT_FLAGS)
    assert done.returncode == 0 and read_rejected(tmp_path) == [], done.stderr
    assert read_texts(tmp_path) == {str(row[3]) for row in rows}


CELLS = st.text('a" \n', max_size=6)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS, st.just("z")), min_size=1, max_size=6)


def as_records(lines: list[str]) -> list[Record]:
    return [Record(row, tuple("abcd"), tuple(line.split("\t"))) for row, line in enumerate(lines, 1) if line.strip()]


def words_of_cells(cells: tuple[str, ...]) -> list[list[str]]:
    """Return the words of each cell without quotation marks, which cells in one line keep."""
    return [cell.replace('"', "").split() for cell in cells]


@given(ROWS)
def test_rows_split_by_line_breaks_are_rejoined(rows):
    file = io.StringIO()
    csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)
    results = list(mend_rows(as_records(file.getvalue().split("\n"))))
    assert [words_of_cells(record.cells) for record in results] == [words_of_cells(row) for row in rows]


@given(ROWS)
def test_complete_rows_with_quotation_marks_are_unchanged(rows):
    records = as_records(["\t".join(row).replace("\n", " ") for row in rows])
    assert list(mend_rows(records)) == records


def test_unclosed_quotation_marks_are_parsed_within_60_s():
    record = Record(1, tuple("abcd"), ("x", '"""' + "a" * 100_000))
    started = time.process_time()
    assert len(list(mend_rows([record] * 300))) == 300
    assert time.process_time() - started < 60


def test_parquet_columns_are_found_in_any_case(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    (tmp_path / "corpus").mkdir()
    rows = {
        "Audio": [{"bytes": audio_bytes(number), "path": None} for number in range(6)],
        "Words": [sentence(number) for number in range(6)],
        "Client_ID": [f"s{number}" for number in range(6)],
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "corpus" / "train-0.parquet")
    done = prepare(tmp_path, "huggingface", "--text_column", "words")
    assert done.returncode == 0 and "by speaker" in done.stdout, done.stderr
    assert read_texts(tmp_path) == set(rows["Words"])
