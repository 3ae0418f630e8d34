"""Map-style datasets that load an utterance's waveform and tokens."""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from konkanivani.data.audio.files import UnusableAudio
from konkanivani.data.audio.waveform import load_audio, speech_span
from konkanivani.data.augmentation import NoiseReverb, choose_speed, perturb_speed
from konkanivani.data.batching import Example
from konkanivani.data.filtering import Selection
from konkanivani.data.index import Utterance
from konkanivani.data.rejections import Rejection
from konkanivani.data.text import Vocabulary
from konkanivani.randomness import derive_seed, utterance_generator


@dataclass(frozen=True)
class TrainDataset(Dataset):
    """Map-style training dataset: (epoch, index) -> `Example`, or a `Rejection` if the audio is unusable.

    Applies speed perturbation, then reverberation, noise and gain. A share `timed_share` of the labels contains the
    start and end of the speech. All randomness is a function of (seed, epoch, utterance).
    """

    utterances: Selection
    tokenizer: Vocabulary
    speeds: tuple[float, ...]
    seed: int
    manifest: str = ""
    noise_reverb: NoiseReverb = NoiseReverb()
    timed_share: float = 0.0

    def __getitem__(self, key: tuple[int, int]) -> Example | Rejection:
        epoch, index = key
        utterance = self.utterances[index]
        waveform = _read(utterance, self.manifest)
        if isinstance(waveform, Rejection):
            return waveform
        speed = choose_speed(self.speeds, utterance_generator(self.seed, epoch, utterance.id, "speed"))
        clean = perturb_speed(waveform, speed)
        waveform = self.noise_reverb(clean, epoch, utterance.id)
        seed = derive_seed(self.seed, epoch, "specaugment", utterance.id)
        drawn = torch.rand((), generator=utterance_generator(self.seed, epoch, utterance.id, "times"))
        if drawn < self.timed_share:
            # Speech is detected in the clean waveform, after speed perturbation has changed its times.
            tokens = self.tokenizer.encode_with_times(utterance.text, *speech_span(clean))
        else:
            tokens = self.tokenizer.encode(utterance.text)
        return Example(utterance.id, waveform, tokens, seed)


@dataclass(frozen=True)
class EvalDataset(Dataset):
    """Map-style dataset without augmentation: index -> `Example`, or a `Rejection` if the audio is unusable."""

    utterances: Selection
    tokenizer: Vocabulary
    manifest: str = ""

    def __getitem__(self, index: int) -> Example | Rejection:
        utterance = self.utterances[index]
        waveform = _read(utterance, self.manifest)
        if isinstance(waveform, Rejection):
            return waveform
        return Example(utterance.id, waveform, self.tokenizer.encode(utterance.text), None)


def _read(utterance: Utterance, manifest: str) -> torch.Tensor | Rejection:
    """Return the utterance's waveform (S,), or a rejection with the reason."""
    try:
        return load_audio(utterance.source)
    except UnusableAudio as error:
        return Rejection(manifest, utterance.row, utterance.id, error.reason, is_broken=True)
