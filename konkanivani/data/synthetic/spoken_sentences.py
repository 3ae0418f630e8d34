"""Sentences spoken by espeak-ng into FLAC files, with their manifest: synthetic, Marathi voices."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from konkanivani.data.manifest import write_manifest
from konkanivani.data.synthetic.speech_synthesis import SpeakingStyle, SpeechSynthesizer, UnspeakableError
from konkanivani.data.utterance import Utterance

RECIPE_VERSION = 1  # counts changes of how sentences become files; changes of sentences and styles are seen without it

# Variants of the voice `mr` that differ in pitch and formants and stay intelligible: none that breathes or croaks.
TRAIN_VOICES = tuple(
    f"mr+{variant}" for variant in ("m1", "f1", "m2", "f2", "m4", "f4", "m6", "Annie", "m7", "Alex", "Mario", "Mike")
)
VALID_VOICES = ("mr+robert", "mr+f5")
TEST_VOICES = ("mr+m3", "mr+f3", "mr+max", "mr+linda")
RATES = (130, 145, 160, 175, 190)  # words a minute
PITCHES = (38, 46, 54, 62)  # 0 to 99
LEVELS = (-9.0, -6.0, -3.0, -1.0)  # dB under espeak-ng's own level


@dataclass(frozen=True)
class SpokenSentence:
    """A sentence, how it is spoken, its level in dB under espeak-ng's own, and `seen`, `unseen` or nothing."""

    text: str
    style: SpeakingStyle
    level: float
    pattern: str = ""


def assign_styles(sentences: Sequence[str], voices: Sequence[str], pattern: str = "") -> list[SpokenSentence]:
    """The sentences with the voices dealt out evenly, and a rate, pitch and level that follow from the text."""
    spoken = []
    for index, text in enumerate(sentences):
        choice = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        choice, rate = divmod(choice, len(RATES))
        choice, pitch = divmod(choice, len(PITCHES))
        style = SpeakingStyle(voices[index % len(voices)], RATES[rate], PITCHES[pitch])
        spoken.append(SpokenSentence(text, style, LEVELS[choice % len(LEVELS)], pattern))
    return spoken


def write_split(
    sentences: Sequence[SpokenSentence], manifest: Path, synthesizer: SpeechSynthesizer
) -> list[UnspeakableError]:
    """Writes `manifest` and beside it audio/<its name>-<number>.flac, 16 kHz mono 16-bit.

    Sentences that cannot be spoken are left out; their errors come back.
    """
    from konkanivani.base.lengths import SAMPLE_RATE

    audio = manifest.parent / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    utterances, errors = [], []
    for sentence in sentences:
        path = audio / f"{manifest.stem}-{len(utterances):04d}.flac"
        try:
            waveform = spoken_waveform(sentence, synthesizer)
        except UnspeakableError as error:
            errors.append(error)
            continue
        content = io.BytesIO()  # written by Python, which reports a full disk
        soundfile.write(content, waveform, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        path.write_bytes(content.getvalue())
        place = f"audio/{path.name}", str(path), len(waveform) / SAMPLE_RATE
        utterances.append(Utterance(*place, sentence.text, sentence.style.voice, sentence.pattern))
    write_manifest(manifest, utterances)
    return errors


def spoken_waveform(sentence: SpokenSentence, synthesizer: SpeechSynthesizer) -> np.ndarray:
    """(S,) int16 at 16 kHz: `sentence` as the corpus has it, from espeak-ng's first sample to its last."""
    import torch
    import torchaudio

    from konkanivani.base.lengths import SAMPLE_RATE
    from konkanivani.data.audio.waveform import one_thread

    spoken = torch.frombuffer(bytearray(synthesizer.speak(sentence.text, sentence.style)), dtype=torch.int16)
    with one_thread():  # and in float64: the rounding below then never depends on the machine's kernels
        waveform = torchaudio.functional.resample(spoken.double(), synthesizer.sample_rate, SAMPLE_RATE)
    return (waveform * 10 ** (sentence.level / 20)).round().clamp(-32768, 32767).to(torch.int16).numpy()
