"""Sentences spoken by espeak-ng, asked of the process that `konkanivani.data.synthetic.espeak` is.

What it speaks is synthetic, by default in the Marathi voice `mr`. The voice `kok` reads vowel signs by their names:
`reads_signs_by_name` tells the two apart.
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

from konkanivani.base.errors import DataError, ResourceError
from konkanivani.data.synthetic.espeak import Request


class UnspeakableError(DataError):
    """A text that espeak-ng cannot speak, and the `reason`."""

    def __init__(self, text: str, voice: str, reason: str) -> None:
        shown = text if len(text) <= 60 else text[:60] + "…"
        super().__init__(f"espeak-ng cannot speak {shown!r} with the voice {voice}: {reason}.")
        self.text, self.reason = text, reason


@dataclass(frozen=True)
class SpeakingStyle:
    """A voice of espeak-ng (`mr+f2`: Marathi, variant f2), a rate in words a minute, a pitch from 0 to 99."""

    voice: str
    rate: int = 160
    pitch: int = 50


@dataclass(frozen=True)
class SpokenWord:
    """A word of a spoken text: `character` is where in the text it begins, `start` where in its speech, in seconds."""

    character: int
    start: float


@dataclass(frozen=True)
class SpokenWords:
    """The words of a spoken text, in order, and the seconds at which the last one ends."""

    words: tuple[SpokenWord, ...]
    end: float


class SpeechSynthesizer:
    """The speaking process, as a context manager; `sample_rate` is in Hz, `engine` names espeak-ng and its version.

    Raises a ResourceError where espeakng-loader is not installed, or when the process ends by itself.
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
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self._complaints = tempfile.TemporaryFile()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "konkanivani.data.synthetic.espeak", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            engine = self._ask(Request("engine"))
        except BaseException:
            self._stop()
            raise
        self.sample_rate: int = engine["sample_rate"]
        self.engine: str = engine["engine"]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def speak(self, text: str, style: SpeakingStyle) -> bytes:
        """`text` as 16-bit mono PCM in the machine's byte order; an UnspeakableError where it cannot be
        spoken so, or takes longer than 30 s.
        """
        return self._ask(Request("speech", text, style.voice, style.rate, style.pitch))

    def words(self, text: str, style: SpeakingStyle) -> SpokenWords:
        """When espeak-ng begins each word of what `speak` returns, to a millisecond; errors as there.

        What it speaks in one breath, such as a number of several words or two short words, may be one word to it.
        """
        events = self._ask(Request("words", text, style.voice, style.rate, style.pitch))
        words = tuple(SpokenWord(character, milliseconds / 1000) for character, milliseconds in events["words"])
        return SpokenWords(words, events["end"] / 1000)

    def phonemes(self, text: str, voice: str = "mr") -> str:
        """`text` as `voice` reads it, in IPA with stress marks."""
        return self._ask(Request("phonemes", text, voice)).decode("utf-8")

    def _ask(self, request: Request) -> bytes | dict[str, object]:
        try:
            self._connection.send(asdict(request))
            answer = self._connection.recv()
        except (ConnectionError, EOFError):
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
        """Ends the process: it stops by itself where the connection ends."""
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()


def reads_signs_by_name(text: str, phonemes: str) -> bool:
    """Whether a voice that reads Devanagari `text` as IPA `phonemes` says the names of vowel signs or of the virama.

    A written syllable (a letter that no virama follows, with the vowel sign it may bear) has one vowel or diphthong
    at most; a name such as `aakaar` adds one or two.
    """
    characters = unicodedata.normalize("NFC", text)
    syllables = sum(
        unicodedata.category(character) == "Lo" and following != "\N{DEVANAGARI SIGN VIRAMA}"
        for character, following in zip(characters, characters[1:] + " ", strict=True)
    )
    sounds = re.sub("[ˈˌː\u0300-\u036f]", "", unicodedata.normalize("NFD", phonemes))  # no stress, length, nasality
    vowels = len(re.findall("[aeiouæɐɑɒɔəɛɜɪʊʌ]+", sounds))
    return vowels > syllables
