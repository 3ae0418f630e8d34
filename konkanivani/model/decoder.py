"""Tokens and encoded frames to hidden states, and those to logits of the next token.

B batch, U tokens, T' encoder frames, D model width, V vocabulary.
"""

import torch

from konkanivani.config import ModelConfig
from konkanivani.lengths import Lengths, padding_mask
from konkanivani.model.attention import RotaryPositions
from konkanivani.model.blocks import BlockRunner, DecoderBlock
from konkanivani.model.dropout import Dropout


class Decoder(torch.nn.Module):
    """Tokens (B, U), encoded (B, T', D) with their lengths -> decoded (B, U, D); `output` makes logits (B, U, V) of it.

    Apart, since the logits of a long transcript are never there all at once.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.positions = RotaryPositions(config.d_model // config.attention_heads)
        self.blocks = torch.nn.ModuleList(DecoderBlock(config) for _ in range(config.decoder_layers))
        self.norm = torch.nn.LayerNorm(config.d_model)
        self.output = torch.nn.Linear(config.d_model, vocab_size)

    def forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, encoded_lengths: Lengths, run_block: BlockRunner
    ) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        positions = self.positions(x.shape[1], x)
        encoded_mask = None
        if min(encoded_lengths) < encoded.shape[1]:
            encoded_mask = ~padding_mask(encoded_lengths, encoded.shape[1], encoded.device)[:, None, None, :]
        for block in self.blocks:
            x = run_block(block, x, positions, encoded, encoded_mask)
        return self.norm(x)
