"""Saving of a run, and the log records of its steps and validations."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from konkanivani.console import say
from konkanivani.data.batching import GlobalBatch
from konkanivani.data.dataset import EvalDataset
from konkanivani.data.rejections import Rejection
from konkanivani.distributed import all_reduce_max, gather
from konkanivani.errors import DataError, Interrupted, ResourceError
from konkanivani.training.progress import EpochLearning
from konkanivani.training.records import HypothesisPair, SkipRecord, SpectrogramRecord, StepRecord, ValidationRecord
from konkanivani.training.run import Run
from konkanivani.training.sharding import full_weights
from konkanivani.training.step import StepReport
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
        self._failures = 0
        self._saved_state: dict[str, int | float] | None = None

    def save_if_due(self) -> None:
        """Save checkpoint_last.pt if --save_steps or --save_minutes have passed."""
        config = self.run.config.run
        state = self.run.state
        by_steps = config.save_steps and state.step % config.save_steps == 0
        by_time = config.save_minutes and time.monotonic() - self._saved_at >= 60 * config.save_minutes
        is_due = bool(by_steps or by_time)
        if self.run.is_sharded:  # all ranks save together, but their clocks differ
            is_due = bool(all_reduce_max(self.run.topology, is_due))
        # The last step of an epoch is saved after the validation.
        if is_due and not state.has_epoch_to_finish:
            self.save()

    def save(self, epoch: int | None = None, is_best: bool = False, is_final: bool = False) -> None:
        """Save now, on the first rank only; warn on failure, but raise at the third in a row or in the final save.

        The final save is skipped if the newest checkpoint already has this state: after a signal, writing the same
        state again on a slow disk could take longer than the scheduler waits before SIGKILL (torchrun: 30 s).
        """
        if is_final and self._is_saved():
            return
        self._saved_at = time.monotonic()
        if not self.run.topology.is_first:
            if self.run.is_sharded:
                self.run.checkpoint()  # a collective: the first rank receives the whole tensors
            return
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
        finally:
            self.run.monitor.end_phase("save")

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
        wer=evaluation.rates.wer,
        cer=evaluation.rates.cer,
        initial_wer=run.state.initial_wer if run.state.initial_wer < math.inf else None,
        initial_cer=run.state.initial_cer if run.state.initial_cer < math.inf else None,
        blank_share=evaluation.blank_share,
        clipped_share=learning.clipped_share,
        utterances=len(evaluation.scored),
        seconds=evaluation.seconds,
        hypotheses=tuple(HypothesisPair(s.utterance.text, s.hypothesis, s.utterance.id) for s in shown),
        memory=memory[0] if memory else None,
        rank_peaks_mib=run.rank_peaks_mib(),
    )
    run.logs.logbook.log(record)
    # FSDP2: the whole model must run once on each rank before the CTC part alone may run.
    if run.state.step and run.data.validation is not None:
        log_spectrogram(run, run.data.validation.speech, shown[0].utterance.id)


@torch.no_grad()
def log_spectrogram(run: Run, speech: EvalDataset, utterance_id: str) -> None:
    """Log the audio, the features and, with CTC, the posteriors of one validation utterance."""
    index = next(i for i, utterance in enumerate(speech.utterances) if utterance.id == utterance_id)
    example = speech[index]
    if isinstance(example, Rejection):  # readable a moment ago, when it was evaluated
        raise DataError(f"{example.audio_filepath} cannot be read any more: {example.reason}. Check the file.")
    waveform = example.waveform
    forward = run.step.forward
    features, lengths = forward.front_end(waveform[None].to(forward.device), (len(waveform),), None)
    posteriors = None
    if forward.architecture.has_ctc:
        forward.model.eval()
        with full_weights(forward.model), forward.autocast():
            logits, _ = forward.model.ctc_logits(features, lengths)
        posteriors = logits[0].float().softmax(dim=-1).cpu()
    record = SpectrogramRecord(run.state.step, utterance_id, waveform, features[0].float().cpu(), posteriors)
    run.logs.logbook.log(record)
