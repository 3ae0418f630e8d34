"""Token times from the decoder's cross-attention.

As in OpenAI's whisper (timing.py, 2023): the attention weights of some heads are standardised over the tokens, smoothed
with a median filter over frames and averaged; dynamic time warping then finds a monotonic path through them.

L blocks, H heads, U tokens, T' encoder frames, D model dimension.
"""

import numpy as np
import torch

from konkanivani.models.whisper.model import Decoder
from konkanivani.models.whisper.vocabulary import PromptedVocabulary

MEDIAN_FRAMES = 7
DIAGONAL, DOWN, RIGHT = range(3)  # steps of the path into a cell


@torch.no_grad()
def attention_spans(
    decoder: Decoder, encoded: torch.Tensor, tokens: list[int], vocabulary: PromptedVocabulary
) -> list[tuple[int, int, float]]:
    """Return for each token (U) its first frame, the frame after its last, and its probability.

    Args:
        encoded: encoded speech (T', D) without frames of padding.
        tokens: text tokens without timestamps.
    """
    prefix = [vocabulary.special.start, *vocabulary.prefix]
    said = torch.tensor([[*prefix, *tokens, vocabulary.special.end]], device=encoded.device)
    decoded, scores = decoder.with_scores(said[:, :-1], encoded[None])
    likely = decoder.output(decoded[0, len(prefix) - 1 : -1]).float().softmax(dim=-1)
    probabilities = likely.gather(1, said[0, len(prefix) : -1, None])[:, 0].tolist()
    # The row of a token predicts the next one, so the last row of the prefix attends to the first token.
    weights = alignment_weights(scores[:, 0].float().softmax(dim=-1), vocabulary.alignment_heads)[len(prefix) - 1 :]
    first = [*first_frames(-weights.double().cpu().numpy()), len(encoded)]
    spans = zip(first, first[1:], strict=False)
    return [(begin, end, probability) for (begin, end), probability in zip(spans, probabilities, strict=False)]


def alignment_weights(weights: torch.Tensor, heads: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return the standardised and averaged attention weights (U, T') of the alignment heads.

    Args:
        weights: attention weights (L, H, U, T') of all blocks and heads.
        heads: pairs (block, head). If empty, all heads of the upper half of the blocks are used, as in OpenAI's code.
    """
    blocks, count = weights.shape[:2]
    if not heads:
        heads = tuple((block, head) for block in range(blocks // 2, blocks) for head in range(count))
    chosen = torch.stack([weights[block, head] for block, head in heads])
    # Over tokens: a frame to which all tokens attend gets no weight.
    deviation, mean = torch.std_mean(chosen, dim=-2, keepdim=True, unbiased=False)
    # A constant column has deviation 0; the clamp avoids 0 / 0.
    return _smoothed((chosen - mean) / deviation.clamp_min(torch.finfo(chosen.dtype).tiny)).mean(dim=0)


def _smoothed(weights: torch.Tensor) -> torch.Tensor:
    """Return the running median over frames (..., T'); inputs of up to 3 frames are returned unchanged."""
    beside = MEDIAN_FRAMES // 2
    if weights.shape[-1] <= beside:
        return weights
    # Reflection needs more frames than it pads.
    mirrored = torch.nn.functional.pad(weights, (beside, beside), mode="reflect")
    return mirrored.unfold(-1, MEDIAN_FRAMES, 1).median(dim=-1).values


def first_frames(costs: np.ndarray) -> list[int]:
    """Return the first column of each row on the cheapest monotonic path through costs (U, T').

    The path leads from corner to corner.
    """
    rows, columns = costs.shape
    totals = np.full((rows + 1, columns + 1), np.inf)
    totals[0, 0], ways = 0.0, np.full((rows + 1, columns + 1), RIGHT)
    # One anti-diagonal at a time, vectorised: its cells depend on the two previous anti-diagonals only.
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        before = np.stack([totals[row - 1, column - 1], totals[row - 1, column], totals[row, column - 1]])
        # Ties go to RIGHT, as in OpenAI's code.
        is_diagonal = (before[DIAGONAL] < before[DOWN]) & (before[DIAGONAL] < before[RIGHT])
        is_down = (before[DOWN] < before[DIAGONAL]) & (before[DOWN] < before[RIGHT])
        ways[row, column] = way = np.select([is_diagonal, is_down], [DIAGONAL, DOWN], RIGHT)
        totals[row, column] = costs[row - 1, column - 1] + np.take_along_axis(before, way[None], 0)[0]
    first = [0] * rows
    row = rows
    column = columns
    while row > 0:
        # Overwritten until the path leaves the row, so the first column remains.
        first[row - 1] = max(0, int(column) - 1)
        # In column 0 only steps down remain.
        step = int(ways[row, column]) if column else DOWN
        row = row - (step != RIGHT)
        column = column - (step != DOWN)
    return first
