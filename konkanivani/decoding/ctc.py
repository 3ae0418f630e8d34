"""CTC search, the interface of networks that can be decoded, and hypotheses.

Graves (2012), Sequence Transduction with Recurrent Neural Networks; Hannun et al. (2014), First-Pass Large Vocabulary
Continuous Speech Recognition using Bi-Directional Recurrent DNNs, algorithm 1, with an optional language model.

B batch, N candidates, K hypotheses per utterance (the beam), T' encoder frames, D model width, V vocabulary, U = T'
maximal tokens, C tokens tried in a frame.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from konkanivani.decoding.language_model import Fusion, FusionScores
from konkanivani.lengths import CHUNK_FRAMES, Lengths, padding_mask
from konkanivani.models.asr import BLANK
from konkanivani.models.decoder import DecoderCache

# --------------------
# Hypotheses of a search, and an order of them that does not depend on the batch.


# Log probabilities that differ by less than a step are a tie. Kernels round the same sum differently at other positions
# of a batch; without steps, the last bit would decide ties, and results could differ from decoding one by one.
STEPS_IN_A_NAT = 2**26
# Beyond this number of steps (16,384 nats) below the best all are equal.
MAX_DISTANCE = 2**40


@dataclass(frozen=True)
class Hypothesis:
    """Token sequence and its log probability in nats, a lower bound if some of its alignments left the beam."""

    tokens: tuple[int, ...]
    log_probability: float


def first_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return indices (B, count) of the highest scores (B, N), highest first; ties in order of index."""
    # Keys have to fit into an int64: (distance + 2) * N <= 2**63. From 2**23 candidates on (a beam of 64 with 131,072
    # tokens) the distance is smaller; 2**26 candidates still leave 1,024 nats.
    distance = min(MAX_DISTANCE, 2 ** (63 - scores.shape[1].bit_length()))
    highest = scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    ranks = ((scores - highest) * STEPS_IN_A_NAT).round().clamp(min=-distance)
    ranks = ranks.masked_fill(scores == -math.inf, -distance - 1).long()
    # All keys differ, so the result does not depend on how a device's topk breaks ties.
    keys = ranks * scores.shape[1] - torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(count, dim=1).indices


def sort_hypotheses(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort by log probability, highest first; ties by token ids, ascending."""
    highest = max((hypothesis.log_probability for hypothesis in hypotheses), default=0.0)

    def rank(hypothesis: Hypothesis) -> tuple[int, tuple[int, ...]]:
        return round((highest - hypothesis.log_probability) * STEPS_IN_A_NAT), hypothesis.tokens

    return sorted(hypotheses, key=rank)


# --------------------
# Interface of the networks that can be decoded: KonkaniVani's own model and Whisper.


class Heads(Protocol):
    """Heads of a model, which decide the searches that it can be decoded with."""

    @property
    def has_ctc(self) -> bool:
        """Whether there is a CTC head."""

    @property
    def has_decoder(self) -> bool:
        """Whether there is an attention decoder."""


class StepwiseDecoder(Protocol):
    """Attention decoder that appends one token at a time to the hypotheses in a cache."""

    @property
    def most_tokens(self) -> float:
        """Maximal number of tokens after the start token; infinite if there is no limit."""

    @property
    def output(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Output layer: decoded (..., D) to logits (..., V)."""

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, T', D)."""

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D)."""


class Network(Protocol):
    """Network with a CTC head, an attention decoder, or both; None for the missing one."""

    @property
    def ctc_head(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Output layer of CTC: encoded (B, T', D) to logits (B, T', V)."""

    @property
    def decoder(self) -> StepwiseDecoder | None:
        """Attention decoder."""


def ctc_head_of(model: Network) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the CTC head; raise a ValueError if the model has none."""
    if model.ctc_head is None:
        raise ValueError("The model has no CTC head.")
    return model.ctc_head


def decoder_of(model: Network) -> StepwiseDecoder:
    """Return the attention decoder; raise a ValueError if the model has none."""
    if model.decoder is None:
        raise ValueError("The model has no attention decoder.")
    return model.decoder


# --------------------
# Greedy CTC decoding (best path), and the masking of frames that all CTC decoders share.


@torch.no_grad()
def greedy_ctc(model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """Return the tokens of the best path through each utterance of encoded (B, T', D)."""
    return collapse_repeats(argmax_tokens(model, encoded), encoded_lengths)


def argmax_tokens(model: Network, encoded: torch.Tensor) -> torch.Tensor:
    """Return each frame's likeliest token (B, T'); logits exist for one chunk of frames at a time."""
    ctc_head = ctc_head_of(model)
    # The argmax needs no softmax.
    return torch.cat([ctc_head(chunk).argmax(dim=-1) for chunk in encoded.split(CHUNK_FRAMES, dim=1)], dim=1)


def blank_frames(paths: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
    """Return the number of blanks among the valid frames of paths (B, T'), 0-dim on their device."""
    return sum(((row[:length] == BLANK).sum() for row, length in zip(paths, encoded_lengths, strict=True)))


def collapse_repeats(paths: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """Turn paths (B, T') into token sequences: valid frames only, repeats merged, then blanks removed."""
    hypotheses = []
    for row, length in zip(paths.cpu(), encoded_lengths, strict=True):  # one transfer for the whole batch
        # Merge first: only repeats without a blank between them are one token.
        merged = torch.unique_consecutive(row[:length])
        hypotheses.append(merged[merged != BLANK].tolist())
    return hypotheses


def mask_padding_as_blank(log_probabilities: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
    """Return log probabilities (B, T', V) cut to the longest utterance, in at least fp32, with blanks in the padding.

    A frame that is blank with probability 1 changes no hypothesis and no probability, so decoders need not handle
    lengths. The padding's former content, NaN included, is overwritten.
    """
    longest = max(encoded_lengths, default=0)
    if len(encoded_lengths) != len(log_probabilities) or longest > log_probabilities.shape[1]:
        raise ValueError(f"Lengths {encoded_lengths} of log probabilities {tuple(log_probabilities.shape)}.")
    dtype = torch.promote_types(log_probabilities.dtype, torch.float32)
    padding = padding_mask(encoded_lengths, longest, log_probabilities.device)
    frames = log_probabilities[:, :longest].to(dtype).masked_fill(padding[:, :, None], -math.inf)
    frames[:, :, BLANK].masked_fill_(padding, 0.0)
    return frames


# --------------------
# CTC prefix beam search: the likeliest token sequences, each summed over all alignments that the beam has kept.
#
# Every prefix in the beam has two probabilities: of its alignments that end in blank, and of its alignments that end in
# its last token. A repeated token can only extend the former. All computations are in float64: a path's log probability
# is about -10^5 after ten minutes, where float32 has steps of 0.008.


NO_TOKEN = -1


@dataclass(frozen=True)
class _Beam:
    """K different prefixes per utterance, best first; unused places have probability zero."""

    tokens: torch.Tensor  # (B, K, U), NO_TOKEN after the last
    lengths: torch.Tensor  # (B, K)
    last: torch.Tensor  # (B, K), BLANK of an empty prefix
    in_blank: torch.Tensor  # (B, K), log probability of the alignments that end in blank
    in_token: torch.Tensor  # (B, K), log probability of the alignments that end in the last token
    fusion_scores: FusionScores | None  # language model scores, if there is a language model

    @property
    def log_probabilities(self) -> torch.Tensor:
        return torch.logaddexp(self.in_blank, self.in_token)


@torch.no_grad()
def prefix_beam_search(
    log_probabilities: torch.Tensor, encoded_lengths: Lengths, beam: int, best: int = 1, fusion: Fusion | None = None
) -> list[tuple[Hypothesis, ...]]:
    """Return each utterance's `best` likeliest hypotheses of log probabilities (B, T', V), likeliest first.

    Fewer if the beam holds fewer of a probability above zero. The result does not depend on the batch. It is exact if
    the beam holds every prefix. With `fusion`, its score replaces the log probability throughout.
    """
    # Ties: of equal hypotheses, smaller token ids come first; at the edge of the beam, the likelier parent prefix, then
    # the unextended prefix, then the smaller last token.
    if min(beam, best) < 1:
        raise ValueError(f"Must be above zero: beam {beam}, best {best}.")
    frames = mask_padding_as_blank(log_probabilities, encoded_lengths)
    places = torch.zeros(len(frames), beam, dtype=torch.int64, device=frames.device)
    impossible = torch.full_like(places, -math.inf, dtype=torch.float64)
    certain = impossible.clone()  # only the empty prefix, with probability one
    certain[:, 0] = 0.0
    tokens = places[:, :, None].expand(-1, -1, frames.shape[1]).clone().fill_(NO_TOKEN)
    blanks = places.clone().fill_(BLANK)
    fused = fusion.begin(*places.shape) if fusion else None
    prefixes = _Beam(tokens, places, blanks, certain, impossible, fused)
    tried = torch.arange(1, frames.shape[2], device=frames.device).expand(len(frames), -1)  # all tokens but blank
    for frame in range(frames.shape[1]):
        emissions = frames[:, frame].double()
        prefixes = _advance(prefixes, frame, emissions, tried)
    return _hypotheses(prefixes, best)


def _advance(beam: _Beam, frame: int, emissions: torch.Tensor, tried: torch.Tensor) -> _Beam:
    """Return the beam after a frame with emissions (B, V), trying tokens (B, C); `frame` frames came before."""
    before, (parents, has_parent) = beam.log_probabilities, _parents(beam, frame)
    by_last = emissions.gather(1, beam.last)
    # A prefix in the beam can also be reached from its parent, the prefix without its last token.
    of_parents = _extendable(beam.last, *_gather_columns(parents, beam.last, beam.in_blank, before))
    from_parent = (of_parents + by_last).masked_fill(~has_parent, -math.inf)
    in_blank = before + emissions[:, BLANK, None]
    in_token = torch.logaddexp(beam.in_token + by_last, from_parent)

    extendable = _extendable(tried[:, None], beam.last[:, :, None], beam.in_blank[:, :, None], before[:, :, None])
    extended = extendable + emissions.gather(1, tried)[:, None]
    extended = extended.masked_fill(_is_in_beam(beam, parents, has_parent, tried, emissions.shape[1]), -math.inf)

    scores = torch.cat([torch.logaddexp(in_blank, in_token)[:, :, None], extended], dim=2)
    fused = scores if beam.fusion_scores is None else scores + beam.fusion_scores.of(tried)
    chosen = first_best(fused.flatten(1), scores.shape[1])  # (B, K): a prefix unchanged, or extended by a token
    sources = chosen // scores.shape[2]
    columns = chosen % scores.shape[2]
    is_longer = columns > 0
    new = F.pad(tried, (1, 0), value=NO_TOKEN).gather(1, columns)
    lengths, last, in_blank, in_token = _gather_columns(sources, beam.lengths, beam.last, in_blank, in_token)
    tokens = beam.tokens.gather(1, sources[:, :, None].expand_as(beam.tokens))
    tokens.scatter_(2, lengths[:, :, None], new[:, :, None])
    return _Beam(
        tokens,
        lengths=lengths + is_longer,
        last=torch.where(is_longer, new, last),
        in_blank=in_blank.masked_fill(is_longer, -math.inf),
        in_token=torch.where(is_longer, scores.flatten(1).gather(1, chosen), in_token),
        fusion_scores=beam.fusion_scores.follow(sources, is_longer, new) if beam.fusion_scores else None,
    )


def _extendable(token: torch.Tensor, last: torch.Tensor, in_blank: torch.Tensor, in_any: torch.Tensor) -> torch.Tensor:
    """Return the log probability of the alignments that `token` can extend: after an equal token, those in blank."""
    return torch.where(token == last, in_blank, in_any)


def _parents(beam: _Beam, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the beam index of each prefix's (B, K) parent (without its last token), and whether it is in the beam.

    No prefix has more than `longest` tokens.
    """
    # Prefixes are compared token by token: one that left the beam may have returned by another path.
    ends = (beam.lengths - 1).clamp(min=0)[:, :, None]
    shortened = beam.tokens.scatter(2, ends, NO_TOKEN)
    is_parent = (beam.tokens[:, None, :, :longest] == shortened[:, :, None, :longest]).all(dim=3)
    is_possible = beam.log_probabilities > -math.inf
    is_parent &= is_possible[:, None] & (is_possible & (beam.lengths > 0))[:, :, None]
    has_parent, parents = is_parent.to(torch.uint8).max(dim=2)
    return parents, has_parent.bool()


def _is_in_beam(
    beam: _Beam, parents: torch.Tensor, has_parent: torch.Tensor, tried: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Return (B, K, C) bool: whether a prefix extended by a tried token (B, C) is in the beam, and counted there."""
    batch, size = parents.shape
    is_there = torch.zeros(batch, size * vocabulary, dtype=torch.bool, device=tried.device)
    # Prefixes without a parent mark blank, which is never tried.
    is_there.scatter_(1, parents * vocabulary + beam.last.masked_fill(~has_parent, BLANK), True)
    return is_there.view(batch, size, vocabulary).gather(2, tried[:, None].expand(-1, size, -1))


def _gather_columns(indices: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each tensor (B, K) gathered at the indices (B, K)."""
    return tuple(tensor.gather(1, indices) for tensor in tensors)


def _hypotheses(beam: _Beam, best: int) -> list[tuple[Hypothesis, ...]]:
    """Return the beam's hypotheses per utterance, likeliest first."""
    results = []
    ended = beam.log_probabilities if beam.fusion_scores is None else beam.log_probabilities + beam.fusion_scores.ended
    rows = zip(beam.tokens.tolist(), beam.lengths.tolist(), ended.tolist(), strict=True)
    for prefixes, lengths, scores in rows:
        hypotheses = [
            Hypothesis(tuple(tokens[:length]), score)
            for tokens, length, score in zip(prefixes, lengths, scores, strict=True)
            if score > -math.inf
        ]
        results.append(tuple(sort_hypotheses(hypotheses)[:best]))
    return results
