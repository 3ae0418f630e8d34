"""A recording of any length as pieces that can be recognised one by one: cut at its pauses, else with an overlap.

The recording is read as a stream; of a long one, no more than about a minute is there at a time.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import SAMPLE_RATE

STEPS_A_SECOND = 100  # levels are measured, and cuts made, every 10 ms
STEP = SAMPLE_RATE // STEPS_A_SECOND  # samples
HORIZON = 60 * STEPS_A_SECOND  # what is looked at to tell pauses from speech
SMOOTHED = 5  # steps, an odd number: a level is the mean power over 50 ms
SILENCE_DB = -90.0  # dB under full scale: less than one step of 16 bit
QUIETEST_FRACTION = 0.02  # of the steps: their level is that of the noise, or of the closures of stops
MAX_RANGE = 60.0  # dB: the noise is taken to be at most so far under the loudest, as where a gate has made zeros of it
# A pause's level above the noise's: so many dB, and this share of the way to the loudest.
MAX_ABOVE_NOISE, SHARE_ABOVE_NOISE = 10.0, 0.25
# dB: what stays nearer to the noise is noise. Speech does not, not even where there is as much noise as speech: its
# loudest syllables are about 8 dB above its mean.
MIN_REACH = 6.0
MARGIN = 15  # steps kept before and after speech: without them the first and last sounds are misheard
OVERLAP = STEPS_A_SECOND  # context of a piece on the side where it was cut within speech
OVERLAP_SHARE = 4  # the overlap is at most the longest piece over this
DIP = 20  # steps: within speech the cut is in the middle of the quietest so many


@dataclass(frozen=True)
class Piece:
    """A stretch (S,) of a recording; its times are seconds from the recording's start.

    Where speech was cut, neighbours overlap: a word belongs to the piece in whose core the word's middle lies. Where it
    was not, `speech_start` is where sound begins after a pause, `speech_end` where it ends before one; else None.
    """

    waveform: torch.Tensor
    start: float
    core_start: float
    core_end: float
    speech_start: float | None
    speech_end: float | None

    @property
    def end(self) -> float:
        """The seconds at which its waveform ends."""
        return self.start + len(self.waveform) / SAMPLE_RATE


@dataclass(frozen=True)
class SegmentationConfig:
    """Where a recording is cut, in steps of 10 ms: pieces of `longest` at most, apart at silences above `pause`."""

    longest: int
    pause: int

    @property
    def overlap(self) -> int:
        """What a piece has of its neighbour where it was cut within speech."""
        return min(OVERLAP, self.longest // OVERLAP_SHARE)


def build_segmentation(longest_seconds: float, pause_seconds: float) -> SegmentationConfig:
    """The cutting for these seconds."""
    return SegmentationConfig(int(longest_seconds * STEPS_A_SECOND), round(pause_seconds * STEPS_A_SECOND))


def segment_audio(blocks: Iterable[torch.Tensor], segmentation: SegmentationConfig) -> Iterator[Piece]:
    """The pieces of a stream of blocks (S,) at 16 kHz, in order; what is silence is in none of them.

    A piece ends where a pause begins. Speech that goes on for longer than a piece can is cut at the quietest place in
    the second half of what there is room for, and both sides reach beyond it.
    """
    stream, overlap = _Stream(blocks), segmentation.overlap
    cut, is_within_speech = 0, False  # pieces are made up to this step; whether speech was cut there
    while True:
        stream.advance(cut - overlap, cut + max(HORIZON, 2 * segmentation.longest))
        loud = stream.loud_steps(cut)
        if not len(loud):
            if stream.has_ended:
                return
            cut, is_within_speech = stream.end, False
            continue
        if not is_within_speech and int(loud[0]) - cut > MARGIN:  # silence; look again as far from its end
            nothing = stream.steps_of_nothing(int(loud[0]) - MARGIN, int(loud[0]))
            cut = int(nothing[-1]) + 1 if len(nothing) else int(loud[0]) - MARGIN
            continue
        start = cut - overlap if is_within_speech else cut
        # The step after the last loud one before the first gap that is a pause.
        before_pauses = loud[:-1][loud.diff() > segmentation.pause]
        speech_end = int(before_pauses[0] if len(before_pauses) else loud[-1]) + 1
        end = min(speech_end + MARGIN, stream.end)
        if end < stream.end:
            nothing = stream.steps_of_nothing(speech_end, end)
            end = int(nothing[0]) if len(nothing) else end
        is_cut = end - start > segmentation.longest
        if is_cut:
            end = stream.quietest_step(cut, start + segmentation.longest - overlap)
        waveform = stream.samples(start, end + overlap if is_cut else end)
        yield Piece(
            waveform,
            start / STEPS_A_SECOND,
            core_start=cut / STEPS_A_SECOND,
            core_end=end / STEPS_A_SECOND,
            speech_start=None if is_within_speech else int(loud[0]) / STEPS_A_SECOND,
            speech_end=None if is_cut else speech_end / STEPS_A_SECOND,
        )
        cut, is_within_speech = end, is_cut


class _Stream:
    """What is there of a stream: the samples from step `first` to step `end`, and the level of each of those steps."""

    def __init__(self, blocks: Iterable[torch.Tensor]) -> None:
        self._blocks = iter(blocks)
        self._samples, self._power = torch.zeros(0), torch.zeros(0)
        self._levels, self._loudest, self._noise = torch.zeros(0), -math.inf, -math.inf
        self.first, self.end, self.has_ended = 0, 0, False

    def advance(self, first: int, end: int) -> None:
        """Forgets what is before step `first` and reads on to step `end`, or to where the stream ends."""
        forgotten = max(0, min(first, self.end) - self.first)
        self.first += forgotten
        self._power = self._power[forgotten:]
        parts, count = [self._samples[forgotten * STEP :]], len(self._samples) - forgotten * STEP
        while count < (end - self.first) * STEP and not self.has_ended:
            block = next(self._blocks, None)
            self.has_ended = block is None
            parts += [] if block is None else [block]
            count += 0 if block is None else len(block)
        self._samples = torch.cat(parts)
        self._measure()

    def _measure(self) -> None:
        """The power of the steps that are new, and the levels of all; the stream's last step may be a short one."""
        new = self._samples[len(self._power) * STEP :]
        whole = len(new) // STEP
        powers = [new[: whole * STEP].view(whole, STEP).square().mean(dim=1)]
        if self.has_ended and len(new) > whole * STEP:
            powers.append(new[whole * STEP :].square().mean()[None])
        self._power = torch.cat([self._power, *powers])
        self.end = self.first + len(self._power)
        self._levels = torch.zeros(0)
        if not len(self._power):
            return
        smoothed = F.avg_pool1d(self._power[None], SMOOTHED, 1, SMOOTHED // 2, count_include_pad=False)[0]
        self._levels = 10 * smoothed.clamp_min(1e-12).log10()
        if len(new):  # else too little may be left to tell what is noise
            self._loudest = max(self._loudest, float(self._levels.max()))
            self._noise = max(float(self._levels.quantile(QUIETEST_FRACTION)), self._loudest - MAX_RANGE)

    def loud_steps(self, first: int) -> torch.Tensor:
        """The steps from `first` on, ascending, that are louder than a pause is among what is there."""
        reach = self._loudest - self._noise
        threshold = max(self._noise + min(MAX_ABOVE_NOISE, SHARE_ABOVE_NOISE * reach), SILENCE_DB)
        if reach < MIN_REACH and len(self._levels) > STEPS_A_SECOND:
            threshold = math.inf
        return torch.nonzero(self._levels[first - self.first :] > threshold)[:, 0] + first

    def steps_of_nothing(self, begin: int, end: int) -> torch.Tensor:
        """The steps from `begin` to `end`, ascending, in which there is nothing at all.

        A gate's zeros are no silence that a model has learnt: their logarithm would change every normalised feature.
        """
        return torch.nonzero(self._power[begin - self.first : end - self.first] < 10 ** (SILENCE_DB / 10))[:, 0] + begin

    def quietest_step(self, begin: int, end: int) -> int:
        """The middle of the quietest fifth of a second in the second half of the steps from `begin` to `end`."""
        power = self._power[(begin + end) // 2 - self.first : end - self.first]
        width = min(DIP, len(power))
        return (begin + end) // 2 + int(power.unfold(0, width, 1).sum(dim=1).argmin()) + width // 2

    def samples(self, begin: int, end: int) -> torch.Tensor:
        """The samples from step `begin` to step `end`, as far as there are."""
        return self._samples[max(0, begin - self.first) * STEP : (end - self.first) * STEP].clone()
