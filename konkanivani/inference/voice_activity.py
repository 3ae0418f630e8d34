"""Causal voice activity detection: segments of speech, known as soon as they have ended.

`segmentation.py` reads a minute ahead. Here the noise level comes from the past, and each decision is made again while
the segment lasts, so that its boundaries follow the latest estimate.

S samples at 16 kHz.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from konkanivani.inference.segmentation import (
    MAX_ABOVE_NOISE,
    MAX_RANGE,
    MIN_REACH,
    QUIETEST_FRACTION,
    SHARE_ABOVE_NOISE,
    SILENCE_DB,
    SMOOTHED,
    STEP,
    STEPS_A_SECOND,
    Piece,
    SegmentationConfig,
    StepBuffer,
    begin_of_piece,
    first_piece,
)

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

    `threshold` is the level above which a step is speech, as in `segmentation.py`; infinite if there is only noise.
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
        # But steps of silence next to sound count as sound, as in `segmentation.py`: models expect a soft beginning.
        softened = 10 * np.log10(np.maximum(sums / np.maximum(_sum_of_neighbours(np.ones(len(power))), 1), 1e-12))
        levels = np.where(is_audible, noise, softened).astype(np.float32)
        changed = levels[-min(len(levels), count + half) :]
        kept = self._levels[: max(0, len(self._levels) + count - len(changed))]
        self._levels = np.concatenate([kept, changed])
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
        # As many steps more as smoothing adds to the loud ones in `segmentation.py`, whose threshold is lower.
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
