"""Audio paths in a Unicode normal form that differs from the file name on disk."""

import io
import json
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.data.audio.files import AudioSource, UnusableAudio, read_header, read_samples
from konkanivani.data.audio.paths import existing_path
from konkanivani.data.manifest import read_manifest
from tests.conftest import checked, run_in_process, speak

RATE = 16_000
COMPOSED = "Gonçalvès ऱ"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
TEXT = "एक दोन घर"
SPELLINGS = [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED), ("घो\u095cो", "घोड\u093cो"), ("घोड\u093cो", "घो\u095cो")]


def write_wav(path: Path, seconds: float) -> None:
    """Write noise whose duration identifies the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = 0.1 * np.random.default_rng(round(1000 * seconds)).standard_normal(round(seconds * RATE))
    soundfile.write(path, noise, RATE)


@pytest.mark.parametrize(("named", "on_disk"), SPELLINGS)
def test_name_in_other_unicode_form_is_found_but_exact_match_wins(tmp_path, named, on_disk):
    assert named != on_disk
    write_wav(tmp_path / on_disk / f"{on_disk}.wav", 1.0)
    path = f"{tmp_path}/{named}/{named}.wav"
    assert existing_path(path) == f"{tmp_path}/{on_disk}/{on_disk}.wav"
    assert read_header(AudioSource(path)).seconds == 1.0
    write_wav(tmp_path / named / f"{named}.wav", 2.0)
    assert read_header(AudioSource(path)).seconds == 2.0
    assert read_header(AudioSource(f"{tmp_path}/{on_disk}/{on_disk}.wav")).seconds == 1.0


def test_different_names_are_not_matched(tmp_path):
    write_wav(tmp_path / f"{DECOMPOSED}.wav", 1.0)
    for name in ("Goncalves ऱ", "Gonçalvès र", COMPOSED.upper(), COMPOSED + "\0", "\udcff" + COMPOSED):
        assert existing_path(f"{tmp_path}/{name}.wav") == f"{tmp_path}/{name}.wav"
        with pytest.raises(UnusableAudio):
            read_header(AudioSource(f"{tmp_path}/{name}.wav"))


def test_manifest_roots_apply_to_names_in_other_unicode_form(tmp_path):
    write_wav(tmp_path / "outside" / "a.wav", 1.0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / f"{DECOMPOSED}.wav").symlink_to(tmp_path / "outside" / "a.wav")
    (folder / f"{DECOMPOSED} folder").symlink_to(tmp_path / "outside")
    names = (f"{COMPOSED}.wav", f"{COMPOSED} folder/a.wav")
    rows = [{"audio_filepath": name, "duration": 1.0, "text": TEXT} for name in names]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for utterance in read_manifest(folder / "train.jsonl"):
        with pytest.raises(UnusableAudio, match="a link points outside"):
            read_samples(utterance.source)
    for utterance in read_manifest(folder / "train.jsonl", (str(tmp_path),)):
        assert len(read_samples(utterance.source)[0]) == RATE


def csv_table(corpus: Path, named: str, on_disk: str) -> list[str]:
    write_wav(corpus / "audio" / f"{on_disk}.wav", 1.0)
    (corpus / "all.csv").write_text(f"audio,text\naudio/{named}.wav,{TEXT}\n", "utf-8")
    return ["csv", "--table", "all.csv"]


def kaldi(corpus: Path, named: str, on_disk: str) -> list[str]:
    named, on_disk = named.replace(" ", ""), on_disk.replace(" ", "")
    write_wav(corpus / "audio" / f"{on_disk}.wav", 1.0)
    (corpus / "wav.scp").write_text(f"u1 audio/{named}.wav\n", "utf-8")
    (corpus / "text").write_text(f"u1 {TEXT}\n", "utf-8")
    return ["kaldi"]


def common_voice(corpus: Path, named: str, on_disk: str) -> list[str]:
    write_wav(corpus / "clips" / "x.wav", 1.0)
    samples, _ = soundfile.read(corpus / "clips" / "x.wav")
    (corpus / "clips" / "x.wav").unlink()
    soundfile.write(corpus / "clips" / f"{on_disk}.mp3", samples, RATE, format="MP3")
    (corpus / "train.tsv").write_text(f"client_id\tpath\tsentence\ns\t{named}.mp3\t{TEXT}\n", "utf-8")
    return ["common_voice"]


def ljspeech(corpus: Path, named: str, on_disk: str) -> list[str]:
    write_wav(corpus / "wavs" / f"{on_disk}.wav", 1.0)
    (corpus / "metadata.csv").write_text(f"{named}|{TEXT}\n", "utf-8")
    return ["ljspeech"]


def openslr(corpus: Path, named: str, on_disk: str) -> list[str]:
    write_wav(corpus / f"{on_disk}.wav", 1.0)
    (corpus / "line_index.tsv").write_text(f"{named}\t{TEXT}\n", "utf-8")
    return ["openslr"]


def folder(corpus: Path, named: str, on_disk: str) -> list[str]:
    write_wav(corpus / f"{on_disk}.wav", 1.0)
    (corpus / f"{named}.txt").write_text(TEXT, "utf-8")
    return ["folder"]


def nemo(corpus: Path, named: str, on_disk: str) -> list[str]:
    write_wav(corpus / "audio" / f"{on_disk}.wav", 1.0)
    row = {"audio_filepath": f"audio/{named}.wav", "duration": 1.0, "text": TEXT}
    (corpus / "train.json").write_text(json.dumps(row) + "\n", "utf-8")
    return ["nemo"]


def nemo_shard(corpus: Path, named: str, on_disk: str) -> list[str]:
    file = io.BytesIO()
    soundfile.write(file, np.full(RATE, 0.1), RATE, format="WAV")
    with tarfile.open(corpus / "audio_0.tar", "w") as shard:
        info = tarfile.TarInfo(f"{on_disk}.wav")
        info.size = len(file.getvalue())
        shard.addfile(info, io.BytesIO(file.getvalue()))
    row = {"audio_filepath": f"{named}.wav", "duration": 1.0, "text": TEXT, "shard_id": 0}
    (corpus / "tarred_audio_manifest.json").write_text(json.dumps(row) + "\n", "utf-8")
    return ["nemo"]


IMPORTERS = [csv_table, kaldi, common_voice, ljspeech, openslr, folder, nemo, nemo_shard]


@pytest.mark.parametrize("write", IMPORTERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("named", "on_disk"), SPELLINGS[:2], ids=["composed in the table", "decomposed in the table"])
def test_importers_find_audio_in_other_unicode_form(tmp_path, write, named, on_disk):
    (tmp_path / "corpus" / "clips").mkdir(parents=True)
    name, *flags = write(tmp_path / "corpus", named, on_disk)
    flags += ["--source", "corpus", "--output", "out", "--valid_share", "0", "--test_share", "0"]
    checked(run_in_process("training_scripts/prepare_data.py", "--format", name, *flags, cwd=tmp_path))
    (utterance,) = read_manifest(tmp_path / "out" / "train.jsonl", (str(tmp_path),))
    assert Path(utterance.audio_path).is_file()  # the manifest has the spelling of the file system
    assert len(read_samples(utterance.source)[0]) == pytest.approx(RATE, abs=1200)


def test_importer_rejects_link_outside_corpus_in_other_unicode_form(tmp_path):
    write_wav(tmp_path / "outside" / "a.wav", 1.0)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / f"{DECOMPOSED}.wav").symlink_to(tmp_path / "outside" / "a.wav")
    (tmp_path / "corpus" / "all.csv").write_text(f"audio,text\n{COMPOSED}.wav,{TEXT}\n", "utf-8")
    flags = ("--format", "csv", "--source", "corpus", "--output", "out", "--table", "all.csv")
    done = run_in_process("training_scripts/prepare_data.py", *flags, cwd=tmp_path)
    assert done.returncode == 3
    assert "outside the corpus" in done.stderr


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_transcribe_finds_command_line_path_in_other_unicode_form(tmp_path, base, is_folder):
    samples = speak(TEXT.split())
    folder = tmp_path / DECOMPOSED
    folder.mkdir()
    soundfile.write(folder / f"{DECOMPOSED}.wav", samples, RATE)
    named = tmp_path / COMPOSED if is_folder else tmp_path / COMPOSED / f"{COMPOSED}.wav"
    flags = ("--checkpoint", str(base), "--device", "cpu", "--output_dir", str(tmp_path / "out"))
    checked(run_in_process("training_scripts/transcribe.py", str(named), *flags))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{DECOMPOSED}.txt"]
