"""Streamed recordings: resampling equals the whole, no speech is lost at cuts, memory is constant."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile
import torch
import torchaudio

from konkanivani.data.audio.files import AudioSource, ShortAudio
from konkanivani.data.audio.waveform import load_audio, resample_blocks, stream_audio, stream_samples
from konkanivani.errors import DataError
from konkanivani.inference.segmentation import Piece, build_segmentation, segment_audio
from konkanivani.lengths import SAMPLE_RATE


def noise(seconds: float, level: float = 0.1, seed: int = 0, rate: int = SAMPLE_RATE) -> torch.Tensor:
    return level * torch.randn(round(seconds * rate), generator=torch.Generator().manual_seed(seed))


def zeros(seconds: float) -> torch.Tensor:
    return torch.zeros(round(seconds * SAMPLE_RATE))


def syllables(seconds: float, seed: int = 0, rate: float = 5.0) -> torch.Tensor:
    """Return noise with the loudness pattern of speech, `rate` syllables per second, and no pause."""
    time = torch.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return noise(seconds, seed=seed) * (0.003 + torch.sin(rate * torch.pi * time).square())


def cut(waveform: torch.Tensor, longest: float = 20.0, pause: float = 0.4, block: int = 16_000) -> list[Piece]:
    return list(segment_audio(waveform.split(block), build_segmentation(longest, pause)))


@pytest.mark.parametrize("rate", [4_000, 8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_resampling_in_blocks_equals_resampling_the_whole(rate):
    whole = noise(1.37, 0.3, rate=rate)
    expected = torchaudio.functional.resample(whole.double(), rate, SAMPLE_RATE)
    for sizes in (rate, 777, len(whole)):
        streamed = torch.cat(list(resample_blocks(whole.split(sizes), rate)))
        assert len(streamed) == len(expected)
        assert (streamed - expected).abs().max() < 1e-6
    # Negative control: blocks resampled independently.
    apart = torch.cat([torchaudio.functional.resample(block.double(), rate, SAMPLE_RATE) for block in whole.split(800)])
    assert (apart[: len(expected)] - expected[: len(apart)]).abs().max() > 1e-2


def test_rate_without_common_divisor_is_resampled_accurately():
    tone = torch.sin(2 * torch.pi * 440 * torch.arange(44_099) / 44_099)
    streamed = torch.cat(list(resample_blocks(tone.split(5_000), 44_099)))
    expected = torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)
    assert len(streamed) == 16_000
    assert (streamed - expected)[200:-200].abs().max() < 2e-3


@pytest.mark.parametrize(("rate", "channels", "suffix"), [(16_000, 1, "flac"), (48_000, 2, "wav"), (8_000, 2, "ogg")])
def test_streamed_file_equals_loaded_file(tmp_path, rate, channels, suffix):
    samples = noise(3.3, rate=rate).repeat(channels, 1).T.numpy() * np.linspace(1, 0.5, channels)
    soundfile.write(tmp_path / f"a.{suffix}", samples, rate)
    source = AudioSource(str(tmp_path / f"a.{suffix}"))
    streamed, loaded = torch.cat(list(stream_audio(source))), load_audio(source)
    assert len(streamed) == len(loaded)
    assert (streamed - loaded).abs().max() < 2e-5  # torchaudio's filter is in float32


def test_truncated_flac_is_streamed_up_to_its_damage_with_warning(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, noise(20).numpy(), SAMPLE_RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(ShortAudio, match=r"a\.flac is truncated or damaged: it can be decoded for"):
        streamed = torch.cat(list(stream_audio(AudioSource(str(path)))))
    assert 8 * SAMPLE_RATE < len(streamed) <= 10 * SAMPLE_RATE
    assert (streamed - noise(20)[: len(streamed)]).abs().max() < 1e-4


def test_arrays_are_converted_to_floats_between_minus_one_and_one():
    wave = noise(0.5)
    stereo = torch.stack([wave, -0.5 * wave], dim=1)
    whole = (wave * 32768).round().clamp(-32768, 32767).to(torch.int16)
    for given, expected in ((wave.numpy(), wave), (stereo, wave / 4), (whole, wave), (wave.double(), wave)):
        assert (torch.cat(list(stream_samples(given, SAMPLE_RATE))) - expected).abs().max() < 2e-5
    assert list(stream_samples(np.zeros(0, dtype=np.float32), SAMPLE_RATE)) in ([], [pytest.approx([])])


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.full(100, np.nan), 16_000, "NaN or infinite"),
        (np.zeros((2, 16_000)), 16_000, "shape"),
        (np.zeros((4, 4, 4)), 16_000, "shape"),
        (np.zeros(100, dtype=np.uint8), 16_000, "uint8"),
        (np.zeros(100), 100, "100 Hz"),
        (["a"], 16_000, "not a numeric array"),
    ],
)
def test_arrays_that_are_not_audio_are_rejected(samples, rate, message):
    with pytest.raises(DataError, match=message):
        list(stream_samples(samples, rate))


def test_recording_is_segmented_at_pauses_and_silence_is_skipped():
    parts = [zeros(3), syllables(2, 1), zeros(0.8), syllables(3, 2), zeros(70), syllables(1, 3), zeros(1)]
    begins = list(itertools.accumulate(len(part) / SAMPLE_RATE for part in parts))
    pieces = cut(torch.cat(parts))
    assert [round(piece.start, 1) for piece in pieces] == [round(begins[place], 1) for place in (0, 2, 4)]
    assert [round(piece.end, 1) for piece in pieces] == [round(begins[place], 1) for place in (1, 3, 5)]
    assert all((piece.core_start, piece.core_end) == (piece.start, pytest.approx(piece.end)) for piece in pieces)


def test_recording_shorter_than_one_piece_is_not_segmented():
    for waveform in (syllables(2.5), torch.cat([zeros(0.1), syllables(2), zeros(0.3), syllables(1), zeros(0.1)])):
        (piece,) = cut(waveform)
        assert torch.equal(piece.waveform, waveform)


@pytest.mark.parametrize("silence", [zeros(30), zeros(0.05), torch.zeros(0), noise(30), noise(30, 1e-6), zeros(90)])
def test_silence_and_steady_noise_give_no_piece(silence):
    assert cut(silence) == []


def test_noise_between_speech_is_skipped_and_quiet_speech_is_kept():
    quiet = 0.05 * syllables(2, 2)
    parts = [syllables(2, 1), zeros(2), quiet, zeros(60), syllables(2, 3)]
    recording = torch.cat(parts)
    pieces = cut(recording + noise(len(recording) / SAMPLE_RATE, 2e-4, seed=9))
    assert [round(piece.start + 0.15) for piece in pieces] == [0, 4, 66]


@pytest.mark.parametrize("block", [160, 4_321, 16_000, 10**9])
def test_speech_without_pause_is_cut_with_overlap_at_quiet_points(block):
    waveform = syllables(95, rate=2.5)
    pieces = cut(waveform, longest=10.0, block=block)
    assert len(pieces) > 9 and all(piece.end - piece.start <= 10.001 for piece in pieces)
    assert (pieces[0].core_start, pieces[-1].core_end) == (0, 95)
    for one, other in itertools.pairwise(pieces):
        assert one.core_end == other.core_start  # every moment is in exactly one core
        assert one.end - one.core_end == pytest.approx(1.0) and other.core_start - other.start == pytest.approx(1.0)
    for piece in pieces:
        first = round(piece.start * SAMPLE_RATE)
        assert torch.equal(piece.waveform, waveform[first : first + len(piece.waveform)])
    # Cuts are at the quietest points: between syllables, which start 0.4 s apart.
    assert all(abs(piece.core_end * 2.5 - round(piece.core_end * 2.5)) < 0.1 for piece in pieces[:-1])


@pytest.mark.parametrize("longest", [0.03, 0.3, 1.0])
def test_segmentation_works_with_very_short_pieces(longest):
    waveform = syllables(4.123)
    pieces = cut(waveform, longest=longest)
    assert all(one.core_end == other.core_start < other.core_end for one, other in itertools.pairwise(pieces))
    assert all(len(piece.waveform) > 0 for piece in pieces)
    assert (pieces[0].core_start, pieces[-1].core_end) == (0, pytest.approx(4.123, abs=0.01))


def test_segmentation_reads_at_most_one_minute_ahead():
    read = 0

    def blocks() -> Iterator[torch.Tensor]:
        nonlocal read
        for number in range(600):
            read += 1
            yield torch.cat([syllables(0.7, number), zeros(0.3)])

    for count, piece in enumerate(segment_audio(blocks(), build_segmentation(20.0, 0.2))):
        assert read <= piece.end + 62
        if count == 50:
            break
    assert read < 120


def test_speech_start_and_end_are_set_at_pauses_only():
    quiet = noise(1.0, level=0.001, seed=1)
    recording = torch.cat([quiet, noise(2.0), quiet, noise(9.0, seed=2), quiet])
    first, *cut_apart = cut(recording, longest=4.0)
    assert (first.speech_start, first.speech_end) == pytest.approx((1.0, 3.0), abs=0.03)
    assert len(cut_apart) >= 3
    assert cut_apart[0].speech_start == pytest.approx(4.0, abs=0.03)
    assert cut_apart[-1].speech_end == pytest.approx(13.0, abs=0.03)
    assert {piece.speech_start for piece in cut_apart[1:]} == {piece.speech_end for piece in cut_apart[:-1]} == {None}
