"""Whisper (Radford et al., 2022): an encoder of features over a padded window, or over speech, and a token decoder.

B batch, T feature frames, T' encoder frames, U tokens, K hypotheses, F mel bins, D model width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.base.config import AudioContext
from konkanivani.base.errors import DataError
from konkanivani.base.lengths import CHUNK_FRAMES, Lengths, padding_mask
from konkanivani.model.asr import ASROutput, SpeechNetwork
from konkanivani.model.attention import key_mask_of
from konkanivani.model.blocks import BlockList, BlockRunner, run_directly
from konkanivani.model.cache import FIRST_ROOM, DecoderCache
from konkanivani.model.decoder import TokenDecoder
from konkanivani.model.encoder import SpeechEncoder
from konkanivani.model.kernels.products import fused_linear
from konkanivani.model.losses import LossSums, Objective, Targets
from konkanivani.model.whisper.blocks import DecoderBlock, EncoderBlock, Subsampling
from konkanivani.model.whisper.shape import STRIDE, WhisperShape
from konkanivani.model.whisper.vocabulary_loss import vocabulary_loss_sum

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
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int = CHUNK_FRAMES
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
        x = run_block(self.subsampling, features, positions, padding)
        encoded_lengths = tuple(-(-length // STRIDE) for length in feature_lengths)
        key_mask = key_mask_of(x, encoded_lengths)
        for block in self.blocks:
            x = run_block(block, x, key_mask)
        return self.norm(x), encoded_lengths


class TiedEmbedding(torch.nn.Embedding):
    """Token embedding whose weight is also the output layer's: logits are products with the same vectors."""

    bias = None

    def with_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, "TiedHead"]:
        """Return vectors (B, U, D) of tokens (B, U) and the output layer; used together, they have one gradient.

        The vectors are on the tokens' device, the output layer and the gradient on the weight's.
        """
        gradient = _TiedGradient(self.weight, tokens.to(self.weight.device))
        vectors, head = _Tied.apply(self.weight, gradient)
        return vectors.to(tokens.device), TiedHead(head, gradient.room)


@dataclass(frozen=True)
class TiedHead:
    """Weight (V, D) of the output layer, and `room`, which returns the tensor to accumulate its gradient in."""

    weight: torch.Tensor
    room: Callable[[], torch.Tensor]


class _TiedGradient:
    """Gradient of a weight (V, D) that is used twice, accumulated in place in the earlier micro-batches' gradient.

    Autograd would hold the sum of the earlier gradients and this one, each of the weight's size. Here the sum is taken
    out of `.grad`, the output layer's gradient is added to it in slices, then the rows of the embedded vectors, and the
    result is returned to autograd as this pass's gradient. Rounding is the same as autograd's: earlier + (output layer
    + vectors).
    """

    def __init__(self, weight: torch.Tensor, tokens: torch.Tensor) -> None:
        self._weight = weight
        self.tokens = tokens
        self._earlier: torch.Tensor | None = None  # (B, U, D)

    def room(self) -> torch.Tensor:
        """Return the tensor (V, D) to add the output layer's gradient to: the earlier sum, with tokens' rows zeroed."""
        earlier = self._weight.grad
        # A hook must see this pass's gradient alone.
        if earlier is None or self._weight._backward_hooks:
            return torch.zeros_like(self._weight)
        self._weight.grad = None
        # Rows of this batch's tokens are added at the end, for the same rounding as autograd's.
        self._earlier = earlier[self.tokens]
        earlier[self.tokens] = 0
        return earlier

    def finish(self, by_head: torch.Tensor, by_vectors: torch.Tensor) -> torch.Tensor:
        """Return by_head (V, D) plus the vectors' gradient (B, U, D) and the earlier sum's rows, added in place."""
        by_vectors = by_vectors.to(by_head.dtype)
        # On a CPU, index_put_ accumulates in the order in which threads arrive: not reproducible.
        if by_head.device.type == "cpu":
            by_head.index_add_(0, self.tokens.flatten(), by_vectors.flatten(0, 1))
        else:
            by_head.index_put_((self.tokens,), by_vectors, accumulate=True)
        # A repeated token has the same row several times: the sum is assigned, not accumulated.
        if self._earlier is not None:
            by_head[self.tokens] = by_head[self.tokens] + self._earlier
            self._earlier = None
        return by_head


class _Tied(torch.autograd.Function):
    """Embedding and output layer of one weight; autograd would hold a gradient of its size for each, and their sum."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: _TiedGradient) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.gradient = gradient
        return torch.nn.functional.embedding(gradient.tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx, by_vectors: torch.Tensor, by_head: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient.finish(by_head, by_vectors), None


class Decoder(TokenDecoder):
    """Decoder: token vectors (B, U, D), encoded (B, T', D) -> decoded (B, U, D); `output` computes logits (B, U, V).

    `encoded_mask` (B, 1, 1, T') is True for frames that are attended to, None if all are.
    """

    blocks: BlockList[DecoderBlock]

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.embedding = TiedEmbedding(shape.vocab_size, shape.d_model)
        self.positions = torch.nn.Parameter(torch.empty(shape.target_positions, shape.d_model))
        self.blocks = BlockList(DecoderBlock(shape) for _ in range(shape.decoder_layers))
        self.norm = torch.nn.LayerNorm(shape.d_model)

    def forward(
        self,
        vectors: torch.Tensor,
        encoded: torch.Tensor,
        run_block: BlockRunner,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if vectors.shape[1] > len(self.positions):
            raise DataError(
                f"A transcript of {vectors.shape[1] - 1} tokens is longer than the model's limit of "
                f"{self.most_tokens}. Exclude it (lower --max_tokens), or cut it."
            )
        x = vectors + self.positions[: vectors.shape[1]].to(vectors.device)
        for block in self.blocks:
            x = run_block(block, x, encoded, encoded_mask)
        return self.norm(x)

    def watched(self, tokens: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode tokens (B, U) without padding; return decoded and all cross-attention scores (L, B, H, U, T')."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        scores = []
        for block in self.blocks:
            x, seen = block.watched(x, encoded)
            scores.append(seen)
        return self.norm(x), torch.stack(scores)

    def output(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return logits (…, V) of decoded (…, D)."""
        return fused_linear(decoded, self.embedding)

    @property
    def most_tokens(self) -> int:
        """Maximal number of tokens after the start token, as there are positions."""
        return len(self.positions) - 1

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, T', D)."""
        cross_kv = [block.cross_attention.keys_and_values(encoded) for block in self.blocks]
        keys, _ = cross_kv[0]
        batch, heads, _, head_width = keys.shape
        room = (2, batch, beam, heads, FIRST_ROOM, head_width)
        encoded_mask = key_mask_of(encoded, encoded_lengths)
        return DecoderCache([keys.new_empty(room) for _ in self.blocks], cross_kv, encoded_mask)

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D).

        Equal to the last position of `forward` over all tokens.
        """
        cache.grow()
        x = self.embedding(tokens) + self.positions[cache.length]
        for block, kept, cross_kv in zip(self.blocks, cache.self_kv, cache.cross_kv, strict=True):
            x = block.step(x, kept, cache.length, cross_kv, cache.encoded_mask)
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
        self._number_blocks(keeps_attention=True)

    @property
    def sliced_weights(self) -> tuple[torch.Tensor, ...]:
        """Weights outside of the blocks that may stay off the model's device: only rows and slices are used."""
        return self.encoder.positions, self.decoder.positions, self.decoder.embedding.weight

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: Lengths,
        decoder_tokens: torch.Tensor,
        run_block: BlockRunner = run_directly,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> WhisperOutput:
        """Run with teacher forcing: features (B, T, F) with lengths, decoder_tokens (B, U + 1) with start token."""
        encoded, encoded_lengths = self.encoder(features, feature_lengths, run_block, chunk_frames)
        vectors, head = self.decoder.embedding.with_head(decoder_tokens)
        decoded = self.decoder(vectors, encoded, run_block, key_mask_of(encoded, encoded_lengths))
        return WhisperOutput(encoded, None, encoded_lengths, decoded, head)

    def loss_sums(self, output: ASROutput, spoken: Targets, objective: Objective, chunk_frames: int) -> LossSums:
        """Return the objective's only term, summed over all labels; transcripts are too short to need chunks."""
        if not isinstance(output, WhisperOutput):
            raise TypeError("the output is not of a Whisper network")
        head = output.head
        smoothing = objective.label_smoothing
        return (vocabulary_loss_sum(output.decoded, head.weight, spoken.targets, smoothing, head.room),)

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
