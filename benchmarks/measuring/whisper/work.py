"""Workload of the Whisper comparison: model sizes, speech, labels, and weights that are equal on both sides.

The speech is noise, since the time of a step does not depend on its content.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from konkanivani.base.config import OptimizerConfig
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.batch import Example
from konkanivani.data.text import SpecialTokens
from konkanivani.model.whisper.shape import WhisperShape

TINY = WhisperShape(384, 6, 4, 4, 1536, 80, 51_865)
SHAPES = {
    "tiny": TINY,
    "base": replace(TINY, d_model=512, attention_heads=8, encoder_layers=6, decoder_layers=6, feedforward_dim=2048),
    "small": replace(TINY, d_model=768, attention_heads=12, encoder_layers=12, decoder_layers=12, feedforward_dim=3072),
    "digits": WhisperShape(64, 2, 2, 1, 128, 80, 400),  # the model of whisper_learning.py
    "medium_blocks": WhisperShape(
        1024, 16, 4, 1, 4096, 80, 400
    ),  # a sixth of medium's encoder, and one block of its decoder
}
DEFAULT_WINDOWS = {"digits": 6}  # seconds; other sizes: 30
END = 50_257  # the end token of the published vocabularies
SCHEDULE = OptimizerConfig(learning_rate=1e-5)
TOTAL_STEPS = 1000  # for the learning-rate schedule
LORA_RANK = 32
POSITIONS_PER_SECOND = 50  # encoder frames
LOUDNESS = 0.1
DEVIATION = 0.02


@dataclass(frozen=True)
class WhisperTerms:
    """Parameters of the workload.

    `train` is the trained part of the model. A step has `utterances` utterances of `shortest` to `longest` seconds,
    `together` of them per micro-batch. Only this trainer supports `audio_context`.
    """

    size: Literal["tiny", "base", "small", "digits", "medium_blocks"]
    train: Literal["all", "decoder", "lora"]
    utterances: int
    together: int
    shortest: float
    longest: float
    tokens_per_second: float
    device: str
    mixed_precision: bool
    audio_context: Literal["window", "speech"]
    window_seconds: int

    @property
    def shape(self) -> WhisperShape:
        """Dimensions of the network."""
        return replace(SHAPES[self.size], source_positions=POSITIONS_PER_SECOND * self.window_seconds)

    @property
    def special(self) -> SpecialTokens:
        """Special tokens, after the text tokens: the end token, then the start token."""
        end = min(END, self.shape.vocab_size - 2)
        return SpecialTokens(blank=end + 1, unknown=end + 1, start=end + 1, end=end)

    @property
    def seconds(self) -> list[float]:
        """Duration of each utterance, longest first; equal on every machine."""
        lengths = random.Random(0)
        return sorted((lengths.uniform(self.shortest, self.longest) for _ in range(self.utterances)), reverse=True)

    @property
    def labels(self) -> list[int]:
        """Number of labels of each utterance with its end token, limited by the positions of the decoder."""
        most = self.shape.target_positions
        return [1 + min(most - 1, max(1, round(self.tokens_per_second * length))) for length in self.seconds]


def build_speech(terms: WhisperTerms) -> list[Example]:
    """Return the utterances, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    return [
        Example(
            utterance_id=str(number),
            waveform=LOUDNESS * torch.randn(round(seconds * SAMPLE_RATE), generator=generator),
            tokens=torch.randint(terms.special.end, (labels - 1,), generator=generator).tolist(),
            augment_seed=None,  # no SpecAugment, as in transformers
        )
        for number, (seconds, labels) in enumerate(zip(terms.seconds, terms.labels, strict=True))
    ]


@torch.no_grad()
def fill(parameters: Iterator[tuple[str, torch.nn.Parameter]]) -> None:
    """Fill every matrix with random values that depend only on its name in the checkpoint files.

    LoRA's B matrices stay 0, as at the start of training, and the sinusoids of the encoder are kept.
    """
    for name, parameter in parameters:
        if parameter.dim() > 1 and "encoder.embed_positions" not in name and not name.endswith("lora_B"):
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.empty(parameter.shape).normal_(std=DEVIATION, generator=drawn))
