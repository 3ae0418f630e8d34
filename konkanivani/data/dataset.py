"""Datasets of examples: utterances read, augmented and encoded as tokens.

S samples.

All random values are functions of (seed, epoch, utterance). Each kind of augmentation has its own generator, so that
enabling one does not change the others.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from konkanivani.config import AugmentConfig
from konkanivani.console import DecibelRange, parse_snr
from konkanivani.data.audio.effects import (
    UNCHANGED,
    add_noise,
    condition_named,
    perturb_speed,
    reverberate,
    scale_and_clip,
)
from konkanivani.data.audio.files import SPAN_ROUNDING, AudioSource, UnusableAudio, read_header, read_samples
from konkanivani.data.audio.waveform import load_audio, resample, restore_peaks, speech_span
from konkanivani.data.augmentation import RecordingAugmentation, draw_index, draw_number
from konkanivani.data.batching import Example
from konkanivani.data.filtering import Limits, Selection, reason_of_missing_frames
from konkanivani.data.index import Utterance
from konkanivani.data.manifest import Rejection, read_recordings
from konkanivani.data.text import TextVocabulary, Vocabulary, reads_text
from konkanivani.errors import DataError, ErrorCollector
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.randomness import derive_seed, utterance_generator

# --------------------
# Noise, reverberation and gain augmentation of training utterances.


MAX_RESPONSE_SECONDS = 20.0  # the longest reverberation measured in halls; a response is read whole per utterance


@dataclass(frozen=True)
class Sound:
    """Row of a manifest of noise or impulse responses: `frames` from frame `first` on, at the file's `rate` in Hz."""

    file: AudioSource
    rate: int
    first: int
    frames: int

    def span(self, first: int, count: int) -> AudioSource:
        """Return the location of `count` frames, from frame `first` of this row on."""
        return dataclasses.replace(self.file, start=(self.first + first) / self.rate, seconds=count / self.rate)


@dataclass(frozen=True)
class NoiseCorpus:
    """Noise recordings, mixed with an utterance with probability `prob` at an SNR drawn uniformly from `snr` (dB)."""

    sounds: tuple[Sound, ...]
    snr: DecibelRange
    prob: float

    def add_to(self, waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the waveform (S,), with noise added with probability `prob`."""
        if draw_number(generator) >= self.prob:
            return waveform
        # The order of the draws must not change: it determines the augmentation of every seed.
        sound = self.sounds[draw_index(len(self.sounds), generator)]
        snr = self.snr.low + (self.snr.high - self.snr.low) * draw_number(generator)
        return add_noise(waveform, load_excerpt(sound, len(waveform), generator), snr)


@dataclass(frozen=True)
class ImpulseResponses:
    """Room impulse responses, applied to an utterance with probability `prob`."""

    responses: tuple[Sound, ...]
    prob: float

    def add_to(self, waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the waveform (S,), with reverberation added with probability `prob`."""
        if draw_number(generator) >= self.prob:
            return waveform
        sound = self.responses[draw_index(len(self.responses), generator)]
        return reverberate(waveform, load_response(sound, generator))


@dataclass(frozen=True)
class NoiseReverb:
    """Augmentation of a 16 kHz waveform (S,): reverberation, then noise, then a gain within ±`gain` dB.

    Length and timing do not change. Stages that are None or 0 are skipped.
    """

    seed: int = 0
    reverb: ImpulseResponses | None = None
    noise: NoiseCorpus | None = None
    gain: float = 0.0

    def __call__(self, waveform: torch.Tensor, epoch: int, utterance_id: str) -> torch.Tensor:
        """Apply this epoch's augmentation to an utterance; raise a `DataError` that names an unreadable audio file."""
        if self.reverb:
            waveform = self.reverb.add_to(waveform, utterance_generator(self.seed, epoch, utterance_id, "room"))
        if self.noise:
            waveform = self.noise.add_to(waveform, utterance_generator(self.seed, epoch, utterance_id, "noise"))
        if self.gain:
            number = draw_number(utterance_generator(self.seed, epoch, utterance_id, "gain"))
            waveform = scale_and_clip(waveform, self.gain * (2 * number - 1))  # uniform in dB
        return waveform


def load_excerpt(sound: Sound, samples: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random excerpt of `samples` samples at 16 kHz, channels averaged; only the excerpt is decoded.

    A recording that is too short is repeated, from a random position on.
    """
    # Rounded up, so that resampling yields at least `samples` samples.
    source_samples = -(-samples * sound.rate // SAMPLE_RATE)
    if sound.frames >= source_samples:
        loaded = load_audio(sound.span(draw_index(sound.frames - source_samples + 1, generator), source_samples))
        start = 0
    else:
        loaded = load_audio(sound.span(0, sound.frames))
        start = draw_index(len(loaded), generator)
    # The modulo also covers files with slightly fewer samples than their headers state.
    return loaded[(torch.arange(samples) + start) % len(loaded)]


def load_response(sound: Sound, generator: torch.Generator) -> torch.Tensor:
    """Return a random channel of the impulse response as (R,) at 16 kHz."""
    samples, rate = read_samples(sound.span(0, sound.frames))
    # Channels are microphones in different positions; their mean is the response of no position in the room.
    channel = draw_index(samples.shape[1], generator)
    return resample(torch.from_numpy(samples[:, channel].copy()), rate)


def read_noise_reverb(config: AugmentConfig, seed: int, named_roots: tuple[str, ...] = ()) -> NoiseReverb:
    """Build the configured augmentation from the files' headers; raise a `DataError` with row and reason."""
    reverb = None
    noise = None
    problems = ErrorCollector()
    if config.rir_manifest is not None:
        with problems.collect():
            responses = read_sounds(config.rir_manifest, named_roots, MAX_RESPONSE_SECONDS)
            reverb = ImpulseResponses(responses, config.rir_prob)
    if config.noise_manifest is not None:
        with problems.collect():
            sounds = read_sounds(config.noise_manifest, named_roots)
            noise = NoiseCorpus(sounds, parse_snr(config.noise_snr), config.noise_prob)
    problems.raise_all()
    return NoiseReverb(seed, reverb, noise, config.gain)


def read_sounds(manifest: str, named_roots: tuple[str, ...] = (), longest: float = float("inf")) -> tuple[Sound, ...]:
    """Return a manifest's rows with rate and frames from the headers; raise a `DataError` for unusable rows."""
    sounds = []
    problems = ErrorCollector()
    for row in read_recordings(manifest, named_roots):
        with problems.collect():
            sounds.append(_read_sound(manifest, row, longest))
    problems.raise_all()
    return tuple(sounds)


def _read_sound(manifest: str, row: Utterance, longest: float) -> Sound:
    """Convert a row to frames; a row without an offset is the whole file, whatever its `duration`."""
    try:
        header = read_header(row.source)
    except DataError as error:
        raise DataError(f"{manifest}, row {row.row}: {error}") from None
    first = 0
    frames = header.frames
    if row.offset is not None:
        first = round(row.offset * header.rate)
        frames = round(row.duration * header.rate)
        # Manifests round offset and duration: a span may end slightly after its file.
        if header.frames < first + frames <= header.frames + SPAN_ROUNDING * header.rate:
            frames = header.frames - first
    reason = ""
    if first + frames > header.frames:
        reason = f"ends at {header.seconds:.2f} s, before the end of the row"
    elif frames < 1:
        reason = "has no samples in the row's range"
    elif frames > longest * header.rate:
        reason = f"lasts {frames / header.rate:.1f} s; an impulse response lasts at most {longest:g} s"
    if reason:
        raise DataError(f"{manifest}, row {row.row}: {row.audio_path} {reason}. Fix or delete the row.")
    return Sound(dataclasses.replace(row.source, start=None, seconds=None), header.rate, first, frames)


# --------------------
# Map-style datasets that load an utterance's waveform and tokens.


def choose_speed(speeds: tuple[float, ...], generator: torch.Generator) -> float:
    """Return one of `speeds`, drawn uniformly."""
    return speeds[int(torch.randint(len(speeds), (), generator=generator))]


@dataclass(frozen=True)
class TrainDataset(Dataset):
    """Map-style training dataset: (epoch, index) -> `Example`, or a `Rejection` if the audio is unusable.

    Applies speed perturbation, then reverberation, noise and gain, then the simulated recording. A share `timed_share`
    of the labels contains the start and end of the speech. All randomness is a function of (seed, epoch, utterance).
    """

    utterances: Selection
    tokenizer: Vocabulary
    speeds: tuple[float, ...]
    seed: int
    manifest: str = ""
    noise_reverb: NoiseReverb = NoiseReverb()
    timed_share: float = 0.0
    recording: RecordingAugmentation = RecordingAugmentation()
    limits: Limits | None = None

    def __getitem__(self, key: tuple[int, int]) -> Example | Rejection:
        epoch, index = key
        utterance = self.utterances[index]
        if reads_text(self.tokenizer):
            return _text_example(utterance, self.tokenizer)
        plain_tokens = self.tokenizer.encode(utterance.text)
        waveform = _read_within(utterance, self.manifest, plain_tokens, self.limits)
        if isinstance(waveform, Rejection):
            return waveform
        speed = choose_speed(self.speeds, utterance_generator(self.seed, epoch, utterance.id, "speed"))
        clean = perturb_speed(waveform, speed)
        noisy = self.noise_reverb(clean, epoch, utterance.id)
        recorded = self.recording(noisy, epoch, utterance.id, self._draw_speech)
        seed = derive_seed(self.seed, epoch, "specaugment", utterance.id)
        drawn = torch.rand((), generator=utterance_generator(self.seed, epoch, utterance.id, "times"))
        if drawn < self.timed_share:
            # Speech is detected in the clean waveform, after speed perturbation has changed its times.
            start, end = speech_span(clean)
            tokens = self.tokenizer.encode_with_times(utterance.text, start + recorded.delay, end + recorded.delay)
        else:
            tokens = plain_tokens
        return Example(utterance.id, recorded.waveform, tokens, seed)

    def _draw_speech(self, generator: torch.Generator) -> torch.Tensor | None:
        """Return the waveform of a random utterance; None if it is unusable, which its own turn reports."""
        example = _read(self.utterances[draw_index(len(self.utterances), generator)], self.manifest)
        return None if isinstance(example, Rejection) else example


@dataclass(frozen=True)
class EvalDataset(Dataset):
    """Map-style dataset without augmentation: index -> `Example`, or a `Rejection` if the audio is unusable.

    `condition` names the recording condition to simulate.
    """

    utterances: Selection
    tokenizer: Vocabulary
    manifest: str = ""
    condition: str = UNCHANGED
    limits: Limits | None = None

    def __getitem__(self, index: int) -> Example | Rejection:
        utterance = self.utterances[index]
        if reads_text(self.tokenizer):
            return _text_example(utterance, self.tokenizer)
        tokens = self.tokenizer.encode(utterance.text)
        waveform = _read_within(utterance, self.manifest, tokens, self.limits)
        if isinstance(waveform, Rejection):
            return waveform
        if self.condition != UNCHANGED:
            # As if a file had been recorded under this condition and was read here.
            waveform = restore_peaks(condition_named(self.condition).apply(waveform, utterance.id), SAMPLE_RATE)
        return Example(utterance.id, waveform, tokens, None)


def _text_example(utterance: Utterance, tokenizer: TextVocabulary) -> Example:
    """Return the tokens of an utterance's input and target texts; nothing is drawn."""
    tokens = torch.tensor(tokenizer.encode_input(utterance.input_text or ""))
    return Example(utterance.id, tokens, tokenizer.encode_target(utterance.text), None)


def _read_within(
    utterance: Utterance, manifest: str, tokens: list[int], limits: Limits | None
) -> torch.Tensor | Rejection:
    """Return the utterance's waveform (S,), or a rejection if it cannot be read or is too short for its tokens.

    The limits were checked on the manifest's durations, which a file may fall short of by `duration_tolerance`. One CTC
    loss without an alignment is infinite and would skip its whole global batch, in each epoch.
    """
    waveform = _read(utterance, manifest)
    if limits is None or isinstance(waveform, Rejection):
        return waveform
    seconds = len(waveform) / SAMPLE_RATE
    reason = None if seconds >= utterance.duration else reason_of_missing_frames(seconds, tokens, limits)
    if reason is None:
        return waveform
    reason = f"it has {seconds:.2f} s, the row {utterance.duration:.2f} s, and {reason}"
    return Rejection(manifest, utterance.row, utterance.id, reason, is_broken=True)


def _read(utterance: Utterance, manifest: str) -> torch.Tensor | Rejection:
    """Return the utterance's waveform (S,), or a rejection with the reason."""
    try:
        return load_audio(utterance.source)
    except UnusableAudio as error:
        return Rejection(manifest, utterance.row, utterance.id, error.reason, is_broken=True)
