"""Long sequences in chunks, so that memory does not grow with the square of the frames, with the same result.

Chunks longer than the layout's `chunk_frames` encoder frames or tokens are computed one after another and recomputed in
the backward pass. A minute of speech is computed in one piece.

B batch, T frames, U tokens, F mel bins, D model width, H heads, E = D / H head width.
"""

from functools import partial

import torch

from konkanivani.lengths import CHUNK_FRAMES, SMALL_CHUNK_FRAMES, Lengths, subsampled_length
from konkanivani.models.attention import UNPADDED, RelativeSelfAttention, SequenceLayout, attend_by_distance
from konkanivani.models.conformer import PaddedSubsampling, Subsampling
from konkanivani.models.losses import Head, HeadLosses, at_least_float32, cross_entropy_sum
from konkanivani.models.twin import replace_modules
from konkanivani.ops.ctc import long_ctc_losses
from konkanivani.ops.packing import PackedRelativeSelfAttention
from konkanivani.ops.recompute import run_recomputed, snapshot_parameters

GPU_CHUNK_FRAMES = 100  # encoder frames of a chunk on a GPU, where a full convolution copies its inputs ninefold


class ChunkedSubsampling(Subsampling):
    """Twin of `Subsampling`, whose first convolution computes sixteen numbers of each input."""

    def forward(self, features: torch.Tensor, layout: SequenceLayout = UNPADDED) -> torch.Tensor:
        frames = subsampled_length(features.shape[1])
        size = layout.chunk_frames
        if frames <= size:
            return super().forward(features, layout)
        # Frame t' sees features 4 t' to 4 t' + 6, so neighbouring chunks overlap by three features.
        spans = [(4 * start, 4 * min(start + size, frames) + 3) for start in range(0, frames, size)]
        subsample = partial(Subsampling.forward, snapshot_parameters(self))
        return torch.cat([run_recomputed(subsample, features[:, first:end], layout) for first, end in spans], dim=1)


class ChunkedPaddedSubsampling(PaddedSubsampling):
    """Twin of `PaddedSubsampling`."""

    def forward(self, features: torch.Tensor, layout: SequenceLayout = UNPADDED) -> torch.Tensor:
        frames = subsampled_length(features.shape[1], self.kind)
        size = layout.chunk_frames
        if self.kind == "striding" and features.device.type == "cuda":
            size = min(size, GPU_CHUNK_FRAMES)
        if frames <= size:
            return super().forward(features, layout)
        pieces = []
        subsample = snapshot_parameters(self).subsample
        padding = layout.padding
        for start in range(0, frames, size):
            # Start one frame early and drop it: only that frame sees the zeros before the chunk.
            before = min(start, 1)
            span = slice(self.stride * (start - before), self.stride * (start + size))
            chunk_padding = None if padding is None else padding[:, span]
            pieces.append(run_recomputed(subsample, features[:, span], chunk_padding, before))
        return torch.cat(pieces, dim=1)

    def subsample(self, features: torch.Tensor, padding: torch.Tensor | None, before: int) -> torch.Tensor:
        """Return the subsampled frames of a chunk without the first `before` ones."""
        x = self.convolve(features, padding)
        return self.output(x[:, :, before:].transpose(1, 2).flatten(2))


class ChunkedRelativeSelfAttention(RelativeSelfAttention):
    """Twin of `RelativeSelfAttention` that attends from a chunk of queries at a time.

    Of all tensors with a number per pair of frames, only the softmax is kept for the backward pass, up to
    `chunk_frames`; for longer utterances nothing is, and chunks of queries are recomputed. At most `chunk_frames`
    squared numbers per head exist at a time, or, for an hour of speech, the scores of a hundred queries.
    """

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        distances: torch.Tensor,
        layout: SequenceLayout,
    ) -> torch.Tensor:
        length = query.shape[2]
        size = layout.chunk_frames
        if length <= size:
            return super().attend_heads(query, key, value, distances, layout)
        pieces = []
        first = 0
        others = key, value, self.content_bias, self.position_bias, layout.padding
        # chunk x length is at most size^2 scores, but a chunk has at least SMALL_CHUNK_FRAMES queries.
        for chunk in query.split(max(size**2 // length, min(size, SMALL_CHUNK_FRAMES)), dim=2):
            # Distances of this chunk's queries: from its last query to key 0, down to its first query to the last key.
            end = first + chunk.shape[2]
            near = distances[length - end : 2 * length - 1 - first]
            pieces.append(run_recomputed(attend_by_distance, chunk, near, *others))
            first = end
        return torch.cat(pieces, dim=2)


class ChunkedPackedRelativeSelfAttention(ChunkedRelativeSelfAttention, PackedRelativeSelfAttention):
    """Twin of `PackedRelativeSelfAttention` that attends from a chunk of queries at a time."""


class ChunkedLosses(HeadLosses):
    """Twin of `HeadLosses`; beyond `chunk_frames`, memory grows linearly with the frames or tokens."""

    def ctc(
        self,
        encoded: torch.Tensor,
        head: Head,
        encoded_lengths: Lengths,
        tokens: torch.Tensor,
        token_lengths: Lengths,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        if encoded.shape[1] <= chunk_frames:
            return super().ctc(encoded, head, encoded_lengths, tokens, token_lengths)
        losses = long_ctc_losses(encoded, head, encoded_lengths, tokens, token_lengths)
        return losses.sum().to(at_least_float32(encoded))

    def attention(
        self,
        decoded: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        label_smoothing: float,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        if decoded.shape[1] <= chunk_frames:
            return super().attention(decoded, head, targets, label_smoothing)
        chunks = zip(decoded.split(chunk_frames, dim=1), targets.split(chunk_frames, dim=1), strict=True)
        # Each chunk's logits are dropped after use and recomputed in the backward pass.
        sums = [run_recomputed(cross_entropy_sum, chunk, head, labels, label_smoothing) for chunk, labels in chunks]
        return torch.stack(sums).sum()


def compute_in_chunks(model: torch.nn.Module) -> None:
    """Replace modules whose memory grows steeply with an utterance's length by twins that compute in chunks."""
    replace_modules(
        model,
        {
            Subsampling: ChunkedSubsampling,
            PaddedSubsampling: ChunkedPaddedSubsampling,
            RelativeSelfAttention: ChunkedRelativeSelfAttention,
            PackedRelativeSelfAttention: ChunkedPackedRelativeSelfAttention,
        },
    )
