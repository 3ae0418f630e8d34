"""Changes of a waveform that microphones, rooms, telephones, editors and codecs make, as pure functions.

With them, `CONDITIONS` evaluates a model as if another microphone, room or line had recorded the same speech.

S samples at 16 kHz, R samples of an impulse response. All random values come from the given generator.
"""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import soundfile
import torch
import torchaudio

from konkanivani.data.audio.waveform import change_rate, one_thread
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.randomness import utterance_generator

# --------------------
# Level, offset and clipping.


FULL_SCALE = 2**15  # of 16-bit samples


def scale(waveform: torch.Tensor, decibels: float) -> torch.Tensor:
    """Return the waveform (S,) amplified by `decibels`."""
    return waveform * 10 ** (decibels / 20)


def scale_and_clip(waveform: torch.Tensor, decibels: float) -> torch.Tensor:
    """Return the waveform (S,) amplified by `decibels` and clipped to [-1, 1], as a recording would be."""
    return scale(waveform, decibels).clamp(-1.0, 1.0)


def quantize(waveform: torch.Tensor) -> torch.Tensor:
    """Round the waveform (S,) to 16-bit samples."""
    return (waveform * FULL_SCALE).round().clamp(-FULL_SCALE, FULL_SCALE - 1) / FULL_SCALE


def clip_peaks(waveform: torch.Tensor, decibels: float) -> torch.Tensor:
    """Clip the waveform (S,) at `decibels` below its peak, as an overdriven microphone does; the level stays."""
    if not len(waveform):
        return waveform
    limit = float(waveform.abs().max()) * 10 ** (-decibels / 20)
    return waveform.clamp(-limit, limit)


# --------------------
# Speed, length and silence.


def perturb_speed(waveform: torch.Tensor, speed: float) -> torch.Tensor:
    """Return the waveform (S,) as (ceil(S / speed),), changed in tempo and pitch (Ko et al., 2015)."""
    percent = round(speed * 100)
    if percent == 100:
        return waveform
    return change_rate(waveform, percent, 100)


def surround(waveform: torch.Tensor, before: float, after: float) -> torch.Tensor:
    """Return the waveform with digital silence before and after, in seconds."""
    sides = (round(before * SAMPLE_RATE), round(after * SAMPLE_RATE))
    return torch.nn.functional.pad(waveform, sides)


# --------------------
# Noise.


def add_noise(waveform: torch.Tensor, noise: torch.Tensor, snr: float) -> torch.Tensor:
    """Return waveform plus noise, all (S,), with the noise scaled to a signal-to-noise ratio of `snr` dB.

    The ratio is 10 log10(P_speech / P_noise) with the mean powers P. If either is silent, it is undefined and the
    waveform is returned unchanged.
    """
    with one_thread():
        speech_energy = energy(waveform)
        noise_energy = energy(noise)
    if not speech_energy > 0 or not noise_energy > 0:
        return waveform
    factor = (speech_energy / noise_energy * 10 ** (-snr / 10)) ** 0.5
    return waveform + (noise.double() * factor).to(waveform.dtype)  # for very quiet noise, the factor exceeds float32


def energy(waveform: torch.Tensor) -> float:
    """Return the sum of the squares, in double precision."""
    return float(waveform.double().square().sum())


def white_noise(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Return Gaussian noise (samples,) of standard deviation 1."""
    return torch.randn(samples, generator=generator)


LOWEST_HERTZ = 20.0  # coloured noise is flat below: 1 / f would put all energy into the lowest bin


def colored_noise(samples: int, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """Return noise (samples,) whose power falls with f^-exponent: 0 white, 1 pink, 2 brown."""
    # Lengths of few prime factors: the FFT of a prime length takes ten times as long.
    padded = max(1, -(-samples // SAMPLE_RATE)) * SAMPLE_RATE
    with one_thread():
        spectrum = torch.fft.rfft(white_noise(padded, generator))
        hertz = torch.linspace(0, SAMPLE_RATE / 2, len(spectrum)).clamp_min(LOWEST_HERTZ)
        return torch.fft.irfft(spectrum * hertz ** (-exponent / 2), padded)[:samples]


def hum(samples: int, hertz: float = 50.0) -> torch.Tensor:
    """Return mains hum (samples,): `hertz` and its first two harmonics, of falling amplitude."""
    phases = torch.arange(samples, dtype=torch.float64) * (2 * math.pi * hertz / SAMPLE_RATE)
    return sum((torch.sin(phases * number) / number for number in (2, 3)), torch.sin(phases)).float()


# --------------------
# Rooms.


EARLIEST_REFLECTION = 0.003  # seconds after the direct path
DECAY_AT_T60 = math.log(10) * 3  # the amplitude falls by 60 dB in T60


def room_response(t60: float, direct_to_reverberant: float, generator: torch.Generator) -> torch.Tensor:
    """Return an artificial impulse response (R,): the direct path, then white noise that decays by 60 dB in `t60` s.

    Args:
        t60: Reverberation time in seconds.
        direct_to_reverberant: Ratio of the energies of direct path and reverberation, in dB.
        generator: Source of the noise.
    """
    first = round(EARLIEST_REFLECTION * SAMPLE_RATE)
    samples = first + max(1, round(t60 * SAMPLE_RATE))
    decay = torch.exp(torch.arange(samples) * (-DECAY_AT_T60 / (t60 * SAMPLE_RATE)))
    tail = white_noise(samples, generator) * decay
    tail[:first] = 0
    response = tail * (10 ** (-direct_to_reverberant / 10) / energy(tail)) ** 0.5
    response[0] = 1.0
    return response


def reverberate(waveform: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Convolve a waveform (S,) with a room's impulse response (R,) and return (S,).

    The response's largest sample is taken as the direct path and keeps its time. A silent response or waveform leaves
    the waveform unchanged.
    """
    direct = int(response.abs().argmax())
    if response[direct] == 0:
        return waveform
    with one_thread():
        # Normalise the direct path to 1: responses of any scale stay within the range of float32.
        reverberant = torchaudio.functional.fftconvolve(waveform, response / response[direct].abs())
        reverberant = reverberant[direct : direct + len(waveform)]
        before = energy(waveform)
        after = energy(reverberant)
    if not before > 0 or not after > 0:
        return waveform
    # Keep the waveform's energy: the scale of a response depends on its recording, not on the room.
    return reverberant * (before / after) ** 0.5


# --------------------
# Telephones.


MU = 255.0  # ITU-T G.711


def limit_band(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the waveform (S,) as if it had been recorded at `rate` Hz: nothing above half of it remains."""
    lower = change_rate(waveform, SAMPLE_RATE, rate)
    return change_rate(lower, rate, SAMPLE_RATE)[: len(waveform)]


def companded(waveform: torch.Tensor) -> torch.Tensor:
    """Return the waveform (S,) after mu-law coding with 8 bits, as on a telephone line."""
    compressed = torch.sign(waveform) * torch.log1p(MU * waveform.abs().clamp_max(1.0)) / math.log1p(MU)
    coded = (compressed * 127).round() / 127
    return torch.sign(coded) * torch.expm1(coded.abs() * math.log1p(MU)) / MU


# --------------------
# Codecs.


Codec = Literal["mp3", "opus"]
CODECS: tuple[Codec, ...] = ("mp3", "opus")
_FORMATS: dict[Codec, tuple[str, str]] = {"mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}


def can_encode(codec: Codec) -> bool:
    """Return whether the installed libsndfile writes the codec (1.1 and newer)."""
    container, subtype = _FORMATS[codec]
    return subtype in soundfile.available_subtypes(container)


def encoded_and_decoded(waveform: torch.Tensor, codec: Codec, compression: float) -> torch.Tensor:
    """Return the waveform (S,) after lossy coding, clipped to [-1, 1]; its timing does not change.

    Args:
        compression: libsndfile's compression level from 0 to less than 1. At 16 kHz, 0 is about 80 kbit/s for MP3 and
            260 kbit/s for Opus; 0.9 is about 30 kbit/s for both.
    """
    if not len(waveform):  # libsndfile writes an MP3 file without frames, which it does not read
        return waveform
    container, subtype = _FORMATS[codec]
    file = io.BytesIO()
    with soundfile.SoundFile(
        file, "w", SAMPLE_RATE, 1, subtype, format=container, compression_level=compression
    ) as writer:
        writer.write(waveform.clamp(-1.0, 1.0).numpy())
    file.seek(0)
    decoded, _ = soundfile.read(file, dtype="float32")
    result = torch.zeros_like(waveform)
    kept = min(len(waveform), len(decoded))
    result[:kept] = torch.from_numpy(decoded[:kept])
    return result


# --------------------
# Recording conditions of an evaluation. Each changes one property, and draws its noise from a fixed seed per utterance.


UNCHANGED = "unchanged"
SEED = 1
SLOWEST = 0.9
FASTEST = 1.1
LONGEST_SILENCE = 2.0  # seconds that a condition adds
NOISE_FLOOR = -60.0  # dBFS

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Condition:
    """A named change of a waveform (S,), described for the user."""

    name: str
    description: str
    change: Change

    def apply(self, waveform: torch.Tensor, utterance_id: str) -> torch.Tensor:
        """Return the utterance's waveform (S,) under this condition."""
        return self.change(waveform, utterance_generator(SEED, 0, utterance_id, f"condition {self.name}"))


def _noise_after(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = white_noise(round(LONGEST_SILENCE * SAMPLE_RATE), generator)
    return torch.cat([waveform, scale(noise, NOISE_FLOOR)])


def _white(snr: float) -> Change:
    return lambda waveform, generator: add_noise(waveform, white_noise(len(waveform), generator), snr)


def _reverberant(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return reverberate(waveform, room_response(0.4, 0.0, generator))


CONDITIONS = (
    Condition(UNCHANGED, "as recorded", lambda waveform, _: waveform),
    Condition("digital_silence", "1 s of zeros before and after", lambda waveform, _: surround(waveform, 1.0, 1.0)),
    Condition("noise_after", "2 s of white noise at -60 dBFS after", _noise_after),
    Condition("dc_offset", "DC offset of 0.005", lambda waveform, _: waveform + 0.005),
    Condition("level", "34 dB quieter, in 16 bits", lambda waveform, _: quantize(scale(waveform, -34.0))),
    Condition("hum", "mains hum of 50 Hz at 30 dB", lambda waveform, _: add_noise(waveform, hum(len(waveform)), 30.0)),
    Condition("clipped", "18 dB louder, clipped", lambda waveform, _: scale_and_clip(waveform, 18.0)),
    Condition("noise_30", "white noise at 30 dB", _white(30.0)),
    Condition("noise_20", "white noise at 20 dB", _white(20.0)),
    Condition("noise_10", "white noise at 10 dB", _white(10.0)),
    Condition("telephone", "8 kHz, mu-law", lambda waveform, _: companded(limit_band(waveform, 8_000))),
    Condition("reverberation", "room with a reverberation time of 0.4 s", _reverberant),
    Condition("slower", "speed 0.9", lambda waveform, _: perturb_speed(waveform, SLOWEST)),
    Condition("faster", "speed 1.1", lambda waveform, _: perturb_speed(waveform, FASTEST)),
)


def condition_named(name: str) -> Condition:
    """Return the condition of this name."""
    return next(condition for condition in CONDITIONS if condition.name == name)
