"""Features to encoded frames: subsampling by 4 or 8, by convolutions, then Conformer or Transformer blocks.

B batch, T feature frames, T' encoder frames, F mel bins, C channels, D model width.
"""

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.base.lengths import CHUNK_FRAMES, SUBSAMPLING, Lengths, padding_mask, subsampled_length
from konkanivani.model.attention import RotaryPositions, SequenceLayout
from konkanivani.model.blocks import BlockRunner, ConformerBlock, TransformerBlock
from konkanivani.model.kernels.dropout import Dropout
from konkanivani.model.kernels.products import Linear, PointwiseConv
from konkanivani.model.kernels.recompute import run_recomputed, snapshot_parameters
from konkanivani.model.kernels.rotary import has_varlen_attention
from konkanivani.model.relative import RelativePositions

CARD_FRAMES = 100  # of a chunk on a card, where a convolution of all channels copies its inputs ninefold
MAX_PACKED = 8  # utterances: each is an attention and a convolution of its own, which takes long for many short ones


class Subsampling(torch.nn.Module):
    """Features (B, T, F) -> (B, T', D) by a convolution and a depthwise-separable one, both 3 x 3 with stride 2.

    Neither pads, so a valid frame never sees padding. Depthwise-separable as in FastConformer (Rekesh et al., 2023):
    two full convolutions cost more than half of the encoder's arithmetic.

    The first convolution makes sixteen numbers of one; beyond `chunk_frames` encoder frames they exist for one chunk of
    as many at a time. Frame t' sees the features 4 t' to 4 t' + 6, so neighbouring chunks share three features.
    """

    def __init__(self, mel_bins: int, channels: int, d_model: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, 3, stride=2)
        self.depthwise = torch.nn.Conv2d(channels, channels, 3, stride=2, groups=channels)
        self.pointwise = PointwiseConv(channels, channels, 1)
        self.output = Linear(channels * subsampled_length(mel_bins), d_model)

    pads = False
    """Whether a valid frame may see padding, which then has to be known."""

    def forward(
        self, features: torch.Tensor, chunk_frames: int = CHUNK_FRAMES, _padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        frames = subsampled_length(features.shape[1])
        if frames <= chunk_frames:
            return self._one_piece(features)
        starts = range(0, frames, chunk_frames)
        spans = [(4 * start, 4 * min(start + chunk_frames, frames) + 3) for start in starts]
        one_piece = snapshot_parameters(self)._one_piece
        return torch.cat([run_recomputed(one_piece, features[:, first:end]) for first, end in spans], dim=1)

    def _one_piece(self, features: torch.Tensor) -> torch.Tensor:
        # Not in half precision on a CPU: there oneDNN's depthwise convolution may never end (kernels/depthwise.py).
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.first(features[:, None]))
            x = torch.relu(self.pointwise(self.depthwise(x)))
        return self.output(x.transpose(1, 2).flatten(2))


class PaddedSubsampling(torch.nn.Module):
    """Features (B, T, F) -> (B, T', D) by convolutions of 3 x 3 and stride 2, padded by 1, a ReLU behind each.

    Two full ones, as in the first Conformers, or a full one and two depthwise-separable ones, as in FastConformer
    (Rekesh et al., 2023). What they make of padding is zeroed before the next one sees it, so that an utterance ends
    with the same zeros in any batch. `padding` (B, T) is True beyond its features, None where nothing is.

    In chunks each begins a frame earlier, and what it makes of that one is left out: it is the only one that sees the
    zeros before the chunk.
    """

    pads = True

    def __init__(self, mel_bins: int, channels: int, d_model: int, kind: str) -> None:
        super().__init__()
        self.kind, self.stride = kind, SUBSAMPLING[kind]
        full = {"kernel_size": 3, "stride": 2, "padding": 1}
        stages = [[torch.nn.Conv2d(1, channels, **full)]]
        if kind == "striding":
            stages.append([torch.nn.Conv2d(channels, channels, **full)])
        else:
            for _ in range(2):
                depthwise = torch.nn.Conv2d(channels, channels, **full, groups=channels)
                stages.append([depthwise, PointwiseConv(channels, channels, 1)])
        self.stages = torch.nn.ModuleList(torch.nn.Sequential(*stage) for stage in stages)
        self.output = Linear(channels * subsampled_length(mel_bins, kind), d_model)

    def forward(
        self, features: torch.Tensor, chunk_frames: int = CHUNK_FRAMES, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        frames = subsampled_length(features.shape[1], self.kind)
        if self.kind == "striding" and features.device.type == "cuda":
            chunk_frames = min(chunk_frames, CARD_FRAMES)
        if frames <= chunk_frames:
            return self._one_piece(features, padding, 0)
        pieces, one_piece = [], snapshot_parameters(self)._one_piece
        for start in range(0, frames, chunk_frames):
            before = min(start, 1)
            span = slice(self.stride * (start - before), self.stride * (start + chunk_frames))
            inputs = features[:, span], None if padding is None else padding[:, span], before
            pieces.append(run_recomputed(one_piece, *inputs))
        return torch.cat(pieces, dim=1)

    def _one_piece(self, features: torch.Tensor, padding: torch.Tensor | None, before: int) -> torch.Tensor:
        x, step = features[:, None], 1
        with torch.autocast("cpu", enabled=False):  # as above
            for stage in self.stages:
                x, step = stage(x), 2 * step
                if padding is not None:  # a frame is valid where the first of those that it halves is
                    x = x.masked_fill_(padding[:, None, ::step, None], 0.0)
                x = torch.relu(x)
        return self.output(x[:, :, before:].transpose(1, 2).flatten(2))


def build_subsampling(config: ModelConfig, mel_bins: int) -> Subsampling | PaddedSubsampling:
    """The kind that the settings name."""
    sizes = mel_bins, config.subsampling_channels, config.d_model
    return Subsampling(*sizes) if config.subsampling == "valid" else PaddedSubsampling(*sizes, config.subsampling)


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
