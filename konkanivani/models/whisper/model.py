"""Whisper (Radford et al., 2022): an encoder of features over a padded window, or over speech, and a token decoder.

Masks are for utterances shorter than the longest of their batch, and None if there are none.
B batch, T feature frames (in attention: frames or tokens), T' or S encoder frames, U tokens, K hypotheses, F mel bins,
D model width, H heads, E = D / H head width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.config import AudioContext
from konkanivani.errors import DataError
from konkanivani.lengths import (
    CHUNK_FRAMES,
    SAMPLE_RATE,
    SECONDS,
    BatchLengths,
    Count,
    map_lengths,
    on_host,
    padding_or_none,
)
from konkanivani.models.asr import (
    ASROutput,
    LossSums,
    Objective,
    SpeechNetwork,
    Targets,
    TiedEmbedding,
    TiedHead,
    VocabularyLoss,
)
from konkanivani.models.attention import SeparateProjections, key_mask_of, score_mask_for
from konkanivani.models.conformer import BlockList, SpeechEncoder, WrapBlock, keep_activations
from konkanivani.models.decoder import FIRST_CAPACITY, DecoderCache, KeysAndValues, TokenDecoder
from konkanivani.randomness import block_dropout

HOP_SAMPLES = 160  # samples per feature frame: 10 ms
STRIDE = 2  # feature frames per encoder frame


@dataclass(frozen=True)
class WhisperShape:
    """Dimensions of the network (Radford et al., 2022); encoder and decoder have the same heads and inner width.

    `source_positions` is the number of encoder frames of a window (1500 in 30 s), `target_positions` the maximal number
    of decoder tokens.
    """

    d_model: int
    attention_heads: int
    encoder_layers: int
    decoder_layers: int
    feedforward_dim: int
    mel_bins: int
    vocab_size: int
    source_positions: int = 1500
    target_positions: int = 448

    @property
    def window_frames(self) -> int:
        """Feature frames of a window."""
        return STRIDE * self.source_positions

    @property
    def window_samples(self) -> int:
        """Samples of a window, to which every utterance is padded."""
        return HOP_SAMPLES * self.window_frames

    @property
    def window_seconds(self) -> float:
        """Duration of a window in seconds."""
        return self.window_samples / SAMPLE_RATE


# Published shapes: width, heads, blocks of the encoder and of the decoder, inner width, mel bands, tokens
# (Radford et al., 2022).
PUBLISHED_SIZES = {
    "tiny": WhisperShape(384, 6, 4, 4, 1536, 80, 51_865),
    "base": WhisperShape(512, 8, 6, 6, 2048, 80, 51_865),
    "small": WhisperShape(768, 12, 12, 12, 3072, 80, 51_865),
    "medium": WhisperShape(1024, 16, 24, 24, 4096, 80, 51_865),
    "turbo": WhisperShape(1280, 20, 32, 4, 5120, 128, 51_866),
    "large-v3": WhisperShape(1280, 20, 32, 32, 5120, 128, 51_866),
}


@dataclass(frozen=True)
class SpeechFraming:
    """Frame counts of the speech alone, the last frame counted in full."""

    unit = SECONDS

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames: 300 for 3 s."""
        return -(-samples // HOP_SAMPLES)

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames: 150 for 3 s."""
        return -(-self.feature_length(samples) // STRIDE)

    @property
    def encoder_hop(self) -> int:
        """Samples per encoder frame: 20 ms."""
        return STRIDE * HOP_SAMPLES

    def encoder_frame_seconds(self, frame: float) -> float:
        """Return the time in seconds of the middle of an encoder frame's context."""
        return frame * self.encoder_hop / SAMPLE_RATE


@dataclass(frozen=True)
class WindowFraming(SpeechFraming):
    """Frame counts of a window, however short the speech in it."""

    shape: WhisperShape

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames: 3000 for a window of 30 s."""
        # `0 * samples` keeps the type and shape of an array of lengths.
        return 0 * samples + self.shape.window_frames

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames: 1500 for a window of 30 s."""
        return 0 * samples + self.shape.source_positions


# --------------------
# Blocks of Whisper (Radford et al., 2022): pre-norm Transformer blocks without dropout, as OpenAI's model reads.


class Subsampling(torch.nn.Module):
    """Subsampling by 2, features (B, T, F) -> (B, T / 2, D): two convolutions over three frames, fixed positions added.

    `padding` (B, 1, T) is True after an utterance's end.
    """

    draws_random_numbers = False

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(shape.mel_bins, shape.d_model, 3, padding=1)
        self.second = torch.nn.Conv1d(shape.d_model, shape.d_model, 3, stride=STRIDE, padding=1)

    def forward(
        self, features: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = features.transpose(1, 2)
        # Zero padding before both convolutions, as after the last frame, so that the batch changes nothing.
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        x = F.gelu(self.first(x))
        if padding is not None:
            x = x.masked_fill_(padding, 0.0)  # in place: no backward needs GELU's output, and no copy is kept
        return F.gelu(self.second(x)).transpose(1, 2) + positions


class Attention(SeparateProjections):
    """Multi-head attention of x (B, T, D) over itself or over encoded frames -> (B, T, D); keys have no bias.

    `key_mask` (B, 1, 1, S) is True for keys that are attended to, or numbers to add to the scores.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(
            heads,
            query=torch.nn.Linear(d_model, d_model),
            key=torch.nn.Linear(d_model, d_model, bias=False),
            value=torch.nn.Linear(d_model, d_model),
            output=torch.nn.Linear(d_model, d_model),
        )

    def forward(
        self,
        x: torch.Tensor,
        encoded: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attend from x to encoded frames or, without these, to x; if causal, only to earlier tokens and itself."""
        key, value = self.keys_and_values(x if encoded is None else encoded)
        return self.attend(self.query(x), key, value, key_mask, is_causal)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attend from projected queries (B, T, D) over given keys and values (B, H, S, E): (B, T, D)."""
        return self.join_heads(self.attend_heads(self.split_heads(query), key, value, key_mask, is_causal))

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Attend from queries (B, H, T, E) over keys and values (B, H, S, E): (B, H, T, E)."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, is_causal=is_causal)

    def scores(self, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the scores (B, H, T, S) over keys (B, H, S, E), before the softmax."""
        query = self.split_heads(self.query(x))
        return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])

    def step(self, x: torch.Tensor, past: torch.Tensor, length: int) -> torch.Tensor:
        """Attend from the newest token (R, 1, D) alone, after `length` earlier ones in `past` (2, R, H, U, E)."""
        return self.attend(self.query(x), *self.cached_keys_and_values(x, past, length))


class FeedForward(torch.nn.Module):
    """Feed-forward module, (B, T, D) -> (B, T, D), with its norm; GELU is exact."""

    def __init__(self, d_model: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.expand = torch.nn.Linear(d_model, inner)
        self.contract = torch.nn.Linear(inner, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(self.norm(x))))


class EncoderBlock(torch.nn.Module):
    """Encoder block, (B, T, D) -> (B, T, D): self-attention, feed-forward."""

    draws_random_numbers = False

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.self_attention = Attention(shape.d_model, shape.attention_heads)
        self.feedforward = FeedForward(shape.d_model, shape.feedforward_dim)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention(self.self_attention_norm(x), key_mask=key_mask)
        x = x + self.feedforward(x)
        return x


class DecoderBlock(torch.nn.Module):
    """Decoder block, (B, T, D) -> (B, T, D): causal self-attention, attention over encoded (B, S, D), feed-forward.

    `encoded_mask` (B, 1, 1, S) is True for frames that are attended to.
    """

    draws_random_numbers = False

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.self_attention = Attention(shape.d_model, shape.attention_heads)
        self.cross_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.cross_attention = Attention(shape.d_model, shape.attention_heads)
        self.feedforward = FeedForward(shape.d_model, shape.feedforward_dim)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, encoded_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention(self.self_attention_norm(x), is_causal=True)
        x = x + self.cross_attention(self.cross_attention_norm(x), encoded, encoded_mask)
        x = x + self.feedforward(x)
        return x

    def with_scores(self, x: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `forward` and the cross-attention scores (B, H, T, S), before the softmax."""
        x = x + self.self_attention(self.self_attention_norm(x), is_causal=True)
        normed = self.cross_attention_norm(x)
        key, value = self.cross_attention.keys_and_values(encoded)
        scores = self.cross_attention.scores(normed, key)
        x = x + self.cross_attention.attend(self.cross_attention.query(normed), key, value)
        return x + self.feedforward(x), scores

    def step(
        self,
        x: torch.Tensor,
        past: torch.Tensor,
        length: int,
        cross_kv: KeysAndValues,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the newest tokens (B, K, D) of K hypotheses per utterance -> (B, K, D).

        `past` (2, B, K, H, U, E) holds keys and values of the `length` tokens before.
        """
        # Hypotheses have their own past, so self-attention has B K rows of one token. All K attend to the same encoded
        # frames, as K tokens of one sequence would.
        rows = self.self_attention_norm(x).flatten(0, 1)[:, None]
        x = x + self.self_attention.step(rows, past.flatten(1, 2), length).view_as(x)
        query = self.cross_attention.query(self.cross_attention_norm(x))
        x = x + self.cross_attention.attend(query, *cross_kv, encoded_mask)
        return x + self.feedforward(x)


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
        feature_lengths: BatchLengths,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> tuple[torch.Tensor, BatchLengths]:
        """Encode; raise ValueError if features are longer than a window, or are not whole windows if they must be."""
        longest = features.shape[1]
        window = STRIDE * len(self.positions)
        if longest > window or (self.audio_context == "window" and {longest, *on_host(feature_lengths)} != {window}):
            raise ValueError(f"features of {longest} frames do not match the window of {window}")
        padding = padding_or_none(feature_lengths, longest, features.device)
        padding = None if padding is None else padding[:, None, :]
        # The table may be in host memory: only the rows that are needed are copied to the features' device.
        positions = self.positions[: -(-longest // STRIDE)].to(features.device)
        x = wrap_block(0, self.subsampling)(features, positions, padding)
        encoded_lengths = map_lengths(lambda length: -(-length // STRIDE), feature_lengths)
        key_mask = score_mask_for(x, x, encoded_lengths)
        for number, block in enumerate(self.blocks, start=1):
            with block_dropout(number):
                x = wrap_block(number, block)(x, key_mask)
        return self.norm(x), encoded_lengths


class Decoder(TokenDecoder):
    """Decoder: token vectors (B, U, D), encoded (B, T', D) -> decoded (B, U, D); `output` computes logits (B, U, V).

    `encoded_mask` (B, 1, 1, T') is a key mask (True: attended to) or is added to the scores; None if all frames are
    attended to.
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

    def begin(self, encoded: torch.Tensor, encoded_lengths: BatchLengths, beam: int) -> DecoderCache:
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
        feature_lengths: BatchLengths,
        decoder_tokens: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> WhisperOutput:
        """Run with teacher forcing: features (B, T, F) with lengths, decoder_tokens (B, U + 1) with start token."""
        encoded, encoded_lengths = self.encoder(features, feature_lengths, wrap_block, chunk_frames)
        vectors, head = self.decoder.embedding.with_head(decoder_tokens)
        decoded = self.decoder(vectors, encoded, wrap_block, score_mask_for(vectors, encoded, encoded_lengths))
        return WhisperOutput(encoded, None, encoded_lengths, decoded, head)

    def loss_sums(self, output: ASROutput, labels: Targets, objective: Objective, chunk_frames: int) -> LossSums:
        """Return the objective's only term, summed over all labels."""
        if not isinstance(output, WhisperOutput):
            raise TypeError("the output is not of a Whisper network")
        return (self.loss(output.decoded, output.head, labels.targets, objective.label_smoothing),)

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
