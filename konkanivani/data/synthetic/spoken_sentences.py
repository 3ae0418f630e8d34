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

RECIPE_VERSION = 1  # of the conversion to files; changed sentences and styles change the digest without it

# Variants of the voice `mr` that differ in pitch and formants and stay intelligible; no breathy or creaky ones.
TRAIN_VOICES = tuple(
    f"mr+{variant}" for variant in ("m1", "f1", "m2", "f2", "m4", "f4", "m6", "Annie", "m7", "Alex", "Mario", "Mike")
)
VALID_VOICES = ("mr+robert", "mr+f5")
TEST_VOICES = ("mr+m3", "mr+f3", "mr+max", "mr+linda")
RATES = (130, 145, 160, 175, 190)  # words per minute
PITCHES = (38, 46, 54, 62)  # 0 to 99
LEVELS = (-9.0, -6.0, -3.0, -1.0)  # dB relative to espeak-ng's own level


@dataclass(frozen=True)
class SpokenSentence:
    """A sentence, its speaking style, its level in dB relative to espeak-ng's own, and `seen`, `unseen` or ""."""

    text: str
    style: SpeakingStyle
    level: float
    pattern: str = ""


def assign_styles(sentences: Sequence[str], voices: Sequence[str], pattern: str = "") -> list[SpokenSentence]:
    """Return the sentences with the voices in turn, and a rate, pitch and level that depend on the text."""
    spoken = []
    for index, text in enumerate(sentences):
        # From a hash of the text, so that other sentences of the corpus do not change the audio of this one.
        choice = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        choice, rate = divmod(choice, len(RATES))
        choice, pitch = divmod(choice, len(PITCHES))
        style = SpeakingStyle(voices[index % len(voices)], RATES[rate], PITCHES[pitch])
        spoken.append(SpokenSentence(text, style, LEVELS[choice % len(LEVELS)], pattern))
    return spoken


def write_split(
    sentences: Sequence[SpokenSentence], manifest: Path, synthesizer: SpeechSynthesizer
) -> list[UnspeakableError]:
    """Write `manifest`, and its audio to audio/<its name>-<number>.flac in the same folder, 16 kHz mono 16-bit.

    Sentences that cannot be spoken are left out; their errors are returned.
    """
    from konkanivani.base.lengths import SAMPLE_RATE

    audio = manifest.parent / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    utterances: list[Utterance] = []
    errors: list[UnspeakableError] = []
    for sentence in sentences:
        path = audio / f"{manifest.stem}-{len(utterances):04d}.flac"
        try:
            waveform = spoken_waveform(sentence, synthesizer)
        except UnspeakableError as error:
            errors.append(error)
            continue
        content = io.BytesIO()  # written to disk by Python, which reports a full disk
        soundfile.write(content, waveform, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        path.write_bytes(content.getvalue())
        place = f"audio/{path.name}", str(path), len(waveform) / SAMPLE_RATE
        utterances.append(Utterance(*place, sentence.text, sentence.style.voice, sentence.pattern))
    write_manifest(manifest, utterances)
    return errors


def spoken_waveform(sentence: SpokenSentence, synthesizer: SpeechSynthesizer) -> np.ndarray:
    """Return the audio of `sentence` (S,) int16 at 16 kHz, from espeak-ng's first sample to its last."""
    import torch
    import torchaudio

    from konkanivani.base.lengths import SAMPLE_RATE
    from konkanivani.data.audio.waveform import one_thread

    spoken = torch.frombuffer(bytearray(synthesizer.speak(sentence.text, sentence.style)), dtype=torch.int16)
    # With one thread and float64, the rounding below does not depend on the machine's kernels.
    with one_thread():
        waveform = torchaudio.functional.resample(spoken.double(), synthesizer.sample_rate, SAMPLE_RATE)
    return (waveform * 10 ** (sentence.level / 20)).round().clamp(-32768, 32767).to(torch.int16).numpy()
