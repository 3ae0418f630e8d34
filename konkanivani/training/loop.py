"""Training loop, and the reports that it makes: log lines, checkpoints and validation results."""

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

import torch

from konkanivani.checkpoints.checkpoint import ScoreKind
from konkanivani.console import say
from konkanivani.data.batching import GlobalBatch
from konkanivani.data.dataset import EvalDataset
from konkanivani.data.manifest import Rejection
from konkanivani.distributed import all_reduce_max, gather
from konkanivani.errors import DataError, Interrupted, NumericsError, ResourceError
from konkanivani.lengths import SECONDS
from konkanivani.models.conformer import keep_activations
from konkanivani.training.optimizer_state import full_weights
from konkanivani.training.progress import (
    EpochLearning,
    HypothesisPair,
    SkipRecord,
    SpectrogramRecord,
    StepRecord,
    ValidationRecord,
    failures,
)
from konkanivani.training.run import Run
from konkanivani.training.step import StepReport, train_step
from konkanivani.training.validation import Evaluation

# --------------------
# Saving of a run: periodically, before an error or a signal ends it, and despite a temporarily full disk.


MAX_FAILED_SAVES = 3


@contextmanager
def save_on_error(saver: "PeriodicSaver") -> Iterator[None]:
    """Save the completed steps before unreadable audio, exhausted memory or a signal ends the run."""
    try:
        yield
    except (DataError, ResourceError):
        # A sharded save needs all ranks, but the others have ended or wait for this one in another collective.
        if not saver.run.is_sharded:
            saver.save(is_final=True)
        raise
    except Interrupted as error:
        saver.save(is_final=True)
        # No rank may end before the first one has saved: torchrun would then end that one too.
        all_reduce_max(saver.run.topology, 0)
        step = saver.run.state.step
        number = error.exit_code - 128
        raise Interrupted(
            f"Stopped by a signal at step {step}; resume from there with --resume auto.", number
        ) from None


class PeriodicSaver:
    """Saves after the configured number of steps or minutes, and tolerates a temporarily full disk."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._saved_at = time.monotonic()
        self._saved_step = run.state.step
        self._failures = 0
        self._saved_state: dict[str, int | float] | None = None

    def save_if_due(self) -> None:
        """Save checkpoint_last.pt if --save_steps or --save_minutes have passed."""
        config = self.run.config.run
        state = self.run.state
        # A skipped step leaves the number, which must not save again.
        by_steps = config.save_steps and state.step % config.save_steps == 0 and state.step != self._saved_step
        by_time = config.save_minutes and time.monotonic() - self._saved_at >= 60 * config.save_minutes
        is_due = bool(by_steps or by_time)
        if self.run.is_sharded:  # all ranks save together, but their clocks differ
            is_due = bool(all_reduce_max(self.run.topology, is_due))
        # The last step of an epoch is saved after the validation.
        if is_due and not state.has_epoch_to_finish:
            self.save()

    def save(self, epoch: int | None = None, is_best: bool = False, is_final: bool = False) -> bool:
        """Save now, on the first rank only; return whether no write failed.

        Warn on failure, but raise at the third in a row or in the final save. The final save is skipped if the newest
        checkpoint already has this state: after a signal, writing the same state again on a slow disk could take longer
        than the scheduler waits before SIGKILL (torchrun: 30 s).
        """
        if is_final and self._is_saved():
            return True
        self._saved_at = time.monotonic()
        self._saved_step = self.run.state.step
        if not self.run.topology.is_first:
            if self.run.is_sharded:
                self.run.checkpoint()  # a collective: the first rank receives the whole tensors
            return True
        checkpoint = self.run.checkpoint()
        self.run.logs.logbook.flush()
        try:
            self.run.storage.checkpointer.save(checkpoint, epoch, is_best)
            self._failures = 0
            self._saved_state = self.run.state.state_dict()
        except ResourceError as error:
            self._failures += 1
            if is_final or self._failures >= MAX_FAILED_SAVES:
                raise
            say(f"{error} Training continues; the previous checkpoint is kept, and the next save retries.")
            return False
        finally:
            self.run.monitor.end_phase("save")
        return True

    def _is_saved(self) -> bool:
        """Return whether no step and no validation came after the last save; always False for sharded weights."""
        if self._saved_state is None or self.run.is_sharded:
            return False
        return self._saved_state == self.run.state.state_dict()


# --------------------
# Construction of the log records of steps and validations.


def log_step(run: Run, global_batch: GlobalBatch, report: StepReport) -> None:
    """Log one consumed global batch.

    A skipped global batch has no step number of its own; it also appears in the count of the next step's record.
    """
    # Whole time since the last lap, so waiting for data and saving are included.
    seconds = run.logs.progress.lap()
    monitor = run.monitor
    run.logs.progress.show(report, global_batch.audio_seconds, seconds, monitor.overall_peak_mib())
    run.logs.watch.look(monitor.overall_peak_mib())
    if report.is_skipped:
        run.logs.logbook.log(skip_record(run, global_batch, report))
        return
    clearing = monitor.report_clearing()
    record = StepRecord(
        step=run.state.step,
        epoch=run.state.epoch,
        loss=report.loss,
        ctc_loss=report.ctc_loss,
        attention_loss=report.attention_loss,
        learning_rate=report.learning_rate,
        gradient_norm=report.gradient_norm,
        scale=report.scale,
        skipped_steps=run.state.skipped_steps,
        skipped=False,
        audio_seconds_per_second=global_batch.audio_seconds / seconds,
        padding_share=global_batch.padding_share,
        tokens=global_batch.tokens,
        utterances=global_batch.utterances,
        seconds=seconds,
        waiting_seconds=run.logs.progress.last_wait,
        model_flops_utilisation=run.logs.utilisation.model_flops_utilisation(global_batch, seconds),
        gpu_utilisation=run.logs.utilisation.gpu_utilisation(),
        splits=report.splits,
        cache_clearings=clearing.count if clearing else None,
        cache_clearing_seconds=clearing.seconds if clearing else None,
        memory=monitor.report(),
    )
    run.logs.logbook.log(record)


def skip_record(run: Run, global_batch: GlobalBatch, report: StepReport) -> SkipRecord:
    """Return the record of a global batch whose loss or gradient is not finite."""
    if not math.isfinite(report.loss):
        reason = f"its loss is {report.loss}"
    elif run.step.scaler.is_enabled():
        reason = (
            f"its gradient overflowed; the loss scale is reduced from {report.scale:g}, which is normal once in a while"
        )
    else:
        reason = f"its gradient norm is {report.gradient_norm}"
    return SkipRecord(
        step=run.state.step,
        epoch=run.state.epoch,
        skipped_steps=run.state.skipped_steps,
        consecutive_skips=run.state.consecutive_skips,
        loss=report.loss,
        ctc_loss=report.ctc_loss,
        attention_loss=report.attention_loss,
        gradient_norm=report.gradient_norm,
        scale=report.scale,
        reason=reason,
        # A collective; all ranks skip the same global batch, since they share its loss and norm.
        utterances=tuple(name for share in gather(run.topology, global_batch.utterance_ids) for name in share),
    )


def log_validation(run: Run, evaluation: Evaluation, learning: EpochLearning) -> None:
    """Log error rates, five utterances with hypotheses, and the spectrogram and audio of the first of them."""
    # Sorted by id, so that every validation shows the same utterances.
    shown = sorted(evaluation.scored, key=lambda scored: scored.utterance.id)[:5]
    memory = [phase for phase in run.monitor.report() if phase.phase == "validation"]
    record = ValidationRecord(
        step=run.state.step,
        epoch=run.state.epoch,
        loss=evaluation.losses.all,
        ctc_loss=evaluation.losses.ctc,
        attention_loss=evaluation.losses.attention,
        wer=evaluation.rates.wer if evaluation.scored else None,
        cer=evaluation.rates.cer if evaluation.scored else None,
        initial_wer=run.state.initial_wer if run.state.initial_wer < math.inf else None,
        initial_cer=run.state.initial_cer if run.state.initial_cer < math.inf else None,
        blank_share=evaluation.blank_share,
        clipped_share=learning.clipped_share,
        utterances=evaluation.utterances,
        seconds=evaluation.seconds,
        hypotheses=tuple(HypothesisPair(s.utterance.text, s.hypothesis, s.utterance.id) for s in shown),
        memory=memory[0] if memory else None,
        rank_peaks_mib=run.rank_peaks_mib(),
    )
    run.logs.logbook.log(record)
    # Without a search there are no hypotheses.
    is_speech = run.step.architecture.framing.unit == SECONDS  # a text has no spectrogram
    # Not before step 1: FSDP2 must run the whole model once on each rank before its CTC part alone.
    if run.state.step and run.data.validation is not None and is_speech and shown:
        log_spectrogram(run, run.data.validation.speech, shown[0].utterance.id)


@torch.no_grad()
def log_spectrogram(run: Run, speech: EvalDataset, utterance_id: str) -> None:
    """Log the audio, the features and, with CTC, the posteriors of one validation utterance."""
    index = next(i for i, utterance in enumerate(speech.utterances) if utterance.id == utterance_id)
    example = speech[index]
    if isinstance(example, Rejection):  # readable a moment ago, when it was evaluated
        say(f"{example.audio_filepath} cannot be read any more: {example.reason}. TensorBoard gets no spectrogram.")
        return
    waveform = example.waveform
    forward = run.step.forward
    features, lengths = forward.front_end(waveform[None].to(forward.device), (len(waveform),), None)
    posteriors = None
    if forward.architecture.has_ctc:
        forward.model.eval()
        with full_weights(forward.model), forward.autocast():
            logits, _ = forward.model.ctc_logits(features, lengths, forward.with_weights(keep_activations))
        posteriors = logits[0].float().softmax(dim=-1).cpu()
    record = SpectrogramRecord(run.state.step, utterance_id, waveform, features[0].float().cpu(), posteriors)
    run.logs.logbook.log(record)


# --------------------
# Training loop: global batches, steps, validation, checkpoints and logs, in the order in which they happen.


MAX_SKIPS_IN_A_ROW = 25
MIN_SCALE = 1e-5  # of the GradScaler


def train(run: Run, last_step: int | None = None) -> None:
    """Train until `run.is_finished(last_step)`; on return the newest checkpoint has the final state."""
    state = run.state
    saver = PeriodicSaver(run)
    run.monitor.end_phase("start")
    interruptible = partial(run.interruption.interruptible, partial(save_and_exit_from_signal_thread, saver))
    # closing(): an error too must stop the loader's workers and finish the line of the progress bar.
    with (
        closing(run.logs.progress),
        closing(run.data.global_batches.from_cursor(state.cursor, run.interruption.check)) as global_batches,
        freeze_gc(),
    ):
        validate_initial_weights(run, interruptible)
        run.logs.progress.lap()  # the set-up, a rehearsal and this validation are not training time
        while True:
            if state.has_epoch_to_finish:
                finish_and_save_epoch(run, saver, interruptible)
            if run.is_finished(last_step):
                break
            with save_on_error(saver):
                with interruptible():
                    global_batch, cursor = run.logs.progress.wait_for_next(global_batches)
                run.monitor.end_phase("data")
                if global_batch is None:
                    state.move_to(cursor)
                    continue
                report = train_step(run.step, global_batch, state.step, run.interruption.is_requested, interruptible)
                if report is None:
                    run.interruption.check()
                    raise Interrupted("Another rank was stopped by a signal.", signal.SIGTERM)
            # Counters change only after the update, so an interruption before it repeats this global batch.
            state.advance(cursor, global_batch.audio_seconds, report.is_skipped, report.splits)
            if not report.is_skipped:
                state.add_up(report.loss, report.gradient_norm > run.step.schedule.max_grad_norm)
            log_step(run, global_batch, report)
            run.monitor.end_phase("log")
            check_numerics(run, report)
            saver.save_if_due()
    saver.save(is_final=True)


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude all existing objects from garbage collection.

    A full collection over a quarter of a million objects, most of them torch's modules, takes 0.14 s, in every
    sixteenth step (docs/experiments.md). If the caller has frozen objects already, this does nothing, and they stay
    frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def save_and_exit_from_signal_thread(saver: "PeriodicSaver", error: Interrupted) -> None:
    """Save the state of the last complete step and exit, in another thread than the one that computes the next step."""
    saver.run.logs.progress.close()
    with save_on_error(saver):
        raise error


def validate_initial_weights(run: Run, interruptible: Callable[[], AbstractContextManager[None]]) -> None:
    """Validate the initial weights of a run before its first step, as a reference for fine-tuning.

    Does nothing for random weights, without a validation set, or in a resumed run.
    """
    state = run.state
    begins = run.config.run.init_from or run.config.pretrained.pretrained
    if run.data.validation is None or not begins or state.step or state.initial_cer < math.inf:
        return
    with interruptible():
        evaluation = run.evaluate(run.data.validation)
    state.initial_wer = evaluation.rates.wer
    state.initial_cer = evaluation.rates.cer
    log_validation(run, evaluation, state.learning(run.step.total_steps))


def finish_epoch(run: Run, interruptible: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
    """Validate the epoch just consumed; return whether it is the best so far (by CER, else by loss)."""
    if run.data.validation is None:
        print_failures(run, run.state.learning(run.step.total_steps))
        # Without validation every epoch counts as the best one.
        return run.state.finish_epoch(float(-run.state.epoch), ScoreKind.EPOCH)
    with interruptible():
        evaluation = run.evaluate(run.data.validation)
    score = evaluation.rates.cer
    learning = run.state.learning(run.step.total_steps, score, evaluation.blank_share)
    log_validation(run, evaluation, learning)
    print_failures(run, learning)
    run.logs.progress.lap()  # validation is not training time
    # The CER is NaN if no reference has a character, or without a search.
    if math.isnan(score):
        return run.state.finish_epoch(evaluation.losses.all, ScoreKind.LOSS)
    return run.state.finish_epoch(score, ScoreKind.CER)


def finish_and_save_epoch(
    run: Run, saver: PeriodicSaver, interruptible: Callable[[], AbstractContextManager[None]]
) -> None:
    """Validate the epoch just consumed and save it."""
    state = run.state
    best_score = state.best_score
    without_improvement = state.epochs_without_improvement
    with save_on_error(saver):
        is_best = finish_epoch(run, interruptible)
    # Outside of save_on_error: a failure of this save must not trigger another one.
    is_saved = saver.save(epoch=state.epoch, is_best=is_best)
    if all_reduce_max(run.topology, not is_saved):
        # Still the score of the weights in checkpoint_best.pt, which the next epochs must surpass.
        state.best_score = best_score
        state.epochs_without_improvement = without_improvement + 1


def print_failures(run: Run, learning: EpochLearning) -> None:
    """Print warnings if the run does not learn."""
    if run.topology.is_first:
        for failure in failures(learning, run.step.architecture.framing.unit):
            run.logs.progress.print_line(f"warning: {failure}")


def check_numerics(run: Run, report: StepReport) -> None:
    """Raise a NumericsError if the gradients have stopped being finite."""
    state = run.state
    scaler = run.step.scaler
    # Each overflow halves the loss scale, so a scale this small means that every recent gradient overflowed.
    has_no_scale = scaler.is_enabled() and report.scale < MIN_SCALE
    if state.consecutive_skips < MAX_SKIPS_IN_A_ROW and not has_no_scale:
        return
    reason = f"the loss scale fell to {report.scale:g}" if has_no_scale else f"{state.consecutive_skips} steps in a row"
    good = run.storage.checkpointer.newest_before(state.step)
    fallback = f"The last good checkpoint is {good}" if good else "No checkpoint was saved before"
    retry = f"Resume from it with --resume {good}" if good else "Start again with --fresh"
    alternative = ", or --amp_dtype bf16 if the GPU supports it" if scaler.is_enabled() else ""
    raise NumericsError(
        f"The gradients are not finite ({reason}) at step {state.step}; log.jsonl lists the utterances. {fallback}. "
        f"{retry} and a lower --learning_rate{alternative}."
    )
