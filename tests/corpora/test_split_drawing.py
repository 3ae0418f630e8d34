"""Missing splits are drawn from the training split; the printed command names folder and run."""

import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest

from konkanivani.cli.prepare import Preparation, describe, prepare_corpus
from tests.cli.test_prepare_data import Table, prepare, table, twelve_recordings  # noqa: F401 - fixtures
from tests.conftest import checked
from tests.corpora.test_formats import SPLITS, openslr_mucs, sentence, webdataset, write_sentence


def read_texts(directory: Path, split: str, output: str = "out") -> list[str]:
    path = directory / output / f"{split}.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def assign_train_and_test(table: Table) -> None:  # noqa: F811
    """Assign nine utterances of s0, s1 and s2 to train, and three of s3 to test."""
    for number, row in enumerate(table.rows):
        row[2:] = [f"s{number // 3}", "train" if number < 9 else "test"]


@pytest.mark.parametrize("flags", [(), ("--split_by", "given")])
def test_valid_is_drawn_from_train_and_given_test_is_kept(flags, tmp_path):
    spoken = openslr_mucs(tmp_path / "corpus")
    done = checked(prepare(tmp_path, "openslr", *flags))
    assert "split by given; valid drawn from its training part, by utterance:" in done.stdout
    assert "--valid_manifest" in done.stdout and "--test_manifest" in done.stdout
    assert sorted(read_texts(tmp_path, "test")) == sorted(item.text for item in spoken if item.split == "test")
    trained, valid = read_texts(tmp_path, "train"), read_texts(tmp_path, "valid")
    assert valid and sorted(trained + valid) == sorted(item.text for item in spoken if item.split == "train")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["split_by"], report["drawn"], report["drawn_by"]) == ("given", ["valid"], "utterance")


def test_whole_speakers_are_drawn_by_share_and_seed(table):  # noqa: F811
    assign_train_and_test(table)
    speakers = {}
    for seed in map(str, range(2, 5)):
        done = table.prepare("--force", "--seed", seed, "--valid_share", "40%")
        assert done.returncode == 0 and "valid drawn from its training part, by speaker:" in done.stdout, done.stderr
        (speakers[seed],) = {u.speaker for u in table.utterances("valid")}
        assert speakers[seed] not in {u.speaker for u in table.utterances("train")}
        assert len(table.utterances("valid")) == 3 and {u.speaker for u in table.utterances("test")} == {"s3"}
    assert len(set(speakers.values())) > 1
    assert table.prepare("--force", "--valid_share", "60%").returncode == 0
    assert len(table.utterances("valid")) == 6


def test_utterances_are_drawn_if_train_has_a_single_speaker(table):  # noqa: F811
    assign_train_and_test(table)
    for row in table.rows[:9]:
        row[2] = "s0"
    done = table.prepare()
    assert done.returncode == 0 and "by utterance:" in done.stdout and "1 × the same speaker" in done.stdout
    assert len(table.utterances("valid")) == 1


def test_given_validation_split_is_kept(table):  # noqa: F811
    assign_train_and_test(table)
    for row in table.rows[9:]:
        row[3] = "dev"
    done = table.prepare()
    assert done.returncode == 0 and "drawn" not in done.stdout
    assert (len(table.utterances("train")), len(table.utterances("valid"))) == (9, 3)
    assert not (table.output / "test.jsonl").exists()


def test_train_only_corpus_gets_valid_and_test_splits(tmp_path):
    webdataset(tmp_path / "corpus")
    for path in (tmp_path / "corpus").iterdir():
        path.rename(path.with_name(path.name.replace("shard", "train")))
    done = prepare(tmp_path, "nemo")
    assert done.returncode == 0 and "valid and test drawn from its training part, by speaker:" in done.stdout, (
        done.stderr
    )
    assert (
        all(read_texts(tmp_path, split) for split in SPLITS) and sum(len(read_texts(tmp_path, s)) for s in SPLITS) == 12
    )
    done = prepare(tmp_path, "nemo", "--test_share", "0", "--force")
    assert "; valid drawn from its train" in done.stdout and read_texts(tmp_path, "test") == []


def test_missing_split_message_suggests_flags(table):  # noqa: F811
    assign_train_and_test(table)
    done = table.prepare("--valid_share", "0")
    assert (
        done.returncode == 0 and "There is no validation part. Run again with --valid_share 5% --force" in done.stdout
    )
    done = table.prepare("--valid_share", "5%", "--force")
    assert done.returncode == 0 and len(table.utterances("valid")) == 3
    for row in table.rows:
        row[3] = "test"
    done = table.prepare("--force")
    assert (
        done.returncode == 0
        and "The corpus has no training part. Run again with --split_by speaker or utterance" in done.stdout
    )
    assert "and --force" in done.stdout
    assert table.prepare("--split_by", "speaker", "--force").returncode == 0
    assert len(table.utterances("train")) == 6


# Output


def test_digest_speaker_names_are_shortened_only_on_stdout(table):  # noqa: F811
    names = [hashlib.sha512(bytes([number])).hexdigest() for number in range(3)]
    for number, row in enumerate(table.rows):
        row[2:] = [names[number % 3], "train" if number < 8 else "dev" if number < 10 else "test"]
    done = table.prepare()
    assert done.returncode == 0 and "3 × the same speaker, such as" in done.stdout
    assert f"    {names[0][:8]}…: train (all.csv, row 2); valid (all.csv, row 11)" in done.stdout
    assert not re.search("[0-9a-f]{9}", done.stdout.replace(str(table.directory), ""))
    assert {u.speaker for u in table.utterances("train")} == set(names)


OUTPUTS = {"data/a": "a", "data/b": "b", "data/kok v1": "kok-v1", "x/data": "x-data", "y/data": "y-data"}
OUTPUTS |= {"y/Prepared/": "y-Prepared", "कोंकणी": "कोंकणी", "z/..": "HERE", ".": "HERE", ".hidden.d": "hidden.d"}
OUTPUTS |= {"n/$(touch ran)": "touch-ran", "m/!!": "m", "m/" + "ळ" * 80: "ळ" * 30}


def test_printed_training_command_names_run_after_output_folder(tmp_path, monkeypatch):
    here = tmp_path / "HERE"
    for number in range(6):
        write_sentence(tmp_path / "corpus" / f"{number}.wav", number)
        (tmp_path / "corpus" / f"{number}.txt").write_text(sentence(number), encoding="utf-8")
    here.mkdir()
    monkeypatch.chdir(here)
    for output, name in OUTPUTS.items():
        task = Preparation(format="folder", source=Path("../corpus"), output=Path(output), force=True)
        words = shlex.split(describe(prepare_corpus(task), task.output).splitlines()[-1])
        assert words[words.index("--checkpoint_dir") + 1] == f"checkpoints/{name}"
        assert words[words.index("--run_name") + 1] == name
    assert not list(tmp_path.rglob("ran"))
