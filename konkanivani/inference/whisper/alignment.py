"""Where each token of a hypothesis was said, by what the decoder's heads look at while they say it.

The way of OpenAI's whisper (timing.py, 2023): the weights of some heads of cross-attention, standardised over the
tokens, smoothed by a median over frames, averaged, and a monotonic path through them by dynamic time warping.
"""

import numpy as np
import torch

from konkanivani.inference.whisper.vocabulary import PromptedVocabulary
from konkanivani.model.whisper.network import Decoder

MEDIAN_FRAMES = 7
DIAGONAL, DOWN, RIGHT = range(3)  # the ways into a cell of the warped matrix


@torch.no_grad()
def attention_spans(
    decoder: Decoder, encoded: torch.Tensor, tokens: list[int], vocabulary: PromptedVocabulary
) -> list[tuple[int, int, float]]:
    """Of tokens (U) without times: each one's first frame of encoded (T', D), the one behind its last, its probability.

    Frames that hold no speech are not to be among them.
    """
    prefix = [vocabulary.special.start, *vocabulary.prefix]
    said = torch.tensor([[*prefix, *tokens, vocabulary.special.end]], device=encoded.device)
    decoded, scores = decoder.watched(said[:, :-1], encoded[None])
    likely = decoder.output(decoded[0, len(prefix) - 1 : -1]).float().softmax(dim=-1)
    probabilities = likely.gather(1, said[0, len(prefix) : -1, None])[:, 0].tolist()
    # The row of a token says what comes behind it: the last one of the prefix looks at where the first one is said.
    weights = alignment_weights(scores[:, 0].float().softmax(dim=-1), vocabulary.alignment_heads)[len(prefix) - 1 :]
    first = [*first_frames(-weights.double().cpu().numpy()), len(encoded)]
    spans = zip(first, first[1:], strict=False)
    return [(begin, end, probability) for (begin, end), probability in zip(spans, probabilities, strict=False)]


def alignment_weights(weights: torch.Tensor, heads: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Of all blocks' and heads' weights (L, H, U, T') those that are told, made comparable and averaged: (U, T').

    Where none is told, all heads of the upper half of the blocks, as the published code has it.
    """
    blocks, count = weights.shape[:2]
    if not heads:
        heads = tuple((block, head) for block in range(blocks // 2, blocks) for head in range(count))
    chosen = torch.stack([weights[block, head] for block, head in heads])
    deviation, mean = torch.std_mean(chosen, dim=-2, keepdim=True, unbiased=False)
    return _smoothed((chosen - mean) / deviation.clamp_min(torch.finfo(chosen.dtype).tiny)).mean(dim=0)


def _smoothed(weights: torch.Tensor) -> torch.Tensor:
    """The median of each frame (…, T') and its neighbours; of fewer frames than it looks at, these themselves."""
    beside = MEDIAN_FRAMES // 2
    if weights.shape[-1] <= beside:
        return weights
    mirrored = torch.nn.functional.pad(weights, (beside, beside), mode="reflect")
    return mirrored.unfold(-1, MEDIAN_FRAMES, 1).median(dim=-1).values


def first_frames(costs: np.ndarray) -> list[int]:
    """The first column of every row on the cheapest way through costs (U, T'), from corner to corner, never back.

    One anti-diagonal after another, each at once: a cell follows from three of the two before.
    """
    rows, columns = costs.shape
    totals = np.full((rows + 1, columns + 1), np.inf)
    totals[0, 0], ways = 0.0, np.full((rows + 1, columns + 1), RIGHT)
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        before = np.stack([totals[row - 1, column - 1], totals[row - 1, column], totals[row, column - 1]])
        is_diagonal = (before[DIAGONAL] < before[DOWN]) & (before[DIAGONAL] < before[RIGHT])
        is_down = (before[DOWN] < before[DIAGONAL]) & (before[DOWN] < before[RIGHT])
        ways[row, column] = way = np.select([is_diagonal, is_down], [DIAGONAL, DOWN], RIGHT)
        totals[row, column] = costs[row - 1, column - 1] + np.take_along_axis(before, way[None], 0)[0]
    first, row, column = [0] * rows, rows, columns
    while row > 0:
        first[row - 1] = max(0, int(column) - 1)
        way = ways[row, column] if column else DOWN
        row, column = row - (way != RIGHT), column - (way != DOWN)
    return first
