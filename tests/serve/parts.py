"""Recogniser of tones, server in a thread, and client functions."""

import contextlib
import json
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from konkanivani.inference.listener import Final, Partial
from konkanivani.inference.word_times import Word
from konkanivani.serve.corrections import Corrections
from konkanivani.serve.decoding_worker import BuildRecognizer
from konkanivani.serve.messages import Ready
from konkanivani.serve.server import PageServer, bind
from konkanivani.serve.session import DEFAULT_LIMITS, Limits

RATE = 16_000
# Each word is a tone of half a second.
PITCHES = {"उदक": 400.0, "घर": 700.0, "शाळा": 1100.0, "बाजार": 1600.0, "आवय": 2200.0}
TONE_SECONDS = 0.5
GAP_SECONDS = 0.25
PAUSE_SECONDS = 0.6
LOUD = 0.02
FRAME_SECONDS = 0.05


def tones(lines: list[list[str]], rate: int = RATE, start: float = 0.3) -> np.ndarray:
    """Return a tone per word, with a pause after each line."""
    time = np.arange(round(TONE_SECONDS * rate)) / rate
    parts = [np.zeros(round(start * rate))]
    for words in lines:
        for word in words:
            parts += [0.3 * np.sin(2 * np.pi * PITCHES[word] * time), np.zeros(round(GAP_SECONDS * rate))]
        parts.append(np.zeros(round(PAUSE_SECONDS * rate)))
    return np.concatenate(parts).astype(np.float32)


class ToneListener:
    """Recogniser of `tones`: one partial result after each word, one final result at each pause."""

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._frame = round(FRAME_SECONDS * sample_rate)
        self._rest = np.zeros(0, dtype=np.float32)
        self._frames = 0
        self._pitches: list[float] = []  # of each frame of the current tone
        self._words: list[Word] = []
        self._silent_since = 0.0

    def accept(self, samples: np.ndarray) -> list[Partial | Final]:
        self._rest = np.concatenate([self._rest, samples])
        results: list[Partial | Final] = []
        while len(self._rest) >= self._frame:
            frame = self._rest[: self._frame]
            self._rest = self._rest[self._frame :]
            self._frames += 1
            results += self._process_frame(frame)
        return results

    def finish(self) -> list[Partial | Final]:
        self._end_word()
        return self._end_line()

    def _process_frame(self, frame: np.ndarray) -> list[Partial | Final]:
        now = self._frames * FRAME_SECONDS
        if np.sqrt(np.mean(np.square(frame))) > LOUD:
            spectrum = np.abs(np.fft.rfft(frame * np.hanning(len(frame)), 8 * len(frame)))
            self._pitches.append(spectrum.argmax() * self._rate / (8 * len(frame)))
            self._silent_since = now
            return []
        if self._end_word():
            texts = [word.text for word in self._words]
            return [Partial(" ".join(texts[:-1]), texts[-1], self._words[0].start)]
        return self._end_line() if now - self._silent_since >= PAUSE_SECONDS else []

    def _end_word(self) -> bool:
        is_word = len(self._pitches) > 2
        if is_word:
            pitch = float(np.median(self._pitches))
            text = min(PITCHES, key=lambda word: abs(PITCHES[word] - pitch))
            confidence = 0.97 if text != "बाजार" else 0.3
            self._words.append(Word(text, self._silent_since - TONE_SECONDS, self._silent_since, confidence))
        self._pitches = []
        return is_word

    def _end_line(self) -> list[Partial | Final]:
        words = tuple(self._words)
        self._words = []
        if not words:
            return []
        return [Final(" ".join(word.text for word in words), words, words[0].start, words[-1].end, False)]


@contextlib.contextmanager
def running_server(
    build: BuildRecognizer = ToneListener, limits: Limits = DEFAULT_LIMITS, corrections: Corrections | None = None
) -> Iterator[PageServer]:
    """Run a server in a thread during the block."""
    ready = Ready("tones.pt", "mr", corrections is not None)
    server = PageServer(build, ready, bind("127.0.0.1", 0), "127.0.0.1", corrections, limits)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)
        assert not thread.is_alive()


def connect_to(server: PageServer, endpoint: str = "listen", **options: object) -> ClientConnection:
    """Open a WebSocket connection with the Origin of the page."""
    parts = urlsplit(server.address)
    options.setdefault("origin", f"http://{parts.netloc}")
    return connect(f"ws://{parts.netloc}{parts.path}{endpoint}", compression=None, **options)


@contextlib.contextmanager
def start_recording(server: PageServer, rate: object = RATE) -> Iterator[ClientConnection]:
    """Open a connection and start a recording."""
    with connect_to(server) as connection:
        with contextlib.suppress(ConnectionClosed):  # all sessions are in use
            connection.send(json.dumps({"type": "start", "sample_rate": rate}))
        yield connection


def send(connection: ClientConnection, samples: np.ndarray, block: int = 1600) -> None:
    for first in range(0, len(samples), block):
        connection.send(samples[first : first + block].astype("<f4").tobytes())


def finish(connection: ClientConnection) -> None:
    connection.send(json.dumps({"type": "finish"}))


def receive_messages(connection: ClientConnection, kind: str | None = None, timeout: float = 10.0) -> list[dict]:
    """Return all messages until the connection is closed, or only those of type `kind`."""
    results = []
    with contextlib.suppress(Exception):
        while True:
            results.append(json.loads(connection.recv(timeout=timeout)))
    return [message for message in results if kind in (None, message["type"])]
