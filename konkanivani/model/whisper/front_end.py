"""From waveforms to what Whisper hears: the logarithm of mel bands over speech, or a window padded with silence.

Nothing is computed for the window's padding: all its frames are one constant.

B batch, S samples, T feature frames, F mel bins.
"""

import math

import torch

from konkanivani.base.config import AudioContext, AugmentConfig
from konkanivani.base.errors import DataError
from konkanivani.base.lengths import SAMPLE_RATE, Lengths
from konkanivani.model.front_end import SpecAugment
from konkanivani.model.whisper.shape import HOP_SAMPLES, SpeechFraming, WhisperShape

FFT_SAMPLES = 400
MIN_POWER = 1e-10
RANGE = 8.0  # powers of ten below an utterance's loudest band that are told apart


class WhisperLogMel(torch.nn.Module):
    """Waveforms (B, S) with their lengths -> log-mel (B, F, T) of the frames that hold speech, and a floor (B, 1, 1).

    The floor is what every frame of silence is: 8 powers of ten below the utterance's loudest band, or 1e-10. T is that
    of the longest utterance and at most a window's; frames behind a shorter one are its floor.
    """

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("window", torch.hann_window(FFT_SAMPLES), persistent=False)
        self.register_buffer("bands", mel_bands(shape.mel_bins).to(self.window.dtype), persistent=False)

    def forward(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
        """One utterance's spectrum is there at a time: it is the largest thing of a small model's step."""
        pairs = zip(waveforms, sample_lengths, strict=True)
        rows = [self._logarithms(waveform[:length]) for waveform, length in pairs]
        floor = torch.stack([row.amax() for row in rows])[:, None, None] - RANGE
        floor = floor.clamp_min_(floor.new_full((), MIN_POWER).log10())
        features = floor.expand(-1, self.shape.mel_bins, max(row.shape[1] for row in rows)).contiguous()
        for heard, row, least in zip(features, rows, floor, strict=True):
            torch.maximum(row, least, out=heard[:, : row.shape[1]])
        return features.add_(4.0).div_(4.0), (floor + 4.0) / 4.0

    def _logarithms(self, waveform: torch.Tensor) -> torch.Tensor:
        """(F, T) of a waveform (S,), up to its first frame without speech or the end of a window."""
        window = self.shape.window_samples
        if len(waveform) > window:
            raise DataError(
                f"An utterance of {len(waveform) / SAMPLE_RATE:.2f} s is longer than the model's window of "
                f"{self.shape.window_seconds:g} s. Exclude it (lower --max_duration), or cut it."
            )
        hops = -(-(len(waveform) + FFT_SAMPLES) // HOP_SAMPLES)
        padded = torch.nn.functional.pad(waveform, (0, min(window, hops * HOP_SAMPLES) - len(waveform)))
        spectrum = torch.stft(padded, FFT_SAMPLES, HOP_SAMPLES, window=self.window, return_complex=True)[:, :-1]
        powers = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
        return (self.bands @ powers).clamp_min_(MIN_POWER).log10_()


def mel_bands(count: int) -> torch.Tensor:
    """Triangles over the frequencies of a transform (count, 201), float64, each of area 1 over hertz (Slaney, 1998).

    In fp32, as torchaudio makes them, 128 bands differ from OpenAI's table by 1.6e-7 and features by 2e-5.
    """
    octave = 27 / math.log(6.4)  # bands a factor of e above 1000 Hz; below, 15 are even
    highest = 15 + octave * math.log(SAMPLE_RATE / 2 / 1000)
    mels = torch.linspace(0, highest, count + 2, dtype=torch.float64)
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp((mels - 15) / octave))
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, FFT_SAMPLES // 2 + 1, dtype=torch.float64)
    low, middle, high = (edges[start : start + count, None] for start in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.minimum(rising, falling).clamp_min(0) * 2 / (high - low)


class WhisperFrontEnd(torch.nn.Module):
    """Waveforms (B, S) -> features (B, T, F) of whole windows, or of speech, and their lengths, in full precision.

    Of speech they are the first ones of the window's; T is that of the longest utterance.
    `augment_seeds` holds one seed an utterance while training and is None in evaluation; what SpecAugment masks, of the
    frames that hold speech, is as silent as the padding.
    """

    def __init__(self, shape: WhisperShape, augment: AugmentConfig, audio_context: AudioContext = "window") -> None:
        super().__init__()
        self.shape, self.audio_context = shape, audio_context
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
    """Feature frames of the speech of each utterance."""
    return tuple(map(SpeechFraming().feature_length, sample_lengths))
