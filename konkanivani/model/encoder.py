"""Features to encoded frames: subsampling by 4 or 8, then Conformer or Transformer blocks.

B batch, T feature frames, T' encoder frames, F mel bins, D model width.
"""

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.base.lengths import CHUNK_FRAMES, Lengths, padding_mask, subsampled_length
from konkanivani.model.attention import RotaryPositions, SequenceLayout
from konkanivani.model.blocks import BlockRunner, ConformerBlock, TransformerBlock
from konkanivani.model.kernels.dropout import Dropout
from konkanivani.model.kernels.rotary import has_varlen_attention
from konkanivani.model.relative import RelativePositions
from konkanivani.model.subsampling import build_subsampling

MAX_PACKED = 8  # utterances: each is an attention and a convolution of its own, which takes long for many short ones


class Encoder(torch.nn.Module):
    """Features (B, T, F) with their lengths -> encoded (B, T', D) with their lengths."""

    packs = True
    """Whether a CPU runs a batch without its padding; a trace for a card, whose tensors are a CPU's, says no."""
    packs_as_one = False
    """Whether a packed batch is one utterance to the blocks: as much memory in fewer operators, for a trace."""

    def __init__(self, config: ModelConfig, mel_bins: int) -> None:
        super().__init__()
        width, is_conformer = config.d_model, config.encoder_type == "conformer"
        self.config = config
        self.subsampling = build_subsampling(config, mel_bins)
        self.dropout = Dropout(config.dropout)
        self.positions = RotaryPositions(width // config.attention_heads)
        if config.attention_positions == "relative":
            self.positions = RelativePositions(width)
        blocks = (
            ConformerBlock(config, number == 0) if is_conformer else TransformerBlock(config)
            for number in range(config.encoder_layers)
        )
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm = torch.nn.LayerNorm(width)

    def forward(
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int = CHUNK_FRAMES
    ) -> tuple[torch.Tensor, Lengths]:
        encoded, _, encoded_lengths = self.with_middle(features, feature_lengths, run_block, chunk_frames)
        return encoded, encoded_lengths

    def with_middle(
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor, Lengths]:
        """encoded (B, T', D), what the middle block made on the way there (B, T', D), and their lengths."""
        kind, frames, feature_padding = self.config.subsampling, features.shape[1], None
        encoded_lengths = tuple(subsampled_length(length, kind) for length in feature_lengths)
        longest, padding = subsampled_length(frames, kind), None
        if self.subsampling.pads and min(feature_lengths) < frames:
            feature_padding = padding_mask(feature_lengths, frames, features.device)
        inputs = features, feature_padding, run_block, chunk_frames
        if min(encoded_lengths) < longest:  # without padding, attention takes its fastest kernel
            if self.packs and has_varlen_attention(features.device) and len(encoded_lengths) <= MAX_PACKED:
                return *self._encode_packed(encoded_lengths, *inputs), encoded_lengths
            padding = padding_mask(encoded_lengths, longest, features.device)
        return *self.encode(padding, *inputs), encoded_lengths

    def encode(
        self,
        padding: torch.Tensor | None,
        features: torch.Tensor,
        feature_padding: torch.Tensor | None,
        run_block: BlockRunner,
        chunk_frames: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, T, F) -> encoded and the middle block's, (B, T', D).

        `padding` (B, T') and `feature_padding` (B, T) are True beyond an end, None where nothing is; a subsampling
        without padding of its own needs no `feature_padding`.
        """
        x = self.dropout(self._scaled(run_block(self.subsampling, features, chunk_frames, feature_padding)))
        layout = SequenceLayout(self.positions(x.shape[1], x), padding, chunk_frames=chunk_frames)
        return self._through_blocks(x, run_block, layout)

    def _encode_packed(
        self,
        lengths: Lengths,
        features: torch.Tensor,
        feature_padding: torch.Tensor | None,
        run_block: BlockRunner,
        chunk_frames: int,
    ) -> tuple[torch.Tensor, ...]:
        """The same without padding: the utterances' frames go through the blocks one after another, as one (1, N, D).

        So nothing is computed for padding and nothing kept; frames beyond an end come out as zeros.
        """
        x = self._scaled(run_block(self.subsampling, features, chunk_frames, feature_padding))
        positions = self.positions.of_spans(lengths, x)
        x = self.dropout(torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None])
        # Attention by distance holds a number a pair of frames: of one utterance that would be more than of several.
        is_one = self.packs_as_one and self.config.attention_positions == "rotary"
        layout = SequenceLayout(positions, None, (sum(lengths),) if is_one else lengths, chunk_frames)
        outputs = self._through_blocks(x, run_block, layout)
        return tuple(torch.nn.utils.rnn.pad_sequence(y[0].split(lengths), batch_first=True) for y in outputs)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.d_model**0.5 if self.config.scaled_input else x

    def _through_blocks(
        self, x: torch.Tensor, run_block: BlockRunner, layout: SequenceLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        middle, last_of_half = x, len(self.blocks) // 2
        for number, block in enumerate(self.blocks, start=1):
            x = run_block(block, x, layout)
            middle = x if number == last_of_half else middle
        return self.norm(x), middle
