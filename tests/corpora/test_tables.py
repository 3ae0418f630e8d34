"""Tables as written by spreadsheets and pandas: UTF-16, `sep=;`, headers in any case, multi-line cells."""

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
from tests.cli.test_prepare_data import ALL, COLUMNS, Table, prepare, rejected, table, twelve  # noqa: F401 - fixtures
from tests.conftest import checked
from tests.corpora.test_formats import CV_HEAD, SPLITS, sentence, sound_bytes, split_of, write_sentence, write_table


def texts(directory: Path) -> set[str]:
    paths = [directory / "out" / f"{split}.jsonl" for split in SPLITS]
    return {u.text for path in paths if path.exists() for u in read_manifest(path, (str(directory),))}


def write_bytes(spoken: Table, content: bytes) -> None:
    (spoken.corpus / "mine.csv").write_bytes(content)


def lines(spoken: Table, mark: str, head: tuple[str, ...] = COLUMNS, first: str = "", end: str = "\r\n") -> str:
    return first + end.join(mark.join(cells) for cells in [head, *spoken.rows]) + end


def tell_splits(spoken: Table) -> None:
    for number, row in enumerate(spoken.rows):
        row[3] = split_of(number)


WAYS: dict[str, Callable[[Table], bytes]] = {
    "UTF-16, as Excel's Unicode text": lambda t: b"\xff\xfe" + lines(t, "\t").encode("utf-16-le"),
    "UTF-16, big end first": lambda t: b"\xfe\xff" + lines(t, ";").encode("utf-16-be"),
    "UTF-16, sep": lambda t: b"\xff\xfe" + lines(t, ";", first="sep=;\r\n").encode("utf-16-le"),
    "sep of semicolons": lambda t: lines(t, ";", first="sep=;\r\n").encode(),
    "sep behind a mark": lambda t: b"\xef\xbb\xbf" + lines(t, ",", first="SEP=,\n").encode(),
    "sep of tabs": lambda t: lines(t, "\t", first='"sep=\t"\n').encode(),
    "sep of lines": lambda t: lines(t, "|", first="sep=|\r").encode(),
    "Capitals": lambda t: lines(t, ",", ("Audio", "Text", "Speaker", "Split")).encode(),
    "CAPITALS and blanks": lambda t: ("\ufeff" + lines(t, ";", (" AUDIO ", "TEXT\t", "Speaker ", " SPLIT"))).encode(),
    "blanks everywhere": lambda t: lines(t, " , ").encode(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_table_is_read_however_a_spreadsheet_wrote_it(way, table):  # noqa: F811
    tell_splits(table)
    write_bytes(table, WAYS[way](table))
    done = prepare(table.directory, "csv", "--table", "mine.csv")
    assert done.returncode == 0 and rejected(table.directory) == [], done.stderr
    assert "split by given" in done.stdout
    assert texts(table.directory) == {row[1] for row in table.rows}
    assert {u.speaker for u in table.utterances("train")} == {row[2] for row in table.rows}


def test_rows_are_counted_from_the_line_that_names_the_separator(table):  # noqa: F811
    table.rows[5][1] = ""
    write_bytes(table, lines(table, ";", first="sep=;\r\n").encode())
    assert prepare(table.directory, "csv", "--table", "mine.csv", *ALL).returncode == 0
    assert [row["row"] for row in rejected(table.directory)] == [8]


@pytest.mark.parametrize(
    "head, flags, said",
    [
        (("audio", "AUDIO", "Text"), (), ""),
        (("Audio", "AUDIO", "Text"), (), "2 columns 'audio'"),
        (("Clip", "note", "Words"), ("--audio_column", "clip", "--text_column", " WORDS "), ""),
        (("clip", "Clip", "Words"), ("--audio_column", "Clip", "--text_column", "words"), "12 missing audio"),
        (("Audio", "note", "Text"), ("--speaker_column", "WHO"), "no column 'WHO'"),
    ],
)
def test_an_exact_name_wins_and_two_that_differ_by_case_are_asked_about(head, flags, said, table):  # noqa: F811
    table.rows[:] = [[row[0], f"x{row[0]}", row[1]] for row in table.rows]
    write_bytes(table, lines(table, ",", head).encode())
    done = prepare(table.directory, "csv", "--table", "mine.csv", "--split_by", "utterance", *flags)
    assert (done.returncode == 0) == (not said) and said in done.stderr, done.stderr


@pytest.mark.parametrize("way", ["without a mark", "odd", "surrogate"])
def test_a_table_that_is_no_whole_utf16_is_refused_in_a_sentence(way, table):  # noqa: F811
    whole = lines(table, "\t").encode("utf-16-le")
    contents = {
        "without a mark": (whole, "looks like UTF-16 without a byte order mark"),
        "odd": (b"\xff\xfe" + whole + b"x", "starts as UTF-16"),
        "surrogate": (b"\xff\xfe" + whole + "\ud800x".encode("utf-16-le", "surrogatepass"), "starts as UTF-16"),
    }
    content, said = contents[way]
    write_bytes(table, content)
    done = prepare(table.directory, "csv", "--table", "mine.csv")
    assert done.returncode == 3 and said in done.stderr and "Save it as UTF-8" in done.stderr, done.stderr
    assert not table.output.exists()


def test_transcripts_in_utf16_are_read_and_a_broken_one_is_left_out(tmp_path):
    for number in range(6):
        write_sentence(tmp_path / "corpus" / f"{number}.wav", number)
        (tmp_path / "corpus" / f"{number}.txt").write_text(sentence(number), encoding="utf-16")
    (tmp_path / "corpus" / "3.txt").write_bytes(b"\xff\xfe\x00")
    assert prepare(tmp_path, "folder", *ALL).returncode == 0
    assert [(row["file"], row["kind"]) for row in rejected(tmp_path)] == [("3.txt", "no transcript")]
    assert texts(tmp_path) == {sentence(number) for number in (0, 1, 2, 4, 5)}


def test_an_id_of_ljspeech_may_be_a_path(tmp_path):
    names = ("wavs/a0.wav", "wavs/a1", "a2", "a3.wav", "more/a4", "wavs/a5")
    for number, name in enumerate(names):
        folder = tmp_path / "corpus" / ("" if "/" in name else "wavs")
        write_sentence(folder / f"{name.removesuffix('.wav')}.wav", number)
    write_sentence(tmp_path / "corpus" / "wavs" / "wavs" / "a5.wav", 50)  # ids first refer to names in wavs/
    write_table(tmp_path / "corpus" / "metadata.csv", (), [(n, sentence(i)) for i, n in enumerate(names)], "|")
    done = prepare(tmp_path, "ljspeech")
    assert done.returncode == 0 and rejected(tmp_path) == [], done.stderr
    listed = [json.loads(line) for path in (tmp_path / "out").glob("t*.jsonl") for line in path.open(encoding="utf-8")]
    assert not [row for row in listed if row["text"] == sentence(5) and "wavs/wavs" not in row["audio_filepath"]]
    write_table(tmp_path / "corpus" / "metadata.csv", (), [("wavs/b0.wav", "एक"), ("/", "दोन"), ("b1", "तीन")], "|")
    done = prepare(tmp_path, "ljspeech", "--force")
    assert done.returncode == 3 and "corpus/wavs/b0.wav cannot be read" in done.stderr
    assert "corpus/wavs/b1.wav" in rejected(tmp_path)[2]["reason"]


# Rows split by a line break


def write_common_voice(folder: Path, rows: list[tuple[object, ...]]) -> None:
    """Write Common Voice with these rows as train.tsv, quoted where necessary, as pandas does."""
    for number in range(6):
        write_sentence(folder / "clips" / f"{number}.mp3", number, 32_000)
    with open(folder / "train.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([CV_HEAD, *rows])


def cv_rows(**spoilt: str) -> list[tuple[object, ...]]:
    texts = {f"t{number}": sentence(number) for number in range(6)} | spoilt
    return [(f"s{n}", f"{n}.mp3", f"x{n}", texts[f"t{n}"], "", 2, 0, "twenties") for n in range(6)]


SPLIT_FLAGS = ("--split_by", "utterance", "--valid_share", "0", "--test_share", "0", "--table", "train.tsv")


def test_a_sentence_over_several_lines_is_read_as_pandas_wrote_it(tmp_path):
    write_common_voice(
        tmp_path / "corpus", cv_rows(t1="एक\nदोन", t2='"हय," म्हणालो\n\n"ना"\nम्हणाली', t3="तीन\r\nचार", t5='घर\n"बरें"')
    )
    done = prepare(tmp_path, "common_voice", *SPLIT_FLAGS)
    assert done.returncode == 0 and rejected(tmp_path) == [], done.stderr
    assert texts(tmp_path) == {
        sentence(0), "एक दोन", '"हय," म्हणालो "ना" म्हणाली', "तीन चार", sentence(4), 'घर "बरें"',
    }  # fmt: skip


def test_a_row_of_which_it_cannot_be_told_where_it_ends_is_left_out_with_both_rows_named(tmp_path):
    rows = cv_rows()
    rows[2] = (*rows[2][:3], '"' + str(rows[2][3]))  # ends early: does the following row belong to it?
    rows[3] = (*rows[3][:3], str(rows[3][3]) + '"', *rows[3][4:])
    write_common_voice(tmp_path / "corpus", [])
    write_table(tmp_path / "corpus" / "train.tsv", CV_HEAD, rows)
    checked(prepare(tmp_path, "common_voice", *SPLIT_FLAGS, *ALL))
    (row,) = rejected(tmp_path)
    assert row["row"] == 4 and "it opens a quote that row 5 closes" in row["reason"], row
    assert len(texts(tmp_path)) == 5


def test_marks_that_do_not_come_in_pairs_stay_characters(tmp_path):
    write_common_voice(tmp_path / "corpus", [])
    spoilt = {"t0": '"एक', "t1": 'दोन"', "t2": '"तीन" म्हणून', "t3": '"', "t4": '""', "t5": '"चार'}
    rows = cv_rows(**{name: f"{text} {number}" for number, (name, text) in enumerate(spoilt.items())})
    rows[5] = rows[5][:4]  # a short row opens a quotation that never closes
    write_table(tmp_path / "corpus" / "train.tsv", CV_HEAD, rows)
    done = prepare(tmp_path, "common_voice", *SPLIT_FLAGS)
    assert done.returncode == 0 and rejected(tmp_path) == [], done.stderr
    assert texts(tmp_path) == {str(row[3]) for row in rows}


CELLS = st.text('a" \n', max_size=6)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS, st.just("z")), min_size=1, max_size=6)


def as_records(lines: list[str]) -> list[Record]:
    return [Record(row, tuple("abcd"), tuple(line.split("\t"))) for row, line in enumerate(lines, 1) if line.strip()]


def words(cells: tuple[str, ...]) -> list[list[str]]:
    """Return the words of the cells without quotation marks, which a cell that is not split keeps."""
    return [cell.replace('"', "").split() for cell in cells]


@given(ROWS)
def test_what_a_writer_of_csv_has_torn_is_whole_again(rows):
    file = io.StringIO()
    csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)
    found = list(mend_rows(as_records(file.getvalue().split("\n"))))
    assert [words(record.cells) for record in found] == [words(row) for row in rows]


@given(ROWS)
def test_rows_that_are_whole_stay_as_they_are_whatever_marks_are_in_them(rows):
    records = as_records(["\t".join(row).replace("\n", " ") for row in rows])
    assert list(mend_rows(records)) == records


def test_marks_without_an_end_take_no_time():
    record = Record(1, tuple("abcd"), ("x", '"""' + "a" * 100_000))
    started = time.process_time()
    assert len(list(mend_rows([record] * 300))) == 300
    assert time.process_time() - started < 60


def test_columns_of_parquet_too_are_found_in_any_case(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    (tmp_path / "corpus").mkdir()
    rows = {
        "Audio": [{"bytes": sound_bytes(number), "path": None} for number in range(6)],
        "Words": [sentence(number) for number in range(6)],
        "Client_ID": [f"s{number}" for number in range(6)],
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "corpus" / "train-0.parquet")
    done = prepare(tmp_path, "huggingface", "--text_column", "words")
    assert done.returncode == 0 and "by speaker" in done.stdout, done.stderr
    assert texts(tmp_path) == set(rows["Words"])
