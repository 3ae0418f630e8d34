"""T5 (Raffel et al., 2020): a Transformer of tokens to tokens, with relative positions as a bias of the attention.

The variants differ in three places: T5 1.0 has a ReLU and multiplies with the embedding, scaled, for the output; T5
1.1, FLAN-T5, mT5 and ByT5 have a gated GELU (Shazeer, 2020) and an output layer of their own. There is no dropout.

B batch, T tokens of an input, S encoded tokens, U tokens of a target, K hypotheses, D model width, H heads, E head
width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.lengths import CHUNK_FRAMES, BatchLengths, Lengths, on_host
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
from konkanivani.models.attention import SeparateProjections, key_mask_of
from konkanivani.models.conformer import BlockList, SpeechEncoder, WrapBlock, keep_activations
from konkanivani.models.decoder import FIRST_CAPACITY, DecoderCache, KeysAndValues, TokenDecoder


@dataclass(frozen=True)
class T5Variant:
    """Differences between T5 1.0 and its successors; `epsilon` belongs to the norms."""

    is_gated: bool = True
    has_head: bool = True
    scales_output: bool = False
    epsilon: float = 1e-6


@dataclass(frozen=True)
class T5Shape:
    """Dimensions of the network; encoder and decoder have the same width, heads and inner width.

    Distances of `max_distance` tokens or more share the last of `position_buckets` buckets.
    """

    d_model: int
    head_width: int
    attention_heads: int
    encoder_layers: int
    decoder_layers: int
    feedforward_dim: int
    vocab_size: int
    position_buckets: int = 32
    max_distance: int = 128
    variant: T5Variant = T5Variant()


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang and Sennrich, 2019) of x (..., D), in at least fp32: no mean and no bias."""

    def __init__(self, d_model: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d_model))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In half precision, the squares of activations above 256 would overflow.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon))


class PositionBias(torch.nn.Module):
    """Bias of the attention by the distance of key and query, in buckets, per head; a stack's blocks share it."""

    def __init__(self, shape: T5Shape, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.max_distance = shape.max_distance
        self.weight = torch.nn.Parameter(torch.empty(shape.position_buckets, shape.attention_heads))

    def forward(self, length: int) -> torch.Tensor:
        """Return the bias (1, H, T, T) of `length` tokens; if causal, -inf for keys after the query."""
        positions = torch.arange(length, device=self.weight.device)
        distances = positions[None, :] - positions[:, None]
        bias = F.embedding(self.buckets(distances), self.weight).permute(2, 0, 1)[None]
        return bias.masked_fill(distances > 0, -math.inf) if self.is_causal else bias

    def before(self, length: int) -> torch.Tensor:
        """Return the bias (U, H) of keys 0 to `length` - 1 tokens before the query."""
        return F.embedding(self.buckets(-torch.arange(length, device=self.weight.device)), self.weight)

    def buckets(self, distances: torch.Tensor) -> torch.Tensor:
        """Return the buckets of distances, key minus query: one each for short ones, then logarithmically wider."""
        count = len(self.weight)
        offset = torch.zeros_like(distances)
        if self.is_causal:
            distances = (-distances).clamp_min(0)
        else:
            count = count // 2
            offset = (distances > 0).long() * count
            distances = distances.abs()
        exact = count // 2
        # In fp32 as in the published models, whatever the weights' precision: the edges depend on the rounding.
        octaves = torch.log(distances.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        wide = (exact + (octaves * (count - exact)).long()).clamp_max(count - 1)
        return offset + torch.where(distances < exact, distances, wide)


class Attention(SeparateProjections):
    """Multi-head attention of x (B, T, D) over itself or over encoded tokens -> (B, T, D), not scaled by 1 / sqrt(E).

    The scale is in the initial weights. `bias` (1, H, T, S) is added to the scores; `key_mask` (B, 1, 1, S) is True for
    keys that are attended to. If `is_causal`, the bias is -inf for keys after the query.
    """

    def __init__(self, shape: T5Shape, is_causal: bool = False) -> None:
        inner = shape.attention_heads * shape.head_width
        super().__init__(
            shape.attention_heads,
            query=torch.nn.Linear(shape.d_model, inner, bias=False),
            key=torch.nn.Linear(shape.d_model, inner, bias=False),
            value=torch.nn.Linear(shape.d_model, inner, bias=False),
            output=torch.nn.Linear(inner, shape.d_model, bias=False),
        )
        self.is_causal = is_causal

    def forward(
        self,
        x: torch.Tensor,
        encoded: torch.Tensor,
        bias: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from x (B, T, D) over encoded (B, S, D)."""
        return self.attend(self.query(x), *self.keys_and_values(encoded), bias, key_mask)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from projected queries (B, T, H E) over keys and values (B, H, S, E): (B, T, D)."""
        return self.join_heads(self.attend_heads(self.split_heads(query), key, value, bias, key_mask))

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from queries (B, H, T, E) over keys and values (B, H, S, E): (B, H, T, E)."""
        mask = key_mask
        if bias is not None:
            mask = bias.to(query.dtype)
            if key_mask is not None:
                mask = mask.masked_fill(~key_mask, -math.inf)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)

    def step(self, x: torch.Tensor, past: torch.Tensor, length: int, bias: torch.Tensor) -> torch.Tensor:
        """Attend from the newest token (R, 1, D) alone, after `length` earlier ones in `past` (2, R, H, U, E).

        `bias` is (1, H, 1, `length` + 1).
        """
        return self.attend(self.query(x), *self.cached_keys_and_values(x, past, length), bias)


class FeedForward(torch.nn.Module):
    """Feed-forward module, (B, T, D) -> (B, T, D), with its norm: ReLU, or GELU with a gate (Shazeer, 2020)."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.d_model, shape.variant.epsilon)
        self.gate = None
        if shape.variant.is_gated:
            self.gate = torch.nn.Linear(shape.d_model, shape.feedforward_dim, bias=False)
        self.expand = torch.nn.Linear(shape.d_model, shape.feedforward_dim, bias=False)
        self.contract = torch.nn.Linear(shape.feedforward_dim, shape.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        expanded = self.expand(normed)
        gate = None if self.gate is None else self.gate(normed)
        if expanded.dtype == torch.float16:
            # In T5's larger sizes, activations here exceed 65,504, the largest number in fp16.
            with torch.autocast(x.device.type, enabled=False):
                return self.contract(activated(expanded.float(), None if gate is None else gate.float()))
        return self.contract(activated(expanded, gate))


def activated(expanded: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return relu(expanded), or with a gate gelu(gate) * expanded; the GELU is the tanh approximation."""
    if gate is None:
        return F.relu(expanded)
    return F.gelu(gate, approximate="tanh") * expanded


class EncoderBlock(torch.nn.Module):
    """Encoder block, (B, T, D) -> (B, T, D): self-attention, feed-forward."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.self_attention_norm = RMSNorm(shape.d_model, shape.variant.epsilon)
        self.self_attention = Attention(shape)
        self.feedforward = FeedForward(shape)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.self_attention_norm(x)
        x = x + self.self_attention(normed, normed, bias, key_mask)
        x = x + self.feedforward(x)
        return x


class DecoderBlock(torch.nn.Module):
    """Decoder block, (B, U, D) -> (B, U, D): causal self-attention, attention over encoded (B, S, D), feed-forward.

    `encoded_mask` (B, 1, 1, S) is True for encoded tokens that are attended to.
    """

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.self_attention_norm = RMSNorm(shape.d_model, shape.variant.epsilon)
        self.self_attention = Attention(shape, is_causal=True)
        self.cross_attention_norm = RMSNorm(shape.d_model, shape.variant.epsilon)
        self.cross_attention = Attention(shape)
        self.feedforward = FeedForward(shape)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, encoded: torch.Tensor, encoded_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = self.self_attention_norm(x)
        x = x + self.self_attention(normed, normed, bias)
        x = x + self.cross_attention(self.cross_attention_norm(x), encoded, None, encoded_mask)
        x = x + self.feedforward(x)
        return x

    def step(
        self,
        x: torch.Tensor,
        bias: torch.Tensor,
        past: torch.Tensor,
        length: int,
        cross_kv: KeysAndValues,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the newest tokens (B, K, D) of K hypotheses per input -> (B, K, D).

        `past` (2, B, K, H, U, E) holds keys and values of the `length` tokens before, `bias` (1, H, 1, `length` + 1).
        """
        # Hypotheses have their own past: B K rows of one token. All K attend to the same encoded tokens.
        rows = self.self_attention_norm(x).flatten(0, 1)[:, None]
        x = x + self.self_attention.step(rows, past.flatten(1, 2), length, bias).view_as(x)
        query = self.cross_attention.query(self.cross_attention_norm(x))
        x = x + self.cross_attention.attend(query, *cross_kv, None, encoded_mask)
        return x + self.feedforward(x)


class Encoder(SpeechEncoder):
    """Encoder: vectors of tokens (B, T, D) with their lengths -> encoded (B, T, D) with the same lengths."""

    blocks: BlockList[EncoderBlock]

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.subsampling = torch.nn.Identity()  # block 0 of every network: there is one vector per token
        self.positions = PositionBias(shape, is_causal=False)
        self.blocks = BlockList(EncoderBlock(shape) for _ in range(shape.encoder_layers))
        self.norm = RMSNorm(shape.d_model, shape.variant.epsilon)

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: BatchLengths,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> tuple[torch.Tensor, BatchLengths]:
        x = wrap_block(0, self.subsampling)(features)
        # An input of the blocks, so that blocks that are recomputed do not recompute it, and its gradient adds up.
        bias = self.positions(x.shape[1])
        key_mask = key_mask_of(x, feature_lengths)
        for number, block in enumerate(self.blocks, start=1):
            x = wrap_block(number, block)(x, bias, key_mask)
        return self.norm(x), feature_lengths


class Decoder(TokenDecoder):
    """Decoder: vectors of tokens (B, U, D), encoded (B, S, D) -> decoded (B, U, D); `output` computes logits (B, U, V).

    The embedding is also the encoder's.
    """

    blocks: BlockList[DecoderBlock]
    most_tokens = math.inf  # positions are computed on demand

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.first_number = 1 + shape.encoder_layers  # of its blocks, see WrapBlock
        self.output_scale = shape.d_model**-0.5 if shape.variant.scales_output else 1.0
        self.embedding = TiedEmbedding(shape.vocab_size, shape.d_model)
        # Not tied: a TiedEmbedding without lookups, so that its loss is computed in slices of the vocabulary too.
        self.head = TiedEmbedding(shape.vocab_size, shape.d_model) if shape.variant.has_head else None
        self.positions = PositionBias(shape, is_causal=True)
        self.blocks = BlockList(DecoderBlock(shape) for _ in range(shape.decoder_layers))
        self.norm = RMSNorm(shape.d_model, shape.variant.epsilon)

    def with_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, TiedHead]:
        """Return vectors (B, N, D) of tokens (B, N), and the output layer."""
        if self.head is None:
            return self.embedding.with_head(tokens)
        _, head = self.head.with_head(tokens[:, :0])
        return self.embedding(tokens.to(self.embedding.weight.device)).to(tokens.device), head

    def forward(
        self,
        vectors: torch.Tensor,
        encoded: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = vectors
        bias = self.positions(x.shape[1])
        for number, block in enumerate(self.blocks, start=self.first_number):
            x = wrap_block(number, block)(x, bias, encoded, encoded_mask)
        return self.scaled(self.norm(x))

    def scaled(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return decoded (…, D), scaled for T5 1.0's output layer."""
        return decoded if self.output_scale == 1 else decoded * self.output_scale

    def output(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return logits (…, V) of decoded (…, D)."""
        head = self.embedding if self.head is None else self.head
        return head.logits(decoded)

    def begin(self, encoded: torch.Tensor, encoded_lengths: BatchLengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each input of encoded (B, S, D)."""
        cross_kv = [block.cross_attention.keys_and_values(encoded) for block in self.blocks]
        keys, _ = cross_kv[0]
        batch, heads, _, head_width = keys.shape
        shape = (2, batch, beam, heads, FIRST_CAPACITY, head_width)
        encoded_mask = key_mask_of(encoded, encoded_lengths)
        biases = (self.positions.before(FIRST_CAPACITY),)
        return DecoderCache([keys.new_empty(shape) for _ in self.blocks], cross_kv, encoded_mask, biases)

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D).

        Equal to the last position of `forward` over all tokens.
        """
        cache.grow()
        if len(cache.tables[0]) < cache.capacity:
            cache.tables = (self.positions.before(cache.capacity),)
        # Key 0 is the farthest from the newest token.
        bias = cache.tables[0][: cache.length + 1].flip(0).t()[None, :, None, :]
        x = self.embedding(tokens)
        for block, past, cross_kv in zip(self.blocks, cache.self_kv, cache.cross_kv, strict=True):
            x = block.step(x, bias, past, cache.length, cross_kv, cache.encoded_mask)
        cache.length += 1
        return self.scaled(self.norm(x))


@dataclass(frozen=True)
class T5Output(ASROutput):
    """Result of a forward pass; `head` holds the output layer's weight."""

    decoded: torch.Tensor
    head: TiedHead


class T5(SpeechNetwork):
    """T5 without dropout; its only loss is the cross entropy of every target token."""

    encoder: Encoder
    decoder: Decoder
    ctc_head = None

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape)
        self.decoder = Decoder(shape)
        self._initialise()
        self.loss = VocabularyLoss()

    @property
    def sliced_weights(self) -> tuple[torch.Tensor, ...]:
        """Weights outside of the blocks that may stay off the model's device: only rows and slices are used."""
        heads = () if self.decoder.head is None else (self.decoder.head.weight,)
        return self.decoder.embedding.weight, *heads

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: BatchLengths,
        decoder_tokens: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> T5Output:
        """Run with teacher forcing: input tokens (B, T) with lengths, decoder_tokens (B, U + 1) with start token."""
        # One call for both, so that the embedding has one gradient.
        tokens = torch.cat([features.flatten(), decoder_tokens.flatten()])
        vectors, head = self.decoder.with_head(tokens[None])
        inputs, targets = vectors[0].split([features.numel(), decoder_tokens.numel()])
        encoded, lengths = self.encoder(inputs.view(*features.shape, -1), feature_lengths, wrap_block, chunk_frames)
        mask = key_mask_of(encoded, lengths)
        decoded = self.decoder(targets.view(*decoder_tokens.shape, -1), encoded, wrap_block, mask)
        return T5Output(encoded, None, lengths, decoded, head)

    def encode(self, features: torch.Tensor, feature_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Return encoded (B, T, D) and lengths of input tokens (B, T)."""
        embedding = self.decoder.embedding
        vectors = embedding(features.to(embedding.weight.device)).to(features.device)
        encoded, lengths = self.encoder(vectors, feature_lengths)
        return encoded, on_host(lengths)

    def loss_sums(self, output: ASROutput, labels: Targets, objective: Objective, chunk_frames: int) -> LossSums:
        """Return the objective's only term, summed over all target tokens."""
        if not isinstance(output, T5Output):
            raise TypeError("the output is not of a T5 network")
        return (self.loss(output.decoded, output.head, labels.targets, objective.label_smoothing),)

    def example_input(self) -> torch.Tensor:
        """Return the shortest input: one token."""
        return torch.ones(1, dtype=torch.long)

    def _initialise(self) -> None:
        """Initialise for training from random weights, with the deviations of Mesh TensorFlow's T5."""
        width = self.shape.d_model
        inner = self.shape.attention_heads * self.shape.head_width
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                continue
            part = name.split(".")[-2]
            variance = {
                "query": 1 / (width * self.shape.head_width),
                "output": 1 / inner,
                "contract": 1 / self.shape.feedforward_dim,
                "embedding": 1.0,
                "head": 1 / width,
            }
            torch.nn.init.normal_(weight, std=variance.get(part, 1 / width) ** 0.5)
