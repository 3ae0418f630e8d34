"""Speech synthesis by espeak-ng, which runs as a separate process (`konkanivani.corpora.espeak`).

The speech is synthetic, by default in the Marathi voice `mr`. The voice `kok` reads vowel signs by their names;
`reads_signs_by_name` detects that.
"""

import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from konkanivani.corpora.espeak import EngineFields, Request, WordFields
from konkanivani.errors import DataError, ResourceError


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
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:  # only the process keeps this end, so that its exit is seen as EOF
            self._process = subprocess.Popen(
                [sys.executable, "-m", "konkanivani.corpora.espeak", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            engine: EngineFields = self._ask(Request("engine"))
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
        speech: bytes = self._ask(Request("speech", text, style.voice, style.rate, style.pitch))
        return speech

    def words(self, text: str, style: SpeakingStyle) -> SpokenWords:
        """Return the start time of each word in the audio of `speak`, to a millisecond; errors as in `speak`.

        espeak-ng may report several words that it speaks without a pause, such as a number of several words or two
        short words, as one.
        """
        events: WordFields = self._ask(Request("words", text, style.voice, style.rate, style.pitch))
        words = tuple(SpokenWord(character, milliseconds / 1000) for character, milliseconds in events["words"])
        return SpokenWords(words, events["end"] / 1000)

    def phonemes(self, text: str, voice: str = "mr") -> str:
        """Return `text` as `voice` reads it, in IPA with stress marks."""
        phonemes: bytes = self._ask(Request("phonemes", text, voice))
        return phonemes.decode("utf-8")

    def _ask(self, request: Request) -> Any:
        """Return the process's answer, of the type that `Espeak.answer` gives for `request.wants`.

        Raises:
            UnspeakableError: If the process returns the reason of a failure.
            ResourceError: If the process has ended.
        """
        try:
            self._connection.send(asdict(request))
            answer = self._connection.recv()
        except (ConnectionError, EOFError):
            # The last line on stderr states the reason, as espeak.py exits with it.
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
