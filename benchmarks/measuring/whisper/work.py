"""The step that both sides take: sizes, speech and labels, and weights that are the same in both.

Speech is noise, since neither side's time depends on what is said.
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
    "digits": WhisperShape(64, 2, 2, 1, 128, 80, 400),  # what whisper_learning.py trains
    "medium_blocks": WhisperShape(
        1024, 16, 4, 1, 4096, 80, 400
    ),  # a sixth of medium's encoder, one block of its decoder
}
DEFAULT_WINDOWS = {"digits": 6}  # in seconds, others 30
END = 50_257  # the end token of the published vocabularies
SCHEDULE = OptimizerConfig(learning_rate=1e-5)
TOTAL_STEPS = 1000  # of the run that these steps pretend to begin
LORA_RANK = 32
POSITIONS_PER_SECOND = 50  # of the encoder
LOUDNESS = 0.1
DEVIATION = 0.02


@dataclass(frozen=True)
class WhisperTerms:
    """The work: a model's size, what of it is trained, utterances in a step and of them `together` in a micro-batch,
    their seconds, labels, where; `audio_context` is of ours alone.
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
        """The dimensions of the network."""
        return replace(SHAPES[self.size], source_positions=POSITIONS_PER_SECOND * self.window_seconds)

    @property
    def special(self) -> SpecialTokens:
        """Behind the tokens of a text: the end token, then the start token."""
        end = min(END, self.shape.vocab_size - 2)
        return SpecialTokens(blank=end + 1, unknown=end + 1, start=end + 1, end=end)

    @property
    def seconds(self) -> list[float]:
        """Of each utterance, the longest first; the same on every machine."""
        lengths = random.Random(0)
        return sorted((lengths.uniform(self.shortest, self.longest) for _ in range(self.utterances)), reverse=True)

    @property
    def labels(self) -> list[int]:
        """Of each utterance, its end token included: as many as the decoder has positions for."""
        most = self.shape.target_positions
        return [1 + min(most - 1, max(1, round(self.tokens_per_second * length))) for length in self.seconds]


def build_speech(terms: WhisperTerms) -> list[Example]:
    """The utterances, the same numbers on every machine."""
    generator = torch.Generator().manual_seed(0)
    return [
        Example(
            utterance_id=str(number),
            waveform=LOUDNESS * torch.randn(round(seconds * SAMPLE_RATE), generator=generator),
            tokens=torch.randint(terms.special.end, (labels - 1,), generator=generator).tolist(),
            augment_seed=None,  # no SpecAugment, of which the other side has none
        )
        for number, (seconds, labels) in enumerate(zip(terms.seconds, terms.labels, strict=True))
    ]


@torch.no_grad()
def fill(parameters: Iterator[tuple[str, torch.nn.Parameter]]) -> None:
    """Gives every matrix numbers that follow from its name in the files alone; LoRA's second ones stay 0."""
    for name, parameter in parameters:
        if parameter.dim() > 1 and "encoder.embed_positions" not in name and not name.endswith("lora_B"):
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.empty(parameter.shape).normal_(std=DEVIATION, generator=drawn))
