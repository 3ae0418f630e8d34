"""One thread that decodes all recordings in turns."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from konkanivani.command_line import is_out_of_memory
from konkanivani.console import show_text
from konkanivani.errors import KonkaniVaniError
from konkanivani.inference.listener import Event
from konkanivani.serve.messages import Failure, Finished, Progress

# Of audio in one turn. Short, so that a recording with a backlog does not delay the others for long; not too short,
# since the recogniser catches up by leaving out partial results within one block.
TURN_SECONDS = 2.0
LOAD_SECONDS = 10.0  # the load is a mean over about this much audio
MAX_THREADS = 4  # of torch: more do not help with single utterances, and the browser runs on the same machine

Result = Event | Progress | Finished | Failure


class StreamingRecognizer(Protocol):
    """Recogniser of one recording, whose samples arrive in blocks: a `Listener`."""

    def accept(self, samples: np.ndarray, /) -> Sequence[Event]:
        """Return the new results for the next samples (S,)."""

    def finish(self) -> Sequence[Event]:
        """Return the remaining results at the end of the recording."""


BuildRecognizer = Callable[[int], StreamingRecognizer]


class Recording:
    """A recording in progress: its recogniser, and the samples that wait for it.

    Args:
        build_recognizer: called once with the sample rate in Hz, from the worker's thread.
        deliver: called with each result, from the worker's thread.
    """

    def __init__(self, build_recognizer: BuildRecognizer, sample_rate: int, deliver: Callable[[Result], None]) -> None:
        self._build_recognizer = build_recognizer
        self._recognizer: StreamingRecognizer | None = None
        self._sample_rate = sample_rate
        self._deliver = deliver
        self._lock = threading.Lock()
        self._blocks: deque[np.ndarray] = deque()
        self._added = 0  # samples
        self._waiting = 0  # samples
        self._decoded = 0  # samples
        self._load = 0.0
        self._is_complete = False
        self._is_ended = False

    @property
    def backlog(self) -> float:
        """Return the seconds of audio that wait for the recogniser."""
        return self._waiting / self._sample_rate

    @property
    def is_behind(self) -> bool:
        """Return whether some samples wait or are being decoded."""
        return self._decoded < self._added

    def add(self, samples: np.ndarray) -> None:
        """Append samples (S,)."""
        with self._lock:
            self._blocks.append(samples)
            self._added += len(samples)
            self._waiting += len(samples)

    def complete(self) -> None:
        """Mark the end of the samples."""
        self._is_complete = True

    def cancel(self) -> None:
        """Drop the waiting samples; no more results are delivered after the current turn."""
        with self._lock:
            self._is_ended = True
            self._blocks.clear()
            self._waiting = 0

    def has_work(self) -> bool:
        """Return whether samples wait, or the end of the recording does."""
        return not self._is_ended and (self._waiting > 0 or self._is_complete)

    def take_turn(self) -> None:
        """Decode up to TURN_SECONDS of audio, or end the recording, and deliver the results."""
        samples = self._next_samples()
        is_end = not len(samples) and self._is_complete
        results: list[Result] = []
        started = time.perf_counter()
        try:
            if self._recognizer is None:
                self._recognizer = self._build_recognizer(self._sample_rate)
            results += self._recognizer.finish() if is_end else self._recognizer.accept(samples)
        except Exception as error:
            # Whatever is wrong with one recording must not stop the others.
            results.append(Failure(explain_error(error)))
            is_end = True
        self._measure(len(samples), time.perf_counter() - started)
        results.append(Progress(self._decoded / self._sample_rate, self.backlog, self._load))
        if is_end:
            results.append(Finished())
        for result in results if not self._is_ended else ():
            self._deliver(result)
        if is_end:
            self.cancel()

    def _next_samples(self) -> np.ndarray:
        most = round(TURN_SECONDS * self._sample_rate)
        blocks: list[np.ndarray] = []
        with self._lock:
            while self._blocks and most > 0:
                block = self._blocks.popleft()
                if len(block) > most:
                    self._blocks.appendleft(block[most:])
                    block = block[:most]
                blocks.append(block)
                most -= len(block)
                self._waiting -= len(block)
        return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)

    def _measure(self, samples: int, seconds: float) -> None:
        self._decoded += samples
        if samples:
            duration = samples / self._sample_rate
            weight = duration / min(LOAD_SECONDS, self._decoded / self._sample_rate)
            self._load += weight * (seconds / duration - self._load)


def explain_error(error: Exception) -> str:
    """Return a sentence for the user about an error during recognition."""
    if isinstance(error, KonkaniVaniError):
        return str(error)
    if is_out_of_memory(error):
        return "The server has too little memory. Close other sessions or programs, and start again."
    kind = type(error).__name__
    return f"The recognition failed ({kind}: {show_text(str(error))}). Start again, and report this message."


class DecodingWorker:
    """Thread that decodes one turn of each recording after the other.

    One thread, because a model on one CPU or GPU does not get faster with two.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._waiting: deque[Recording] = deque()
        self._current: Recording | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def schedule(self, recording: Recording) -> None:
        """Give the recording a turn after the ones that wait already."""
        with self._wake:
            # The current recording is appended again after its turn, if it has work.
            if recording not in self._waiting and recording is not self._current:
                self._waiting.append(recording)
                self._wake.notify()

    def close(self) -> None:
        """End the thread after the current turn."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        # The number of OpenMP threads is a setting of each thread.
        torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._current = self._waiting.popleft()
            if self._current.has_work():
                self._current.take_turn()
            with self._wake:
                if self._current.has_work():
                    self._waiting.append(self._current)
                self._current = None
