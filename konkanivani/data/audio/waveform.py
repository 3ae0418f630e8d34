"""Waveforms: silence, clipped peaks and resampling.

S samples.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torchaudio

from konkanivani.data.audio.channels import choose_channel, mix, mix_blocks
from konkanivani.data.audio.files import (
    MAX_CHANNELS,
    MAX_RATE,
    MIN_RATE,
    AudioSource,
    claimed_header,
    read_blocks,
    read_samples,
)
from konkanivani.errors import DataError
from konkanivani.lengths import SAMPLE_RATE, resampled_samples

# --------------------
# Silence detection by frame energy, and the span of an utterance that contains speech.


FRAME_SECONDS = 0.010
# Relative threshold: a quiet speaker's words are not silence, whereas pauses in background noise are.
SILENCE_BELOW_SPEECH = 30.0  # dB below the 95th percentile of the utterance's frame levels
DIGITAL_SILENCE = -80.0  # dBFS: silence below this level, whatever the other frames are


def silent_frames(mono: np.ndarray, rate: int) -> np.ndarray:
    """Return which 10 ms frames of samples (S,) are silent, bool (frames,); the last frame may be longer."""
    size = max(1, round(rate * FRAME_SECONDS))
    count = max(1, len(mono) // size)
    # A DC offset is inaudible but would raise the level of every frame.
    centred = np.square(mono - mono.mean())
    power = np.add.reduceat(centred, np.arange(count) * size) / np.diff([*(np.arange(count) * size), len(mono)])
    # The floor of 1e-12 (-120 dB) keeps the logarithm of digital silence finite.
    levels = 10 * np.log10(np.maximum(power, 1e-12))
    return (levels < np.quantile(levels, 0.95) - SILENCE_BELOW_SPEECH) | (levels < DIGITAL_SILENCE)


def speech_span(waveform: torch.Tensor) -> tuple[float, float]:
    """Return start and end of the speech in a 16 kHz waveform (S,), in seconds; the whole waveform if all is silent."""
    speech = np.flatnonzero(~silent_frames(waveform.double().numpy(), SAMPLE_RATE))
    if not len(speech):
        return 0.0, len(waveform) / SAMPLE_RATE
    return float(speech[0] * FRAME_SECONDS), float((speech[-1] + 1) * FRAME_SECONDS)


# --------------------
# Restoration of clipped peaks.
#
# A recorder that is too loud cuts peaks off at full scale, which adds harmonics to all frequencies. A cubic between the
# slopes on both sides of a flat peak removes most of them. It must run before resampling, after which no peak is flat.


# Of full scale. A lower plateau may be the top of a wave in a quiet recording with few bits, a higher one is no limit.
CLIP_LEVEL = 0.98
CLIP_HIGHEST = 1.02
CLIP_FLATNESS = 1e-4  # largest difference of neighbouring samples on a plateau
CLIP_MIN_SAMPLES = 3
CLIP_MAX_SECONDS = 0.02  # a longer plateau is not half a period of a voice
# In loud speech, the slopes next to a plateau are steep, and a cubic with the full slopes is too high.
CLIP_SLOPE = 0.7
CLIP_MAX_GAIN = 4.0  # height of a restored peak over the plateau


def restore_peaks(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the waveform (S,) of `rate` Hz with clipped peaks restored; without any, the same tensor.

    A restored peak is higher than 1.
    """
    if not len(waveform) or waveform.abs().max() < CLIP_LEVEL:
        return waveform
    samples = waveform.numpy()
    first, count = _plateaus(samples, rate)
    if not len(first):
        return waveform
    # Position of each sample within its plateau, 1 to n, and its plateau's number.
    number = np.repeat(np.arange(len(first)), count)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + 1.0
    wide = samples.astype(np.float64)
    sign = np.sign(wide[first])
    after = first + count
    left, right = wide[first - 1] * sign, wide[after] * sign
    length = count + 1.0
    rise = np.maximum(left - wide[first - 2] * sign, 0.0) * length * CLIP_SLOPE
    fall = np.minimum(wide[after + 1] * sign - right, 0.0) * length * CLIP_SLOPE
    # Cubic Hermite interpolation between the last sample before the plateau and the first one after it.
    t = place / length[number]
    cubic = (2 * t**3 - 3 * t**2 + 1) * left[number] + (t**3 - 2 * t**2 + t) * rise[number]
    cubic += (3 * t**2 - 2 * t**3) * right[number] + (t**3 - t**2) * fall[number]
    level = wide[first] * sign
    peak = np.clip(cubic, level[number], CLIP_MAX_GAIN * level[number]) * sign[number]
    restored = samples.copy()
    restored[first[number] + place.astype(np.int64) - 1] = peak
    return torch.from_numpy(restored)


def _plateaus(samples: np.ndarray, rate: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first sample and the number of samples of each plateau with two samples on both sides of it."""
    first, count = _flat_runs(samples)
    fits = (count >= CLIP_MIN_SAMPLES) & (count <= CLIP_MAX_SECONDS * rate)
    fits &= (first >= 2) & (first + count <= len(samples) - 2)
    first, count = first[fits], count[fits]
    # A peak is higher than both neighbouring samples, so that the edge of a restored peak is not taken for one.
    sign = np.sign(samples[first])
    is_peak = np.maximum(samples[first - 1] * sign, samples[first + count] * sign) < samples[first] * sign
    return first[is_peak], count[is_peak]


def _flat_runs(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first sample and the number of samples of each run, 1 or longer, of equal samples at full scale."""
    is_loud = (np.abs(samples) >= CLIP_LEVEL) & (np.abs(samples) <= CLIP_HIGHEST)
    # Whether sample n + 1 belongs to the run of sample n.
    continues = is_loud[1:] & is_loud[:-1] & (np.abs(np.diff(samples)) <= CLIP_FLATNESS)
    first = np.flatnonzero(is_loud & ~np.append(False, continues))
    last = np.flatnonzero(is_loud & ~np.append(continues, False))
    return first, last - first + 1


class PeakRestorer:
    """Restoration of clipped peaks in a stream, block by block, with the result of `restore_peaks` for any blocks."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        # The last two samples that were returned, as they were before, and then those that wait.
        self._samples = torch.zeros(0)
        self._returned = 0  # 0 to 2 of them

    def accept(self, block: torch.Tensor) -> torch.Tensor:
        """Return the samples that are complete with the input block (S,): all but a last peak without an end."""
        self._samples = torch.cat([self._samples, block])
        if not len(self._samples) or self._samples.abs().max() < CLIP_LEVEL:
            return self._take(len(self._samples))
        first, count = _flat_runs(self._samples.numpy())
        # A peak needs two samples after it, to see its slope. A plateau that is too long for a peak need not wait.
        is_last = first + count > len(self._samples) - 2
        is_open = is_last & (first >= 2) & (count <= CLIP_MAX_SECONDS * self._rate)
        return self._take(int(first[is_open].min()) if is_open.any() else len(self._samples))

    def finish(self) -> torch.Tensor:
        """Return the remaining samples at the end of the stream."""
        return self._take(len(self._samples))

    def _take(self, end: int) -> torch.Tensor:
        """Return the waiting samples before position `end`, restored."""
        taken = restore_peaks(self._samples, self._rate)[self._returned : end]
        kept = max(0, end - 2)
        self._samples = self._samples[kept:]
        self._returned = end - kept
        return taken


# --------------------
# Loading and resampling of audio to 16 kHz mono waveforms, whole or as streams of blocks.


BLOCK_SECONDS = 1.0  # decoded and resampled at a time in a stream
# torchaudio's resampling filter: a sinc up to its sixth zero, cutoff at 0.99 of the lower rate's Nyquist frequency.
FILTER_ZEROS = 6
FILTER_ROLLOFF = 0.99
FILTERED_SAMPLES = 4000  # lengths are padded to a multiple of it, see change_rate
MAX_FILTER_WEIGHTS = 2**20  # 4 MiB; 44,100 Hz has 70,560


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that results are bitwise equal in a worker and in the training process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_audio(source: AudioSource) -> torch.Tensor:
    """Return the source's waveform (S,) float32 at 16 kHz: its channel if it names one, else all of them (see `mix`).

    Raise a `DataError` that names the source if it cannot be used.
    """
    samples, rate = read_samples(source)
    return resample(restore_peaks(mix(samples, source), rate), rate)


def resample(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """Resample a waveform (S,) from `rate` Hz to 16 kHz."""
    if rate == SAMPLE_RATE:
        return waveform
    # torchaudio's filter has a weight for each pair of an input and an output sample within the common period of both
    # rates: 3 GB at 44,099 Hz. resample_blocks applies the same filter with far fewer weights.
    if math.lcm(rate, SAMPLE_RATE) // math.gcd(rate, SAMPLE_RATE) > MAX_FILTER_WEIGHTS:
        return torch.cat(list(resample_blocks(waveform.split(rate), rate)))
    return change_rate(waveform, rate, SAMPLE_RATE)


def change_rate(waveform: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """Resample a waveform (S,) from rate `old` to rate `new`: (ceil(S new / old),)."""
    if not len(waveform):  # torchaudio raises an error
        return waveform
    # PyTorch's convolution compiles a kernel for each new length, which takes the time of resampling two seconds of
    # speech. Padding to a multiple of FILTERED_SAMPLES limits the number of lengths; the filter assumes zeros there
    # anyway.
    with one_thread():
        longer = torch.nn.functional.pad(waveform, (0, -len(waveform) % FILTERED_SAMPLES))
        return torchaudio.functional.resample(longer, old, new)[: resampled_samples(len(waveform), old, new)]


def stream_audio(source: AudioSource) -> Iterator[torch.Tensor]:
    """Return the waveform of `load_audio` as a stream of blocks (S,) of about 1 s; raise as `read_blocks`."""
    rate = claimed_header(source).rate
    return _at_16_khz(mix_blocks(read_blocks(source, BLOCK_SECONDS), source), rate)


def stream_samples(samples: np.ndarray | torch.Tensor, rate: int) -> Iterator[torch.Tensor]:
    """Return samples (S,) or (S, channels) of `rate` Hz as a stream of 16 kHz blocks (S,).

    Channels are averaged, or one is used if their mean would lose the speech, as for a file.

    Floats must be within -1 to 1; integers are scaled from the full range of their type. Raise a `DataError` if the
    samples cannot be used.
    """
    check_rate(rate)
    samples = check_samples(samples)
    # NumPy has no bfloat16.
    channel, _ = choose_channel((samples.float() if samples.dtype == torch.bfloat16 else samples).numpy(force=True))
    if channel is not None:
        samples = samples[:, channel : channel + 1]
    blocks = samples.split(max(1, int(BLOCK_SECONDS * rate)))
    return _at_16_khz((as_mono(block) for block in blocks), rate)


def check_rate(rate: int) -> None:
    """Raise a DataError unless the sample rate is within the limits."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataError(f"The sample rate {rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz. Resample it.")


def check_samples(samples: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return samples as a tensor (S, channels) on the CPU; raise a DataError if type or shape cannot be audio."""
    try:
        samples = torch.as_tensor(samples).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"The samples are not a numeric array: {error}. Pass an array of shape (S,) or (S, channels)."
        ) from None
    if samples.dtype in (torch.bool, torch.uint8) or samples.is_complex():
        raise DataError(f"Samples cannot be {samples.dtype}. Pass floats between -1 and 1, or signed integers.")
    channels = samples.shape[1] if samples.dim() == 2 else 1
    if samples.dim() == 2 and channels > MAX_CHANNELS and 1 <= len(samples) <= MAX_CHANNELS:
        raise DataError(
            f"Samples of shape {tuple(samples.shape)} are (channels, S), torchaudio's layout; (S, channels) is "
            "expected. Give samples.T."
        )
    if samples.dim() not in (1, 2) or not 1 <= channels <= MAX_CHANNELS:
        raise DataError(
            f"Samples of shape {tuple(samples.shape)} are not audio. Pass an array of shape (S,) or (S, channels)."
        )
    return samples.reshape(len(samples), channels)


def as_mono(block: torch.Tensor) -> torch.Tensor:
    """Return the mean (S,) float32 of the channels of a block (S, channels), with integers scaled to -1 to 1."""
    return scale_samples(block).mean(dim=1).float()


def scale_samples(block: torch.Tensor) -> torch.Tensor:
    """Convert a block to float64, with integers scaled to -1 to 1; raise a DataError if a sample is not finite."""
    # A power of two, so that scaling is exact: an integer type's minimum is -2**(bits - 1).
    scale = 1.0 if block.is_floating_point() else 1 / -torch.iinfo(block.dtype).min
    scaled = block.double() * scale
    if not torch.isfinite(scaled.float()).all():  # the float64 value 1e300 is infinite in float32
        raise DataError("The recording contains NaN or infinite samples. Repair it, or leave it out.")
    return scaled


class Resampler:
    """Conversion of a stream from `rate` Hz to 16 kHz, block by block, with the result of `resample` for any blocks.

    Output sample j is at the input position j * old / new and is a weighted sum of the input samples within the
    filter's reach; the weights depend only on j modulo `new`.
    """

    def __init__(self, rate: int) -> None:
        divisor = math.gcd(rate, SAMPLE_RATE)
        self._old = rate // divisor
        self._new = SAMPLE_RATE // divisor
        self._weights = _filter_weights(self._old, self._new)
        self._reach = self._weights.shape[1] // 2
        self._waiting = torch.zeros(self._reach)
        self._first = -self._reach  # stream position of waiting[0]
        self._length = 0
        self._done = 0

    def accept(self, block: torch.Tensor) -> torch.Tensor:
        """Return the output samples that are complete with the input block (S,)."""
        if self._old == self._new:
            return block
        self._length += len(block)
        self._waiting = torch.cat([self._waiting, block])
        return self._filter((self._length - self._reach) * self._new // self._old)

    def finish(self) -> torch.Tensor:
        """Return the remaining output samples at the end of the stream."""
        if self._old == self._new:
            return torch.zeros(0)
        self._waiting = torch.cat([self._waiting, torch.zeros(2 * self._reach)])
        return self._filter(resampled_samples(self._length, self._old, self._new))

    def _filter(self, ready: int) -> torch.Tensor:
        """Return the output samples up to sample `ready`, and drop the input that no later sample needs."""
        if ready <= self._done:
            return torch.zeros(0)
        outputs = torch.arange(self._done, ready)
        begins = outputs * self._old // self._new - self._reach - self._first
        windows = self._waiting.unfold(0, self._weights.shape[1], 1)
        filtered = (windows[begins] * self._weights[outputs % self._new]).sum(dim=1)
        self._done = ready
        first_needed = ready * self._old // self._new - self._reach
        self._waiting = self._waiting[first_needed - self._first :]
        self._first = first_needed
        return filtered


def resample_blocks(blocks: Iterable[torch.Tensor], rate: int) -> Iterator[torch.Tensor]:
    """Resample a stream of blocks (S,) from `rate` Hz to 16 kHz by a `Resampler`."""
    return _through(Resampler(rate), blocks)


def _at_16_khz(blocks: Iterable[torch.Tensor], rate: int) -> Iterator[torch.Tensor]:
    """Restore clipped peaks in a stream of blocks (S,) of `rate` Hz, and resample it to 16 kHz."""
    return resample_blocks(_through(PeakRestorer(rate), blocks), rate)


def _through(stage: PeakRestorer | Resampler, blocks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return the results of a stage for a stream of blocks (S,), without empty ones."""
    yield from (done for block in blocks if len(done := stage.accept(block)))
    rest = stage.finish()
    if len(rest):
        yield rest


def _filter_weights(old: int, new: int) -> torch.Tensor:
    """Return the filter weights (new, taps), one row per fractional position of an output sample.

    The middle tap is the last input sample before the position. The filter is a sinc with a Hann window, as in
    torchaudio's resampler (Smith, Digital Audio Resampling), computed in float64.
    """
    cutoff = min(old, new) * FILTER_ROLLOFF
    reach = math.ceil(FILTER_ZEROS * old / cutoff) + 1
    fractions = torch.arange(new, dtype=torch.float64) * old / new % 1
    distances = torch.arange(-reach, reach + 1, dtype=torch.float64)[None] - fractions[:, None]
    zeros = (distances * cutoff / old).clamp(-FILTER_ZEROS, FILTER_ZEROS)
    window = torch.cos(zeros * math.pi / FILTER_ZEROS / 2).square()
    return (torch.sinc(zeros) * window * cutoff / old).float()
