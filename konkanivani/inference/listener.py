"""Recognition of live speech: partial results by local agreement, and the final text of each segment.

The current segment is decoded again and again. A word is fixed when two successive passes agree on it
(LocalAgreement-2: Liu et al., 2020, Low-Latency Sequence-to-Sequence Speech Recognition; Macháček et al., 2023,
Turning Whisper into Real-Time Transcription System), or more passes if decodings of the same audio differ. Late in a
pause the segment is decoded with the configured search, which fixes all its words. They become the final text if the
pause lasts.

Time is counted in samples, never by a clock: results depend on the samples, not on the machine.
"""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from konkanivani.data.audio.channels import ChannelMixer
from konkanivani.data.audio.waveform import PeakRestorer, Resampler, check_rate, check_samples, scale_samples
from konkanivani.errors import DataError
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.segmentation import STEPS_A_SECOND, TICK_SAMPLES, CausalSegmenter, Piece
from konkanivani.inference.word_times import EmissionDelay, Word
from konkanivani.lengths import SAMPLE_RATE

EVERY = 0.2  # seconds of audio from one pass to the next
AGREEING_PASSES = 2  # that fix a word; one more for each of the `views` without it
SETTLED_SHARE = 0.75  # of the pause, after which the final search runs; closures of plosives reach half of it
MAX_LEVEL = 8.0  # samples beyond it are not audio between -1 and 1, even with clipping restored
FINALS_KEPT = 1000


@dataclass(frozen=True)
class Partial:
    """Words of the current segment: `fixed` ones no longer change, `tentative` ones may; `start` is in seconds."""

    fixed: str
    tentative: str
    start: float


@dataclass(frozen=True)
class Final:
    """Final words of a segment, with times in seconds; `changed` if fixed words were different."""

    text: str
    words: tuple[Word, ...]
    start: float
    end: float
    changed: bool


Event = Partial | Final


class LocalAgreement:
    """Words of a segment that are fixed, and the words of the latest pass after them."""

    def __init__(self) -> None:
        self.fixed: list[str] = []
        self.tentative: list[str] = []
        self._counts: list[int] = []  # successive passes that agree on each tentative word and all before it

    def update(self, words: Sequence[str], views: Sequence[Sequence[str]] = ()) -> None:
        """Fix the words on which this pass agrees with previous ones, but never the last word of a pass.

        Args:
            views: words of other decodings of the same audio. A word needs one more pass for each without it.
        """
        tail = list(words[matched_prefix(self.fixed, words) :])
        tails = [list(view[matched_prefix(self.fixed, view) :]) for view in views]
        same = 0
        while same < min(len(tail), len(self.tentative)) and tail[same] == self.tentative[same]:
            same += 1
        counts = [count + 1 for count in self._counts[:same]] + [1] * (len(tail) - same)
        agreed = 0
        while agreed < len(tail) - 1:
            differing = sum(other[agreed : agreed + 1] != [tail[agreed]] for other in tails)
            if counts[agreed] < AGREEING_PASSES + differing:
                break
            agreed += 1
        self.fixed += tail[:agreed]
        self.tentative = tail[agreed:]
        self._counts = counts[agreed:]

    def settle(self, words: Sequence[str]) -> None:
        """Fix all words of a pass, whose speech has probably ended."""
        self.fixed += words[matched_prefix(self.fixed, words) :]
        self.tentative = []
        self._counts = []

    def finish(self, words: Sequence[str], is_cut: bool) -> bool:
        """Start the next segment after these final words; return whether fixed words were different.

        Args:
            is_cut: whether the segment was cut within speech, so that fixed words may belong to the next one.
        """
        count = matched_prefix(words, self.fixed) if is_cut else len(self.fixed)
        is_changed = self.fixed[:count] != list(words[:count])
        self.fixed = self.fixed[count:]
        self.tentative = []
        self._counts = []
        return is_changed


def matched_prefix(words: Sequence[str], others: Sequence[str]) -> int:
    """Return the length of the prefix of `others` with the fewest word edits to `words`.

    Of equal ones, a prefix that ends with the same word is preferred, then the nearest in length.
    """
    distances = list(range(len(others) + 1))
    for place, word in enumerate(words):
        previous = distances
        distances = [place + 1]
        for column, other in enumerate(others):
            substituted = previous[column] + (word != other)
            distances.append(min(substituted, previous[column + 1] + 1, distances[column] + 1))

    def rank(count: int) -> tuple[int, bool, int]:
        ends_differently = not (count and words) or others[count - 1] != words[-1]
        return distances[count], ends_differently, abs(count - len(words))

    return min(range(len(others) + 1), key=rank)


@dataclass(frozen=True)
class Decoded:
    """Final words of a segment, and the estimate of the emission delay that they updated."""

    piece: Piece
    words: tuple[Word, ...]
    delay: EmissionDelay

    def is_of(self, piece: Piece) -> bool:
        """Return whether `piece` is the segment that was decoded."""
        return (
            self.piece.core_start == piece.core_start
            and self.piece.core_end == piece.core_end
            and self.piece.speech_start == piece.speech_start
            and self.piece.speech_end == piece.speech_end
            and torch.equal(self.piece.waveform, piece.waveform)
        )


class Listener:
    """Recogniser of one recording whose samples arrive in blocks of any length.

    Args:
        recognizer: recogniser with the search for the final text; partial results are decoded greedily.
        sample_rate: sampling rate of the samples, in Hz.
        every: seconds of audio from one pass to the next; None for final results only.
        skips_passes: leave out passes whose result the rest of the same block would replace at once. A caller that
            passes on all the audio that waits then catches up after a slow pass. Final results are never left out.

    Raises a DataError if the sample rate is not within the limits.
    """

    def __init__(
        self, recognizer: Recognizer, sample_rate: int, every: float | None = EVERY, skips_passes: bool = True
    ) -> None:
        check_rate(sample_rate)
        self._recognizer = recognizer
        self._every = every
        self._skips_passes = skips_passes
        self._restorer = PeakRestorer(sample_rate)
        self._resampler = Resampler(sample_rate)
        self._quantum = max(1, round(sample_rate * TICK_SAMPLES / SAMPLE_RATE))  # input samples resampled together
        self._mixer = ChannelMixer()
        self._given: list[torch.Tensor] = []  # less than a quantum, (S, channels)
        self._given_count = 0
        self._waveform = torch.zeros(0)  # at 16 kHz, less than a tick
        self._segmenter = CausalSegmenter(recognizer.segmentation)
        self._delay = EmissionDelay()
        self._agreement = LocalAgreement()
        self._next_pass = 0.0
        self._passed_end = 0.0  # end of the speech in the latest pass
        self._early: Decoded | None = None  # final text in case that the current pause lasts
        self._is_finished = False
        self.partial: Partial | None = None
        self.finals: deque[Final] = deque(maxlen=FINALS_KEPT)

    @property
    def seconds(self) -> float:
        """Duration of the audio that was examined so far."""
        return self._segmenter.seconds

    @property
    def buffered_samples(self) -> int:
        """Samples in memory, which do not grow with the recording."""
        return self._segmenter.buffered_samples + self._given_count + len(self._waveform)

    def accept(self, samples: np.ndarray | torch.Tensor) -> list[Event]:
        """Return the new results for the next samples (S,) or (S, channels).

        Channels are averaged, or one is used if their mean would lose the speech.

        Raises a DataError if the samples are not audio, or have another number of channels than before; they are left
        out of the recording.
        """
        if self._is_finished:
            raise ValueError("the recording has ended: create a new listener")
        block = scale_samples(check_samples(samples))
        if not len(block):
            return []
        if self._given and block.shape[1] != self._given[0].shape[1]:
            raise DataError(
                f"The number of channels changed from {self._given[0].shape[1]} to {block.shape[1]}. Use a new "
                "listener for another recording."
            )
        if float(block.abs().max()) > MAX_LEVEL:
            raise DataError(
                f"A sample is {float(block.abs().max()):.3g}, which is not between -1 and 1. Divide the samples by "
                "their full scale."
            )
        self._given.append(block)
        self._given_count += len(block)
        # In blocks of one length, so that rounding does not depend on the caller's blocks.
        whole = self._given_count // self._quantum * self._quantum
        if not whole:
            return []
        given = torch.cat(self._given)
        self._given = [given[whole:].clone()]
        self._given_count -= whole
        quanta = given[:whole].split(self._quantum)
        return self._decode_ticks(torch.cat([self._at_16_khz(quantum) for quantum in quanta]))

    def finish(self) -> list[Event]:
        """Return the remaining results at the end of the recording."""
        if self._is_finished:
            return []
        self._is_finished = True
        last = [self._at_16_khz(torch.cat(self._given))] if self._given else []
        last += [self._resampler.accept(self._restorer.finish()), self._resampler.finish()]
        events = self._decode_ticks(torch.cat(last))
        for piece in self._segmenter.advance(self._waveform, is_end=True):
            events += self._decode_final(piece)
        return events + self._clear_partial()

    def _at_16_khz(self, quantum: torch.Tensor) -> torch.Tensor:
        """Return the 16 kHz samples (S,) that are complete with the next samples (S, channels) of the recording."""
        return self._resampler.accept(self._restorer.accept(self._mixer.accept(quantum)))

    def _decode_ticks(self, waveform: torch.Tensor) -> list[Event]:
        waveform = torch.cat([self._waveform, waveform])
        whole = len(waveform) // TICK_SAMPLES * TICK_SAMPLES
        self._waveform = waveform[whole:].clone()
        events: list[Event] = []
        last = self._segmenter.seconds + whole / SAMPLE_RATE
        for tick in waveform[:whole].split(TICK_SAMPLES) if whole else ():
            for piece in self._segmenter.advance(tick):
                events += self._decode_final(piece)
            events += self._decode_partial(last)
        return events

    def _decode_partial(self, last: float) -> list[Event]:
        """Decode the current segment if a pass is due; `last` is the end of the available audio in seconds."""
        now = self._segmenter.seconds
        # Tolerance of half a tick: seconds are rounded.
        tolerance = TICK_SAMPLES / SAMPLE_RATE / 2
        if self._every is None or (self._skips_passes and last - now >= self._every - tolerance):
            return []
        piece = self._segmenter.current()
        if piece is None:
            return self._clear_partial()
        if not self._recognizer.is_long_enough(piece):
            return []
        pause = self._recognizer.segmentation.pause / STEPS_A_SECOND
        if piece.speech_end is not None and now - piece.speech_end >= SETTLED_SHARE * pause - tolerance:
            return self._decode_early(piece)
        # In a pause the same audio would be decoded again, and would agree with itself.
        if now < self._next_pass - tolerance or piece.end <= self._passed_end:
            return []
        self._next_pass = now + self._every
        self._passed_end = piece.end
        # Without the overlap with the previous segment, whose words are final.
        core = piece.waveform[round((piece.core_start - piece.start) * SAMPLE_RATE) :]
        prefix = self._recognizer.recognize_prefix(core)
        self._agreement.update(prefix.text.split(), [view.split() for view in prefix.views])
        return self._show_partial(piece.core_start)

    def _decode_early(self, piece: Piece) -> list[Event]:
        """Decode a segment that has probably ended, once, with the configured search."""
        if self._early is not None and self._early.is_of(piece):
            return []
        self._early = self._decode_segment(piece)
        self._agreement.settle([word.text for word in self._early.words])
        return self._show_partial(piece.core_start)

    def _show_partial(self, start: float) -> list[Event]:
        """Return the partial result if it is new."""
        partial = Partial(" ".join(self._agreement.fixed), " ".join(self._agreement.tentative), start)
        if self.partial is None and not (partial.fixed or partial.tentative):
            return []
        is_new = partial != self.partial
        self.partial = partial
        return [partial] if is_new else []

    def _clear_partial(self) -> list[Event]:
        """Return an empty partial result if words are shown that turned out to be noise."""
        # Also words that a cut carried over, if silence follows: the next sentence does not start with them.
        self._agreement = LocalAgreement()
        if self.partial is None:
            return []
        cleared = Partial("", "", self.partial.start)
        self.partial = None
        return [cleared]

    def _decode_final(self, piece: Piece) -> list[Event]:
        """Decode a complete segment with the configured search."""
        decoded = self._early
        if decoded is None or not decoded.is_of(piece):
            decoded = self._decode_segment(piece)
        self._early = None
        self._delay = decoded.delay
        self._passed_end = piece.core_end
        words = decoded.words
        texts = [word.text for word in words]
        is_changed = self._agreement.finish(texts, piece.is_cut)
        if not words:
            return self._clear_partial()
        self.partial = None
        final = Final(" ".join(texts), words, words[0].start, words[-1].end, is_changed)
        self.finals.append(final)
        return [final]

    def _decode_segment(self, piece: Piece) -> Decoded:
        """Decode a segment; the estimate of the delay becomes the listener's only if the segment is final."""
        delay = copy.deepcopy(self._delay)
        words: list[Word] = []
        if self._recognizer.is_long_enough(piece):
            (words,) = self._recognizer.recognize([piece], delay)
        return Decoded(piece, tuple(words), delay)
