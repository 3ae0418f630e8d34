"""Noise, reverberation and gain: exact SNR, determined by (seed, epoch, utterance), minimal reads."""

import dataclasses
import json
import multiprocessing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.config import AugmentConfig
from konkanivani.console import DecibelRange, parse_snr
from konkanivani.data import dataset as noise_module
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.batching import Cursor, EpochPlanner, GlobalBatch, same_size
from konkanivani.data.dataset import (
    NoiseReverb,
    Sound,
    TrainDataset,
    add_noise,
    load_excerpt,
    read_noise_reverb,
    read_sounds,
    reverberate,
    scale_and_clip,
)
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.manifest import Rejections, read_manifest
from konkanivani.data.text import train_tokenizer
from konkanivani.errors import DataError, UsageError
from konkanivani.flags import config_from_text, config_to_text
from tests.conftest import TINY_MODEL, Corpus, checked, mark_full, read_log, run_folders, run_trainer
from tests.run_setup import parse_flags

RATE = 16_000


def random_speech(seconds: float, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(round(seconds * RATE), generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_row(directory: Path, name: str, samples: np.ndarray, rate: int = RATE, **fields: object) -> dict:
    soundfile.write(directory / name, samples, rate, subtype="PCM_16")
    return {"audio_filepath": name, "duration": len(samples) / rate, **fields}


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def noise_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write noise and impulse responses at several rates; noise.jsonl and rooms.jsonl."""
    directory = tmp_path_factory.mktemp("noises")
    random = np.random.default_rng(5)
    long, short = (0.2 * random.standard_normal(length).clip(-4, 4) for length in (44_100 * 6, 8_000 // 3))
    stereo = 0.1 * random.standard_normal((16_000, 2)).clip(-4, 4)
    rows = [write_row(directory, "long.wav", long, 44_100), write_row(directory, "short.wav", short, 8_000, text="")]
    rows.append(write_row(directory, "stereo.flac", stereo, RATE, text=None))
    write_rows(directory / "noise.jsonl", [*rows, {"audio_filepath": "long.wav", "offset": 1.0, "duration": 2.5}])
    decay = np.exp(-np.arange(4_000) / 600)[:, None] * random.standard_normal((4_000, 3)) * 0.1
    decay[300] = 0.9
    write_rows(directory / "rooms.jsonl", [write_row(directory, "room.wav", decay)])
    return directory


@pytest.fixture(scope="module")
def full_augmentation(noise_folder: Path) -> NoiseReverb:
    """Return noise, reverberation and gain for most utterances."""
    rooms, noise = (str(noise_folder / f"{kind}.jsonl") for kind in ("rooms", "noise"))
    shares = {"rir_prob": 0.7, "noise_prob": 0.8, "gain": 6.0}
    return read_noise_reverb(AugmentConfig(rir_manifest=rooms, noise_manifest=noise, **shares), seed=3)


# Noise


@pytest.mark.parametrize("snr", [-10.0, 0.0, 5.0, 17.3, 40.0])
@pytest.mark.parametrize("level", [1e-12, 1.0, 1e6])
def test_measured_snr_equals_requested_snr(snr, level):
    speech, noise = random_speech(1.3), level * random_speech(1.3, seed=1)
    added = add_noise(speech, noise, snr).double() - speech.double()
    measured = 10 * torch.log10(speech.double().square().mean() / added.square().mean())
    assert float(measured) == pytest.approx(snr, abs=0.01)


def test_silent_speech_noise_or_response_changes_nothing():
    speech, silence = random_speech(0.5), torch.zeros(RATE // 2)
    assert torch.equal(add_noise(speech, silence, 5.0), speech)
    assert torch.equal(add_noise(silence, speech, 5.0), silence)
    assert torch.equal(reverberate(speech, torch.zeros(100)), speech)
    assert torch.equal(reverberate(silence, speech[:100]), silence)


@pytest.mark.parametrize("seconds", [0.1, 0.31, 1.0, 2.5, 5.9999, 7.3])
def test_noise_excerpt_has_the_length_of_the_speech(seconds, noise_folder):
    speech = random_speech(seconds)
    for sound in read_sounds(str(noise_folder / "noise.jsonl")):
        for seed in range(4):
            assert len(load_excerpt(sound, len(speech), generator(seed))) == len(speech)


def test_short_noise_is_repeated_from_a_random_start(tmp_path):
    ramp = np.arange(1, 101) / 200
    sounds = read_sounds(write_rows(tmp_path / "n.jsonl", [write_row(tmp_path, "ramp.wav", ramp)]))
    excerpts = [load_excerpt(sounds[0], 250, generator(seed)) for seed in range(8)]
    assert all(torch.equal(excerpt[:150], excerpt[100:]) for excerpt in excerpts)
    assert len({float(excerpt[0]) for excerpt in excerpts}) > 4


def decoded_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of frames of every read."""
    frames, read = [], soundfile.SoundFile.read

    def recorded(self: soundfile.SoundFile, count: int = -1, *arguments: object, **options: object) -> np.ndarray:
        frames.append(count)
        return read(self, count, *arguments, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", recorded)
    return frames


def test_only_the_excerpt_of_long_noise_is_decoded(noise_folder, tmp_path, monkeypatch):
    steps = np.arange(-30_000, 30_000) / 2**15
    sound = read_sounds(write_rows(tmp_path / "n.jsonl", [write_row(tmp_path, "steps.wav", steps)]))[0]
    excerpts = [load_excerpt(sound, 4_000, generator(seed)) * 2**15 for seed in range(5)]
    assert all((excerpt.diff() == 1).all() for excerpt in excerpts)
    assert len({float(excerpt[0]) for excerpt in excerpts}) == 5
    frames = decoded_frames(monkeypatch)
    sound = read_sounds(str(noise_folder / "noise.jsonl"))[0]
    assert frames == []  # headers are read without decoding
    load_excerpt(sound, RATE, generator())
    assert frames == [44_100]  # 1 of 6 s, at the file's own rate


def test_noise_row_with_offset_stays_within_its_span(tmp_path):
    samples = np.concatenate([np.full(RATE, 0.25), np.full(RATE, 0.5), np.full(RATE, 0.25)])
    row = {**write_row(tmp_path, "steps.wav", samples), "offset": 1.0, "duration": 1.0}
    sound = read_sounds(write_rows(tmp_path / "n.jsonl", [row]))[0]
    for length in (RATE // 2, RATE, 3 * RATE):
        assert load_excerpt(sound, length, generator(length)).tolist() == [0.5] * length


def test_noise_is_read_from_a_shard_member(tmp_path):
    row = write_row(tmp_path, "tone.wav", np.full(RATE, 0.5))
    content = (tmp_path / "tone.wav").read_bytes()
    (tmp_path / "shard.tar").write_bytes(b"x" * 512 + content + b"y" * 512)
    row |= {"audio_filepath": "shard.tar", "byte_offset": 512, "byte_count": len(content)}
    sound = read_sounds(write_rows(tmp_path / "n.jsonl", [row]))[0]
    assert sound.file.byte_offset == 512
    assert load_excerpt(sound, 1000, generator()).tolist() == [0.5] * 1000


# Reverberation and gain


@pytest.mark.parametrize("delay", [0, 1, 37, 4_000])
@pytest.mark.parametrize("height", [1.0, 1e-30, 0.3])
def test_impulse_response_of_one_sample_changes_nothing(delay, height):
    response = torch.zeros(5_000)
    response[delay] = height
    speech = random_speech(2.1)
    augmented = reverberate(speech, response)
    assert augmented.shape == speech.shape and (augmented - speech).abs().max() < 1e-6


def test_reverberation_keeps_length_timing_and_energy_and_adds_echoes():
    click = torch.zeros(RATE)
    click[5_000] = 1.0
    response = torch.zeros(3_000)
    response[200], response[100], response[1_200] = 0.8, 0.1, 0.4  # the direct path, an earlier sample, an echo
    augmented = reverberate(click, response)
    assert len(augmented) == RATE and int(augmented.abs().argmax()) == 5_000
    assert float(augmented.square().sum()) == pytest.approx(1.0, rel=1e-5)
    assert float(augmented[6_000] / augmented[5_000]) == pytest.approx(0.5, rel=1e-4)
    assert float(augmented[4_900] / augmented[5_000]) == pytest.approx(0.125, rel=1e-4)


def test_one_channel_of_impulse_response_is_drawn(noise_folder):
    response = read_sounds(str(noise_folder / "rooms.jsonl"))[0]
    result = {noise_module.load_response(response, generator(seed)).numpy().tobytes() for seed in range(20)}
    assert len(result) == 3


def test_gain_is_in_decibels_and_clips_at_full_scale():
    assert scale_and_clip(torch.tensor([0.1, -0.6]), 6.0).tolist() == pytest.approx([0.1 * 10**0.3, -1.0])
    assert scale_and_clip(torch.tensor([0.5]), -20.0).tolist() == pytest.approx([0.05])


# Determinism


def test_augmentation_is_determined_by_seed_epoch_and_utterance(full_augmentation):
    speech = random_speech(6.0)  # long enough for threaded sums, if there were any
    here = [full_augmentation(speech, epoch, f"u{number}") for epoch in range(3) for number in range(4)]
    torch.manual_seed(99)  # the default generator is not used
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        again = [full_augmentation(speech, epoch, f"u{number}") for epoch in range(3) for number in range(4)]
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, here, again))
    assert len({waveform.numpy().tobytes() for waveform in here}) == len(here)
    reseeded = dataclasses.replace(full_augmentation, seed=4)
    assert not torch.equal(reseeded(speech, 0, "u0"), here[0])
    assert all(waveform.isfinite().all() and len(waveform) == len(speech) for waveform in here)


@pytest.mark.parametrize("kind", ["rooms", "noise", "gain"])
def test_each_augmentation_varies_with_seed_epoch_and_utterance(kind, full_augmentation):
    rooms, noise = (
        dataclasses.replace(corpus, prob=1.0) for corpus in (full_augmentation.reverb, full_augmentation.noise)
    )
    alone = {"rooms": {"reverb": rooms}, "noise": {"noise": noise}, "gain": {"gain": 6.0}}
    speech = random_speech(0.3)

    def augmented(seed: int, epoch: int, name: str) -> bytes:
        return NoiseReverb(seed, **alone[kind])(speech, epoch, name).numpy().tobytes()

    # Twenty draws cover each of the three channels of the response.
    for others in zip(*([(n, 0, "u"), (0, n, "u"), (0, 0, f"{n}")] for n in range(20)), strict=True):
        results = [augmented(*other) for other in others]
        assert results == [augmented(*other) for other in others]
        assert len(set(results)) == (3 if kind == "rooms" else 20)


def test_probabilities_are_respected_and_draws_are_independent(full_augmentation):
    speech = random_speech(0.2)
    only_noise = dataclasses.replace(full_augmentation, reverb=None, gain=0.0)
    changed = [not torch.equal(only_noise(speech, 0, f"u{number}"), speech) for number in range(300)]
    assert 210 < sum(changed) < 270  # 0.8
    louder = dataclasses.replace(only_noise, gain=6.0)
    waveforms, of_one = (louder(speech, 0, f"u{number}") for number in range(300)), speech / speech.norm()
    assert changed == [not torch.allclose(each / each.norm(), of_one, atol=1e-5) for each in waveforms]
    never = dataclasses.replace(only_noise, noise=dataclasses.replace(full_augmentation.noise, prob=0.0))
    assert all(torch.equal(never(speech, 0, f"u{number}"), speech) for number in range(20))
    assert torch.equal(NoiseReverb()(speech, 0, "u"), speech)


def test_snr_is_drawn_from_the_whole_range(full_augmentation, monkeypatch):
    drawn = []
    monkeypatch.setattr(noise_module, "add_noise", lambda waveform, noise, snr: drawn.append(snr) or waveform)
    for number in range(200):
        full_augmentation(torch.ones(100), 0, f"u{number}")
    assert all(5 <= snr <= 25 for snr in drawn) and min(drawn) < 7 and max(drawn) > 23


# Invariant 1: resuming is exact with all augmentations, for any worker count


@pytest.fixture(scope="module")
def speech(corpus: Corpus, full_augmentation: NoiseReverb) -> TrainDataset:
    utterances = list(read_manifest(corpus.manifest("train")))[:14]  # 4 global batches per epoch
    tokenizer = train_tokenizer([u.text for u in utterances], "char", 100)
    return TrainDataset(utterances, tokenizer, (0.9, 1.0, 1.1), 3, noise_reverb=full_augmentation)


def global_batches(speech: TrainDataset, workers: int, cursor: Cursor, count: int) -> list[list[bytes]]:
    """Return the bytes of the waveforms of `count` global batches from the cursor."""
    planner = EpochPlanner(np.array([u.duration for u in speech.utterances]), 4, seed=3)
    loader = LoaderConfig(workers, 60.0, pin_memory=False)
    stream = GlobalBatchStream(speech, planner, same_size(2), loader, Rejections(None, most=0.0))
    opened = stream.from_cursor(cursor)
    taken: list[GlobalBatch] = [global_batch for global_batch, _ in islice(opened, count)]
    opened.close()
    return [[batch.waveforms.numpy().tobytes() for batch in global_batch.micro_batches] for global_batch in taken]


@pytest.mark.parametrize("workers", [0, 2, *mark_full(1, 4)])
def test_global_batches_are_equal_for_any_worker_count_and_cursor(speech, workers):
    whole = global_batches(speech, 0, Cursor(0, 0), 6)
    assert global_batches(speech, workers, Cursor(0, 0), 6) == whole
    assert global_batches(speech, workers, Cursor(0, 2), 4) == whole[2:]
    assert multiprocessing.active_children() == []


def test_negative_control_with_default_generator_global_batches_differ(speech, monkeypatch):
    whole = global_batches(speech, 0, Cursor(0, 0), 5)
    monkeypatch.setattr(noise_module, "utterance_generator", lambda seed, epoch, name, purpose: torch.default_generator)
    assert global_batches(speech, 2, Cursor(0, 0), 5)[2:] != global_batches(speech, 2, Cursor(0, 2), 3)
    assert global_batches(speech, 0, Cursor(0, 0), 5) != whole


def flags(noise_folder: Path) -> tuple[str, ...]:
    rooms = ("--rir_manifest", str(noise_folder / "rooms.jsonl"), "--rir_prob", "0.5", "--gain", "6")
    return "--noise_manifest", str(noise_folder / "noise.jsonl"), "--noise_snr", "0:20", *rooms


def test_augmented_run_resumes_exactly_with_other_worker_count(corpus, noise_folder, tmp_path):
    shape = (*TINY_MODEL, *corpus.flags(), "--batch_size", "2", "--gradient_accumulation_steps", "2")
    for name, first, workers in (("whole", "3", "0"), ("parted", "1", "2")):
        ends = ("--max_steps", first, "--num_workers", workers)
        checked(run_trainer(*shape, *flags(noise_folder), *run_folders(tmp_path / name), *ends))
    folders = run_folders(tmp_path / "parted")
    checked(run_trainer("--resume", "auto", *folders, "--max_steps", "3", "--num_workers", "1", "--noise_prob", "0.5"))
    whole, parted = ([record["loss"] for record in read_log(tmp_path / name)] for name in ("whole", "parted"))
    assert len(whole) == 3 and whole == parted
    clean = run_trainer(*shape, *run_folders(tmp_path / "clean"), "--max_steps", "1", "--num_workers", "0")
    assert clean.returncode == 0 and read_log(tmp_path / "clean")[0]["loss"] != whole[0]


def test_config_without_noise_flags_gets_the_defaults():
    lines = config_to_text(parse_flags([])).splitlines(True)
    old = [line for line in lines if not line.startswith(("--noise_", "--rir_", "--gain "))]
    assert len(lines) - len(old) == 6 and config_from_text("".join(old)) == parse_flags([])


def test_noise_settings_can_be_changed_on_resume():
    stored = parse_flags(["--noise_manifest", "n", "--noise_prob", "0.7"])
    assert parse_flags(["--resume", "auto", "--noise_prob", "0.2"], stored).augment.noise_prob == 0.2
    assert parse_flags(["--resume", "auto", "--noise_manifest", "None"], stored).augment.noise_manifest is None
    with pytest.raises(UsageError, match="--rir_prob has no effect"):
        parse_flags(["--resume", "auto", "--rir_prob", "0.2"], stored)


# Rejected settings


@pytest.mark.parametrize(
    "given, message",
    [
        (("--noise_snr", "5:25"), "--noise_snr has no effect without --noise_manifest"),
        (("--noise_prob", "0.5"), "--noise_prob has no effect without --noise_manifest"),
        (("--rir_prob=0.5",), "--rir_prob has no effect without --rir_manifest"),
        (("--noise_manifest", "n", "--noise_snr", "loud"), "--noise_snr loud: give the lowest and highest SNR"),
        (("--noise_manifest", "n", "--noise_snr", "5"), "--noise_snr 5: give the lowest and highest SNR"),
        (("--noise_manifest", "n", "--noise_snr", "25:5"), "--noise_snr 25:5: give the lower SNR first"),
        (("--noise_manifest", "n", "--noise_snr", "5:1000"), "both between -50 and 100 dB"),
        (("--noise_manifest", "n", "--noise_snr", "nan:5"), "--noise_snr nan:5: give"),
        (("--noise_manifest", "n", "--noise_prob", "1.5"), "--noise_prob must be between 0 and 1"),
        (("--rir_manifest", "n", "--rir_prob", "-0.5"), "--rir_prob and"),
        (("--gain", "-1"), "--gain must be between 0 and 40 dB"),
        (("--gain", "inf"), "--gain"),
    ],
)
def test_invalid_noise_flags_raise_usage_error(given, message):
    with pytest.raises(UsageError) as caught:
        parse_flags(list(given))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_snr_range_is_parsed_as_decibels():
    assert parse_snr("5:25") == DecibelRange(5.0, 25.0)
    assert parse_snr(" -5 : 0.5") == DecibelRange(-5.0, 0.5)
    assert parse_flags(["--noise_snr", "-5:5", "--noise_manifest", "n"]).augment.noise_snr == "-5:5"


def test_script_exits_with_2_for_flags_and_3_for_unusable_noise(corpus, tmp_path):
    idle = run_trainer(*corpus.flags(), "--resume", "auto", "--noise_prob", "0.5", *run_folders(tmp_path), cwd=tmp_path)
    assert idle.returncode == 2 and "has no effect without --noise_manifest" in idle.stderr
    empty = write_rows(tmp_path / "empty.jsonl", [])
    done = run_trainer(*TINY_MODEL, *corpus.flags(), "--noise_manifest", empty, *run_folders(tmp_path), cwd=tmp_path)
    assert done.returncode == 3 and "empty.jsonl is empty" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "row, message",
    [
        ({"audio_filepath": "gone.wav", "duration": 1}, "it does not exist"),
        ({"audio_filepath": "text.wav", "duration": 1}, "it cannot be opened as audio"),
        ({"audio_filepath": "empty.wav", "duration": 1}, "it contains no samples"),
        ({"audio_filepath": ".", "duration": 1}, "it is not a file"),
        ({"audio_filepath": "good.wav", "duration": 1, "offset": 1.5}, "ends at 2.00 s, before the end of the row"),
        ({"audio_filepath": "good.wav", "duration": 0, "offset": 1.5}, "has no samples in the row's range"),
        ({"audio_filepath": "good.wav"}, "duration must be a number"),
        ({"audio_filepath": "good.wav", "duration": 1, "text": 5}, "text must be"),
        ({"audio_filepath": "hall.wav", "duration": 1}, "lasts 21.0 s; an impulse response"),
    ],
)
def test_unusable_impulse_response_is_rejected_with_row_and_reason(row, message, tmp_path, monkeypatch):
    good = write_row(tmp_path, "good.wav", np.full(2 * RATE, 0.5))
    write_row(tmp_path, "hall.wav", np.zeros(21 * RATE))
    write_row(tmp_path, "empty.wav", np.zeros(0))
    (tmp_path / "text.wav").write_text("no audio")
    manifest = write_rows(tmp_path / "rooms.jsonl", [good, row])
    frames = decoded_frames(monkeypatch)
    with pytest.raises(DataError) as caught:
        read_noise_reverb(AugmentConfig(rir_manifest=manifest), seed=1)
    assert f"{manifest}, row 2: " in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value) and frames == []


def test_row_duration_rounded_up_ends_at_end_of_file(tmp_path):
    row = {**write_row(tmp_path, "a.wav", np.full(RATE, 0.5)), "offset": 0.5, "duration": 0.55}
    assert read_sounds(write_rows(tmp_path / "n.jsonl", [row])) == (
        Sound(AudioSource(str(tmp_path / "a.wav")), RATE, 8_000, 8_000),
    )


def test_noise_file_deleted_during_training_is_reported(corpus, speech, tmp_path):
    row = write_row(tmp_path, "a.wav", np.full(RATE, 0.5))
    manifest = write_rows(tmp_path / "n.jsonl", [row])
    noisy = read_noise_reverb(AugmentConfig(noise_manifest=manifest, noise_prob=1.0), seed=1)
    (tmp_path / "a.wav").unlink()
    with pytest.raises(DataError, match="a.wav from .* cannot be read: it does not exist"):
        global_batches(dataclasses.replace(speech, noise_reverb=noisy), 1, Cursor(0, 0), 1)
