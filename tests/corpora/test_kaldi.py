"""Audio of Kaldi data folders: paths relative to the recipe, links, and commands in wav.scp."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_prepare_data import prepare, read_rejected
from tests.conftest import ROOT, checked, run_script
from tests.corpora.test_formats import SCRIPT, sentence, write_sentence, write_table


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe egs/x/s5 whose data/train/wav.scp has six paths relative to the recipe, in downloads/."""
    folder = tmp_path / "egs" / "x" / "s5"
    for number in range(6):
        write_sentence(folder / "downloads" / f"rec{number}.flac", number)
    data = folder / "data" / "train"
    data.mkdir(parents=True)
    write_table(data / "wav.scp", (), [(f"u{number}", f"downloads/rec{number}.flac") for number in range(6)], " ")
    write_table(data / "text", (), [(f"u{number}", sentence(number)) for number in range(6)], " ")
    return folder


def prepare_recipe(recipe: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--format", "kaldi", "--source", "data/train", "--output", "out", "--split_by", "utterance")
    done = run_script(SCRIPT, *arguments, *flags, cwd=recipe)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def prepared_audio(recipe: Path) -> set[str]:
    """Return the recordings in the manifests, relative to the recipe."""
    names = set()
    for path in (recipe / "out").glob("*.jsonl"):
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        names |= {str((path.parent / row["audio_filepath"]).resolve().relative_to(recipe.resolve())) for row in rows}
    return names


ALL_RECORDINGS = {f"downloads/rec{number}.flac" for number in range(6)}


@pytest.mark.parametrize("root", [".", "../..", "downloads"])
def test_relative_paths_resolve_against_recipe_with_audio_root(recipe, root):
    done = prepare_recipe(recipe, "--audio_root", root)
    assert done.returncode == 0 and prepared_audio(recipe) == ALL_RECORDINGS, done.stderr
    assert f"--audio_roots {(recipe / root).resolve()}" in done.stdout


def test_audio_above_source_is_rejected_and_message_names_audio_root(recipe):
    done = prepare_recipe(recipe)
    assert done.returncode == 3 and "6 outside the corpus" in done.stderr, done.stderr
    named = re.search(r"give --audio_root (\S+) to allow it", done.stderr)
    assert named and named.group(1) == str(recipe.resolve())
    assert [path.name for path in (recipe / "out").iterdir()] == ["rejected.jsonl"]
    assert prepare_recipe(recipe, "--audio_root", named.group(1)).returncode == 0
    assert prepared_audio(recipe) == ALL_RECORDINGS


def test_linked_audio_is_read_if_its_real_folder_is_audio_root(recipe, tmp_path):
    (tmp_path / "disk").mkdir()
    shutil.move(recipe / "downloads", tmp_path / "disk" / "corpus")
    (recipe / "downloads").symlink_to(tmp_path / "disk" / "corpus")
    done = prepare_recipe(recipe, "--audio_root", ".")
    assert done.returncode == 3 and f"--audio_root {tmp_path.resolve()} to allow it" in done.stderr, done.stderr
    assert prepare_recipe(recipe, "--audio_root", str(tmp_path / "disk")).returncode == 0


def test_search_order_is_data_folder_audio_root_then_parent_folders(recipe, tmp_path):
    places = (recipe / "data" / "train", tmp_path / "given", recipe)
    for place, number in zip(places, (20, 30, 40), strict=True):
        for name in range(6):
            write_sentence(place / "downloads" / f"rec{name}.flac", number + name)
    for place, root in zip(places, (tmp_path, tmp_path / "given", tmp_path), strict=True):
        checked(prepare_recipe(recipe, "--force", "--audio_root", str(root)))
        paths = {
            str((recipe / "out" / json.loads(line)["audio_filepath"]).resolve().parent.parent)
            for line in (recipe / "out" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        }
        assert paths == {str(place.resolve())}
        shutil.rmtree(place / "downloads")


def test_missing_path_message_lists_searched_folders(recipe):
    shutil.rmtree(recipe / "downloads")
    done = prepare_recipe(recipe, "--audio_root", ".")
    assert done.returncode == 3 and "wav.scp's downloads/rec0.flac is not in data/train" in done.stderr
    assert "--audio_root or a folder above" in done.stderr


def test_kaldi_backup_folder_is_ignored(recipe):
    shutil.copytree(recipe / "data" / "train", recipe / "data" / "train" / ".backup")
    assert prepare_recipe(recipe, "--audio_root", ".").returncode == 0
    assert (recipe / "out" / "rejected.jsonl").read_text() == ""


def test_wav_scp_command_is_rejected_and_documented_script_converts_it(tmp_path):
    data = tmp_path / "data" / "train"
    data.mkdir(parents=True)
    for number in range(6):
        write_sentence(tmp_path / f"rec{number}.wav", number)
    entries = [f"touch ran; cat rec{number}.wav |" for number in range(5)] + ["rec5.wav"]
    write_table(data / "wav.scp", (), [(f"u{number}", entry) for number, entry in enumerate(entries)], " ")
    write_table(data / "text", (), [(f"u{number}", sentence(number)) for number in range(6)], " ")
    shutil.copytree(tmp_path / "data", tmp_path / "corpus")
    done = prepare(tmp_path, "kaldi", "--audio_root", ".")
    assert done.returncode == 3 and not (tmp_path / "ran").exists()
    assert "5 command or archive" in done.stderr and "docs/data.md, Paths and commands in wav.scp" in done.stderr
    guide = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").split("### Paths and commands in wav.scp")[1]
    lines = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)[1]
    subprocess.run(["bash", "-euc", lines], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "ran").exists()
    shutil.rmtree(tmp_path / "corpus")
    shutil.copytree(tmp_path / "data", tmp_path / "corpus")
    done = prepare(tmp_path, "kaldi", "--audio_root", ".")
    assert done.returncode == 0 and read_rejected(tmp_path) == [], done.stderr
