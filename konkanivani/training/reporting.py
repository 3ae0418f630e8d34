"""Construction of the log records of steps and validations."""

import math

import torch

from konkanivani.base.distributed import gather
from konkanivani.base.errors import DataError
from konkanivani.data.batch import GlobalBatch
from konkanivani.data.dataset import EvalDataset
from konkanivani.data.rejections import Rejection
from konkanivani.training.logs.learning import EpochLearning
from konkanivani.training.logs.records import (
    HypothesisPair,
    SkipRecord,
    SpectrogramRecord,
    StepRecord,
    ValidationRecord,
)
from konkanivani.training.run import Run
from konkanivani.training.sharding import full_weights
from konkanivani.training.step import StepReport
from konkanivani.training.validation import Evaluation


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
