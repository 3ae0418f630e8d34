"""Loss, WER and CER over a set of utterances, under `no_grad`."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from konkanivani.data.batch import Batch
from konkanivani.data.utterance import Utterance
from konkanivani.decoding.decode import Decode
from konkanivani.memory.recovery import Cut, RememberedSplits, run_or_split
from konkanivani.metrics import ErrorRates, error_rates
from konkanivani.text import Tokenizer
from konkanivani.training.forward import ForwardPass


@dataclass(frozen=True)
class ScoredUtterance:
    """One utterance with what was said and what was heard, both normalised."""

    utterance: Utterance
    hypothesis: str


@dataclass(frozen=True)
class Evaluation:
    """Losses in nats a token, error rates, and every utterance's hypothesis in the order of evaluation."""

    loss: float
    ctc_loss: float
    attention_loss: float
    rates: ErrorRates
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
    """The summed CTC and attention losses (2,) of a batch, on its device, and each utterance's token ids."""

    loss_sums: torch.Tensor
    hypotheses: list[list[int]]


def recognize(forward: ForwardPass, batch: Batch, decode: Decode) -> RecognizedBatch:
    """What the model, in the mode in which it is, makes of one batch."""
    output, sums = forward(batch)
    with forward.autocast():
        hypotheses = decode(forward.model, output.encoded, output.encoded_lengths)
    return RecognizedBatch(torch.stack([sums.ctc, sums.attention]).double(), hypotheses)


@torch.no_grad()
def evaluate(
    forward: ForwardPass,
    batches: Iterable[tuple[Batch, list[Utterance]]],
    tokenizer: Tokenizer,
    decode: Decode,
) -> Evaluation:
    """Evaluates `batches`, each with its utterances in order; the weights stay as they are.

    A batch that does not fit in memory is cut smaller; a ResourceError names an utterance that does not fit even alone.
    """
    started = time.perf_counter()
    forward.model.eval()
    splits = RememberedSplits(conditions=0)  # not training's: without gradients far more fits
    totals, tokens, scored = torch.zeros(2, dtype=torch.float64, device=forward.device), 0, []
    for batch, utterances in batches:
        pieces, _ = run_or_split(
            attempt=lambda cut: [recognize(forward.run_as(cut), piece, decode) for piece in cut.micro_batches],
            # Nothing is kept, so there is nothing to recompute.
            cut=Cut((batch,), recomputes_all=True, chunk_frames=forward.chunk_frames),
            splits=splits,
            undo=lambda: None,
        )
        totals += sum(piece.loss_sums for piece in pieces)
        tokens += sum(batch.token_lengths)
        hypotheses = [hypothesis for piece in pieces for hypothesis in piece.hypotheses]
        scored += [ScoredUtterance(u, tokenizer.decode(h)) for u, h in zip(utterances, hypotheses, strict=True)]
        forward.monitor.end_phase("validation")
    ctc_loss, attention_loss = totals[0].item() / tokens, totals[1].item() / (tokens + len(scored))
    return Evaluation(
        loss=forward.loss.ctc_weight * ctc_loss + (1 - forward.loss.ctc_weight) * attention_loss,
        ctc_loss=ctc_loss,
        attention_loss=attention_loss,
        rates=rates_over(scored),
        scored=tuple(scored),
        seconds=time.perf_counter() - started,
    )
