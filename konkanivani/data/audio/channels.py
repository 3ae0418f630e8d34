"""Mono from the channels of a recording: their mean, or one channel if the mean would lose the speech.

S samples per channel, C channels.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import parent_process

import numpy as np
import torch

from konkanivani.console import say
from konkanivani.data.audio.sound import AudioSource

# The mean has less than this share of the power of the loudest channel: -20 dB. Uncorrelated channels keep a quarter.
CANCELLED_SHARE = 0.01
# A channel below this share of the loudest one's power, -40 dB, contains nothing but noise.
ONE_SIDED_SHARE = 1e-4
DECISION_BLOCKS = 10  # blocks with sound, of 1 s, after which a stream's channel is chosen
MAX_WAITING_BLOCKS = 60  # blocks in memory before that, silent ones included
PIECE_FRAMES = 2**18

CANCELLED = "its channels have opposite phases, so that their mean is nearly silent"
ONE_SIDED = "only one of its channels has sound"
# Files that a worker of a data loader names. New workers validate each epoch, and a corpus may have thousands.
MAX_NAMED_BY_WORKER = 2

_reported: set[str] = set()


class ChannelPowers:
    """Powers of the channels of a recording and of their mean, each without its DC offset, summed over blocks."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self._frames = 0
        self._sums = np.zeros(channels + 1)
        self._squares = np.zeros(channels + 1)

    def add(self, samples: np.ndarray) -> None:
        """Add samples (S, C)."""
        for start in range(0, len(samples), PIECE_FRAMES):  # a float64 copy of a whole recording may not fit
            piece = samples[start : start + PIECE_FRAMES].astype(np.float64)
            both = np.column_stack([piece, piece.mean(axis=1)])
            self._frames += len(both)
            self._sums += both.sum(axis=0)
            self._squares += np.square(both).sum(axis=0)

    def powers(self) -> np.ndarray:
        """Return the mean powers (C + 1,), the last of the mean of all channels."""
        frames = max(1, self._frames)
        return np.maximum(self._squares / frames - np.square(self._sums / frames), 0.0)

    def choose(self) -> tuple[int | None, str]:
        """Return the channel to use and the reason; None and "" for the mean of all channels."""
        *powers, mixed = self.powers()
        best = int(np.argmax(powers))
        if not powers[best] > 0:
            return None, ""
        if mixed < CANCELLED_SHARE * powers[best]:
            return best, CANCELLED
        remaining = [power for channel, power in enumerate(powers) if channel != best]
        if max(remaining, default=powers[best]) < ONE_SIDED_SHARE * powers[best]:
            return best, ONE_SIDED
        return None, ""


class ChannelMixer:
    """Mono from a stream of samples: at each block the powers of all samples so far decide, as for a file."""

    def __init__(self) -> None:
        self._powers: ChannelPowers | None = None

    def accept(self, samples: torch.Tensor) -> torch.Tensor:
        """Return samples (S, C) as mono (S,) float32."""
        if samples.shape[1] == 1:
            return samples[:, 0].float()
        if self._powers is None:
            self._powers = ChannelPowers(samples.shape[1])
        self._powers.add(samples.numpy())
        channel, _ = self._powers.choose()
        return _select_channel(samples, channel).float()


def choose_channel(samples: np.ndarray) -> tuple[int | None, str]:
    """Return the channel to use of samples (S, C) and the reason; None and "" for the mean of all channels."""
    if samples.shape[1] == 1:
        return None, ""
    powers = ChannelPowers(samples.shape[1])
    powers.add(samples)
    return powers.choose()


def mix(samples: np.ndarray, source: AudioSource) -> torch.Tensor:
    """Return the samples (S, C) of a source as mono (S,); a line names a file whose channels are not averaged."""
    channels = torch.from_numpy(samples)
    if channels.shape[1] == 1:
        return channels[:, 0]
    return _select_channel(channels, _report(*choose_channel(samples), source))


def mix_blocks(blocks: Iterable[np.ndarray], source: AudioSource) -> Iterator[torch.Tensor]:
    """Yield blocks (S, C) of a source as mono (S,), as `mix` does; the first seconds with sound decide for all."""
    stream = iter(blocks)
    waiting: list[np.ndarray] = []
    powers: ChannelPowers | None = None
    with_sound = 0
    for block in stream:
        waiting.append(block)
        if block.shape[1] == 1:
            break
        if powers is None:
            powers = ChannelPowers(block.shape[1])
        powers.add(block)
        with_sound += bool(block.any())
        if with_sound == DECISION_BLOCKS or len(waiting) == MAX_WAITING_BLOCKS:
            break
    channel = None if powers is None else _report(*powers.choose(), source)
    for block in itertools.chain(waiting, stream):
        yield _select_channel(torch.from_numpy(block), channel)


def _report(channel: int | None, reason: str, source: AudioSource) -> int | None:
    """Return the channel; print the file's name, once per process, if it is not None; workers name only the first."""
    name = str(source.path)
    if channel is None or name in _reported:
        return channel
    _reported.add(name)
    if parent_process() is None or len(_reported) <= MAX_NAMED_BY_WORKER:
        advice = "Set the row's channel to choose another one."
        # On stderr: transcripts and JSON are on stdout.
        say(f"Only channel {channel} of {name} is used, because {reason}. {advice}", sys.stderr)
    return channel


def _select_channel(channels: torch.Tensor, channel: int | None) -> torch.Tensor:
    return channels.mean(dim=1) if channel is None else channels[:, channel].contiguous()
