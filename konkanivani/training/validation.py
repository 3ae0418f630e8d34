"""Evaluation of a set of utterances: loss, WER and CER, under `no_grad`."""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext

import numpy as np
import torch

from konkanivani.data.batching import Batch, partition, plan_evaluation
from konkanivani.data.dataset import EvalDataset
from konkanivani.data.index import Utterance
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import load_batches
from konkanivani.data.manifest import Rejections
from konkanivani.data.text import Vocabulary, normalize_text
from konkanivani.decoding.ctc import argmax_tokens, blank_frames
from konkanivani.decoding.decode import Decode
from konkanivani.distributed import ALONE, Topology, gather
from konkanivani.errors import Interrupted
from konkanivani.lengths import on_host
from konkanivani.memory.recovery import MicroBatchPlan, OomHistory, OomRetry
from konkanivani.models.asr import LossCounts, Losses, Objective
from konkanivani.scoring.metrics import ErrorRates, error_rates
from konkanivani.training.optimizer_state import full_weights
from konkanivani.training.step import ForwardPass


@dataclasses.dataclass(frozen=True)
class ScoredUtterance:
    """An utterance with its hypothesis; reference and hypothesis are in the form of the training targets."""

    utterance: Utterance
    hypothesis: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Args:
        losses: nats per token.
        rates: WER and CER.
        blank_share: fraction of blank frames on the CTC best paths; 1 if CTC outputs nothing, None without CTC.
        scored: all utterances in the order of evaluation; empty if only the loss was computed.
        seconds: wall time.
        utterances: number of utterances.
    """

    losses: Losses
    rates: ErrorRates
    blank_share: float | None
    scored: tuple[ScoredUtterance, ...]
    seconds: float
    utterances: int


def rates_over(scored: list[ScoredUtterance]) -> ErrorRates:
    """Return WER and CER over the utterances, ignoring case and punctuation if their input is speech."""
    references = [s.utterance.text for s in scored]
    hypotheses = [s.hypothesis for s in scored]
    if any(s.utterance.input_text is not None for s in scored):
        # A text-to-text model may be trained to restore case and punctuation alone.
        return error_rates(references, hypotheses)
    return error_rates(list(map(normalize_text, references)), list(map(normalize_text, hypotheses)))


@dataclasses.dataclass(frozen=True)
class RecognizedBatch:
    """Results of one batch; `loss_sums` and `blanks` are on the device.

    Args:
        loss_sums: summed losses (terms,).
        blanks: number of blank frames on the CTC best paths.
        frames: number of encoder frames; 0 without CTC.
        hypotheses: token ids of each utterance; empty if only the loss was computed.
    """

    loss_sums: torch.Tensor
    blanks: torch.Tensor
    frames: int
    hypotheses: list[list[int]]


def recognize(forward: ForwardPass, batch: Batch, decode: Decode | None) -> RecognizedBatch:
    """Return the losses and hypotheses, if `decode` is given, of one batch, in the current mode of the model."""
    output, sums = forward(batch)
    lengths = on_host(output.encoded_lengths)
    with forward.autocast():
        hypotheses = decode(forward.model, output.encoded, lengths) if decode else []
        blanks = torch.zeros((), dtype=torch.int64, device=forward.device)
        frames = 0
        if forward.architecture.has_ctc:
            frames = sum(lengths)
            blanks = blank_frames(argmax_tokens(forward.model, output.encoded), lengths)
    # In float64, because these sums are added over the whole set.
    return RecognizedBatch(torch.stack(sums).double(), blanks, frames, hypotheses)


@dataclasses.dataclass(frozen=True)
class RecognizedPortion:
    """Host-side results of several batches: summed losses, blank frames, frames, tokens and utterances in order.

    `utterances` is their number; without a decoder, none is scored.
    """

    loss_sums: tuple[float, ...]
    blanks: int
    frames: int
    tokens: int
    utterances: int
    scored: tuple[ScoredUtterance, ...]


@torch.no_grad()
def recognize_all(
    forward: ForwardPass, batches: Iterable[tuple[Batch, list[Utterance]]], tokenizer: Vocabulary, decode: Decode | None
) -> RecognizedPortion:
    """Recognize `batches`, each with its utterances in the same order, without changing the weights.

    A batch that does not fit in memory is split. A ResourceError names an utterance that does not fit even alone.
    """
    forward.model.eval()
    # The copies of offloaded weights are older than the optimizer's last update.
    forward.refresh_weights()
    oom_history = OomHistory(conditions=0)  # not training's: without gradients much larger batches fit
    terms = len(forward.objective.terms)
    tokens = 0
    count = 0
    scored: list[ScoredUtterance] = []
    totals = torch.zeros(terms, dtype=torch.float64, device=forward.device)
    blanks = torch.zeros((), dtype=torch.int64, device=forward.device)
    frames = 0
    for batch, utterances in batches:
        # Without gradients no activations are stored: recomputes_all=True skips that stage of the OOM retries.
        cut = MicroBatchPlan((batch,), recomputes_all=True, chunk_frames=forward.chunk_frames)
        attempts: OomRetry[list[RecognizedBatch]] = OomRetry(cut, oom_history)
        for attempt in attempts:
            with attempt:
                smaller = forward.with_plan(attempt.plan)
                attempt.result = [recognize(smaller, piece, decode) for piece in attempt.plan.micro_batches]
        pieces = attempts.result
        assert pieces is not None  # nothing interrupts an attempt, so it fits in the end or raises
        totals += sum(piece.loss_sums for piece in pieces)
        blanks += sum(piece.blanks for piece in pieces)
        frames += sum(piece.frames for piece in pieces)
        tokens += sum(batch.token_lengths)
        count += len(utterances)
        if decode is None:
            continue
        hypotheses = [hypothesis for piece in pieces for hypothesis in piece.hypotheses]
        # strict=True: a decoder that drops an utterance would shift all later hypotheses.
        scored += [ScoredUtterance(u, tokenizer.decode(h)) for u, h in zip(utterances, hypotheses, strict=True)]
    return RecognizedPortion(tuple(totals.tolist()), int(blanks), frames, tokens, count, tuple(scored))


def join_portions(portions: Sequence[RecognizedPortion], objective: Objective, seconds: float) -> Evaluation:
    """Merge the portions of all ranks, in rank order, into one evaluation; each utterance occurs once."""
    scored = [utterance for portion in portions for utterance in portion.scored]
    utterances = sum(portion.utterances for portion in portions)
    counts = LossCounts(sum(portion.tokens for portion in portions), utterances)
    sums = [sum(of_term) for of_term in zip(*(portion.loss_sums for portion in portions), strict=True)]
    frames = sum(portion.frames for portion in portions)
    return Evaluation(
        losses=objective.losses(sums, counts),
        rates=rates_over(scored),
        blank_share=sum(portion.blanks for portion in portions) / frames if frames else None,
        scored=tuple(scored),
        seconds=seconds,
        utterances=utterances,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Utterances to evaluate, with their plan of batches.

    The reference texts are normalized. Without `has_search`, only the loss is computed.
    """

    speech: EvalDataset
    plan: list[np.ndarray]
    loader: LoaderConfig
    rejections: Rejections
    topology: Topology = ALONE
    has_search: bool = True

    def within(self, batch_seconds: float) -> "EvaluationSet":
        """Return the same set in batches of at most `batch_seconds` of padded audio."""
        return dataclasses.replace(self, plan=plan_evaluation(self.speech.utterances.durations, batch_seconds))

    def evaluate(self, forward: ForwardPass, decode: Decode, check: Callable[[], None] = lambda: None) -> Evaluation:
        """Return losses and error rates over the set; `check` is called before each batch and may raise.

        Each rank recognizes a portion of the batches, and all ranks receive the result over all portions.
        """
        started = time.perf_counter()
        interrupted = None
        portion = None
        try:
            portion = self._recognize_portion(forward, decode, check)
        except Interrupted as error:
            if self.topology.is_single_process:
                raise
            interrupted = error
        # An interrupted rank takes part with None, or the other ranks would wait forever.
        gathered = gather(self.topology, portion)
        portions = [part for part in gathered if part is not None]
        if len(portions) < len(gathered):
            raise interrupted or Interrupted("Another rank was stopped by a signal.", signal.SIGTERM)
        # Each rank has seen only its own portion's rejections.
        for new_rejections in gather(self.topology, self.rejections.news()):
            self.rejections.add(new_rejections)
        return join_portions(portions, forward.objective, time.perf_counter() - started)

    def _recognize_portion(self, forward: ForwardPass, decode: Decode, check: Callable[[], None]) -> RecognizedPortion:
        durations = self.speech.utterances.durations
        # Padded audio: the rows of a batch times its longest duration.
        costs = np.array([len(batch) * durations[batch].max() for batch in self.plan])
        plan = [self.plan[number] for number in partition(costs, self.topology.world_size)[self.topology.rank]]
        loaded = load_batches(self.speech, plan, self.loader, self.rejections, check)
        # The loss alone needs one block of the decoder at a time.
        at_hand = forward.decoder_on_device() if self.has_search else nullcontext()
        with full_weights(forward.model), at_hand, closing(loaded) as batches:
            return recognize_all(forward, batches, self.speech.tokenizer, decode if self.has_search else None)
