"""Encoder: convolutional subsampling of features by 4 or 8, then Conformer or Transformer blocks.

B batch, T feature frames, T' encoder frames, N frames of a packed batch, F mel bins, C channels, D model width.
"""

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.base.lengths import CHUNK_FRAMES, SUBSAMPLING, Lengths, padding_mask, subsampled_length
from konkanivani.model.attention import RotaryPositions, SequenceLayout
from konkanivani.model.blocks import Block, BlockList, BlockRunner, ConformerBlock, TransformerBlock
from konkanivani.model.kernels.dropout import Dropout
from konkanivani.model.kernels.products import Linear, PointwiseConv
from konkanivani.model.kernels.recompute import run_recomputed, snapshot_parameters
from konkanivani.model.kernels.rotary import has_varlen_attention
from konkanivani.model.relative import RelativePositions

CARD_FRAMES = 100  # encoder frames of a chunk on a GPU, where a full convolution copies its inputs ninefold
MAX_PACKED = 8  # utterances: each needs its own attention and convolution calls, slow for many short ones


class Subsampling(Block):
    """Subsampling by 4 without padding: a 3 x 3 convolution and a depthwise-separable one, each with stride 2.

    Features (B, T, F) -> (B, T', D). Without padding, a valid frame never sees the zeros after an utterance.
    Depthwise-separable as in FastConformer (Rekesh et al., 2023): two full convolutions cost more than half of the
    encoder's arithmetic.

    The first convolution makes sixteen numbers of each input; beyond `chunk_frames` encoder frames they exist for one
    chunk at a time.
    """

    def __init__(self, mel_bins: int, channels: int, d_model: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, 3, stride=2)
        self.depthwise = torch.nn.Conv2d(channels, channels, 3, stride=2, groups=channels)
        self.pointwise = PointwiseConv(channels, channels, 1)
        self.output = Linear(channels * subsampled_length(mel_bins), d_model)

    pads = False
    """Whether a valid frame may see padding, so that `forward` needs the padding mask."""

    def forward(
        self, features: torch.Tensor, chunk_frames: int = CHUNK_FRAMES, _padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        frames = subsampled_length(features.shape[1])
        if frames <= chunk_frames:
            return self._one_piece(features)
        starts = range(0, frames, chunk_frames)
        # Frame t' sees features 4 t' to 4 t' + 6, so neighbouring chunks overlap by three features.
        spans = [(4 * start, 4 * min(start + chunk_frames, frames) + 3) for start in starts]
        one_piece = snapshot_parameters(self)._one_piece
        return torch.cat([run_recomputed(one_piece, features[:, first:end]) for first, end in spans], dim=1)

    def _one_piece(self, features: torch.Tensor) -> torch.Tensor:
        # Not in half precision on a CPU: oneDNN's bf16 depthwise kernel may never terminate (kernels/depthwise.py).
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.first(features[:, None]))
            x = torch.relu(self.pointwise(self.depthwise(x)))
        return self.output(x.transpose(1, 2).flatten(2))


class PaddedSubsampling(Block):
    """Subsampling by 4 or 8 with padding: 3 x 3 convolutions with stride 2 and padding 1, each followed by a ReLU.

    Features (B, T, F) -> (B, T', D). Two full convolutions, as in the first Conformers, or one full and two
    depthwise-separable ones, as in FastConformer (Rekesh et al., 2023). `padding` (B, T) is True after an utterance's
    features, None if no utterance is padded. Long utterances are computed in chunks of `chunk_frames` encoder frames.
    """

    pads = True

    def __init__(self, mel_bins: int, channels: int, d_model: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stride = SUBSAMPLING[kind]
        stages = [[torch.nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)]]
        if kind == "striding":
            stages.append([torch.nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)])
        else:
            for _ in range(2):
                depthwise = torch.nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1, groups=channels)
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
        pieces = []
        one_piece = snapshot_parameters(self)._one_piece
        for start in range(0, frames, chunk_frames):
            # Start one frame early and drop it: only that frame sees the zeros before the chunk.
            before = min(start, 1)
            span = slice(self.stride * (start - before), self.stride * (start + chunk_frames))
            inputs = features[:, span], None if padding is None else padding[:, span], before
            pieces.append(run_recomputed(one_piece, *inputs))
        return torch.cat(pieces, dim=1)

    def _one_piece(self, features: torch.Tensor, padding: torch.Tensor | None, before: int) -> torch.Tensor:
        x = features[:, None]
        step = 1
        with torch.autocast("cpu", enabled=False):  # bf16 may never terminate, see Subsampling
            for stage in self.stages:
                x = stage(x)
                step = 2 * step
                # Zero padding before the next convolution, so that an utterance ends with the same zeros in any batch.
                # A frame is valid if the first of the frames that it subsamples is.
                if padding is not None:
                    x = x.masked_fill_(padding[:, None, ::step, None], 0.0)
                x = torch.relu(x)
        return self.output(x[:, :, before:].transpose(1, 2).flatten(2))


def build_subsampling(config: ModelConfig, mel_bins: int) -> Subsampling | PaddedSubsampling:
    """Build the subsampling that `config.subsampling` names."""
    sizes = mel_bins, config.subsampling_channels, config.d_model
    return Subsampling(*sizes) if config.subsampling == "valid" else PaddedSubsampling(*sizes, config.subsampling)


def build_positions(config: ModelConfig) -> RotaryPositions | RelativePositions:
    """Build the position tables of the encoder's attention."""
    if config.attention_positions == "relative":
        return RelativePositions(config.d_model)
    return RotaryPositions(config.d_model // config.attention_heads)


class SpeechEncoder(torch.nn.Module):
    """Base of encoders: features (B, T, F) with their lengths -> encoded (B, T', D) with their lengths."""

    subsampling: Block
    blocks: BlockList[Block]

    def forward(
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int = CHUNK_FRAMES
    ) -> tuple[torch.Tensor, Lengths]:
        raise NotImplementedError


class Encoder(SpeechEncoder):
    """Conformer or Transformer encoder."""

    subsampling: Subsampling | PaddedSubsampling
    packs = True
    """Whether a CPU packs a batch without padding; off in a trace for a GPU, whose tensors are placed on `cpu`."""
    packs_as_one = False
    """Whether blocks see a packed batch as one utterance: the same memory in fewer operators, for a trace."""

    def __init__(self, config: ModelConfig, mel_bins: int) -> None:
        super().__init__()
        width = config.d_model
        is_conformer = config.encoder_type == "conformer"
        self.config = config
        self.subsampling = build_subsampling(config, mel_bins)
        self.dropout = Dropout(config.dropout)
        self.positions = build_positions(config)
        blocks = (
            ConformerBlock(config, number == 0) if is_conformer else TransformerBlock(config)
            for number in range(config.encoder_layers)
        )
        self.blocks = BlockList(blocks)
        self.norm = torch.nn.LayerNorm(width)

    def forward(
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int = CHUNK_FRAMES
    ) -> tuple[torch.Tensor, Lengths]:
        encoded, _, encoded_lengths = self.with_middle(features, feature_lengths, run_block, chunk_frames)
        return encoded, encoded_lengths

    def with_middle(
        self, features: torch.Tensor, feature_lengths: Lengths, run_block: BlockRunner, chunk_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor, Lengths]:
        """Return encoded (B, T', D), the middle block's output (B, T', D) for intermediate CTC, and their lengths."""
        kind = self.config.subsampling
        frames = features.shape[1]
        feature_padding = None
        encoded_lengths = tuple(subsampled_length(length, kind) for length in feature_lengths)
        longest = subsampled_length(frames, kind)
        padding = None
        if self.subsampling.pads and min(feature_lengths) < frames:
            feature_padding = padding_mask(feature_lengths, frames, features.device)
        inputs = features, feature_padding, run_block, chunk_frames
        if min(encoded_lengths) < longest:  # without a mask, attention uses its fastest kernel
            if self.packs and has_varlen_attention(features.device) and len(encoded_lengths) <= MAX_PACKED:
                encoded, middle = self._encode_packed(encoded_lengths, *inputs)
                return encoded, middle, encoded_lengths
            padding = padding_mask(encoded_lengths, longest, features.device)
        encoded, middle = self.encode(padding, *inputs)
        return encoded, middle, encoded_lengths

    def encode(
        self,
        padding: torch.Tensor | None,
        features: torch.Tensor,
        feature_padding: torch.Tensor | None,
        run_block: BlockRunner,
        chunk_frames: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode features (B, T, F); return encoded and the middle block's output, each (B, T', D).

        `padding` (B, T') and `feature_padding` (B, T) are True after an utterance's end, None if no utterance is
        padded. A subsampling that does not pad needs no `feature_padding`.
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
        """Encode without padding: the utterances' frames are concatenated into one sequence (1, N, D).

        Padding costs neither arithmetic nor activations; frames after an utterance's end are zeros in the output.
        """
        x = self._scaled(run_block(self.subsampling, features, chunk_frames, feature_padding))
        positions = self.positions.of_spans(lengths, x)
        x = self.dropout(torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None])
        # Relative attention holds a number per pair of frames: more for one long sequence than for several short ones.
        is_one = self.packs_as_one and self.config.attention_positions == "rotary"
        layout = SequenceLayout(positions, None, (sum(lengths),) if is_one else lengths, chunk_frames)
        outputs = self._through_blocks(x, run_block, layout)
        return tuple(torch.nn.utils.rnn.pad_sequence(y[0].split(lengths), batch_first=True) for y in outputs)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.d_model**0.5 if self.config.scaled_input else x

    def _through_blocks(
        self, x: torch.Tensor, run_block: BlockRunner, layout: SequenceLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        middle = x
        last_of_half = len(self.blocks) // 2
        for number, block in enumerate(self.blocks, start=1):
            x = run_block(block, x, layout)
            middle = x if number == last_of_half else middle
        return self.norm(x), middle
