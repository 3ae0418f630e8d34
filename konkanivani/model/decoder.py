"""Transformer decoder: tokens and encoded frames to hidden states, and hidden states to logits of the next token.

B batch, K hypotheses of an utterance, U tokens, T' encoder frames, D model width, V vocabulary.
"""

import math
from collections.abc import Callable

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.base.lengths import Lengths
from konkanivani.model.attention import RotaryPositions, SequenceLayout, key_mask_of
from konkanivani.model.blocks import Block, BlockList, BlockRunner, DecoderBlock
from konkanivani.model.cache import FIRST_ROOM, DecoderCache
from konkanivani.model.kernels.dropout import Dropout
from konkanivani.model.kernels.products import Linear


class TokenDecoder(torch.nn.Module):
    """Base of decoders, as generation uses them: hypotheses grow by one token per `step`."""

    blocks: BlockList[Block]
    output: Callable[[torch.Tensor], torch.Tensor]
    """Output layer, (..., D) -> logits (..., V)."""

    @property
    def most_tokens(self) -> float:
        """Maximal number of tokens after the start token; infinite if there is none."""
        raise NotImplementedError

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, T', D)."""
        raise NotImplementedError

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D)."""
        raise NotImplementedError


class Decoder(TokenDecoder):
    """Decoder of tokens (B, U) and encoded (B, T', D) with their lengths -> decoded (B, U, D).

    `output`, (B, U, D) -> logits (B, U, V), is not part of `forward`: the logits of a long transcript are computed in
    chunks only.
    """

    most_tokens = math.inf  # positions are computed on demand
    blocks: BlockList[DecoderBlock]
    output: Linear

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.positions = RotaryPositions(config.d_model // config.attention_heads)
        self.blocks = BlockList(DecoderBlock(config) for _ in range(config.decoder_layers))
        self.norm = torch.nn.LayerNorm(config.d_model)
        self.output = Linear(config.d_model, vocab_size)

    def forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, encoded_lengths: Lengths, run_block: BlockRunner
    ) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        # No mask for padded tokens: they come last, and causal attention never looks ahead.
        layout = SequenceLayout(self.positions(x.shape[1], x))
        encoded_mask = key_mask_of(encoded, encoded_lengths)
        for block in self.blocks:
            x = run_block(block, x, layout, encoded, encoded_mask)
        return self.norm(x)

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, T', D)."""
        cross_kv = [block.cross_attention.keys_and_values(encoded) for block in self.blocks]
        keys, _ = cross_kv[0]
        batch, heads, _, head_width = keys.shape
        room = (2, batch, beam, heads, FIRST_ROOM, head_width)
        return DecoderCache(
            # Uninitialised: attention reads only the positions that are filled.
            self_kv=[keys.new_empty(room) for _ in self.blocks],
            cross_kv=cross_kv,
            encoded_mask=key_mask_of(encoded, encoded_lengths),
            tables=self.positions(FIRST_ROOM, keys),
        )

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D).

        Equal to the last position of `forward` over all tokens, in evaluation mode.
        """
        cache.grow()
        if len(cache.tables[0]) < cache.room:
            cache.tables = self.positions(cache.room, cache.self_kv[0])
        # A row of one position, (1, E / 2), so that it broadcasts over all hypotheses.
        position = tuple(table[cache.length, None] for table in cache.tables)
        x = self.embedding(tokens)
        for block, kept, cross_kv in zip(self.blocks, cache.self_kv, cache.cross_kv, strict=True):
            x = block.step(x, position, kept, cache.length, cross_kv, cache.encoded_mask)
        cache.length += 1
        return self.norm(x)
