"""Audio files as 16 kHz mono waveforms, and waveforms as normalised log-mel features.

B batch, S samples, T feature frames, F mel bins.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torchaudio

from konkanivani.base.errors import DataError
from konkanivani.base.lengths import SAMPLE_RATE, resampled_samples
from konkanivani.data.audio.files import (
    MAX_CHANNELS,
    MAX_RATE,
    MIN_RATE,
    AudioSource,
    claimed_header,
    read_blocks,
    read_samples,
)

BLOCK_SECONDS = 1.0  # of a stream: what is decoded and resampled at once
# The resampling filter, as torchaudio's: a sinc that ends after six zeros, its cutoff a little under half of the rate.
FILTER_ZEROS, FILTER_ROLLOFF = 6, 0.99
FILTERED_SAMPLES = 4000  # lengths are rounded up to as many
MAX_FILTER_WEIGHTS = 2**20  # 4 MiB; 44,100 Hz has 70,560


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread, so that a transform gives the same bits in a worker and in the training process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_audio(source: AudioSource) -> torch.Tensor:
    """Return the source's (S,) float32 waveform at 16 kHz; a DataError names one that cannot be used.

    That is its channel if it names one, else the mean of all channels.
    """
    samples, rate = read_samples(source)
    channels = torch.from_numpy(samples)
    return resample(channels[:, 0] if channels.shape[1] == 1 else channels.mean(dim=1), rate)


def resample(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """The waveform (S,) of `rate` Hz at 16 kHz.

    Torchaudio's filter has a weight for each pair of an old and a new sample in the shortest time that both rates
    divide: 3 GB of them at 44,099 Hz. Such odd rates go the streams' way, which has the same filter in a few.
    """
    if rate == SAMPLE_RATE:
        return waveform
    if math.lcm(rate, SAMPLE_RATE) // math.gcd(rate, SAMPLE_RATE) > MAX_FILTER_WEIGHTS:
        return torch.cat(list(resample_blocks(waveform.split(rate), rate)))
    return change_rate(waveform, rate, SAMPLE_RATE)


def change_rate(waveform: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """The waveform (S,) of rate `old` at rate `new`: (ceil(S new / old),).

    Made longer to a whole number of blocks, of zeros as the filter takes them there anyway: PyTorch's convolution makes
    a program for each length that it meets, and that takes as long as two seconds of speech take to go through it.
    """
    with one_thread():
        longer = torch.nn.functional.pad(waveform, (0, -len(waveform) % FILTERED_SAMPLES))
        return torchaudio.functional.resample(longer, old, new)[: resampled_samples(len(waveform), old, new)]


def stream_audio(source: AudioSource) -> Iterator[torch.Tensor]:
    """The waveform that load_audio would return, in blocks (S,) of about a second; errors as in read_blocks."""
    rate = claimed_header(source).rate
    blocks = (torch.from_numpy(samples).mean(dim=1) for samples in read_blocks(source, BLOCK_SECONDS))
    return resample_blocks(blocks, rate)


def stream_samples(samples: np.ndarray | torch.Tensor, rate: int) -> Iterator[torch.Tensor]:
    """Samples (S,) or (S, channels) of `rate` Hz as a stream of blocks (S,) at 16 kHz, channels averaged.

    Floats are between -1 and 1, integers between the ends of their range. A DataError says why they cannot be used.
    """
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataError(f"The sample rate {rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz. Resample it.")
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
    blocks = samples.reshape(len(samples), channels).split(max(1, int(BLOCK_SECONDS * rate)))
    return resample_blocks((_as_mono(block) for block in blocks), rate)


def _as_mono(block: torch.Tensor) -> torch.Tensor:
    """A block (S, channels) of a recording as (S,) float32."""
    scale = 1.0 if block.is_floating_point() else 1 / -torch.iinfo(block.dtype).min
    mono = (block.double() * scale).mean(dim=1).float()
    if not torch.isfinite(mono).all():
        raise DataError("The recording contains NaN or infinite samples. Repair it, or leave it out.")
    return mono


def resample_blocks(blocks: Iterable[torch.Tensor], rate: int) -> Iterator[torch.Tensor]:
    """A stream of blocks (S,) at `rate` Hz as one at 16 kHz: what `resample` makes of the whole, for any blocks.

    Sample j of the result lies at j * old / new of the stream and is a sum over the samples that the filter reaches
    from there; its weights depend on j modulo `new` alone.
    """
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    divisor = math.gcd(rate, SAMPLE_RATE)
    old, new = rate // divisor, SAMPLE_RATE // divisor
    weights = _filter_weights(old, new)
    reach = weights.shape[1] // 2
    waiting, first, done, length = torch.zeros(reach), -reach, 0, 0  # `first` is where in the stream `waiting` begins
    for block in itertools.chain(blocks, [None]):
        length += 0 if block is None else len(block)
        waiting = torch.cat([waiting, torch.zeros(2 * reach) if block is None else block])
        # At the end, every sample that the stream's duration has room for; before it, those whose filter is all there.
        ready = resampled_samples(length, old, new) if block is None else max(done, ((length - reach) * new) // old)
        if ready == done:
            continue
        made = torch.arange(done, ready)
        begins = made * old // new - reach - first
        windows = waiting.unfold(0, weights.shape[1], 1)
        yield (windows[begins] * weights[made % new]).sum(dim=1)
        done = ready
        first_needed = done * old // new - reach
        waiting, first = waiting[first_needed - first :], first_needed


def _filter_weights(old: int, new: int) -> torch.Tensor:
    """(new, taps): for each fraction of a sample, the weights of the samples around it, the middle one the last before.

    A sinc under a Hann window, as torchaudio's resampler has it (Smith, Digital Audio Resampling); in float64 first.
    """
    cutoff = min(old, new) * FILTER_ROLLOFF
    reach = math.ceil(FILTER_ZEROS * old / cutoff) + 1
    fractions = torch.arange(new, dtype=torch.float64) * old / new % 1
    distances = torch.arange(-reach, reach + 1, dtype=torch.float64)[None] - fractions[:, None]
    zeros = (distances * cutoff / old).clamp(-FILTER_ZEROS, FILTER_ZEROS)
    window = torch.cos(zeros * math.pi / FILTER_ZEROS / 2).square()
    return (torch.sinc(zeros) * window * cutoff / old).float()
