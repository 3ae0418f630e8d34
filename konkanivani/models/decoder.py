"""Transformer decoder: tokens and encoded frames to hidden states, and hidden states to logits of the next token.

The key-value cache makes generation linear in the tokens: no token is computed twice.

B batch, K hypotheses of an utterance, U tokens or capacity in tokens, S encoder frames, D model width, H heads, E head
width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.config import ModelConfig
from konkanivani.lengths import BatchLengths
from konkanivani.models.attention import (
    CrossAttention,
    Positions,
    RotaryPositions,
    SelfAttention,
    SequenceLayout,
    key_mask_of,
    score_mask_for,
)
from konkanivani.models.conformer import BlockList, Dropout, FeedForward, WrapBlock, keep_activations
from konkanivani.randomness import block_dropout

FIRST_CAPACITY = 32  # of the cache, in tokens; doubled whenever it is used up

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class DecoderCache:
    """Keys and values of B utterances with K hypotheses each, all of the same `length` in tokens.

    Keys and values of encoded frames are stored once per utterance and shared by its hypotheses. The decoder
    creates and updates it; it is not part of any module's state.
    """

    self_kv: list[torch.Tensor]  # per block: keys and values (2, B, K, H, U, E)
    cross_kv: list[KeysAndValues]  # per block: (B, H, S, E) each
    encoded_mask: torch.Tensor | None  # (B, 1, 1, S), True where a frame is valid
    tables: Positions = ()  # position tables of U positions, such as cosines and sines
    length: int = 0

    @property
    def capacity(self) -> int:
        """Number of tokens that fit without growing."""
        return self.self_kv[0].shape[4]

    def grow(self) -> None:
        """Double the capacity if there is none left for another token."""
        if self.length >= self.capacity:
            self.self_kv = [torch.cat([past, torch.empty_like(past)], dim=4) for past in self.self_kv]

    def reorder(self, sources: torch.Tensor) -> None:
        """Replace hypothesis k of each utterance by its former hypothesis sources[k]; sources (B, K)."""
        beam = sources.shape[1]
        moved = (sources != torch.arange(beam, device=sources.device)).nonzero(as_tuple=True)
        if len(moved[0]) == 0:
            return
        utterances, hypotheses = moved
        for past in self.self_kv:
            # Copy only the filled part, and only of hypotheses that move.
            filled = past[:, :, :, :, : self.length]
            filled[:, utterances, hypotheses] = filled[:, utterances, sources[moved]]

    def select(self, utterances: torch.Tensor) -> None:
        """Keep only the utterances with these indices (B',)."""
        self.self_kv = [past.index_select(1, utterances) for past in self.self_kv]
        self.cross_kv = [
            (keys.index_select(0, utterances), values.index_select(0, utterances)) for keys, values in self.cross_kv
        ]
        if self.encoded_mask is not None:
            self.encoded_mask = self.encoded_mask.index_select(0, utterances)


class DecoderBlock(torch.nn.Module):
    """Decoder block, (B, T, D) -> (B, T, D): causal self-attention, attention over encoded (B, S, D), feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(config.d_model)
        self.self_attention = SelfAttention(config.d_model, config.attention_heads, causal=True)
        self.cross_attention_norm = torch.nn.LayerNorm(config.d_model)
        self.cross_attention = CrossAttention(config.d_model, config.attention_heads)
        self.dropout = Dropout(config.dropout)
        self.feedforward = FeedForward(config.d_model, config.resolved_feedforward_dim)

    def forward(
        self, x: torch.Tensor, layout: SequenceLayout, encoded: torch.Tensor, encoded_mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.dropout(self.self_attention(self.self_attention_norm(x), layout))
        x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), encoded, encoded_mask))
        x = x + self.dropout(self.feedforward(x))
        return x

    def step(
        self,
        x: torch.Tensor,
        position: Positions,
        past: torch.Tensor,
        length: int,
        cross_kv: KeysAndValues,
        encoded_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the newest tokens (B, K, D) of K hypotheses per utterance -> (B, K, D), without dropout.

        `past` (2, B, K, H, U, E) holds keys and values of the `length` tokens before.
        """
        # Hypotheses have their own past, so self-attention has B K rows of one token.
        rows = self.self_attention_norm(x).flatten(0, 1)[:, None]
        attended = self.self_attention.step(rows, position, past.flatten(1, 2), length)
        x = x + attended.view_as(x)
        # All K hypotheses of an utterance attend to the same encoded frames, as K tokens of one sequence would.
        query = self.cross_attention.query(self.cross_attention_norm(x))
        x = x + self.cross_attention.attend(query, *cross_kv, encoded_mask)
        return x + self.feedforward(x)


class TokenDecoder(torch.nn.Module):
    """Base of decoders, as generation uses them: hypotheses grow by one token per `step`."""

    blocks: BlockList[torch.nn.Module]
    output: Callable[[torch.Tensor], torch.Tensor]
    """Output layer, (..., D) -> logits (..., V)."""

    @property
    def most_tokens(self) -> float:
        """Maximal number of tokens after the start token; infinite if there is none."""
        raise NotImplementedError

    def begin(self, encoded: torch.Tensor, encoded_lengths: BatchLengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, S, D)."""
        raise NotImplementedError

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D)."""
        raise NotImplementedError


class Decoder(TokenDecoder):
    """Decoder of tokens (B, U) and encoded (B, S, D) with their lengths -> decoded (B, U, D).

    `output`, (B, U, D) -> logits (B, U, V), is not part of `forward`: the loss computes the logits of a long transcript
    in chunks.
    """

    most_tokens = math.inf  # positions are computed on demand
    blocks: BlockList[DecoderBlock]
    output: torch.nn.Linear

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.first_number = 1 + config.encoder_layers  # of its blocks, see WrapBlock
        self.embedding = torch.nn.Embedding(vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.positions = RotaryPositions(config.d_model // config.attention_heads)
        self.blocks = BlockList(DecoderBlock(config) for _ in range(config.decoder_layers))
        self.norm = torch.nn.LayerNorm(config.d_model)
        self.output = torch.nn.Linear(config.d_model, vocab_size)

    def forward(
        self,
        tokens: torch.Tensor,
        encoded: torch.Tensor,
        encoded_lengths: BatchLengths,
        wrap_block: WrapBlock = keep_activations,
    ) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        # No mask for padded tokens: they come last, and causal attention never looks ahead.
        layout = SequenceLayout(self.positions(x.shape[1], x))
        encoded_mask = score_mask_for(x, encoded, encoded_lengths)
        for number, block in enumerate(self.blocks, start=self.first_number):
            with block_dropout(number):
                x = wrap_block(number, block)(x, layout, encoded, encoded_mask)
        return self.norm(x)

    def begin(self, encoded: torch.Tensor, encoded_lengths: BatchLengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, S, D)."""
        cross_kv = [block.cross_attention.keys_and_values(encoded) for block in self.blocks]
        keys, _ = cross_kv[0]
        batch, heads, _, head_width = keys.shape
        shape = (2, batch, beam, heads, FIRST_CAPACITY, head_width)
        return DecoderCache(
            # Uninitialised: attention reads only the positions that are filled.
            self_kv=[keys.new_empty(shape) for _ in self.blocks],
            cross_kv=cross_kv,
            encoded_mask=key_mask_of(encoded, encoded_lengths),
            tables=self.positions(FIRST_CAPACITY, keys),
        )

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D).

        Equal to the last position of `forward` over all tokens, in evaluation mode.
        """
        cache.grow()
        if len(cache.tables[0]) < cache.capacity:
            cache.tables = self.positions(cache.capacity, cache.self_kv[0])
        # A row of one position, (1, E / 2), so that it broadcasts over all hypotheses.
        position = tuple(table[cache.length, None] for table in cache.tables)
        x = self.embedding(tokens)
        for block, past, cross_kv in zip(self.blocks, cache.self_kv, cache.cross_kv, strict=True):
            x = block.step(x, position, past, cache.length, cross_kv, cache.encoded_mask)
        cache.length += 1
        return self.norm(x)
