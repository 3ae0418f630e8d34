"""Features of Whisper: log-mel spectrogram over speech, or over a 30 s window padded with silence.

The padding's frames are not computed: all of them are one constant.

B batch, S samples, T feature frames, F mel bins.
"""

import math

import torch

from konkanivani.config import AudioContext, AugmentConfig
from konkanivani.errors import DataError
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.models.front_end import SpecAugment
from konkanivani.models.whisper.network import HOP_SAMPLES, SpeechFraming, WhisperShape

FFT_SAMPLES = 400
MIN_POWER = 1e-10
RANGE = 8.0  # dynamic range in powers of ten, below an utterance's loudest band


class WhisperLogMel(torch.nn.Module):
    """Log-mel spectrogram (B, F, T) of the frames with speech of waveforms (B, S), and a floor (B, 1, 1).

    The floor is the value of every silent frame: 8 powers of ten below the utterance's loudest band, or 1e-10. T is the
    longest utterance's number of frames, at most a window's; frames after a shorter utterance have its floor.
    """

    window: torch.Tensor
    bands: torch.Tensor

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("window", torch.hann_window(FFT_SAMPLES), persistent=False)
        self.register_buffer("bands", mel_bands(shape.mel_bins).to(self.window.dtype), persistent=False)

    def forward(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
        # One spectrum at a time: it is the largest tensor of a small model's step.
        pairs = zip(waveforms, sample_lengths, strict=True)
        rows = [self._logarithms(waveform[:length]) for waveform, length in pairs]
        floor = torch.stack([row.amax() for row in rows])[:, None, None] - RANGE
        floor = floor.clamp_min_(floor.new_full((), MIN_POWER).log10())
        features = floor.expand(-1, self.shape.mel_bins, max(row.shape[1] for row in rows)).contiguous()
        for heard, row, least in zip(features, rows, floor, strict=True):
            torch.maximum(row, least, out=heard[:, : row.shape[1]])
        # As in OpenAI's Whisper: (log10 + 4) / 4.
        return features.add_(4.0).div_(4.0), (floor + 4.0) / 4.0

    def _logarithms(self, waveform: torch.Tensor) -> torch.Tensor:
        """Return log10 bands (F, T) of a waveform (S,), up to its first frame without speech or a window's end."""
        window = self.shape.window_samples
        if len(waveform) > window:
            raise DataError(
                f"An utterance of {len(waveform) / SAMPLE_RATE:.2f} s is longer than the model's window of "
                f"{self.shape.window_seconds:g} s. Exclude it (lower --max_duration), or cut it."
            )
        hops = -(-(len(waveform) + FFT_SAMPLES) // HOP_SAMPLES)
        padded = torch.nn.functional.pad(waveform, (0, min(window, hops * HOP_SAMPLES) - len(waveform)))
        # Whisper drops the last frame of the centred STFT.
        spectrum = torch.stft(padded, FFT_SAMPLES, HOP_SAMPLES, window=self.window, return_complex=True)[:, :-1]
        powers = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
        return (self.bands @ powers).clamp_min_(MIN_POWER).log10_()


def mel_bands(count: int) -> torch.Tensor:
    """Return mel filters (count, 201), float64: triangles over the frequency bins, each of area 1 Hz (Slaney, 1998)."""
    # Not torchaudio's: in fp32 its 128 bands differ from OpenAI's table by 1.6e-7, and features by 2e-5.
    octave = 27 / math.log(6.4)  # bands per factor of e above 1000 Hz; below, 15 are evenly spaced
    highest = 15 + octave * math.log(SAMPLE_RATE / 2 / 1000)
    mels = torch.linspace(0, highest, count + 2, dtype=torch.float64)
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp((mels - 15) / octave))
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, FFT_SAMPLES // 2 + 1, dtype=torch.float64)
    low, middle, high = (edges[start : start + count, None] for start in range(3))
    rising = (frequencies - low) / (middle - low)
    falling = (high - frequencies) / (high - middle)
    return torch.minimum(rising, falling).clamp_min(0) * 2 / (high - low)


class WhisperFrontEnd(torch.nn.Module):
    """Front end: waveforms (B, S) -> features (B, T, F) and their lengths, in fp32.

    T is a window's number of frames or, if the audio context is speech, the longest utterance's: the same features as
    the window's first frames. `augment_seeds` holds one seed per utterance in training and is None in evaluation.
    SpecAugment masks frames with speech, and sets them to the value of the padding.
    """

    def __init__(self, shape: WhisperShape, augment: AugmentConfig, audio_context: AudioContext = "window") -> None:
        super().__init__()
        self.shape = shape
        self.audio_context = audio_context
        self.log_mel = WhisperLogMel(shape)
        self.spec_augment = SpecAugment(augment, shape.mel_bins)

    @torch.no_grad()
    def forward(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]:
        with torch.autocast(waveforms.device.type, enabled=False):
            heard, floor = self.log_mel(waveforms, sample_lengths)
        if augment_seeds is not None:
            heard = self._masked(heard, floor, augment_seeds, sample_lengths)
        if self.audio_context == "speech":
            spoken = _spoken(sample_lengths)
            return heard[:, :, : max(spoken)].transpose(1, 2), spoken
        features = floor.expand(-1, self.shape.mel_bins, self.shape.window_frames).contiguous()
        features[:, :, : heard.shape[2]] = heard
        return features.transpose(1, 2), (self.shape.window_frames,) * len(sample_lengths)

    def _masked(
        self, heard: torch.Tensor, floor: torch.Tensor, seeds: tuple[int, ...], sample_lengths: Lengths
    ) -> torch.Tensor:
        time, frequency = self.spec_augment.draw_masks(seeds, _spoken(sample_lengths))
        time = torch.nn.functional.pad(time, (0, heard.shape[2] - time.shape[1])).to(heard.device, non_blocking=True)
        frequency = frequency.to(heard.device, non_blocking=True)
        return torch.where(time[:, None, :] | frequency[:, :, None], floor, heard)


def _spoken(sample_lengths: Lengths) -> Lengths:
    """Return the number of feature frames with speech, per utterance."""
    return tuple(map(SpeechFraming().feature_length, sample_lengths))
