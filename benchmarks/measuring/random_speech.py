"""Utterances of noise with random tokens, generated on demand without any file."""

import torch

from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.batch import Example

FIRST_TOKEN = 5
TOKENS_PER_SECOND = 4
LOUDNESS = 0.1  # standard deviation of the samples


def build_speech(seconds: float, vocabulary: int, generator: torch.Generator) -> Example:
    """Return `seconds` seconds of noise with tokens and a SpecAugment seed, all drawn from `generator`."""
    waveform = LOUDNESS * torch.randn(round(seconds * SAMPLE_RATE), generator=generator)
    count = max(1, round(seconds * TOKENS_PER_SECOND))
    tokens = torch.randint(FIRST_TOKEN, vocabulary, (count,), generator=generator).tolist()
    seed = int(torch.randint(2**31, (), generator=generator))
    return Example(utterance_id=f"noise {seed}", waveform=waveform, tokens=tokens, augment_seed=seed)
