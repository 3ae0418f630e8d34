"""Segmentation of a recording, or of live speech, into pieces for recognition, cut at pauses or else with an overlap.

The recording is read as a stream. At most a minute of it is in memory, or twice the maximum duration of a piece.

S samples at 16 kHz.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from konkanivani.errors import UsageError
from konkanivani.lengths import SAMPLE_RATE

STEPS_A_SECOND = 100  # levels and cuts have a resolution of 10 ms
STEP = SAMPLE_RATE // STEPS_A_SECOND  # samples
HORIZON = 60 * STEPS_A_SECOND  # steps read ahead to estimate the noise level
SMOOTHED = 5  # steps, an odd number: levels are mean powers over 50 ms
SILENCE_DB = -90.0  # dBFS, below one step of 16-bit audio
QUIETEST_FRACTION = 0.02  # fraction of steps whose level is taken as noise; in clean speech, closures of plosives
MAX_RANGE = 60.0  # dB, bound of the range from noise to the loudest step, for recordings with a noise gate
# A pause is at most this far above the noise: in dB, and as a fraction of the range from noise to the loudest step.
MAX_ABOVE_NOISE = 10.0
SHARE_ABOVE_NOISE = 0.25
# dB. A recording with a smaller range is noise only. Speech exceeds it even at 0 dB SNR: its loudest syllables are
# about 8 dB above its mean.
MIN_REACH = 6.0
MARGIN = 15  # steps of context around speech; without them the first and last sounds are misrecognised
OVERLAP = STEPS_A_SECOND  # steps of context at a cut within speech
OVERLAP_SHARE = 4  # the overlap is at most `longest` divided by this
DIP = 20  # steps: a cut within speech is in the middle of the quietest 0.2 s


@dataclass(frozen=True)
class Piece:
    """Part (S,) of a recording; its times are seconds from the start of the recording.

    Neighbours overlap if the cut is within speech: a word belongs to the piece whose core contains the middle of the
    word. `speech_start` and `speech_end` are the times of the first and last sound next to a pause, or None at a cut
    within speech.
    """

    waveform: torch.Tensor
    start: float
    core_start: float
    core_end: float
    speech_start: float | None
    speech_end: float | None

    @property
    def end(self) -> float:
        """End of the waveform in seconds."""
        return self.start + len(self.waveform) / SAMPLE_RATE

    @property
    def end_step(self) -> int:
        """End of the core, in steps of 10 ms."""
        return round(self.core_end * STEPS_A_SECOND)

    @property
    def is_cut(self) -> bool:
        """Return whether the piece ends within speech."""
        return self.speech_end is None


@dataclass(frozen=True)
class SegmentationConfig:
    """Maximum piece length `longest` and minimum silence `pause` between pieces, in steps of 10 ms."""

    longest: int
    pause: int

    @property
    def overlap(self) -> int:
        """Overlap with the neighbouring piece at a cut within speech."""
        return min(OVERLAP, self.longest // OVERLAP_SHARE)


def build_segmentation(
    longest_seconds: float, pause_seconds: float, window_seconds: float = math.inf
) -> SegmentationConfig:
    """Return the configuration for durations in seconds; raise a UsageError if a piece exceeds the model's window."""
    if longest_seconds > window_seconds:
        raise UsageError(
            f"--longest_piece {longest_seconds:g} is longer than the model's window of {window_seconds:g} s: use at "
            "most that."
        )
    return SegmentationConfig(int(longest_seconds * STEPS_A_SECOND), round(pause_seconds * STEPS_A_SECOND))


def segment_audio(blocks: Iterable[torch.Tensor], segmentation: SegmentationConfig) -> Iterator[Piece]:
    """Yield the pieces of a stream of blocks (S,) at 16 kHz, in order, without silence.

    A piece ends at the start of a pause. Speech longer than a piece is cut at the quietest point in the second half of
    the possible range, and both pieces extend beyond the cut by the overlap.
    """
    stream = _Stream(blocks)
    overlap = segmentation.overlap
    # end of the last piece, and whether speech was cut there
    cut = 0
    is_within_speech = False
    while True:
        stream.advance(cut - overlap, cut + max(HORIZON, 2 * segmentation.longest))
        loud = stream.loud_steps(cut)
        if not len(loud):
            if stream.has_ended:
                return
            cut = max(cut, stream.end - MARGIN)  # of the speech that may follow
            is_within_speech = False
            continue
        if not is_within_speech and int(loud[0]) - cut > MARGIN:
            # Skip the silence, then measure again, so that the levels cover a full horizon from here on.
            cut = begin_of_piece(stream, int(loud[0]), cut)
            continue
        piece = first_piece(stream, loud, segmentation, cut, is_within_speech)
        yield piece
        cut = piece.end_step
        is_within_speech = piece.is_cut


def begin_of_piece(steps: "StepBuffer", first_loud: int, cut: int) -> int:
    """Return the first step of a piece whose speech starts at `first_loud`: a margin before it, no digital silence."""
    begin = max(cut, first_loud - MARGIN)
    nothing = steps.steps_of_nothing(begin, first_loud)
    return int(nothing[-1]) + 1 if len(nothing) else begin


def first_piece(
    steps: "StepBuffer", loud: torch.Tensor, segmentation: SegmentationConfig, cut: int, is_within_speech: bool
) -> Piece:
    """Return the piece of the loud steps up to the first pause, cut if it would be too long.

    Args:
        loud: the loud steps after `cut`, ascending, at least one.
        cut: end of the previous piece, or the beginning of this one.
        is_within_speech: whether the previous piece was cut within speech.
    """
    overlap = segmentation.overlap
    start = cut - overlap if is_within_speech else cut
    # Last loud step before the first gap that is a pause; all loud steps count if there is none.
    before_pauses = loud[:-1][loud.diff() > segmentation.pause]
    speech_end = int(before_pauses[0] if len(before_pauses) else loud[-1]) + 1
    end = min(speech_end + MARGIN, steps.end)
    if end < steps.end:
        # Digital silence at the end is not part of a piece. It may also be the closure before a weak final plosive.
        nothing = set(steps.steps_of_nothing(speech_end, end).tolist())
        while end > speech_end and end - 1 in nothing:
            end -= 1
    is_cut = end - start > segmentation.longest
    if is_cut:
        end = steps.quietest_step(cut, start + segmentation.longest - overlap)
    waveform = steps.samples(start, end + overlap if is_cut else end)
    return Piece(
        waveform,
        start / STEPS_A_SECOND,
        core_start=cut / STEPS_A_SECOND,
        core_end=end / STEPS_A_SECOND,
        speech_start=None if is_within_speech else int(loud[0]) / STEPS_A_SECOND,
        speech_end=None if is_cut else speech_end / STEPS_A_SECOND,
    )


def step_powers(steps: torch.Tensor) -> torch.Tensor:
    """Return the power of each row of steps (N, samples) without its mean: a DC offset would hide the pauses."""
    return (steps - steps.mean(dim=1, keepdim=True)).square().mean(dim=1)


class StepBuffer:
    """Samples from step `first` to step `end` of a stream, and the power of each step."""

    def __init__(self) -> None:
        self._samples = torch.zeros(0)
        self._power = torch.zeros(0)
        self.first = 0
        self.end = 0

    def drop(self, first: int) -> int:
        """Drop everything before step `first`; return the number of steps dropped."""
        forgotten = max(0, min(first, self.end) - self.first)
        self.first += forgotten
        self._power = self._power[forgotten:]
        self._samples = self._samples[forgotten * STEP :]
        return forgotten

    def append(self, blocks: Sequence[torch.Tensor], is_end: bool) -> int:
        """Append blocks (S,) and return the number of new steps; only at the end of a stream, the last may be short."""
        self._samples = torch.cat([self._samples, *blocks])
        new = self._samples[len(self._power) * STEP :]
        complete_steps = len(new) // STEP
        powers = [step_powers(new[: complete_steps * STEP].view(complete_steps, STEP))]
        if is_end and len(new) > complete_steps * STEP:
            powers.append(step_powers(new[None, complete_steps * STEP :]))
        self._power = torch.cat([self._power, *powers])
        added = self.first + len(self._power) - self.end
        self.end += added
        return added

    def centred_power(self, count: int) -> np.ndarray:
        """Return the power of the last `count` whole steps without their mean, which is a DC offset or hum."""
        count = min(count, len(self._samples) // STEP)
        complete_samples = len(self._samples) // STEP * STEP
        steps = self._samples[complete_samples - count * STEP : complete_samples].view(count, STEP).numpy()
        return steps.var(axis=1, dtype=np.float64)

    def steps_of_nothing(self, begin: int, end: int) -> torch.Tensor:
        """Return the steps of digital silence in a range, ascending."""
        # The zeros of a noise gate are unlike any silence in training: their logarithm would shift every normalised
        # feature.
        return torch.nonzero(self._power[begin - self.first : end - self.first] < 10 ** (SILENCE_DB / 10))[:, 0] + begin

    def quietest_step(self, begin: int, end: int) -> int:
        """Return the middle of the quietest 0.2 s in the second half of a range of steps."""
        power = self._power[(begin + end) // 2 - self.first : end - self.first]
        width = min(DIP, len(power))
        return (begin + end) // 2 + int(power.unfold(0, width, 1).sum(dim=1).argmin()) + width // 2

    def samples(self, begin: int, end: int) -> torch.Tensor:
        """Return the buffered samples in a range of steps."""
        return self._samples[max(0, begin - self.first) * STEP : (end - self.first) * STEP].clone()


class _Stream(StepBuffer):
    """Buffer that reads a stream of blocks ahead, with the level of each step."""

    def __init__(self, blocks: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._blocks = iter(blocks)
        self._levels = torch.zeros(0)
        self._loudest = -math.inf
        self._noise = -math.inf
        self.has_ended = False

    def advance(self, first: int, end: int) -> None:
        """Drop everything before step `first` and read up to step `end` or the end of the stream."""
        self.drop(first)
        blocks = []
        count = len(self._samples)
        while count < (end - self.first) * STEP and not self.has_ended:
            block = next(self._blocks, None)
            self.has_ended = block is None
            blocks += [] if block is None else [block]
            count += 0 if block is None else len(block)
        self._measure(has_new=count > len(self._power) * STEP, blocks=blocks)

    def _measure(self, has_new: bool, blocks: list[torch.Tensor]) -> None:
        """Append blocks and compute the levels of all steps."""
        self.append(blocks, self.has_ended)
        self._levels = torch.zeros(0)
        if not len(self._power):
            return
        # The first and last steps average over fewer neighbours, not over zeros.
        smoothed = F.avg_pool1d(self._power[None], SMOOTHED, 1, SMOOTHED // 2, count_include_pad=False)[0]
        self._levels = 10 * smoothed.clamp_min(1e-12).log10()
        if has_new:  # at the end of the stream too few steps may remain for an estimate
            # The loudest level of the whole recording, but the noise of the buffered steps only.
            self._loudest = max(self._loudest, float(self._levels.max()))
            self._noise = max(float(self._levels.quantile(QUIETEST_FRACTION)), self._loudest - MAX_RANGE)

    def loud_steps(self, first: int) -> torch.Tensor:
        """Return the buffered steps from `first` on that are louder than a pause, ascending."""
        reach = self._loudest - self._noise
        threshold = max(self._noise + min(MAX_ABOVE_NOISE, SHARE_ABOVE_NOISE * reach), SILENCE_DB)
        # In less than a second there are too few steps to judge.
        if reach < MIN_REACH and len(self._levels) > STEPS_A_SECOND:
            threshold = math.inf
        return torch.nonzero(self._levels[first - self.first :] > threshold)[:, 0] + first


# --------------------
# Segments of live speech, known as soon as they have ended. `segment_audio` reads a minute ahead. Here the noise level
# comes from the past, and each decision is made again while the segment lasts, so that its boundaries follow the latest
# estimate.


TICK = 5  # steps from one decision to the next
TICK_SAMPLES = TICK * STEP
HISTORY = 60 * STEPS_A_SECOND  # latest steps that the estimates are from
# Speech has a closure or a pause within this many steps. Sound that is louder for longer is new noise, such as a fan
# that was switched on. 3 s is twice the window of minimum statistics (Martin, 2001).
STEADY = 3 * STEPS_A_SECOND
LOOKBACK = 2 * STEPS_A_SECOND  # steps before the first detection in which speech may have started
MIN_LOUD = 8  # steps; a click has at most SMOOTHED + 1
# The mean of a steady signal changes between steps only by chance. Below 0.05 s no level is complete.
MIN_HISTORY = 2 * SMOOTHED  # steps


class NoiseEstimate:
    """Running levels of the noise and of the loudest sound, in dBFS, from the latest minute without digital silence.

    `threshold` is the level above which a step is speech, as in `segment_audio`; infinite if there is only noise.
    """

    def __init__(self) -> None:
        self._levels = np.zeros(HISTORY, dtype=np.float32)
        self._count = 0
        self._recent = np.zeros(0, dtype=np.float32)
        self.threshold = math.inf

    def add(self, levels: np.ndarray) -> None:
        """Add the levels of new steps."""
        audible = levels[levels > SILENCE_DB]
        if not len(audible):
            return
        self._levels[(self._count + np.arange(len(audible))) % HISTORY] = audible
        self._count += len(audible)
        self._recent = np.concatenate([self._recent, audible])[-STEADY:]
        self.threshold = self._speech_threshold()

    def _speech_threshold(self) -> float:
        count = min(self._count, HISTORY)
        if count < MIN_HISTORY:
            return math.inf
        levels = self._levels[:count]
        loudest = float(levels.max())
        rank = int(QUIETEST_FRACTION * (count - 1))
        noise = max(float(np.partition(levels, rank)[rank]), loudest - MAX_RANGE)
        if len(self._recent) == STEADY:
            noise = max(noise, float(self._recent.min()))
        reach = loudest - noise
        if reach < MIN_REACH:
            return math.inf
        return noise + min(MAX_ABOVE_NOISE, SHARE_ABOVE_NOISE * reach)


class CausalSegmenter:
    """Segmentation of a stream into pieces, each returned at its pause or at its maximum length."""

    def __init__(self, segmentation: SegmentationConfig) -> None:
        self._segmentation = segmentation
        self._steps = StepBuffer()
        self._levels = np.zeros(0, dtype=np.float32)
        self._noise = NoiseEstimate()
        # End of the last piece, or the step from which speech may start; and whether speech was cut there.
        self._cut = 0
        self._is_within_speech = False

    @property
    def seconds(self) -> float:
        """Duration of the stream so far."""
        return self._steps.end / STEPS_A_SECOND

    @property
    def start(self) -> float | None:
        """Start of the current piece in seconds, or None in a pause."""
        loud = self._loud_steps()
        if len(loud) < MIN_LOUD:
            return None
        return self._begin(loud) / STEPS_A_SECOND

    @property
    def buffered_samples(self) -> int:
        """Number of samples in memory, which does not grow with the stream."""
        return (self._steps.end - self._steps.first) * STEP

    def current(self) -> Piece | None:
        """Return the current piece as far as it is known, without the pause at its end; None in a pause."""
        loud = self._loud_steps()
        if len(loud) < MIN_LOUD:
            return None
        return first_piece(self._steps, loud, self._segmentation, self._begin(loud), self._is_within_speech)

    def advance(self, waveform: torch.Tensor, is_end: bool = False) -> list[Piece]:
        """Append samples (S,) and return the pieces that have ended.

        Args:
            waveform: `TICK_SAMPLES` samples; any number at the end of the stream.
        """
        if is_end:
            # Zeros complete the last step of 10 ms.
            waveform = F.pad(waveform, (0, -len(waveform) % STEP))
        self._measure(self._steps.append([waveform], is_end), is_end)
        pieces: list[Piece] = []
        while True:
            loud = self._loud_steps()
            if not len(loud):
                self._skip_silence(is_end)
                return pieces
            begin = self._begin(loud)
            start = begin - self._segmentation.overlap if self._is_within_speech else begin
            is_too_long = self._steps.end - start > self._segmentation.longest
            if not (is_too_long or is_end or self._is_followed_by_pause(loud)):
                # A later threshold may move the start, but not by more than the look-back.
                self._cut = max(self._cut, begin - LOOKBACK)
                self._forget()
                return pieces
            piece = first_piece(self._steps, loud, self._segmentation, begin, self._is_within_speech)
            if not (piece.is_cut or is_end or self._is_followed_by_pause(loud)):
                return pieces
            loud_steps = int((loud < piece.end_step).sum())
            if loud_steps >= MIN_LOUD or piece.is_cut or self._is_within_speech:
                pieces.append(piece)
            self._cut = piece.end_step
            self._is_within_speech = piece.is_cut

    def _measure(self, count: int, is_end: bool) -> None:
        """Compute the levels of `count` new steps, and of the two before, which lacked later neighbours."""
        half = SMOOTHED // 2
        power = self._steps.centred_power(count + 2 * half)
        is_audible = power > 10 ** (SILENCE_DB / 10)
        sums = _sum_of_neighbours(power * is_audible)
        counts = _sum_of_neighbours(is_audible.astype(np.float64))
        # Digital silence is left out of the noise and of its means: it would make any noise next to it seem loud.
        noise = np.full(len(power), SILENCE_DB - 1, dtype=np.float32)
        noise[is_audible] = 10 * np.log10(sums[is_audible] / counts[is_audible])
        # Silent steps next to sound count as sound, as in `segment_audio`: models expect a fade-in.
        softened = 10 * np.log10(np.maximum(sums / np.maximum(_sum_of_neighbours(np.ones(len(power))), 1), 1e-12))
        levels = np.where(is_audible, noise, softened).astype(np.float32)
        changed = levels[-min(len(levels), count + half) :]
        unchanged = self._levels[: max(0, len(self._levels) + count - len(changed))]
        self._levels = np.concatenate([unchanged, changed])
        # Only levels over a whole window: the last steps' levels change.
        complete = len(power) - (0 if is_end else half)
        self._noise.add(noise[max(0, complete - count) : complete])

    def _loud_steps(self) -> torch.Tensor:
        """Return the steps from the cut on that are louder than a pause, ascending."""
        levels = self._levels[self._cut - self._steps.first :]
        return torch.from_numpy(np.flatnonzero(levels > self._noise.threshold)) + self._cut

    def _begin(self, loud: torch.Tensor) -> int:
        """Return the first step of the core of the piece of these loud steps."""
        if self._is_within_speech:
            return self._cut
        # As many steps more as smoothing adds to the loud ones in `segment_audio`, whose threshold is lower.
        return max(self._cut, begin_of_piece(self._steps, int(loud[0]), self._cut) - SMOOTHED // 2)

    def _is_followed_by_pause(self, loud: torch.Tensor) -> bool:
        pause = self._segmentation.pause
        return self._steps.end - 1 - int(loud[-1]) > pause or bool((loud.diff() > pause).any())

    def _skip_silence(self, is_end: bool) -> None:
        """Move the cut to the end of the silence."""
        if self._is_within_speech and self._steps.end - self._cut <= self._segmentation.pause and not is_end:
            return
        self._is_within_speech = False
        self._cut = max(self._cut, self._steps.end - LOOKBACK)
        self._forget()

    def _forget(self) -> None:
        """Drop the steps before the cut and its overlap; the last steps are kept, whose levels are not complete."""
        first = min(self._cut - self._segmentation.overlap, self._steps.end - SMOOTHED)
        self._levels = self._levels[self._steps.drop(first) :]


def _sum_of_neighbours(values: np.ndarray) -> np.ndarray:
    """Return the sums over `SMOOTHED` values around each, fewer at the ends."""
    if not len(values):
        return values
    half = SMOOTHED // 2
    return np.convolve(values, np.ones(SMOOTHED))[half : half + len(values)]
