"""Features to encoded frames: subsampling by 4, then Conformer or Transformer blocks.

B batch, T feature frames, T' encoder frames, F mel bins, D model width.
"""

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.base.lengths import CHUNK_FRAMES, Lengths, padding_mask, subsampled_length
from konkanivani.model.attention import RotaryPositions, SequenceLayout
from konkanivani.model.blocks import BlockRunner, ConformerBlock, TransformerBlock
from konkanivani.model.kernels.dropout import Dropout
from konkanivani.model.kernels.rotary import has_varlen_attention
from konkanivani.model.subsampling import Subsampling

MAX_PACKED = 8  # utterances: each is an attention and a convolution of its own, which takes long for many short ones


class Encoder(torch.nn.Module):
    """Features (B, T, F) with their lengths -> encoded (B, T', D) with their lengths."""

    packs = True
    """Whether a CPU runs a batch without its padding; a trace for a card, whose tensors are a CPU's, says no."""
    packs_as_one = False
    """Whether a packed batch is one utterance to the blocks: as much memory in fewer operators, for a trace."""

    def __init__(self, config: ModelConfig, mel_bins: int) -> None:
        super().__init__()
        block = ConformerBlock if config.encoder_type == "conformer" else TransformerBlock
        self.subsampling = Subsampling(mel_bins, config.subsampling_channels, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.positions = RotaryPositions(config.d_model // config.attention_heads)
        self.blocks = torch.nn.ModuleList(block(config) for _ in range(config.encoder_layers))
        self.norm = torch.nn.LayerNorm(config.d_model)

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: Lengths,
        run_block: BlockRunner,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> tuple[torch.Tensor, Lengths]:
        encoded, _, encoded_lengths = self.with_middle(features, feature_lengths, run_block, chunk_frames)
        return encoded, encoded_lengths

    def with_middle(
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor, Lengths]:
        """encoded (B, T', D), what the middle block made on the way there (B, T', D), and their lengths."""
        encoded_lengths = tuple(map(subsampled_length, feature_lengths))
        longest, padding = subsampled_length(features.shape[1]), None
        if min(encoded_lengths) < longest:  # without padding, attention takes its fastest kernel
            if self.packs and has_varlen_attention(features.device) and len(encoded_lengths) <= MAX_PACKED:
                return *self._encode_packed(features, encoded_lengths, run_block, chunk_frames), encoded_lengths
            padding = padding_mask(encoded_lengths, longest, features.device)
        return *self.encode(features, padding, run_block, chunk_frames), encoded_lengths

    def encode(
        self, features: torch.Tensor, padding: torch.Tensor | None, run_block: BlockRunner, chunk_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, T, F) -> encoded and the middle block's, (B, T', D); `padding` (B, T') is True beyond an end."""
        x = self.dropout(run_block(self.subsampling, features, chunk_frames))
        return self._through_blocks(x, run_block, SequenceLayout(self.positions(x.shape[1], x), padding))

    def _encode_packed(
        self, features: torch.Tensor, lengths: Lengths, run_block: BlockRunner, chunk_frames: int
    ) -> tuple[torch.Tensor, ...]:
        """The same without padding: the utterances' frames go through the blocks one after another, as one (1, N, D).

        So nothing is computed for padding and nothing kept; frames beyond an end come out as zeros.
        """
        x = run_block(self.subsampling, features, chunk_frames)
        tables = self.positions(max(lengths), x)
        positions = tuple(torch.cat([table[:length] for length in lengths]) for table in tables)
        x = self.dropout(torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None])
        spans = (sum(lengths),) if self.packs_as_one else lengths
        outputs = self._through_blocks(x, run_block, SequenceLayout(positions, lengths=spans))
        return tuple(torch.nn.utils.rnn.pad_sequence(y[0].split(lengths), batch_first=True) for y in outputs)

    def _through_blocks(
        self, x: torch.Tensor, run_block: BlockRunner, layout: SequenceLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        middle, last_of_half = x, len(self.blocks) // 2
        for number, block in enumerate(self.blocks, start=1):
            x = run_block(block, x, layout)
            middle = x if number == last_of_half else middle
        return self.norm(x), middle
