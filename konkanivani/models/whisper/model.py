"""Whisper (Radford et al., 2022): an encoder of features over a padded window, or over speech, and a token decoder.

B batch, T feature frames, T' encoder frames, U tokens, K hypotheses, F mel bins, D model width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.config import AudioContext
from konkanivani.errors import DataError
from konkanivani.lengths import CHUNK_FRAMES, Lengths, padding_mask
from konkanivani.models.asr import ASROutput, SpeechNetwork
from konkanivani.models.attention import key_mask_of
from konkanivani.models.conformer import BlockList, SpeechEncoder, WrapBlock, keep_activations
from konkanivani.models.decoder import FIRST_CAPACITY, DecoderCache, TokenDecoder
from konkanivani.models.losses import LossSums, Objective, Targets, cross_entropy_sum
from konkanivani.models.whisper.network import STRIDE, DecoderBlock, EncoderBlock, Subsampling, WhisperShape
from konkanivani.randomness import block_dropout

LONGEST_WAVE = 10_000.0  # longest wavelength of the encoder's fixed positions, over 2 pi
INITIAL_DEVIATION = 0.02  # standard deviation of weights that are not read from a file


class Encoder(SpeechEncoder):
    """Encoder: features (B, T, F) with their lengths -> encoded (B, T / 2, D) with their lengths, halves rounded up.

    With the audio context "window", all utterances have a window's length. With "speech", frames after an utterance's
    end are zeroed for the convolutions and masked in attention.
    """

    def __init__(self, shape: WhisperShape, audio_context: AudioContext = "window") -> None:
        super().__init__()
        self.audio_context = audio_context
        self.subsampling = Subsampling(shape)
        positions = torch.empty(shape.source_positions, shape.d_model)
        self.positions = torch.nn.Parameter(positions, requires_grad=False)
        self.blocks = BlockList(EncoderBlock(shape) for _ in range(shape.encoder_layers))
        self.norm = torch.nn.LayerNorm(shape.d_model)

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: Lengths,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> tuple[torch.Tensor, Lengths]:
        """Encode; raise ValueError if features are longer than a window, or are not whole windows if they must be."""
        longest = features.shape[1]
        window = STRIDE * len(self.positions)
        if longest > window or (self.audio_context == "window" and {longest, *feature_lengths} != {window}):
            raise ValueError(f"features of {longest} frames do not match the window of {window}")
        padding = None
        if min(feature_lengths) < longest:
            padding = padding_mask(feature_lengths, longest, features.device)[:, None, :]
        # The table may be in host memory: only the rows that are needed are copied to the features' device.
        positions = self.positions[: -(-longest // STRIDE)].to(features.device)
        x = wrap_block(0, self.subsampling)(features, positions, padding)
        encoded_lengths = tuple(-(-length // STRIDE) for length in feature_lengths)
        key_mask = key_mask_of(x, encoded_lengths)
        for number, block in enumerate(self.blocks, start=1):
            with block_dropout(number):
                x = wrap_block(number, block)(x, key_mask)
        return self.norm(x), encoded_lengths


@dataclass(frozen=True)
class TiedHead:
    """Weight (V, D) of the output layer; `gradient_buffer` returns the tensor to add its gradient to, if given."""

    weight: torch.Tensor
    gradient_buffer: Callable[[], torch.Tensor] | None = None


class TiedEmbedding(torch.nn.Embedding):
    """Token embedding whose weight is also the output layer's: logits are products with the same vectors."""

    bias = None

    def with_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, TiedHead]:
        """Return vectors (B, U, D) of tokens (B, U), on their device, and the output layer."""
        vectors = self(tokens.to(self.weight.device)).to(tokens.device)
        return vectors, TiedHead(self.weight)

    def logits(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return logits (…, V) of decoded (…, D)."""
        return F.linear(decoded, self.weight)


class VocabularyLoss:
    """Loss of the output layer over the vocabulary."""

    def __call__(
        self, decoded: torch.Tensor, head: TiedHead, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """Return the summed, smoothed cross entropy of decoded (B, U, D) against targets (B, U), padded with -1."""
        weight = head.weight.to(decoded.device)
        return cross_entropy_sum(decoded, lambda rows: F.linear(rows, weight), targets, label_smoothing)


class Decoder(TokenDecoder):
    """Decoder: token vectors (B, U, D), encoded (B, T', D) -> decoded (B, U, D); `output` computes logits (B, U, V).

    `encoded_mask` (B, 1, 1, T') is True for frames that are attended to, None if all are.
    """

    blocks: BlockList[DecoderBlock]

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.first_number = 1 + shape.encoder_layers  # of its blocks, see WrapBlock
        self.embedding = TiedEmbedding(shape.vocab_size, shape.d_model)
        self.positions = torch.nn.Parameter(torch.empty(shape.target_positions, shape.d_model))
        self.blocks = BlockList(DecoderBlock(shape) for _ in range(shape.decoder_layers))
        self.norm = torch.nn.LayerNorm(shape.d_model)

    def forward(
        self,
        vectors: torch.Tensor,
        encoded: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if vectors.shape[1] > len(self.positions):
            raise DataError(
                f"A transcript of {vectors.shape[1] - 1} tokens is longer than the model's limit of "
                f"{self.most_tokens}. Exclude it (lower --max_tokens), or cut it."
            )
        x = vectors + self.positions[: vectors.shape[1]].to(vectors.device)
        for number, block in enumerate(self.blocks, start=self.first_number):
            with block_dropout(number):
                x = wrap_block(number, block)(x, encoded, encoded_mask)
        return self.norm(x)

    def with_scores(self, tokens: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode tokens (B, U) without padding; return decoded and all cross-attention scores (L, B, H, U, T')."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        scores = []
        for block in self.blocks:
            x, block_scores = block.with_scores(x, encoded)
            scores.append(block_scores)
        return self.norm(x), torch.stack(scores)

    def output(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return logits (…, V) of decoded (…, D)."""
        return self.embedding.logits(decoded)

    @property
    def most_tokens(self) -> int:
        """Maximal number of tokens after the start token, as there are positions."""
        return len(self.positions) - 1

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, T', D)."""
        cross_kv = [block.cross_attention.keys_and_values(encoded) for block in self.blocks]
        keys, _ = cross_kv[0]
        batch, heads, _, head_width = keys.shape
        shape = (2, batch, beam, heads, FIRST_CAPACITY, head_width)
        encoded_mask = key_mask_of(encoded, encoded_lengths)
        return DecoderCache([keys.new_empty(shape) for _ in self.blocks], cross_kv, encoded_mask)

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D).

        Equal to the last position of `forward` over all tokens.
        """
        cache.grow()
        x = self.embedding(tokens) + self.positions[cache.length]
        for block, past, cross_kv in zip(self.blocks, cache.self_kv, cache.cross_kv, strict=True):
            x = block.step(x, past, cache.length, cross_kv, cache.encoded_mask)
        cache.length += 1
        return self.norm(x)


@dataclass(frozen=True)
class WhisperOutput(ASROutput):
    """Result of a forward pass; `head` holds the output layer's weight."""

    decoded: torch.Tensor
    head: TiedHead


class Whisper(SpeechNetwork):
    """Whisper without dropout; its only loss is the cross entropy of every label."""

    encoder: Encoder
    decoder: Decoder
    ctc_head = None

    def __init__(self, shape: WhisperShape, audio_context: AudioContext = "window") -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape, audio_context)
        self.decoder = Decoder(shape)
        self._initialise()
        self.loss = VocabularyLoss()

    @property
    def sliced_weights(self) -> tuple[torch.Tensor, ...]:
        """Weights outside of the blocks that may stay off the model's device: only rows and slices are used."""
        return self.encoder.positions, self.decoder.positions, self.decoder.embedding.weight

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: Lengths,
        decoder_tokens: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> WhisperOutput:
        """Run with teacher forcing: features (B, T, F) with lengths, decoder_tokens (B, U + 1) with start token."""
        encoded, encoded_lengths = self.encoder(features, feature_lengths, wrap_block, chunk_frames)
        vectors, head = self.decoder.embedding.with_head(decoder_tokens)
        decoded = self.decoder(vectors, encoded, wrap_block, key_mask_of(encoded, encoded_lengths))
        return WhisperOutput(encoded, None, encoded_lengths, decoded, head)

    def loss_sums(self, output: ASROutput, spoken: Targets, objective: Objective, chunk_frames: int) -> LossSums:
        """Return the objective's only term, summed over all labels."""
        if not isinstance(output, WhisperOutput):
            raise TypeError("the output is not of a Whisper network")
        return (self.loss(output.decoded, output.head, spoken.targets, objective.label_smoothing),)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
                if not isinstance(module, torch.nn.Embedding) and module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
        torch.nn.init.normal_(self.decoder.positions, std=INITIAL_DEVIATION)
        # On the meta device, torch would import its compiler to compute nothing.
        if not self.encoder.positions.is_meta:
            with torch.no_grad():
                self.encoder.positions.copy_(sinusoids(*self.encoder.positions.shape))


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Return fixed positions (length, width): sines, then cosines, with wavelengths from 2 pi to 20,000 pi frames."""
    step = math.log(LONGEST_WAVE) / max(1, width // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(width // 2))[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
