"""Features of an encoder: log-mel spectrogram, normalised, masked in training.

B batch, S samples, T feature frames, F mel bins.
"""

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
import torchaudio

from konkanivani.config import AugmentConfig, FeatureConfig
from konkanivani.lengths import SAMPLE_RATE, Framing, Lengths, beyond, padding_mask

# Descriptions, in exported models, of settings whose values are words.
DESCRIPTIONS = {
    "window": {kind: f"hann, {kind}, in the middle of the transform" for kind in ("periodic", "symmetric")},
    "mel_scale": {
        "htk": "htk, 0 Hz to half the sample rate, not normalised",
        "slaney": "slaney, 0 Hz to half the sample rate, each divided by its width in Hz",
    },
    "edges": {
        "none": "no padding",
        "zeros": "half a transform of zeros before, as much less a hop after",
        "reflected": "half a transform reflected at both ends",
    },
    "deviation": {
        "population": "mean 0 and variance 1 of each bin over the utterance",
        "sample": "mean 0 and variance 1, of n frames with n - 1, of each bin over the utterance",
    },
}
# Settings that a description omits at these values.
UNSAID = {"preemphasis": 0.0, "power_guard": "floor", "dynamic_range": 0.0, "dc_removal": "none"}
NORMALISATIONS = {  # normalisations that replace `deviation`
    "speech": "mean 0 and variance 1 of each bin over the frames within 35 dB of the loudest, weighted",
    "peak": "1.5 at the utterance's maximum, 3 less at 80 dB below it",
}
# Keys of these fields in bundles and ONNX files, which other programs and older versions read.
STORED_NAMES = {"frame_padding": "edges", "std_ddof": "deviation", "log_floor_mode": "power_guard"}


def stored_features(config: FeatureConfig) -> dict[str, object]:
    """Return the feature settings under the keys that files use."""
    return {STORED_NAMES.get(name, name): value for name, value in dataclasses.asdict(config).items()}


def described(config: FeatureConfig) -> dict[str, object]:
    """Return every setting that the features depend on, by name, for exported models that other programs read."""
    settings = stored_features(config)
    words = {name: kinds[str(settings[name])] for name, kinds in DESCRIPTIONS.items()}
    numbers = {name: value for name, value in settings.items() if name not in words and UNSAID.get(name) != value}
    words["normalisation"] = words.pop("deviation")
    words["normalisation"] = NORMALISATIONS.get(str(numbers.pop("normalization")), words["normalisation"])
    return {"sample_rate": SAMPLE_RATE, **words, **numbers}


class FeatureExtractor(Protocol):
    """Front end: waveforms (B, S), their lengths, seeds -> features (B, T, F), their lengths."""

    def __call__(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]: ...


class LogMel(torch.nn.Module):
    """Log-mel features: waveforms (B, S) with their lengths -> features (B, T, F) and their lengths.

    Frames reach beyond a waveform only into margins computed from that waveform, so batch padding never enters a valid
    frame, nor the maximum and the statistics of an utterance. NeMo's dither (noise of 1e-5, in training only) is not
    implemented.
    """

    dc_response: torch.Tensor

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.framing = Framing(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of 128 bands some fall between two frequency bins and are always 0
            self.power = torchaudio.transforms.MelSpectrogram(
                SAMPLE_RATE,
                n_fft=config.fft_samples,
                win_length=config.window_samples,
                hop_length=config.hop_samples,
                n_mels=config.mel_bins,
                # Padding at the ends depends on each utterance's length, so `with_margins` adds it.
                center=False,
                wkwargs={"periodic": config.window == "periodic"},
                norm="slaney" if config.mel_scale == "slaney" else None,
                mel_scale=config.mel_scale,
            )
        if config.mel_scale == "slaney":
            self.power.mel_scale.fb.copy_(slaney_bands(config))
        self.register_buffer("dc_response", dc_response(self.power.spectrogram.window, config), persistent=False)

    def forward(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        if has_margins(self.config):
            ends = torch.tensor(sample_lengths).to(waveforms.device, non_blocking=True)
            waveforms = with_margins(waveforms, ends, self.framing)
        power = self.power(waveforms) if self.config.dc_removal == "none" else self._power_without_dc(waveforms)
        features = log_power(power, self.config, out=power).transpose(1, 2)
        feature_lengths = tuple(map(self.framing.feature_length, sample_lengths))
        padding = padding_mask(feature_lengths, features.shape[1], features.device)
        frames = torch.tensor(feature_lengths, dtype=features.dtype).to(features.device)
        return normalize(features, padding, frames, self.config), feature_lengths

    def _power_without_dc(self, waveforms: torch.Tensor) -> torch.Tensor:
        """Return the band powers (B, F, T) of the frames without their DC offsets."""
        config = self.config
        spectrum = torch.stft(
            waveforms,
            config.fft_samples,
            config.hop_samples,
            config.window_samples,
            self.power.spectrogram.window,
            center=False,
            return_complex=True,
        )
        # A constant c in a frame has the spectrum c W(f), and bin 0 gives c W(0).
        offsets = spectrum[:, :1].clone()
        spectrum.addcmul_(offsets, torch.view_as_complex(self.dc_response)[:, None], value=-1)
        # In place and freed: the spectrum is larger than all later features, and may be the peak of a small model.
        power = torch.view_as_real(spectrum).square_().sum(dim=-1)
        del spectrum
        return self.power.mel_scale(power)


def dc_response(window: torch.Tensor, config: FeatureConfig) -> torch.Tensor:
    """Return the spectrum of the window, divided by its value at 0 Hz, as real and imaginary parts (K, 2)."""
    before = (config.fft_samples - config.window_samples) // 2
    padded = torch.zeros(config.fft_samples, dtype=torch.float64)
    padded[before : before + config.window_samples] = window.double()
    spectrum = torch.fft.rfft(padded)
    # Real and imaginary parts: Module.double() does not convert complex buffers.
    return torch.view_as_real(spectrum / spectrum[0].real).to(window.dtype)


def has_margins(config: FeatureConfig) -> bool:
    """Return whether waveforms are pre-emphasised or padded before the STFT."""
    return config.preemphasis > 0 or config.frame_padding != "none"


def with_margins(waveforms: torch.Tensor, ends: torch.Tensor, framing: Framing) -> torch.Tensor:
    """Return waveforms (B, S) with ends (B,) pre-emphasised, zeroed after their ends and padded on both sides."""
    config, (before, after) = framing.features, framing.padding
    if config.preemphasis:  # the first sample stays as it is
        waveforms = waveforms - config.preemphasis * F.pad(waveforms, (1, 0))[:, :-1]
    waveforms = waveforms.masked_fill(beyond(ends, waveforms.shape[1]), 0.0)
    if config.frame_padding != "reflected":
        return F.pad(waveforms, (before, after))
    # Reflect each utterance at its own end, so that its features do not depend on the batch.
    times = torch.arange(-before, waveforms.shape[1] + after, device=waveforms.device).abs()[None, :]
    last = ends[:, None] - 1
    times = torch.where(times > last, 2 * last - times, times)
    return waveforms.gather(1, times.clamp(min=0))


def log_power(power: torch.Tensor, config: FeatureConfig, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logarithm of band powers, guarded against log(0); written to `out` if given."""
    guard = torch.clamp_min if config.log_floor_mode == "floor" else torch.add
    return torch.log(guard(power, config.smallest_power, out=out), out=out)


def slaney_bands(config: FeatureConfig) -> torch.Tensor:
    """Return filters (K, F), float64, over the K frequency bins: triangles of area 1 Hz, as in librosa.

    The Slaney mel scale is linear up to 1000 Hz (15 mel), then logarithmic with steps of ln(6.4) / 27.
    """
    # Not torchaudio's: computed in fp32 its filters are off by 1e-5, which is 1e-4 in a feature.
    steepness = math.log(6.4) / 27
    highest = 15 + math.log(SAMPLE_RATE / 2 / 1000) / steepness
    mels = torch.linspace(0, highest, config.mel_bins + 2, dtype=torch.float64)
    hertz = torch.where(mels < 15, mels * 200 / 3, 1000 * ((mels - 15) * steepness).exp())
    bins = torch.linspace(0, SAMPLE_RATE / 2, config.fft_samples // 2 + 1, dtype=torch.float64)[:, None]
    low = hertz[:-2]
    middle = hertz[1:-1]
    high = hertz[2:]
    rising = (bins - low) / (middle - low)
    falling = (high - bins) / (high - middle)
    return torch.minimum(rising, falling).clamp_min(0) * 2 / (high - low)


NEPERS_PER_DB = math.log(10) / 10  # of power
# Weight of a frame in the statistics of speech: 1 down to 25 dB below the loudest frame, 0 from 35 dB on. A ramp
# instead of a threshold, so that rounding never moves a frame in or out.
FULL_WEIGHT_DB = 25.0
NO_WEIGHT_DB = 35.0
PEAK_RANGE_DB = 80.0  # Whisper maps this range to 2; these features are 1.5 times as large, of variance about 1
PEAK_SCALE = 1.5


def normalize(
    features: torch.Tensor, padding: torch.Tensor, frames: torch.Tensor, config: FeatureConfig
) -> torch.Tensor:
    """Limit the dynamic range of log-mel features (B, T, F) and normalise them; padding becomes 0.

    `padding` (B, T) is True after an utterance's end; `frames` (B,) is the number of valid frames, as floats.
    """
    if config.dynamic_range or config.normalization == "peak":
        # The smallest value that the logarithm can have: the maximum of an utterance without frames stays finite.
        smallest = math.log(config.smallest_power)
        highest = features.masked_fill(padding[:, :, None], smallest).amax(dim=(1, 2), keepdim=True)
    if config.dynamic_range:
        features = torch.maximum(features, highest - config.dynamic_range * NEPERS_PER_DB)
    if config.normalization == "utterance":
        return normalize_features(features, padding, frames, config.std_ddof)
    if config.normalization == "speech":
        return normalize_by_speech(features, padding)
    half_range = PEAK_RANGE_DB / 2 * NEPERS_PER_DB
    features = ((features - highest) / half_range + 1) * PEAK_SCALE
    return features.masked_fill(padding[:, :, None], 0.0)


def normalize_by_speech(features: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Normalise each bin of features (B, T, F) to mean 0, variance 1 over the frames of speech; padding becomes 0.

    Silence does not change the result, however much of it the recording contains: only frames within 35 dB of the
    utterance's loudest frame count.
    """
    # Energies, not means of logarithms, in which weak noise of all bands would outweigh vowels.
    levels = features.logsumexp(dim=2, keepdim=True) / NEPERS_PER_DB
    padding = padding[:, :, None]
    lowest = levels.amin(dim=1, keepdim=True)
    highest = torch.where(padding, lowest, levels).amax(dim=1, keepdim=True)
    weights = (levels - highest + NO_WEIGHT_DB) / (NO_WEIGHT_DB - FULL_WEIGHT_DB)
    weights = weights.clamp(0.0, 1.0).masked_fill(padding, 0.0)
    total = weights.sum(dim=1, keepdim=True).clamp_min(1.0)  # 0 for an utterance without frames
    features = features - (features * weights).sum(dim=1, keepdim=True) / total
    spread = ((features.square() * weights).sum(dim=1, keepdim=True) / total).sqrt()
    return (features / (spread + 1e-5)).masked_fill(padding, 0.0)


def normalize_features(
    features: torch.Tensor, padding: torch.Tensor, frames: torch.Tensor, std_ddof: str = "population"
) -> torch.Tensor:
    """Normalise each bin of features (B, T, F) to mean 0, variance 1 over the valid frames; padding becomes 0.

    `padding` (B, T) is True after an utterance's end; `frames` (B,) is the number of valid frames, as floats.
    """
    padding = padding[:, :, None]
    frames = frames[:, None, None].clamp_min(1)  # 0 for an utterance without frames
    features = features.masked_fill(padding, 0.0)
    features = features - features.sum(dim=1, keepdim=True) / frames
    features = features.masked_fill(padding, 0.0)  # subtracting the mean made the padding nonzero
    if std_ddof == "sample":
        frames = (frames - 1).clamp_min(1)
    spread = (features.square().sum(dim=1, keepdim=True) / frames).sqrt()
    return features / (spread + 1e-5)  # a constant bin has a spread of 0


@dataclass(frozen=True)
class SpecAugment:
    """SpecAugment (Park et al., 2019): bands and time spans set to 0, the mean after normalisation."""

    config: AugmentConfig
    mel_bins: int

    def draw_masks(self, seeds: tuple[int, ...], lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool masks (B, T) and (B, F) on the CPU, True if masked; row b depends on seeds[b] and lengths[b]."""
        time = torch.zeros(len(seeds), max(lengths), dtype=torch.bool)
        frequency = torch.zeros(len(seeds), self.mel_bins, dtype=torch.bool)
        for row, (seed, length) in enumerate(zip(seeds, lengths, strict=True)):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(self.config.frequency_masks):
                _mask_span(frequency[row], self.mel_bins, self.config.frequency_mask_bins, generator)
            for _ in range(self.config.time_masks):
                _mask_span(time[row], length, int(length * self.config.time_mask_share), generator)
        return time, frequency


def _mask_span(row: torch.Tensor, length: int, widest: int, generator: torch.Generator) -> None:
    width = int(torch.randint(widest + 1, (), generator=generator))
    start = int(torch.randint(length - width + 1, (), generator=generator))
    row[start : start + width] = True


class FrontEnd(torch.nn.Module):
    """Front end: waveforms (B, S) -> features (B, T, F) and their lengths, on the waveforms' device, in fp32.

    `augment_seeds` holds one seed per utterance in training and is None in evaluation.
    """

    def __init__(self, features: FeatureConfig, augment: AugmentConfig) -> None:
        super().__init__()
        self.log_mel = LogMel(features)
        self.spec_augment = SpecAugment(augment, features.mel_bins)

    @torch.no_grad()
    def forward(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]:
        # Band powers span more than fp16's range.
        with torch.autocast(waveforms.device.type, enabled=False):
            features, feature_lengths = self.log_mel(waveforms, sample_lengths)
        if augment_seeds is not None:
            time, frequency = self.spec_augment.draw_masks(augment_seeds, feature_lengths)
            features.masked_fill_(time.to(features.device, non_blocking=True)[:, :, None], 0.0)
            features.masked_fill_(frequency.to(features.device, non_blocking=True)[:, None, :], 0.0)
        return features, feature_lengths
