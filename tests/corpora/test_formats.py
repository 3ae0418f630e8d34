"""Prepare a small corpus of every format from the command line, and train on it."""

import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.data.audio.files import read_samples
from konkanivani.data.manifest import read_manifest
from tests.conftest import (
    TINY_MODEL,
    WORDS,
    checked,
    mark_full,
    run_folders,
    run_in_process,
    run_script,
    run_trainer,
    speak,
)

SCRIPT = "training_scripts/prepare_data.py"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class ExpectedUtterance:
    """Expected utterance: `split` is empty if the corpus does not give it, `offset` is None for a whole file."""

    text: str
    seconds: float
    speaker: str = ""
    split: str = ""
    offset: float | None = None


def sentence(number: int) -> str:
    """Return three words; the sentence differs for each number below 100."""
    return " ".join(WORDS[i % 10] for i in (number, number // 10, 3 * number + 1))


def write_sentence(path: Path, number: int, rate: int = 16_000) -> ExpectedUtterance:
    """Write a sentence as audio in the format of the file suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = speak(sentence(number).split())
    if rate != 16_000:
        samples = np.interp(np.arange(len(samples) * rate // 16_000) * 16_000 / rate, np.arange(len(samples)), samples)
    soundfile.write(path, samples, rate)
    return ExpectedUtterance(sentence(number), len(samples) / rate)


def audio_bytes(number: int, kind: str = "FLAC") -> bytes:
    content = io.BytesIO()
    soundfile.write(content, speak(sentence(number).split()), 16_000, format=kind)
    return content.getvalue()


def sentence_seconds(number: int) -> float:
    return len(speak(sentence(number).split())) / 16_000


def write_table(path: Path, head: tuple[str, ...], rows: Iterable[tuple[object, ...]], mark: str = "\t") -> None:
    lines = [mark.join(map(str, row)) for row in ([head] if head else []) + list(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def split_of(number: int) -> str:
    return "valid" if number % 6 == 4 else "test" if number % 6 == 5 else "train"


CV_HEAD = ("client_id", "path", "sentence_id", "sentence", "sentence_domain", "up_votes", "down_votes", "age")


def common_voice(folder: Path) -> list[ExpectedUtterance]:
    language = folder / "cv-corpus-21.0-2025-03-14" / "kok"
    results, rows, durations = [], {split: [] for split in SPLITS}, []
    for number in range(12):
        name, split = f"common_voice_kok_{4_000_000 + number}.mp3", split_of(number)
        spoken = write_sentence(language / "clips" / name, number, 32_000)
        # In Common Voice quotation marks are literal and may be unbalanced.
        text = f'"{spoken.text}' if number == 0 else spoken.text
        speaker = f"{split}{number % 2}"
        results.append(replace(spoken, text=text, speaker=speaker, split=split))
        rows[split].append((speaker, name, f"s{number}", text, "", 2, 0, "twenties"))
        durations.append((name, round(1000 * spoken.seconds)))
    for split, name in (("train", "train"), ("valid", "dev"), ("test", "test")):
        write_table(language / f"{name}.tsv", CV_HEAD, rows[split])
    write_table(language / "validated.tsv", CV_HEAD, [row for split in SPLITS for row in rows[split]])
    write_table(language / "clip_durations.tsv", ("clip", "duration[ms]"), durations)
    return results


def openslr(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for gender in ("female", "male"):
        rows = []
        for number in range(6) if gender == "female" else range(6, 12):
            speaker = f"ml{gender[0]}_0{1000 + number % 3}"
            name = f"{speaker}_{10_000_000_000 + number:011d}"
            spoken = write_sentence(folder / gender / f"{name}.wav", number, 48_000)
            rows.append((name, spoken.text) if number % 2 else (name, "", spoken.text))
            results.append(replace(spoken, speaker=speaker))
        write_table(folder / gender / "line_index.tsv", (), rows)
    return results


def openslr_mucs(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for split in ("train", "test"):
        rows = []
        for number in range(9) if split == "train" else range(9, 12):
            spoken = write_sentence(folder / split / "audio" / f"0{number}_003.wav", number, 8_000)
            rows.append((f"0{number}_003", spoken.text))
            results.append(replace(spoken, split=split))
        write_table(folder / split / "transcription.txt", (), rows, " ")
    return results


def openslr_csv(folder: Path) -> list[ExpectedUtterance]:
    results, rows = [], []
    for number in range(12):
        name = f"irm_0{2000 + number % 4}_{number:011d}"
        spoken = write_sentence(folder / "irish_english_male" / f"{name}.wav", number)
        text = spoken.text.replace(" ", ", ", 1)
        rows.append((f"EN{number:05d}", name, text))
        results.append(replace(spoken, text=text, speaker=name[:9]))
    write_table(folder / "line_index_all.csv", (), rows, ", ")
    return results


def kaldi(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for split, numbers in (("train", range(8)), ("dev", range(8, 10)), ("test", range(10, 12))):
        data = folder / split
        data.mkdir(parents=True)
        audio = np.concatenate([speak(sentence(number).split()) for number in numbers])
        path = folder / "wavs" / f"{split}.flac"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, audio, 16_000)
        at, segments, texts, speakers = 0.0, [], [], []
        for number in numbers:
            seconds, name = sentence_seconds(number), f"spk{number % 2}-{split}-{number:02d}"
            end = -1 if number == numbers[-1] else f"{at + seconds:.3f}"
            segments.append((name, f"rec-{split}", f"{at:.3f}", end))
            texts.append((name, sentence(number)))
            speakers.append((name, f"{split}-spk{number % 2}"))
            given = "valid" if split == "dev" else split
            results.append(ExpectedUtterance(sentence(number), seconds, f"{split}-spk{number % 2}", given, at))
            at += seconds
        place = path.resolve() if split == "train" else f"wavs/{split}.flac"
        tables = {"wav.scp": [(f"rec-{split}", place)], "segments": segments, "text": texts, "utt2spk": speakers}
        for name, rows in tables.items():
            write_table(data / name, (), rows, " ")
    return results


def nemo(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for split, numbers in (("train", range(8)), ("dev", range(8, 10)), ("test", range(10, 12))):
        rows = []
        for number in numbers:
            spoken = write_sentence(folder / "audio" / f"{number}.wav", number)
            row = {"audio_filepath": f"audio/{number}.wav", "duration": spoken.seconds, "text": spoken.text}
            if number == 0:
                row |= {"offset": 0.1, "duration": 0.5}
                spoken = replace(spoken, seconds=0.5, offset=0.1)
            rows.append((json.dumps(row | {"speaker": number}),))
            results.append(replace(spoken, speaker=str(number), split="valid" if split == "dev" else split))
        write_table(folder / f"{split}_manifest.json", (), rows)
    return results


def add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def nemo_tarred(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for split, numbers in (("train", range(8)), ("valid", range(8, 10)), ("test", range(10, 12))):
        (folder / split).mkdir(parents=True)
        rows = []
        for shard in (0, 1):
            with tarfile.open(folder / split / f"audio_{shard}.tar", "w") as tar:
                for number in numbers[shard::2]:
                    seconds, name = sentence_seconds(number), f"data_wavs_{number}.flac"
                    add_member(tar, name, audio_bytes(number))
                    row = {"audio_filepath": name, "duration": seconds, "text": sentence(number), "shard_id": shard}
                    spoken = ExpectedUtterance(sentence(number), seconds, split=split)
                    if number == 2:  # one file with two utterances
                        rows.append((json.dumps(row | {"offset": 0.0, "duration": 0.5}),))
                        row |= {"offset": 0.5, "duration": 0.4, "text": "घर"}
                        row["audio_filepath"] = "data_wavs_2-sub1.flac"
                        results.append(replace(spoken, seconds=0.5, offset=0.0))
                        spoken = replace(spoken, text="घर", seconds=0.4, offset=0.5)
                    rows.append((json.dumps(row),))
                    results.append(spoken)
        if split != "valid":  # a folder may have only manifests of shards
            write_table(folder / split / "tarred_audio_manifest.json", (), rows)
        (folder / split / "sharded_manifests").mkdir()
        for shard in (0, 1):  # NeMo writes the same rows again per shard
            chosen = [row for row in rows if json.loads(row[0])["shard_id"] == shard]
            write_table(folder / split / "sharded_manifests" / f"manifest_{shard}.json", (), chosen)
    return results


def webdataset(folder: Path) -> list[ExpectedUtterance]:
    results, kinds = [], (("wav", "WAV"), ("flac", "FLAC"), ("mp3", "MP3"))
    for shard in range(2):
        folder.mkdir(exist_ok=True)
        with tarfile.open(folder / f"shard-{shard:06d}.tar", "w") as tar:
            for number in range(6 * shard, 6 * shard + 6):
                suffix, kind = kinds[number % 3]
                text, speaker = sentence(number), f"s{number}"
                words = {"text": text, "speaker": speaker}
                add_member(tar, f"part/{number:04d}.{suffix}", audio_bytes(number, kind))
                if number % 2:
                    add_member(tar, f"part/{number:04d}.txt", f"{text}\n".encode())
                    words = {"speaker": speaker}
                add_member(tar, f"part/{number:04d}.json", json.dumps(words).encode())
                results.append(ExpectedUtterance(text, sentence_seconds(number), speaker))
    return results


def indicvoices(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for split, recordings in (("train", ((0, 1, 2, 3), (4, 5, 6, 7))), ("valid", ((8, 9),))):
        for numbers in recordings:
            path = folder / "Konkani" / "v1" / split / f"0a1b8a86-{numbers[0]}_0.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            at, segments = 0.0, []
            for number in numbers:
                seconds = sentence_seconds(number)
                text = f"{sentence(number)} [noise]"
                begin = -0.01 if at == 0 else at  # some corpora have small negative starts
                segments.append({"start": begin, "end": at + seconds, "text": text, "speaker_id": 0})
                speaker = f"S42{split}{numbers[0]}"
                results.append(ExpectedUtterance(sentence(number), seconds, speaker, split, at))
                at += seconds
            segments.append({"start": 0.0, "end": 0.3, "text": "[laughter]", "speaker_id": 0})
            segments.append({"start": 0.3, "end": 0.6, "text": "हय", "speaker_id": 1})
            soundfile.write(path, np.concatenate([speak(sentence(n).split()) for n in numbers]), 16_000)
            described = {"verbatim": segments, "normalized": segments, "speaker_id": speaker, "scenario": "Extempore"}
            path.with_suffix(".json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    return results


def indicvoices_flat(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for split, numbers in (("train", range(8)), ("valid", range(8, 10))):
        rows = []
        for number in numbers:
            spoken = write_sentence(folder / "Konkani" / split / "audios" / f"a_chunk_{number}.wav", number)
            row = {"audio_filepath": f"../audios/a_chunk_{number}.wav", "text": spoken.text, "verbatim": "x"}
            rows.append((json.dumps(row | {"duration": spoken.seconds, "speaker_id": f"S{number}"}),))
            results.append(replace(spoken, speaker=f"S{number}", split=split))
        (folder / "Konkani" / split / "transcripts").mkdir()
        write_table(folder / "Konkani" / split / "transcripts" / "a.json", (), rows)
    return results


def ljspeech(folder: Path) -> list[ExpectedUtterance]:
    results, rows = [], []
    for number in range(12):
        spoken = write_sentence(folder / "wavs" / f"LJ001-{number:04d}.wav", number, 22_050)
        rows.append((f"LJ001-{number:04d}", spoken.text.upper() + ' 5"', spoken.text))
        results.append(spoken)
    write_table(folder / "metadata.csv", (), rows, "|")
    return results


def huggingface_saved(folder: Path) -> list[ExpectedUtterance]:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    splits, results = {}, []
    for split, numbers in (("train", range(8)), ("validation", range(8, 10)), ("test", range(10, 12))):
        rows = {
            "audio": [{"bytes": audio_bytes(number, "MP3"), "path": f"{number}.mp3"} for number in numbers],
            "sentence": [sentence(number) for number in numbers],
            "client_id": [f"{split}{number % 2}" for number in numbers],
        }
        text = datasets.Value("string")
        features = datasets.Features({"audio": datasets.Audio(), "sentence": text, "client_id": text})
        # Not from_dict: encoding audio needs torchcodec.
        table = datasets.table.InMemoryTable(pyarrow.table(rows, schema=features.arrow_schema))
        splits[split] = datasets.Dataset(table, datasets.DatasetInfo(features=features))
        given = "valid" if split == "validation" else split
        results += [ExpectedUtterance(sentence(n), sentence_seconds(n), f"{split}{n % 2}", given) for n in numbers]
    datasets.DatasetDict(splits).save_to_disk(folder)
    return results


def huggingface_parquet(folder: Path) -> list[ExpectedUtterance]:
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "data").mkdir(parents=True)
    results = []
    for split, numbers in (("train", range(8)), ("validation", range(8, 10)), ("test", range(10, 12))):
        audio = [{"bytes": audio_bytes(number), "path": None} for number in numbers]
        table = pyarrow.table({"speech": audio, "words": [sentence(number) for number in numbers]})
        parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
        given = "valid" if split == "validation" else split
        results += [ExpectedUtterance(sentence(number), sentence_seconds(number), split=given) for number in numbers]
    return results


def folders(folder: Path) -> list[ExpectedUtterance]:
    results = []
    for number in range(12):
        split, suffix = split_of(number), ("wav", "flac", "ogg")[number % 3]
        path = folder / split / f"room {number % 2}" / f"नाद{number}.{suffix}"
        spoken = write_sentence(path, number)
        path.with_suffix(".txt").write_text(spoken.text.replace(" ", "\n") + "\n", encoding="utf-8")
        results.append(replace(spoken, split=split))
    return results


def csv_table(folder: Path) -> list[ExpectedUtterance]:
    results = []
    folder.mkdir()
    with open(folder / "all.csv", "w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["note", "file", "words", "who", "part"])
        for number in range(12):
            spoken = write_sentence(folder / "clips" / f"{number}.wav", number)
            text, split = f'{spoken.text}; "बरें"', split_of(number)
            part = {"valid": "dev"}.get(split, split)
            table.writerow(["two\nlines, of a note", f"clips/{number}.wav", text, f"{split}{number % 3}", part])
            results.append(replace(spoken, text=text, speaker=f"{split}{number % 3}", split=split))
    return results


CSV_FLAGS = ("--table", "all.csv", "--audio_column", "file", "--text_column", "words", "--speaker_column", "who")
MINIATURES: dict[str, tuple[Callable[[Path], list[ExpectedUtterance]], tuple[str, ...]]] = {
    "common_voice": (common_voice, ("--source", "corpus/cv-corpus-21.0-2025-03-14")),
    "openslr": (openslr, ()),
    "openslr mucs": (openslr_mucs, ()),
    "openslr csv": (openslr_csv, ()),
    "kaldi": (kaldi, ()),
    "nemo": (nemo, ()),
    "nemo tarred": (nemo_tarred, ()),
    "nemo webdataset": (webdataset, ()),
    "indicvoices": (indicvoices, ()),
    "indicvoices flat": (indicvoices_flat, ()),
    "ljspeech": (ljspeech, ()),
    "huggingface": (huggingface_saved, ()),
    "huggingface parquet": (huggingface_parquet, ("--audio_column", "speech", "--text_column", "words")),
    "folder": (folders, ()),
    "csv": (csv_table, (*CSV_FLAGS, "--split_column", "part")),
}


@dataclass(frozen=True)
class PreparedCorpus:
    """Small corpus, its expected utterances, and the stdout of prepare_data.py."""

    directory: Path
    spoken: list[ExpectedUtterance]
    stdout: str

    def manifest(self, split: str) -> Path:
        return self.directory / "prepared" / f"{split}.jsonl"

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the folder of the printed --audio_roots, if any."""
        root = json.loads((self.directory / "prepared" / "report.json").read_text())["audio_root"]
        assert not root or f"--audio_roots {root}" in self.stdout
        return (root,) if root else ()


# Without --full, train only on one format each of whole files, segments of files, byte ranges of a shard, and Parquet.
TRAINED = ("common_voice", "kaldi", "nemo tarred", "huggingface parquet")
TRAINING_CASES = [each for name in MINIATURES for each in ([name] if name in TRAINED else mark_full(name))]


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    build, flags = MINIATURES[request.param]
    directory = tmp_path_factory.mktemp("format")
    spoken = build(directory / "corpus")
    name = request.param.split()[0]
    done = checked(
        run_in_process(SCRIPT, "--format", name, "--source", "corpus", "--output", "prepared", *flags, cwd=directory)
    )
    return PreparedCorpus(directory, spoken, done.stdout)


@pytest.mark.parametrize("prepared", MINIATURES, indirect=True)
def test_manifests_list_every_utterance_with_text_segment_and_speaker(prepared):
    expected = {spoken.text: spoken for spoken in prepared.spoken}
    given = {spoken.split for spoken in prepared.spoken} - {""}
    listed = []
    for split in SPLITS:
        if not prepared.manifest(split).exists():
            assert split == "test" and given == {"train", "valid"}
            continue
        for utterance in read_manifest(prepared.manifest(split), prepared.roots):
            spoken = expected[utterance.text]
            listed.append(utterance.text)
            is_drawn = given and split == "valid" and split not in given
            assert (utterance.speaker, spoken.split or split) == (spoken.speaker, "train" if is_drawn else split)
            assert utterance.duration == pytest.approx(
                spoken.seconds, abs=0.06
            )  # MP3 audio is a multiple of the frame size
            assert (utterance.offset is None) == (spoken.offset is None)
            assert utterance.offset is None or utterance.offset == pytest.approx(spoken.offset, abs=0.002)
            samples, rate = read_samples(utterance.source)
            assert len(samples) / rate == pytest.approx(utterance.duration, abs=0.01)
            assert not Path(utterance.audio_filepath).is_absolute()
    assert sorted(listed) == sorted(expected)
    assert [path.name for path in prepared.manifest("x").parent.iterdir() if path.name.startswith(".")] == []
    assert "./run_training_memory_optimized.sh --train_manifest" in prepared.stdout


@pytest.mark.parametrize("prepared", TRAINING_CASES, indirect=True)
def test_prepared_corpus_trains_two_steps(prepared, tmp_path):
    flags = ("--max_steps", "2", "--batch_size", "2", "--gradient_accumulation_steps", "2", "--num_workers", "0")
    done = run_trainer(
        *TINY_MODEL, *flags, "--train_manifest", str(prepared.manifest("train")),
        "--valid_manifest", str(prepared.manifest("valid")),
        *run_folders(tmp_path), "--vocab_size", "60", "--tokenizer_type", "unigram",
        *(("--audio_roots", *prepared.roots) if prepared.roots else ()),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    assert "skipped" not in done.stdout, done.stdout


def test_common_voice_table_is_split_by_speaker(tmp_path):
    common_voice(tmp_path / "corpus")
    flags = ("--source", "corpus/cv-corpus-21.0-2025-03-14/kok", "--table", "validated.tsv", "--output", "out")
    done = run_in_process(SCRIPT, "--format", "common_voice", *flags, cwd=tmp_path)
    assert done.returncode == 0 and "split by speaker" in done.stdout, done.stderr
    manifests = [
        list(read_manifest(tmp_path / "out" / f"{split}.jsonl", (str(tmp_path / "corpus"),))) for split in SPLITS
    ]
    speakers = [{utterance.speaker for utterance in utterances} for utterances in manifests]
    assert all(speakers) and not (speakers[0] & speakers[1] or speakers[0] & speakers[2] or speakers[1] & speakers[2])
    assert sum(map(len, manifests)) == 12


def test_preparation_needs_no_torch_and_names_missing_package(tmp_path, monkeypatch):
    folders(tmp_path / "corpus")
    for module in ("torch", "datasets", "pyarrow"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KONKANIVANI_RERUN", "1")
    flags = ("--source", str(tmp_path / "corpus"), "--output", str(tmp_path / "out"))
    checked(run_script(SCRIPT, "--format", "folder", *flags))
    done = run_script(SCRIPT, "--format", "huggingface", "--force", *flags)
    assert done.returncode == 6 and "pip install datasets" in done.stderr, done.stderr


def test_parquet_files_with_similar_names_keep_their_own_audio(tmp_path):
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    expected = {}
    for first, name in enumerate(("मराठी", "कोंकणी", "a-b", "a/b")):
        numbers = range(3 * first, 3 * first + 3)
        audio = [{"bytes": audio_bytes(number), "path": None} for number in numbers]
        table = pyarrow.table({"audio": audio, "text": [sentence(number) for number in numbers]})
        path = tmp_path / "corpus" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path)
        expected |= {sentence(number): sentence_seconds(number) for number in numbers}
    checked(run_in_process(SCRIPT, "--format", "huggingface", "--source", "corpus", "--output", "out", cwd=tmp_path))
    manifests = [path for path in (tmp_path / "out").glob("*.jsonl") if path.stem in SPLITS]
    found = [utterance for manifest in manifests for utterance in read_manifest(manifest)]
    assert len({each.source.path for each in found}) == len(found) == 12
    assert {each.text: pytest.approx(each.duration, abs=1e-3) for each in found} == expected
