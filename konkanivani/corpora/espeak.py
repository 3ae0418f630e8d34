"""espeak-ng in a process of its own, and the messages between it and its client.

    python -m konkanivani.corpora.espeak DESCRIPTOR

starts this process. It receives the fields of a `Request` over the connection (multiprocessing.connection) of this
descriptor, and returns the result, or a ValueError with the reason of the failure. espeak-ng comes with the PyPI
package espeakng-loader and is GPL-3; it is loaded in this process only, and its crash does not end a training.

Every request is answered by a new fork that has not spoken yet: espeak-ng carries oscillator phases from one utterance
into the next, so only then does the audio depend on the request alone.
"""

import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypedDict

MAX_SECONDS = 30.0  # of speech: the default limit in validation; longer speech is stopped and refused
REQUEST_SECONDS = 60  # timeout of a request; one sentence takes about 5 ms

# Constants of espeak-ng's speak_lib.h.
SYNCHRONOUS = 2
POSITION_IN_CHARACTERS = 1
UTF8_TEXT = 1
IPA_PHONEMES = 0x02
RATE = 1
VOLUME = 2
PITCH = 3
PITCH_RANGE = 4
END_OF_EVENTS = 0
WORD_EVENT = 1
END_EVENT = 5


@dataclass(frozen=True)
class Request:
    """A request to the process; `wants` is `engine`, `speech`, `words` or `phonemes`."""

    wants: str
    text: str = ""
    voice: str = "mr"
    rate: int = 160
    pitch: int = 50


class EngineFields(TypedDict):
    """Answer to the request `engine`: the sample rate in Hz, and espeak-ng with its version."""

    sample_rate: int
    engine: str


class WordFields(TypedDict):
    """Answer to the request `words`: each word's first character and start, and the end of the speech.

    Times are in milliseconds.
    """

    words: list[tuple[int, int]]
    end: int


class Event(ctypes.Structure):
    """espeak_EVENT of espeak-ng's speak_lib.h; text positions in characters from 1, audio positions in milliseconds."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


def iterate_events(events: "ctypes._Pointer[Event]") -> Iterator[Event]:
    """Yield the events of an array that ends with an END_OF_EVENTS; none if the pointer is null."""
    if not events:
        return
    for index in itertools.count():
        if events[index].type == END_OF_EVENTS:
            return
        yield events[index]


class Espeak:
    """espeak-ng through ctypes: created once in the process, used once in each of its forks."""

    def __init__(self) -> None:
        """Load espeak-ng; an OSError if the library or its data cannot be loaded."""
        import espeakng_loader

        self.data_path = espeakng_loader.get_data_path()
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_Info.restype = ctypes.c_char_p
        self._chunks: list[bytes] = []
        self._heard = 0  # samples
        self._words: list[tuple[int, int]] = []  # character, milliseconds
        self._end = 0  # milliseconds
        listener = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Event))
        self._listener = listener(self._hear)  # keep a reference: ctypes frees a callback without one
        self.sample_rate = self._library.espeak_Initialize(SYNCHRONOUS, 0, os.fsencode(self.data_path), 0)
        if self.sample_rate <= 0:
            raise OSError(f"espeak-ng does not accept its data in {self.data_path}")
        self._library.espeak_SetSynthCallback(self._listener)

    def _hear(self, samples: int | None, count: int, events: "ctypes._Pointer[Event]") -> int:
        """Store `count` 16-bit samples at the address `samples`, the starts of words and the end of the speech.

        espeak-ng expects 0 to continue, 1 to stop.
        """
        for event in iterate_events(events):
            if event.type == WORD_EVENT:
                self._words.append((event.text_position - 1, event.audio_position))
            elif event.type == END_EVENT:
                self._end = event.audio_position
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
            self._heard += count
        return int(self._is_too_long())

    def _is_too_long(self) -> bool:
        return self._heard > MAX_SECONDS * self.sample_rate

    def answer(self, request: Request) -> bytes | EngineFields | WordFields:
        """Return the result of `request`; a ValueError gives the reason of a failure."""
        if request.wants == "engine":
            version = self._library.espeak_Info(None).decode()
            return {"sample_rate": self.sample_rate, "engine": f"espeak-ng {version}"}
        if not any(character.isalnum() for character in request.text):
            raise ValueError("it contains no letter")
        # espeak-ng ignores an unknown variant without an error.
        _, plus, variant = request.voice.partition("+")
        is_known = not plus or os.path.isfile(os.path.join(self.data_path, "voices", "!v", variant))
        if not is_known or self._library.espeak_SetVoiceByName(request.voice.encode()) != 0:
            raise ValueError("the voice does not exist")
        if request.wants == "phonemes":
            buffer = ctypes.create_string_buffer(request.text.encode())
            position = ctypes.c_void_p(ctypes.addressof(buffer))
            clauses = []
            while position.value:  # espeak-ng moves it from clause to clause
                clauses.append(self._library.espeak_TextToPhonemes(ctypes.byref(position), UTF8_TEXT, IPA_PHONEMES))
            return b" ".join(clauses)
        speech = self._speech(request)
        if request.wants == "speech":
            return speech
        return {"words": self._words, "end": self._end}

    def _speech(self, request: Request) -> bytes:
        library = self._library
        for parameter, value in ((RATE, request.rate), (VOLUME, 100), (PITCH, request.pitch), (PITCH_RANGE, 50)):
            if library.espeak_SetParameter(parameter, value, 0) != 0:
                raise ValueError(f"it does not accept the value {value}")
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # else breath and flutter are seeded from the clock
        text = request.text.encode() + b"\0"
        status = library.espeak_Synth(
            text, ctypes.c_size_t(len(text)), 0, POSITION_IN_CHARACTERS, 0, UTF8_TEXT, None, None
        )
        if self._is_too_long():
            raise ValueError(f"its speech is longer than {MAX_SECONDS:g} s")
        if status != 0 or not self._chunks:
            raise ValueError(f"it returned status {status} and {len(self._chunks)} pieces of audio")
        return b"".join(self._chunks)


def main() -> None:
    """Answer requests until the connection is closed; Ctrl-C is left to the client."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        espeak = Espeak()
    except (ImportError, OSError, AttributeError) as error:
        sys.exit(str(error))
    while True:
        try:
            request = Request(**connection.recv())
        except (EOFError, ConnectionError):
            return
        process = os.fork()
        if process == 0:
            # SIGALRM ends a fork that hangs in native code.
            signal.alarm(REQUEST_SECONDS)
            answer: bytes | EngineFields | WordFields | ValueError
            try:
                answer = espeak.answer(request)
            except ValueError as error:
                answer = error
            connection.send(answer)
            os._exit(0)  # a fork must not run the exit handlers of its parent
        _, wait_status = os.waitpid(process, 0)
        if wait_status != 0:
            connection.send(ValueError(f"it exited with code {os.waitstatus_to_exitcode(wait_status)}"))


if __name__ == "__main__":
    main()
