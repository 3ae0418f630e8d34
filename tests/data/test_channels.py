"""A row with `channel` uses only that channel of its recording; a row without it uses the mean of all channels."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.corpora.recordings import content_key, extent_key
from konkanivani.data.audio.files import AudioSource, UnusableAudio, read_blocks, read_samples
from konkanivani.data.audio.waveform import load_audio, resample, stream_audio
from konkanivani.data.dataset import EvalDataset, TrainDataset, read_sounds
from konkanivani.data.index import BadRow, Utterance, open_index, parse_row, row_of
from konkanivani.data.manifest import Manifest, Rejection, make_fingerprint, read_manifest
from konkanivani.data.text import train_tokenizer
from konkanivani.scoring.transcripts import read_transcripts
from tests.cli.test_prepare_data import prepare, read_rejected
from tests.conftest import TINY_MODEL, checked, run_folders, run_script, run_trainer, speak
from tests.corpora.test_formats import add_member, sentence, write_table

RATE = 16_000
SECONDS = 2.0
INVALID_CHANNELS = [-1, True, 0.0, 1.5, "1", "left", [0], {}, float("nan")]


def two_signals(number: int = 0, rate: int = RATE) -> np.ndarray:
    """Return two different tones with noise (S, 2), float32, exact in 16 bits; `number` selects the pair."""
    generator = np.random.default_rng(number)
    time = np.arange(round(SECONDS * rate)) / rate
    tones = np.stack([np.sin(2 * np.pi * pitch * time) for pitch in (200 + number, 700 + number)], axis=1)
    samples = 0.3 * tones + 0.01 * generator.standard_normal(tones.shape)
    return (np.rint(samples * 32_768) / 32_768).astype(np.float32)


def write_stereo(path: Path, number: int = 0, rate: int = RATE) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = two_signals(number, rate)
    soundfile.write(path, samples, rate, subtype="PCM_16")
    return samples


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def row(audio: str, number: int = 0, **fields: object) -> dict[str, object]:
    return {"audio_filepath": audio, "duration": SECONDS, "text": sentence(number)} | fields


def parse_fields(**fields: object) -> Utterance:
    return parse_row(json.dumps(row("a.wav", **fields)).encode(), "", 1)


@pytest.fixture
def stereo_manifest(tmp_path: Path) -> tuple[Manifest, np.ndarray]:
    """Return a manifest with channel 0, channel 1 and the mean of one stereo recording, and its samples (S, 2)."""
    samples = write_stereo(tmp_path / "call.wav")
    rows = [row("call.wav", 1, channel=0), row("call.wav", 2, channel=1), row("call.wav", 3)]
    return read_manifest(write_rows(tmp_path / "train.jsonl", rows)), samples


# Samples


@pytest.mark.parametrize("dataset", ["training", "evaluation"])
def test_dataset_returns_exactly_the_samples_of_the_row_channel(dataset: str, stereo_manifest) -> None:
    manifest, samples = stereo_manifest
    tokenizer = train_tokenizer([utterance.text for utterance in manifest], "char", 60)
    if dataset == "training":
        speech = TrainDataset(manifest, tokenizer, (1.0,), seed=0, manifest=manifest.path)
        waveforms = [speech[0, index].waveform.numpy() for index in range(3)]
    else:
        speech = EvalDataset(manifest, tokenizer, manifest.path)
        waveforms = [speech[index].waveform.numpy() for index in range(3)]
    expected = (samples[:, 0], samples[:, 1], torch.from_numpy(samples).mean(dim=1).numpy())
    for waveform, signal in zip(waveforms, expected, strict=True):
        assert np.array_equal(waveform, signal)
    assert not np.array_equal(waveforms[0], waveforms[1]) and not np.array_equal(waveforms[0], waveforms[2])


def test_blocks_spans_streams_and_tar_members_use_selected_channel(tmp_path: Path) -> None:
    import tarfile

    samples = write_stereo(tmp_path / "call.wav")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        add_member(tar, "call.wav", (tmp_path / "call.wav").read_bytes())
    with tarfile.open(tmp_path / "shard.tar") as tar:
        member = tar.getmembers()[0]
    whole = AudioSource(str(tmp_path / "call.wav"))
    inside = AudioSource(str(tmp_path / "shard.tar"), member.offset_data, member.size)
    for source in (whole, inside):
        for channel in (0, 1):
            own = samples[:, channel]
            chosen = replace(source, channel=channel)
            assert np.array_equal(read_samples(chosen)[0], own[:, None])
            assert np.array_equal(np.concatenate(list(read_blocks(chosen, 0.3)))[:, 0], own)
            assert np.array_equal(torch.cat(list(stream_audio(chosen))).numpy(), own)
            span = replace(chosen, start=0.5, seconds=0.25)
            assert np.array_equal(load_audio(span).numpy(), own[8_000:12_000])
        assert np.array_equal(read_samples(source)[0], samples)


def test_selected_channel_is_resampled_like_a_mono_recording(tmp_path: Path) -> None:
    samples = write_stereo(tmp_path / "call.wav", rate=8_000)
    for channel in (0, 1):
        alone = resample(torch.from_numpy(samples[:, channel].copy()), 8_000)
        assert load_audio(AudioSource(str(tmp_path / "call.wav"), channel=channel)).equal(alone)


def test_channel_of_ffmpeg_decoded_file_is_selected(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    samples = two_signals()
    with av.open(str(tmp_path / "call.m4a"), "w") as file:
        stream = file.add_stream("alac", rate=RATE, layout="stereo")
        planes = np.ascontiguousarray(np.rint(samples * 32_768).astype(np.int16).T)
        frame = av.AudioFrame.from_ndarray(planes, format="s16p", layout="stereo")
        frame.sample_rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    for channel in (0, 1):
        source = AudioSource(str(tmp_path / "call.m4a"), channel=channel)
        assert np.array_equal(read_samples(source)[0][: len(samples), 0], samples[:, channel])
    with pytest.raises(UnusableAudio, match="no channel 2"):
        read_samples(AudioSource(str(tmp_path / "call.m4a"), channel=2))


def test_nan_in_the_other_channel_is_ignored(tmp_path: Path) -> None:
    samples = two_signals()
    samples[5, 1] = np.nan
    soundfile.write(tmp_path / "call.wav", samples, RATE, subtype="FLOAT")
    source = AudioSource(str(tmp_path / "call.wav"), channel=0)
    assert np.array_equal(read_samples(source)[0][:, 0], samples[:, 0])
    for channel in (1, None):
        with pytest.raises(UnusableAudio, match="NaN or infinite"):
            read_samples(replace(source, channel=channel))


def test_noise_row_with_channel_uses_that_channel(tmp_path: Path) -> None:
    samples = write_stereo(tmp_path / "noise.wav")
    manifest = write_rows(tmp_path / "noise.jsonl", [row("noise.wav", channel=1)])
    sound = read_sounds(str(manifest))[0]
    assert np.array_equal(load_audio(sound.span(0, sound.frames)).numpy(), samples[:, 1])


# Rejected rows


@pytest.mark.parametrize("name", ["channel", "channel_selector"])
@pytest.mark.parametrize("value", INVALID_CHANNELS)
def test_invalid_channel_value_raises_bad_row(value: object, name: str) -> None:
    with pytest.raises(BadRow, match=f"^{name} must be the number of a channel, from 0, not ") as refused:
        parse_fields(**{name: value})
    assert refused.value.audio_filepath == "a.wav"


def test_null_and_nemo_average_select_the_channel_mean() -> None:
    assert (
        parse_fields().channel
        is parse_fields(channel=None).channel
        is parse_fields(channel_selector="average").channel
        is None
    )
    assert parse_fields(channel=0).channel == 0 and parse_fields(channel_selector=1).channel == 1
    assert parse_fields(channel=0, channel_selector=1).channel == 0


def test_index_lists_rows_with_invalid_channel_as_broken(tmp_path: Path) -> None:
    write_stereo(tmp_path / "call.wav")
    rows = [row("call.wav", channel=value) for value in (0, "1", 1, -1)]
    index = open_index(write_rows(tmp_path / "train.jsonl", rows))
    assert index.rows.tolist() == [1, 3] and [broken.row for broken in index.broken] == [2, 4]


@pytest.mark.parametrize("channel", [2, 31, 10**30])
def test_missing_channel_is_rejected_when_audio_is_read(channel: int, tmp_path: Path) -> None:
    write_stereo(tmp_path / "call.wav")
    manifest = read_manifest(write_rows(tmp_path / "train.jsonl", [row("call.wav", 1, channel=channel)]))
    tokenizer = train_tokenizer([sentence(1)], "char", 60)
    rejection = EvalDataset(manifest, tokenizer, manifest.path)[0]
    assert isinstance(rejection, Rejection) and rejection.is_broken and rejection.row == 1
    assert rejection.reason == f"it has no channel {channel}: it has 2 channels, counted from 0"
    with pytest.raises(UnusableAudio):
        list(read_blocks(manifest[0].source, 1.0))


# Identity


def test_channels_of_one_file_have_distinct_utterance_keys(stereo_manifest) -> None:
    manifest, _ = stereo_manifest
    one, other, both = manifest
    assert len({one.id, other.id, both.id}) == len({one.mark, other.mark, both.mark}) == 3
    assert len({content_key(u.source) for u in manifest}) == len({extent_key(u.source, 9) for u in manifest}) == 3
    again = replace(one, row=9)
    assert (again.id, again.mark, content_key(again.source)) == (one.id, one.mark, content_key(one.source))


def test_row_with_channel_is_written_and_parsed_equal() -> None:
    for fields in ({}, {"channel": 0}, {"channel": 3, "offset": 1.5}):
        utterance = parse_fields(**fields)
        assert row_of(utterance) == row("a.wav", **fields)
        assert parse_row(json.dumps(row_of(utterance)).encode(), "", 1) == utterance


def test_fingerprint_depends_on_the_channel(tmp_path: Path) -> None:
    write_stereo(tmp_path / "call.wav")
    prints = []
    for channel in (0, 1, None, None):
        fields = {} if channel is None else {"channel": channel}
        manifest = read_manifest(write_rows(tmp_path / "train.jsonl", [row("call.wav", **fields)]))
        prints.append(make_fingerprint(manifest))
    assert not prints[0].is_unchanged(prints[1]) and not prints[0].is_unchanged(prints[2])
    assert prints[2].is_unchanged(prints[3])


def test_index_of_version_without_channels_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("konkanivani.data.index.SMALL_BYTES", 0)
    write_stereo(tmp_path / "call.wav")
    manifest = write_rows(tmp_path / "train.jsonl", [row("call.wav", channel=0), row("call.wav", channel="1")])
    assert len(open_index(manifest).broken) == 1
    kept = tmp_path / "train.jsonl.index" / "index.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"version": 4}))
    (kept.parent / "broken.jsonl").write_text("")
    assert len(open_index(manifest).broken) == 1


def test_transcript_ids_distinguish_channels(tmp_path: Path) -> None:
    write_stereo(tmp_path / "call.wav")
    manifest = write_rows(tmp_path / "a.jsonl", [row("call.wav", n, channel=n) for n in (0, 1)])
    ids = [text.id for text in read_transcripts(str(manifest), "lines", "reference").rows]
    assert ids == [utterance.id for utterance in read_manifest(manifest)] == ["call.wav:ch0", "call.wav:ch1"]
    other = write_rows(tmp_path / "b.jsonl", [row("call.wav", channel="whatsapp")])
    assert read_transcripts(str(other), "lines", "reference").rows[0].id == "call.wav"


# Importers


def prepared_channels(tmp_path: Path) -> dict[str, int | None]:
    """Return the channel of each text in the written manifests."""
    paths = [path for path in (tmp_path / "out").glob("*.jsonl") if path.name != "rejected.jsonl"]
    results = [read_manifest(path, (str(tmp_path),)) for path in paths]
    return {utterance.text: utterance.channel for manifest in results for utterance in manifest}


CALLS = range(3)
CHANNELS = (0, 1, None)
EXPECTED = {sentence(3 * call + place): channel for call in CALLS for place, channel in enumerate(CHANNELS)}


def write_calls(folder: Path) -> None:
    for call in CALLS:
        write_stereo(folder / f"{call}.wav", call)


def write_csv(folder: Path) -> tuple[str, ...]:
    rows = [
        (f"{call}.wav", sentence(3 * call + place), "" if channel is None else channel)
        for call in CALLS
        for place, channel in enumerate(CHANNELS)
    ]
    write_table(folder / "all.csv", ("audio", "text", "Channel"), rows, ",")
    return "csv", "--table", "all.csv"


def write_csv_named(folder: Path) -> tuple[str, ...]:
    write_csv(folder)
    table = (folder / "all.csv").read_text(encoding="utf-8")
    (folder / "all.csv").write_text(table.replace("Channel", "side"), encoding="utf-8")
    return "csv", "--table", "all.csv", "--channel_column", "side"


def write_nemo(folder: Path) -> tuple[str, ...]:
    rows = []
    for call in CALLS:
        fields = ({"channel": 0}, {"channel_selector": 1}, {"channel_selector": "average"})
        rows += [row(f"{call}.wav", 3 * call + place, **named) for place, named in enumerate(fields)]
    write_rows(folder / "all.json", rows)
    return ("nemo",)


def write_kaldi_segments(folder: Path) -> tuple[str, ...]:
    segments, texts = [], []
    for call in CALLS:
        for place, channel in enumerate(("0", "1", "-1")):
            name = f"u{call}-{place}"
            segments.append((name, f"rec{call}", "0.0", "-1", channel))
            texts.append((name, sentence(3 * call + place)))
    write_table(folder / "wav.scp", (), [(f"rec{call}", f"{call}.wav") for call in CALLS], " ")
    write_table(folder / "segments", (), segments, " ")
    write_table(folder / "text", (), texts, " ")
    return "kaldi", "--split_by", "utterance"


def write_kaldi_recordings(folder: Path, labels: tuple[str, str]) -> tuple[str, ...]:
    """Write three recordings per file: one for each channel and one without a label."""
    names = [(f"rec{call}{side}", call, place) for call in CALLS for place, side in enumerate(("a", "b", "m"))]
    write_table(folder / "wav.scp", (), [(name, f"{call}.wav") for name, call, _ in names], " ")
    write_table(folder / "text", (), [(name, sentence(3 * call + place)) for name, call, place in names], " ")
    labelled = [(name, f"call{call}", labels[place]) for name, call, place in names if place < 2]
    write_table(folder / "reco2file_and_channel", (), labelled, " ")
    return "kaldi", "--split_by", "utterance"


def write_parquet(folder: Path) -> tuple[str, ...]:
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cases = [(call, place, channel) for call in CALLS for place, channel in enumerate(CHANNELS)]
    columns = {
        "audio": [f"{call}.wav" for call, _, _ in cases],
        "text": [sentence(3 * call + place) for call, place, _ in cases],
        "channel": pyarrow.array([channel for _, _, channel in cases], pyarrow.int64()),
    }
    parquet.write_table(pyarrow.table(columns), folder / "all.parquet")
    return ("huggingface",)


IMPORTERS = {
    "csv": write_csv,
    "csv, column given by flag": write_csv_named,
    "nemo": write_nemo,
    "kaldi segments": write_kaldi_segments,
    "kaldi letters": partial(write_kaldi_recordings, labels=("A", "B")),
    "kaldi numbers from 1": partial(write_kaldi_recordings, labels=("1", "2")),
    "kaldi numbers from 0": partial(write_kaldi_recordings, labels=("0", "1")),
    "parquet": write_parquet,
}


@pytest.mark.parametrize("name", IMPORTERS)
def test_importers_preserve_the_channel(name: str, tmp_path: Path) -> None:
    write_calls(tmp_path / "corpus")
    checked(prepare(tmp_path, *IMPORTERS[name](tmp_path / "corpus"), "--valid_share", "0", "--test_share", "0"))
    assert prepared_channels(tmp_path) == EXPECTED
    manifest = read_manifest(tmp_path / "out" / "train.jsonl", (str(tmp_path),))
    for utterance in manifest:
        samples = two_signals(int(Path(utterance.audio_filepath).stem))
        mono = samples[:, utterance.channel] if utterance.channel is not None else samples.mean(axis=1)
        assert np.array_equal(load_audio(utterance.source).numpy(), mono)


def test_kaldi_channel_letter_is_ignored_for_mono_files(tmp_path: Path) -> None:
    for call in CALLS:
        (tmp_path / "corpus").mkdir(exist_ok=True)
        soundfile.write(tmp_path / "corpus" / f"{call}.wav", two_signals(call)[:, 0], RATE)
    flags = write_kaldi_recordings(tmp_path / "corpus", ("A", "B"))
    for name in ("text", "wav.scp"):  # keep only channel B of each file
        rows = (tmp_path / "corpus" / name).read_text(encoding="utf-8").splitlines()
        (tmp_path / "corpus" / name).write_text("\n".join(rows[1::3]) + "\n", encoding="utf-8")
    checked(prepare(tmp_path, *flags, "--valid_share", "0", "--test_share", "0"))
    assert set(prepared_channels(tmp_path).values()) == {None} and len(prepared_channels(tmp_path)) == len(CALLS)


@pytest.mark.parametrize("kind", ["csv", "nemo", "kaldi"])
@pytest.mark.parametrize("value", ["2", "-2", "1.0", "left"])
def test_importer_rejects_only_the_row_with_invalid_channel(kind: str, value: str, tmp_path: Path) -> None:
    write_calls(tmp_path / "corpus")
    folder = tmp_path / "corpus"
    if kind == "csv":
        flags = write_csv(folder)
        lines = (folder / "all.csv").read_text(encoding="utf-8").splitlines()
        lines[1] = lines[1].rpartition(",")[0] + f",{value}"
        (folder / "all.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif kind == "nemo":
        flags = write_nemo(folder)
        lines = (folder / "all.json").read_text(encoding="utf-8").splitlines()
        number = json.loads(value) if value != "left" else value
        lines[0] = json.dumps(json.loads(lines[0]) | {"channel": number}, ensure_ascii=False)
        (folder / "all.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        flags = write_kaldi_segments(folder)
        lines = (folder / "segments").read_text(encoding="utf-8").splitlines()
        lines[0] = lines[0].rpartition(" ")[0] + f" {value}"
        (folder / "segments").write_text("\n".join(lines) + "\n", encoding="utf-8")
    checked(prepare(tmp_path, *flags, "--valid_share", "0", "--test_share", "0", "--max_rejected", "100%"))
    assert prepared_channels(tmp_path) == {text: channel for text, channel in EXPECTED.items() if text != sentence(0)}
    only = read_rejected(tmp_path)
    assert [item["kind"] for item in only] == ["channel"]
    assert ("no channel 2" if value == "2" else "channel") in only[0]["reason"]


def test_unrelated_channel_column_can_be_ignored_by_flag(tmp_path: Path) -> None:
    write_calls(tmp_path / "corpus")
    write_table(
        tmp_path / "corpus" / "all.csv",
        ("audio", "text", "channel"),
        [(f"{call}.wav", sentence(call), "Akashvani") for call in CALLS],
        ",",
    )
    flags = ("csv", "--table", "all.csv", "--valid_share", "0", "--test_share", "0")
    refused = prepare(tmp_path, *flags)
    assert refused.returncode == 3 and "--channel_column none" in refused.stderr
    checked(prepare(tmp_path, *flags, "--channel_column", "none"))
    assert set(prepared_channels(tmp_path).values()) == {None}


@pytest.mark.parametrize(("channels", "count"), [(("0", "1"), 0), (("0", "0"), 1), (("1", ""), 1), (("", ""), 1)])
def test_leak_is_reported_only_for_overlapping_channels(channels, count: int, tmp_path: Path) -> None:
    write_calls(tmp_path / "corpus")
    (tmp_path / "corpus" / "copy.wav").write_bytes((tmp_path / "corpus" / "0.wav").read_bytes())
    rows = [
        ("0.wav", "घर", "train", channels[0]),
        ("copy.wav", "उदक", "test", channels[1]),
        ("1.wav", "एक", "valid", ""),
    ]
    write_table(tmp_path / "corpus" / "all.csv", ("audio", "text", "split", "channel"), rows, ",")
    checked(prepare(tmp_path, "csv", "--table", "all.csv"))
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert {leak["what"]: leak["count"] for leak in report["leaks"]}["audio"] == count


def test_repeated_channel_is_rejected_as_duplicate(tmp_path: Path) -> None:
    write_calls(tmp_path / "corpus")
    rows = [("0.wav", "घर", "0"), ("0.wav", "उदक", "0"), ("0.wav", "एक", "1")]
    write_table(tmp_path / "corpus" / "all.csv", ("audio", "text", "channel"), rows, ",")
    shares = ("--valid_share", "0", "--test_share", "0", "--max_rejected", "100%")
    checked(prepare(tmp_path, "csv", "--table", "all.csv", *shares))
    assert prepared_channels(tmp_path) == {"घर": 0, "एक": 1}
    assert [item["kind"] for item in read_rejected(tmp_path)] == ["duplicate"]


# Commands


def inspect(manifest: Path) -> dict[str, object]:
    done = run_script("training_scripts/inspect_data.py", str(manifest), "--json")
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


def health_counts(report: dict[str, object]) -> list[int]:
    """Return the numbers of repeated audio, repeated rows and unreadable recordings."""
    part = report["health"]["parts"][0]
    result = (part["repeated_audio"], part["repeated_rows"], part["sound"]["unreadable"])
    return [listed["count"] for listed in result]


def test_inspection_counts_only_the_same_channel_as_repeated(tmp_path: Path) -> None:
    write_stereo(tmp_path / "call.wav")
    distinct = [row("call.wav", 1, channel=0), row("call.wav", 2, channel=1)]
    assert health_counts(inspect(write_rows(tmp_path / "a.jsonl", distinct))) == [0, 0, 0]
    repeated = [row("call.wav", 1, channel=1), row("call.wav", 2, channel=1), row("call.wav", 3, channel=7)]
    assert health_counts(inspect(write_rows(tmp_path / "b.jsonl", repeated))) == [1, 1, 1]


def write_dialogue(folder: Path, calls: int) -> Path:
    """Write stereo recordings of two speakers, one row each; row 1 names a missing channel."""
    rows = []
    for call in range(calls):
        sides = [speak(sentence(number).split()) for number in (2 * call, 2 * call + 1)]
        samples = np.zeros((max(map(len, sides)), 2), np.float32)
        for channel, side in enumerate(sides):
            samples[: len(side), channel] = side
        soundfile.write(folder / f"{call}.wav", samples, RATE)
        seconds = len(samples) / RATE
        rows += [row(f"{call}.wav", 2 * call + c, channel=c) | {"duration": seconds} for c in (0, 1)]
    rows[0]["channel"] = 2
    return write_rows(folder / "dialogue.jsonl", rows)


def test_training_and_evaluation_use_channels_and_list_a_missing_one(tmp_path: Path) -> None:
    manifest = str(write_dialogue(tmp_path, 6))
    flags = ("--max_steps", "2", "--batch_size", "4", "--num_workers", "0", "--max_rejected", "10%")
    manifests = ("--train_manifest", manifest, "--valid_manifest", manifest)
    checked(run_trainer(*TINY_MODEL, *flags, *manifests, *run_folders(tmp_path)))
    listed = (tmp_path / "runs" / "default" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    reasons = {(json.loads(line)["row"], json.loads(line)["reason"]) for line in listed}
    assert reasons == {(1, "it has no channel 2: it has 2 channels, counted from 0")}
    output = tmp_path / "hypotheses.jsonl"
    checked(
        run_script(
            "training_scripts/evaluate_konkanivani_asr.py",
            *("--checkpoint", str(tmp_path / "checkpoints" / "checkpoint_last.pt"), "--manifest", manifest),
            *("--output", str(output), "--device", "cpu"),
        )
    )
    ids = [json.loads(line)["audio_filepath"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert sorted(ids) == sorted(f"{call}.wav:ch{channel}" for call in range(6) for channel in (0, 1))[1:]
