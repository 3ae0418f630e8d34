"""prepare_data.py: rejected utterances, invalid input, splits, and leaks between splits."""

import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from konkanivani.cli.prepare import Preparation, prepare_corpus
from konkanivani.corpora.tables import Shares, draw_splits, split_named
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import KonkaniVaniError
from tests.conftest import checked, run_in_process
from tests.corpora.test_formats import (
    MINIATURES,
    SCRIPT,
    SPLITS,
    add_member,
    audio_bytes,
    kaldi,
    sentence,
    write_sentence,
    write_table,
)
from tests.fork_server import DEV_NULL, ROOT, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT

COLUMNS = ("audio", "text", "speaker", "split")


@dataclass(frozen=True)
class Table:
    """Corpus of twelve WAV files and a CSV with these rows (audio, text, speaker, split), which tests damage."""

    directory: Path
    rows: list[list[str]]

    @property
    def corpus(self) -> Path:
        return self.directory / "corpus"

    @property
    def output(self) -> Path:
        return self.directory / "out"

    def prepare(self, *flags: str) -> subprocess.CompletedProcess[str]:
        with open(self.corpus / "all.csv", "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *self.rows])
        return prepare(self.directory, "csv", "--table", "all.csv", *flags)

    def utterances(self, split: str) -> list:
        return list(read_manifest(self.output / f"{split}.jsonl", (str(self.directory),)))

    def report(self) -> dict:
        return json.loads((self.output / "report.json").read_text())


def prepare(directory: Path, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    done = run_in_process(SCRIPT, "--format", name, "--source", "corpus", "--output", "out", *flags, cwd=directory)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert [*directory.rglob("*.partial")] == []
    return done


def read_rejected(directory: Path) -> list[dict]:
    lines = (directory / "out" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def twelve_recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("twelve_recordings")
    for number in range(12):
        write_sentence(directory / f"{number}.wav", number)
    return directory


@pytest.fixture
def table(tmp_path: Path, twelve_recordings: Path) -> Table:
    shutil.copytree(twelve_recordings, tmp_path / "corpus")
    return Table(tmp_path, [[f"{number}.wav", sentence(number), f"s{number % 4}", ""] for number in range(12)])


# Rejected utterances

NO_REJECTION_LIMIT = ("--max_rejected", "100%")


def _replace_audio(write: Callable[[Path], object]) -> Callable[[Table], None]:
    def damage(table: Table) -> None:
        table.rows[5][0] = "damaged.wav"
        write(table.corpus / "damaged.wav")

    return damage


def _set_cell(column: str, value: str) -> Callable[[Table], None]:
    return lambda table: table.rows[5].__setitem__(COLUMNS.index(column), value)


def _use_absolute_path(table: Table) -> None:
    write_sentence(table.directory / "elsewhere" / "0.wav", 40)
    table.rows[5][0] = str(table.directory / "elsewhere" / "0.wav")


def _link_outside(table: Table) -> None:
    _use_absolute_path(table)
    (table.corpus / "inner").symlink_to(table.directory / "elsewhere")
    table.rows[5][0] = "inner/0.wav"


UNUSABLE_ROWS: dict[str, tuple[Callable[[Table], object], str, str]] = {
    "missing": (_set_cell("audio", "nowhere.wav"), "missing audio", "does not exist"),
    "no path": (_set_cell("audio", ""), "broken row", "column audio is empty"),
    "text for audio": (
        _replace_audio(lambda path: path.write_text("x")),
        "unusable audio",
        "cannot be opened as audio",
    ),
    "FIFO": (_replace_audio(os.mkfifo), "unusable audio", "it is not a file"),
    "device": (_replace_audio(lambda path: path.symlink_to("/dev/zero")), "outside the corpus", "--audio_root"),
    "link to itself": (_replace_audio(lambda path: path.symlink_to(path.name)), "", "damaged.wav"),
    "long name": (_set_cell("audio", "x" * 300 + ".wav"), "missing audio", "too long"),
    "parent": (_set_cell("audio", "../out.wav"), "outside the corpus", "--audio_root"),
    "absolute": (_use_absolute_path, "outside the corpus", "--audio_root"),
    "link": (_link_outside, "outside the corpus", "--audio_root"),
    "empty text": (_set_cell("text", "  "), "empty transcript", "transcript is empty"),
    "no word": (_set_cell("text", "। ! –"), "empty transcript", "transcript is empty"),
    "text not UTF-8": (_set_cell("text", "caf\udce9"), "not UTF-8", "its text is not UTF-8"),
    "path not UTF-8": (_set_cell("audio", "caf\udce9.wav"), "not UTF-8", "its path is not UTF-8"),
    "bell": (_set_cell("text", "एक\a दोन"), "control character", "U+0007"),
    "line break": (_set_cell("text", "एक\nदोन"), "control character", "U+000A"),
    "override in a speaker": (_set_cell("speaker", "s\u202e"), "control character", "U+202E"),
    "isolate": (_set_cell("speaker", "s\u2066"), "control character", "its speaker contains the character U+2066"),
    "mark in a path": (_set_cell("audio", "0\u200f.wav"), "control character", "U+200F"),
    "escape in a path": (_set_cell("audio", "\x1b[2J.wav"), "control character", "U+001B"),
    "duplicate": (_set_cell("audio", "0.wav"), "duplicate", "the same audio as all.csv, row 2"),
    "unknown split": (_set_cell("split", "later"), "no split", "'later'"),
    "long text": (_set_cell("text", "एक " * 10_000), "long transcript", "29999 characters"),
    "extra cell": (lambda table: table.rows[5].append("x"), "broken row", "5 cells, but the header has 4"),
}


@pytest.mark.parametrize("name", UNUSABLE_ROWS)
def test_unusable_row_is_skipped_with_its_reason(name, table):
    damage, kind, message = UNUSABLE_ROWS[name]
    damage(table)
    done = checked(table.prepare(*NO_REJECTION_LIMIT))
    (row,) = read_rejected(table.directory)
    assert (row["file"], row["row"]) == ("all.csv", 7)
    assert message in row["reason"] and kind in row["kind"], row
    assert f"skipped: 1 ({row['kind']})" in done.stdout
    assert table.report()["refused"] == [{"kind": row["kind"], "rows": 1}]
    assert sum(len(table.utterances(split)) for split in SPLITS) == 11
    assert row["reason"].isprintable() and "\x1b" not in done.stdout


def test_devanagari_joiners_are_kept(table):
    table.rows[5][1] = "र्\u200dय क्\u200cष"
    assert table.prepare().returncode == 0
    assert read_rejected(table.directory) == []
    assert "र्\u200dय क्\u200cष" in {u.text for split in SPLITS for u in table.utterances(split)}


def test_audio_outside_source_is_read_with_audio_root(table):
    _use_absolute_path(table)
    done = table.prepare("--audio_root", ".")
    assert done.returncode == 0 and read_rejected(table.directory) == [], done.stderr


def test_too_many_rejected_rows_exit_with_3_and_are_listed(table):
    for number in (3, 5):
        table.rows[number][1] = ""
    done = table.prepare()
    assert done.returncode == 3
    assert "16.7% of the rows" in done.stderr and "2 empty transcript" in done.stderr and "row 5" in done.stderr
    assert len(read_rejected(table.directory)) == 2
    assert sorted(path.name for path in table.output.iterdir()) == ["rejected.jsonl"]
    assert table.prepare("--max_rejected", "16%").returncode == 3
    assert table.prepare("--max_rejected", "0.17").returncode == 0
    assert sorted(path.name for path in table.output.iterdir()) == [
        "rejected.jsonl", "report.json", "test.jsonl", "train.jsonl", "valid.jsonl",
    ]  # fmt: skip


def test_kaldi_commands_are_not_run(tmp_path):
    kaldi(tmp_path / "corpus")
    marker = tmp_path / "marker"
    scp = tmp_path / "corpus" / "train" / "wav.scp"
    os.remove(tmp_path / "corpus" / "train" / "segments")
    names = [line.split()[0] for line in (scp.parent / "text").read_text().splitlines()]
    wav = tmp_path / "corpus" / "wavs" / "dev.flac"
    values = [f"touch {marker}; cat {wav} |", f"|touch {marker}", f"{wav}.ark:17", "-", *[str(wav)] * 4]
    write_table(scp, (), zip(names, values, strict=True), " ")
    checked(prepare(tmp_path, "kaldi", *NO_REJECTION_LIMIT))
    assert not marker.exists()
    commands = [row for row in read_rejected(tmp_path) if row["kind"] == "command or archive"]
    assert [(row["file"], row["row"]) for row in commands] == [("train/wav.scp", n) for n in (1, 2, 3, 4)]
    assert "commands are not run" in commands[0]["reason"] and "archive" in commands[2]["reason"]
    assert [row["kind"] for row in read_rejected(tmp_path)].count("duplicate") == 3
    assert prepare(tmp_path, "kaldi", "--force").returncode == 3


SPANS = {"beyond the end": "0 9999", "reversed": "1.0 0.5", "negative start": "-0.5 1.0", "empty": "1.0 1.0"}
SPANS |= {"NaN": "nan 1.0", "infinite": "0.0 inf"}
SEGMENTS = {name: (written, "span") for name, written in SPANS.items()}
SEGMENTS |= {
    "not numbers": ("one two", "broken row"),
    "one time": ("1.0", "broken row"),
    "no times": ("", "broken row"),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_invalid_kaldi_segment_is_skipped(name, tmp_path):
    kaldi(tmp_path / "corpus")
    times, kind = SEGMENTS[name]
    path = tmp_path / "corpus" / "dev" / "segments"
    lines = path.read_text().splitlines()
    lines[1] = " ".join([*lines[1].split()[: 2 if times else 1], times])
    path.write_text("\n".join(lines) + "\n")
    assert prepare(tmp_path, "kaldi", *NO_REJECTION_LIMIT).returncode == 0
    (row,) = read_rejected(tmp_path)
    assert row["kind"] == kind, row


def test_recording_shorter_than_stated_duration_is_skipped(tmp_path):
    rows = []
    for number in range(3):
        spoken = write_sentence(tmp_path / "corpus" / f"{number}.wav", number)
        stated = 99.0 if number == 1 else spoken.seconds
        rows.append((json.dumps({"audio_filepath": f"{number}.wav", "duration": stated, "text": spoken.text}),))
    write_table(tmp_path / "corpus" / "train.json", (), rows)
    done = prepare(tmp_path, "nemo", *NO_REJECTION_LIMIT)
    assert done.returncode == 0 and [row["row"] for row in read_rejected(tmp_path)] == [2], done.stderr
    assert "its table states 99.00 s" in read_rejected(tmp_path)[0]["reason"]


NEMO_LINES = ("{", "[1]", '{"audio_filepath": 3}', '{"text": "एक"}', "[" * 100_000, '"' * 50_000)
NEMO_LINES += ('{"audio_filepath": ""}',)


def test_invalid_nemo_manifest_lines_are_skipped(tmp_path):
    spoken = write_sentence(tmp_path / "corpus" / "0.wav", 0)
    good = json.dumps({"audio_filepath": "0.wav", "duration": spoken.seconds, "text": spoken.text})
    write_table(tmp_path / "corpus" / "train.json", (), [(line,) for line in (good, *NEMO_LINES)])
    assert prepare(tmp_path, "nemo", *NO_REJECTION_LIMIT).returncode == 0
    assert [row["row"] for row in read_rejected(tmp_path)] == [2, 3, 4, 5, 6, 7, 8]


def test_usable_tar_members_are_prepared_and_others_rejected(tmp_path):
    (tmp_path / "corpus").mkdir()
    with tarfile.open(tmp_path / "corpus" / "train-0.tar", "w") as tar:
        for name, content in (
            ("../../evil.flac", audio_bytes(0)),  # the path is used only as an id, no file is written there
            ("../../evil.txt", sentence(0).encode()),
            ("mute.flac", audio_bytes(1)),
            ("empty.wav", b""),
            ("empty.txt", sentence(2).encode()),
            ("latin.flac", audio_bytes(3)),
            ("latin.txt", b"caf\xe9"),
            ("bad.flac", audio_bytes(4)),
            ("bad.json", b"{"),
            ("__meta__.json", b"{}"),
        ):
            add_member(tar, name, content)
        link = tarfile.TarInfo("link.wav")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    checked(prepare(tmp_path, "nemo", *NO_REJECTION_LIMIT))
    assert Counter(row["kind"] for row in read_rejected(tmp_path)) == Counter(
        {"no transcript": 1, "unusable audio": 1, "not UTF-8": 1, "broken row": 1}
    )
    assert [u.text for u in read_manifest(tmp_path / "out" / "train.jsonl", (str(tmp_path),))] == [sentence(0)]


def damage_random_bytes(path: Path, generator: random.Random) -> None:
    """Flip, delete, repeat or insert bytes at a random position of a file."""
    content = bytearray(path.read_bytes())
    place = generator.randrange(len(content))
    added = (b"\0", b'"', b"\t", b"\n", b"|", b"../", b"\xff", b"{", b"null", b"NaN", b"1e999", b"\\ud800", b"9" * 5000)
    kind_of_damage = generator.randrange(5)
    if kind_of_damage == 0:
        content[place] ^= 1 << generator.randrange(8)
    elif kind_of_damage == 1:
        del content[place:]
    elif kind_of_damage == 2:
        content[place:place] = content[:place]
    elif kind_of_damage == 3:
        content[place : place + 64] = content[:64]
    else:
        content[place:place] = generator.choice(added)
    path.write_bytes(content)


@pytest.mark.parametrize("name", MINIATURES)
def test_randomly_damaged_corpus_is_prepared_or_rejected_in_one_line(name, tmp_path):
    build, given = MINIATURES[name]
    flags = {flag.removeprefix("--"): value for flag, value in zip(given[::2], given[1::2], strict=True)}
    flags.pop("source", None)
    build(tmp_path / "sound")
    generator, rejected = random.Random(name), 0
    for attempt in range(15):
        corpus, output = tmp_path / f"corpus{attempt}", tmp_path / f"out{attempt}"
        shutil.copytree(tmp_path / "sound", corpus)
        files = sorted(path for path in corpus.rglob("*") if path.is_file())
        tables = [path for path in files if path.suffix not in (".wav", ".flac", ".mp3", ".ogg")]
        damage_random_bytes(generator.choice(tables if tables and attempt % 3 else files), generator)
        source = corpus / "cv-corpus-21.0-2025-03-14" if name == "common_voice" else corpus
        try:
            prepare_corpus(Preparation(name.split()[0], source, output, **flags))
        except KonkaniVaniError as error:
            rejected += 1
            assert "\n" not in str(error)
            assert not output.exists() or [path.name for path in output.iterdir()] == ["rejected.jsonl"]
        shutil.rmtree(corpus)
    assert 0 < rejected <= 15


# Invalid input


def test_compressed_and_broken_tars_exit_with_3(tmp_path):
    (tmp_path / "corpus").mkdir()
    for name, mode, message in (("train-0.tar.gz", "w:gz", "compressed"), ("train-0.tar", "w:xz", "compressed")):
        with tarfile.open(tmp_path / "corpus" / name, mode) as tar:
            add_member(tar, "a.flac", audio_bytes(0))
        done = prepare(tmp_path, "nemo")
        assert done.returncode == 3 and message in done.stderr and name in done.stderr, done.stderr
        os.remove(tmp_path / "corpus" / name)
        assert not (tmp_path / "out").exists()
    (tmp_path / "corpus" / "train-0.tar").write_bytes(b"not a tar" * 1000)
    assert prepare(tmp_path, "nemo").returncode == 3
    os.remove(tmp_path / "corpus" / "train-0.tar")
    os.mkfifo(tmp_path / "corpus" / "train-0.tar")
    assert prepare(tmp_path, "nemo").returncode == 3


TABLES = ("train.tsv", "metadata.csv", "wav.scp", "text", "a.json", "line_index.tsv", "state.json", "x.parquet")


@pytest.mark.parametrize(
    "name", ["common_voice", "openslr", "kaldi", "nemo", "indicvoices", "ljspeech", "huggingface", "folder", "csv"]
)
def test_folder_of_other_format_is_rejected(name, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    codes = [prepare(tmp_path, name).returncode]
    (corpus / "holiday.jpg").write_bytes(b"\xff\xd8\xff")
    codes.append(prepare(tmp_path, name).returncode)
    for damaged in TABLES:
        os.mkfifo(corpus / damaged)
    (corpus / "clips").mkdir()
    codes.append(prepare(tmp_path, name).returncode)
    for damaged in TABLES:
        os.remove(corpus / damaged)
        (corpus / damaged).write_bytes(bytes(range(256)) * 3)
    codes.append(prepare(tmp_path, name).returncode)
    assert set(codes) == {2 if name == "csv" else 3}
    assert not [*tmp_path.rglob("train.jsonl")]


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--format", "flac"), "common_voice"),
        (("--format", "csv", "--source", "nowhere"), "--source nowhere is not a folder"),
        (("--valid_share", "a lot"), "--valid_share a lot"),
        (("--valid_share", "60%", "--test_share", "0.4"), "leave no training data"),
        (("--max_rejected", "200%"), "--max_rejected 200%"),
        (("--max_rejected", "nan"), "--max_rejected nan"),
        (("--text_column", "words"), "no column 'words'; its columns are 'audio', 'speaker'"),
        (("--split_by", "given"), "--split_by given is not possible"),
        (("--output", "corpus"), "is inside --source"),
        (("--tabel", "x"), "--table"),
    ],
)
def test_invalid_flags_exit_with_2(flags, message, table):
    done = table.prepare(*flags)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not [*table.directory.rglob("train.jsonl")]


def test_existing_manifests_are_replaced_only_with_force(table):
    table.output.mkdir()
    for name in ("train.jsonl", "test.jsonl", "mine.txt"):
        (table.output / name).write_text("mine")
    done = table.prepare("--test_share", "0")
    assert done.returncode == 2 and "--force" in done.stderr
    assert (table.output / "train.jsonl").read_text() == "mine" and len([*table.output.iterdir()]) == 3
    assert table.prepare("--test_share", "0", "--force").returncode == 0
    assert len(table.utterances("train")) > 5 and not (table.output / "test.jsonl").exists()
    assert (table.output / "mine.txt").read_text() == "mine"


def test_unwritable_output_exits_with_6(table):
    (table.directory / "file").write_text("")
    done = table.prepare("--output", "file/out")
    assert done.returncode == 6 and "--output" in done.stderr, done.stderr


def test_full_disk_exits_with_6_and_keeps_previous_output(table):
    assert table.prepare().returncode == 0
    before = {path.name: path.read_bytes() for path in table.output.iterdir()}
    words = ("--format", "csv", "--source", "corpus", "--output", "out", "--table", "all.csv", "--force")
    small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (512, 512))  # limits the size of each file
    done = fork_server().run(ROOT / SCRIPT, *words, cwd=table.directory, before=small)
    assert done.returncode == 6 and "Free disk space there" in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )
    assert {path.name: path.read_bytes() for path in table.output.iterdir()} == before


def kill_at_audit_event(event: str) -> None:
    """Kill the process at the first audit event (PEP 578), `open` or `os.rename`, in the partial output folder."""
    sys.addaudithook(
        lambda what, where: what == event and ".partial" in str(where[0]) and os.kill(os.getpid(), signal.SIGKILL)
    )


@pytest.mark.parametrize("moment", ["open", "os.rename"])
def test_killed_preparation_leaves_no_manifest_and_rerun_cleans_up(moment, tmp_path):
    rows = [(f"s-{number:06d}", sentence(number)) for number in range(90)]
    (tmp_path / "corpus" / "train").mkdir(parents=True)
    write_sentence(tmp_path / "corpus" / "train" / "0.wav", 0)
    for name, values in (("text", rows), ("wav.scp", [(name, "0.wav") for name, _ in rows])):
        write_table(tmp_path / "corpus" / "train" / name, (), values, " ")
    words = ("--format", "kaldi", "--source", "corpus", "--output", "out", *NO_REJECTION_LIMIT)
    killed = fork_server().start(
        Job(ROOT / SCRIPT, words, DEV_NULL, cwd=tmp_path, before=partial(kill_at_audit_event, moment))
    )
    assert killed.wait(PROCESS_TIMEOUT) == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".prepare.partial"]
    done = prepare(tmp_path, "kaldi", *NO_REJECTION_LIMIT)
    assert done.returncode == 0 and len(read_rejected(tmp_path)) == 89, done.stderr


# Splits


def test_split_depends_on_seed_and_names_but_not_on_row_order(table):
    def draw(*flags: str) -> dict[str, str]:
        checked(table.prepare("--force", "--valid_share", "20%", "--test_share", "20%", *flags))
        return {utterance.text: split for split in SPLITS for utterance in table.utterances(split)}

    for kind in ("speaker", "utterance"):
        first = draw("--split_by", kind)
        random.Random(1).shuffle(table.rows)
        assert draw("--split_by", kind) == first
        assert draw("--split_by", kind, "--seed", "7") != first
    moved = table.directory.with_name(table.directory.name + "-moved")
    table.directory.rename(moved)
    again = Table(moved, table.rows)
    checked(again.prepare("--force", "--valid_share", "20%", "--test_share", "20%", "--split_by", "utterance"))
    assert {u.text: split for split in SPLITS for u in again.utterances(split)} == first


def test_speakers_are_not_split_and_unknown_ones_go_to_train(table):
    for row in table.rows[:2]:
        row[2] = ""
    assert table.prepare().returncode == 0
    speakers = [{utterance.speaker for utterance in table.utterances(split)} for split in SPLITS]
    assert "" in speakers[0] and not speakers[0] & speakers[1] and not speakers[1] & speakers[2]
    assert sum(len(item - {""}) for item in speakers) == 4


def test_too_few_speakers_exit_with_3_and_suggest_flags(table):
    for number, row in enumerate(table.rows):
        row[2] = f"s{number % 2}"
    done = table.prepare()
    assert done.returncode == 3 and "2 speakers, too few for 3 splits" in done.stderr, done.stderr
    assert "--split_by utterance" in done.stderr and "--test_share 0" in done.stderr
    assert table.prepare("--test_share", "0").returncode == 0


UNITS = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(1, 10**6), min_size=3, max_size=60)


@given(UNITS, st.sampled_from([0.0, 0.01, 0.05, 0.3]), st.sampled_from([0.0, 0.05, 0.2, 0.4]), st.integers(0, 3))
def test_drawn_splits_are_deterministic_and_close_to_their_shares(lengths, valid_share, test_share, seed):
    shares = Shares(valid_share, test_share)
    valid, test = draw_splits(lengths, shares, seed)
    assert (valid, test) == draw_splits(dict(reversed(lengths.items())), shares, seed)
    assert not valid & test and len(valid | test) < len(lengths)
    total, longest = sum(lengths.values()), max(lengths.values())
    for names, share in ((valid, valid_share), (test, test_share)):
        assert bool(names) == (share > 0)
        assert sum(lengths[name] for name in names) <= share * total + longest


def test_split_shares_are_accurate_with_many_speakers():
    lengths = {f"s{number}": 1000 + 37 * (number % 50) for number in range(200)}
    for names in draw_splits(lengths, Shares(0.05, 0.05), 0):
        drawn = sum(lengths[name] for name in names)
        assert drawn / sum(lengths.values()) == pytest.approx(0.05, abs=0.003)


def test_common_split_names_are_recognized():
    named = {name: split_named(name) for name in ("train-00000", "dev", "validation", "test.tsv", "train_clean", "Val")}
    assert list(named.values()) == ["train", "valid", "valid", "test", "train", "valid"]
    assert {split_named(name) for name in ("validated.tsv", "trainer", "audio", "contest", "", "1")} == {""}


# Leaks


def leak_counts(table: Table) -> dict[str, int]:
    return {leak["what"]: leak["count"] for leak in table.report()["leaks"]}


def test_leaks_between_splits_are_counted_and_reported(table):
    for number, row in enumerate(table.rows):
        row[2:] = [f"s{number}", "train" if number < 8 else "dev" if number < 10 else "test"]
    done = table.prepare()
    assert done.returncode == 0 and leak_counts(table) == {"audio": 0, "speaker": 0, "sentence": 0}
    assert "in two splits" not in done.stdout
    shutil.copy(table.corpus / "0.wav", table.corpus / "8.wav")  # the same bytes with another name
    same_size = bytearray((table.corpus / "1.wav").read_bytes())
    same_size[-2] ^= 1
    (table.corpus / "9.wav").write_bytes(same_size)  # equal size, different bytes
    table.rows[10][2] = "s3"
    table.rows[11][1] = f" {table.rows[4][1]}! "
    done = table.prepare("--force")
    assert done.returncode == 0 and leak_counts(table) == {"audio": 1, "speaker": 1, "sentence": 1}
    assert "1 × the same audio, such as\n    all.csv, row 2 (train) and all.csv, row 10 (valid)" in done.stdout
    assert "the same speaker, such as\n    s3: test (all.csv, row 12); train (all.csv, row 5)" in done.stdout
    assert "the same sentence" in done.stdout


def test_segments_of_one_file_leak_only_if_they_overlap(tmp_path):
    kaldi(tmp_path / "corpus")
    for split in ("dev", "test"):
        shutil.copy(tmp_path / "corpus" / "wavs" / "train.flac", tmp_path / "corpus" / "wavs" / f"{split}.flac")
    lines = {split: (tmp_path / "corpus" / split / "segments").read_text().splitlines() for split in ("dev", "test")}
    begin = float((tmp_path / "corpus" / "train" / "segments").read_text().splitlines()[-1].split()[2])
    for split, spans in (
        ("dev", (("0.0", "0.3"), ("0.3", "0.6"))),
        ("test", ((begin, begin + 0.3), (begin + 0.3, begin + 0.6))),
    ):
        rows = [(*line.split()[:2], *span) for line, span in zip(lines[split], spans, strict=True)]
        write_table(tmp_path / "corpus" / split / "segments", (), rows, " ")
    assert prepare(tmp_path, "kaldi").returncode == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["leaks"][0]["count"] == 4
    train = (tmp_path / "corpus" / "train" / "segments").read_text().splitlines()
    names = (tmp_path / "corpus" / "train" / "text").read_text().splitlines()
    write_table(tmp_path / "corpus" / "train" / "segments", (), [line.split() for line in train[3:5]], " ")
    (tmp_path / "corpus" / "train" / "text").write_text("\n".join(names[3:5]) + "\n")
    assert prepare(tmp_path, "kaldi", "--force").returncode == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["leaks"][0]["count"] == 0, report["leaks"]
