"""Loss, WER and CER over a set of utterances, under `no_grad`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from konkanivani.base.config import LossConfig
from konkanivani.data.batch import Batch
from konkanivani.data.text import Tokenizer
from konkanivani.data.utterance import Utterance
from konkanivani.decoding.ctc import blank_frames, likeliest_tokens
from konkanivani.decoding.decode import Decode
from konkanivani.evaluation.metrics import ErrorRates, error_rates
from konkanivani.memory.recovery import Cut, RememberedSplits, run_or_split
from konkanivani.training.forward import ForwardPass


@dataclass(frozen=True)
class ScoredUtterance:
    """One utterance with what was said and what was heard, both normalised."""

    utterance: Utterance
    hypothesis: str


@dataclass(frozen=True)
class Evaluation:
    """Losses in nats a token, error rates, and every utterance's hypothesis in the order of evaluation.

    `blank_share` is that of CTC's best paths: 1 where nothing is heard.
    """

    loss: float
    ctc_loss: float
    attention_loss: float
    rates: ErrorRates
    blank_share: float
    scored: tuple[ScoredUtterance, ...]
    seconds: float

    def rates_of(self, pattern: str) -> ErrorRates:
        """The rates over the utterances whose manifest marks them with `pattern`."""
        return rates_over([s for s in self.scored if s.utterance.pattern == pattern])


def rates_over(scored: list[ScoredUtterance]) -> ErrorRates:
    """The error rates over these utterances."""
    return error_rates([s.utterance.text for s in scored], [s.hypothesis for s in scored])


@dataclass(frozen=True)
class RecognizedBatch:
    """The summed CTC and attention losses (2,) of a batch and its blank frames, on its device; each utterance's ids."""

    loss_sums: torch.Tensor
    blanks: torch.Tensor
    frames: int
    hypotheses: list[list[int]]


def recognize(forward: ForwardPass, batch: Batch, decode: Decode) -> RecognizedBatch:
    """What the model, in the mode in which it is, makes of one batch."""
    output, sums = forward(batch)
    with forward.autocast():
        hypotheses = decode(forward.model, output.encoded, output.encoded_lengths)
        blanks = blank_frames(likeliest_tokens(forward.model, output.encoded), output.encoded_lengths)
    losses = torch.stack([sums.ctc, sums.attention]).double()
    return RecognizedBatch(losses, blanks, sum(output.encoded_lengths), hypotheses)


@dataclass(frozen=True)
class HeardShare:
    """What was heard in some batches: summed losses, blanks of so many frames, tokens, every utterance in order."""

    ctc_sum: float
    attention_sum: float
    blanks: int
    frames: int
    tokens: int
    scored: tuple[ScoredUtterance, ...]


@torch.no_grad()
def hear(
    forward: ForwardPass,
    batches: Iterable[tuple[Batch, list[Utterance]]],
    tokenizer: Tokenizer,
    decode: Decode,
) -> HeardShare:
    """What the model hears in `batches`, each with its utterances in order; the weights stay as they are.

    A batch that does not fit in memory is cut smaller; a ResourceError names an utterance that does not fit even alone.
    """
    forward.model.eval()
    splits = RememberedSplits(conditions=0)  # not training's: without gradients far more fits
    totals, tokens, scored = torch.zeros(2, dtype=torch.float64, device=forward.device), 0, []
    blanks, frames = torch.zeros((), dtype=torch.int64, device=forward.device), 0
    for batch, utterances in batches:
        pieces, _ = run_or_split(
            attempt=lambda cut: [recognize(forward.run_as(cut), piece, decode) for piece in cut.micro_batches],
            # Nothing is kept, so there is nothing to recompute.
            cut=Cut((batch,), recomputes_all=True, chunk_frames=forward.chunk_frames),
            splits=splits,
            undo=lambda: None,
        )
        totals += sum(piece.loss_sums for piece in pieces)
        blanks += sum(piece.blanks for piece in pieces)
        frames += sum(piece.frames for piece in pieces)
        tokens += sum(batch.token_lengths)
        hypotheses = [hypothesis for piece in pieces for hypothesis in piece.hypotheses]
        scored += [ScoredUtterance(u, tokenizer.decode(h)) for u, h in zip(utterances, hypotheses, strict=True)]
        forward.monitor.end_phase("validation")
    return HeardShare(totals[0].item(), totals[1].item(), int(blanks), frames, tokens, tuple(scored))


def join_shares(shares: Sequence[HeardShare], loss: LossConfig, seconds: float) -> Evaluation:
    """What all shares come to: each utterance once, share after share."""
    scored = [utterance for share in shares for utterance in share.scored]
    tokens = sum(share.tokens for share in shares)
    ctc_loss = sum(share.ctc_sum for share in shares) / tokens
    attention_loss = sum(share.attention_sum for share in shares) / (tokens + len(scored))
    return Evaluation(
        loss=loss.ctc_weight * ctc_loss + (1 - loss.ctc_weight) * attention_loss,
        ctc_loss=ctc_loss,
        attention_loss=attention_loss,
        rates=rates_over(scored),
        blank_share=sum(share.blanks for share in shares) / max(1, sum(share.frames for share in shares)),
        scored=tuple(scored),
        seconds=seconds,
    )
