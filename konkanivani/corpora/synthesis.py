"""Speech synthesis with eSpeak NG, in parallel processes.

    python -m konkanivani.corpora.synthesis DESCRIPTOR

starts this process. It receives the fields of a `Request` over the connection (multiprocessing.connection) of this
descriptor, and returns the result, or a ValueError with the reason of the failure. espeak-ng comes with the PyPI
package espeakng-loader and is GPL-3; it is loaded in this process only, and its crash does not end a training.

Every request is answered by a new fork that has not spoken yet: espeak-ng carries oscillator phases from one utterance
into the next, so only then does the audio depend on the request alone.

The speech is synthetic, by default in the Marathi voice `mr`. The voice `kok` reads vowel signs by their names;
`reads_signs_by_name` detects that.
"""

import ctypes
import importlib.util
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypedDict

from konkanivani.errors import DataError, ResourceError

# --------------------
# espeak-ng in a process of its own, and the messages between it and its client.


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
        self._received = 0  # samples
        self._words: list[tuple[int, int]] = []  # character, milliseconds
        self._end = 0  # milliseconds
        listener = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Event))
        self._listener = listener(self._store_samples)  # keep a reference: ctypes frees a callback without one
        self.sample_rate = self._library.espeak_Initialize(SYNCHRONOUS, 0, os.fsencode(self.data_path), 0)
        if self.sample_rate <= 0:
            raise OSError(f"espeak-ng does not accept its data in {self.data_path}")
        self._library.espeak_SetSynthCallback(self._listener)

    def _store_samples(self, samples: int | None, count: int, events: "ctypes._Pointer[Event]") -> int:
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
            self._received += count
        return int(self._is_too_long())

    def _is_too_long(self) -> bool:
        return self._received > MAX_SECONDS * self.sample_rate

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


# --------------------
# Speech synthesis by espeak-ng, which runs as a separate process (`konkanivani.corpora.synthesis`).


class UnspeakableError(DataError):
    """A text that espeak-ng cannot speak; `reason` says why."""

    def __init__(self, text: str, voice: str, reason: str) -> None:
        shown = text if len(text) <= 60 else text[:60] + "…"
        super().__init__(f"espeak-ng cannot speak {shown!r} with the voice {voice}: {reason}.")
        self.text = text
        self.reason = reason


@dataclass(frozen=True)
class SpeakingStyle:
    """A voice of espeak-ng (`mr+f2`: Marathi, variant f2), a rate in words per minute, a pitch from 0 to 99."""

    voice: str
    rate: int = 160
    pitch: int = 50


@dataclass(frozen=True)
class SpokenWord:
    """A word of a spoken text: the index of its first character, and its start time in seconds."""

    character: int
    start: float


@dataclass(frozen=True)
class SpokenWords:
    """The words of a spoken text, in order, and the end time of the last one in seconds."""

    words: tuple[SpokenWord, ...]
    end: float


class SpeechSynthesizer:
    """Context manager of the espeak-ng process; `sample_rate` is in Hz, `engine` names espeak-ng and its version.

    Raises a ResourceError if espeakng-loader is not installed, or if the process ends unexpectedly.
    """

    def __enter__(self) -> "SpeechSynthesizer":
        if importlib.util.find_spec("espeakng_loader") is None:
            raise ResourceError(
                "Speech synthesis needs the package espeakng-loader, which is not installed for "
                f"{sys.executable}. Run `pip install espeakng-loader`, or train on your own recordings."
            )
        if not hasattr(os, "fork"):
            raise ResourceError(
                f"Speech synthesis does not work on {sys.platform}, which cannot fork processes. Use Linux, "
                "macOS or the Windows Subsystem for Linux."
            )
        # The process must find the package even if it is not installed.
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        # A file, because a pipe that is not read would fill up and block the process.
        self._complaints = tempfile.TemporaryFile()
        self._connection, child_end = multiprocessing.Pipe()
        with child_end:  # only the process keeps this end, so that its exit is seen as EOF
            self._process = subprocess.Popen(
                [sys.executable, "-m", "konkanivani.corpora.synthesis", str(child_end.fileno())],
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            engine: EngineFields = self._request(Request("engine"))
        except BaseException:  # Ctrl-C, too, must not leave the process running
            self._stop()
            raise
        self.sample_rate = engine["sample_rate"]
        self.engine = engine["engine"]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def speak(self, text: str, style: SpeakingStyle) -> bytes:
        """Return `text` as 16-bit mono PCM in the machine's byte order.

        Raises:
            UnspeakableError: If it cannot be spoken in this style, or lasts longer than 30 s.
        """
        speech: bytes = self._request(Request("speech", text, style.voice, style.rate, style.pitch))
        return speech

    def words(self, text: str, style: SpeakingStyle) -> SpokenWords:
        """Return the start time of each word in the audio of `speak`, to a millisecond; errors as in `speak`.

        espeak-ng may report several words that it speaks without a pause, such as a number of several words or two
        short words, as one.
        """
        events: WordFields = self._request(Request("words", text, style.voice, style.rate, style.pitch))
        words = tuple(SpokenWord(character, milliseconds / 1000) for character, milliseconds in events["words"])
        return SpokenWords(words, events["end"] / 1000)

    def phonemes(self, text: str, voice: str = "mr") -> str:
        """Return `text` as `voice` reads it, in IPA with stress marks."""
        phonemes: bytes = self._request(Request("phonemes", text, voice))
        return phonemes.decode("utf-8")

    def _request(self, request: Request) -> Any:
        """Return the process's answer, of the type that `Espeak.answer` gives for `request.wants`.

        Raises:
            UnspeakableError: If the process returns the reason of a failure.
            ResourceError: If the process has ended.
        """
        try:
            self._connection.send(asdict(request))
            answer = self._connection.recv()
        except (ConnectionError, EOFError):
            # The last line on stderr states the reason, as `main` exits with it.
            code = self._process.wait()
            self._complaints.seek(0)
            lines = self._complaints.read().decode("utf-8", "replace").split("\n")
            reason = next((line.strip() for line in reversed(lines) if line.strip()), "it produced no audio")
            raise ResourceError(
                f"The speech synthesis exited with code {code} on {request.text!r}: {reason}. Reinstall it "
                "with `pip install --force-reinstall espeakng-loader`."
            ) from None
        if isinstance(answer, ValueError):
            raise UnspeakableError(request.text, request.voice, str(answer))
        return answer

    def _stop(self) -> None:
        """End the process, which stops by itself when the connection is closed."""
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()


def reads_signs_by_name(text: str, phonemes: str) -> bool:
    """Return whether a voice that reads Devanagari `text` as IPA `phonemes` names the vowel signs or the virama.

    A written syllable (a letter that no virama follows, with its optional vowel sign) has at most one vowel or
    diphthong; a name such as `aakaar` adds one or two.
    """
    characters = unicodedata.normalize("NFC", text)
    syllables = sum(
        unicodedata.category(character) == "Lo" and following != "\N{DEVANAGARI SIGN VIRAMA}"
        for character, following in zip(characters, characters[1:] + " ", strict=True)
    )
    sounds = re.sub("[ˈˌː\u0300-\u036f]", "", unicodedata.normalize("NFD", phonemes))  # no stress, length, nasality
    vowels = len(re.findall("[aeiouæɐɑɒɔəɛɜɪʊʌ]+", sounds))
    return vowels > syllables
