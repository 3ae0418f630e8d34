"""Utterances of noise with random tokens, made as they are needed: nothing is read from a disk."""

import torch

from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.batch import Example

FIRST_TOKEN = 5
TOKENS_PER_SECOND = 4
LOUDNESS = 0.1


def build_speech(seconds: float, vocabulary: int, generator: torch.Generator) -> Example:
    """So many seconds of noise, its tokens and the seed of its SpecAugment, all drawn from the generator."""
    waveform = LOUDNESS * torch.randn(round(seconds * SAMPLE_RATE), generator=generator)
    count = max(1, round(seconds * TOKENS_PER_SECOND))
    tokens = torch.randint(FIRST_TOKEN, vocabulary, (count,), generator=generator).tolist()
    seed = int(torch.randint(2**31, (), generator=generator))
    return Example(utterance_id=f"noise {seed}", waveform=waveform, tokens=tokens, augment_seed=seed)
