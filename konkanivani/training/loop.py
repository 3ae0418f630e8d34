"""The training loop: windows in, steps, validation, checkpoints and logs out, in the order in which they happen."""

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

import torch

from konkanivani.base.console import say
from konkanivani.base.distributed import agree, gather
from konkanivani.base.errors import DataError, Interrupted, NumericsError, ResourceError
from konkanivani.data.batch import Window
from konkanivani.records import HypothesisPair, SkipRecord, SpectrogramRecord, StepRecord, ValidationRecord
from konkanivani.sharding import whole_weights
from konkanivani.training.evaluation import Evaluation
from konkanivani.training.learning import EpochLearning, failures
from konkanivani.training.run import Run
from konkanivani.training.step import StepReport, train_step

MOST_SKIPS_IN_A_ROW = 25
SMALLEST_SCALE = 1e-5
MOST_FAILED_SAVES_IN_A_ROW = 3


def train(run: Run) -> None:
    """Trains until `run.is_finished()`; what it has learned is in the newest checkpoint when it returns."""
    state, saver, monitor = run.state, PeriodicSaver(run), run.step.forward.monitor
    monitor.end_phase("start")
    breaking_off = partial(run.interruption.breaking_off, partial(stop_here, saver))
    # An error too must end the workers, and leave the progress bar's line.
    with (
        closing(run.progress),
        closing(run.windows.from_cursor(state.cursor, run.interruption.check)) as windows,
        no_collection_of_what_stays(),
    ):
        while True:
            if state.has_epoch_to_finish:
                with steps_kept(saver):
                    is_best = finish_epoch(run, breaking_off)
                saver.save(epoch=state.epoch, is_best=is_best)
            if run.is_finished():
                break
            with steps_kept(saver):
                with breaking_off():
                    window, cursor = run.progress.wait_for_next(windows)
                monitor.end_phase("data")
                report = train_step(run.step, window, state.step, run.interruption.is_requested, breaking_off)
                if report is None:
                    run.interruption.check()
                    raise Interrupted("Another rank was stopped by a signal.", signal.SIGTERM)
            state.advance(cursor, window.audio_seconds, report.is_skipped, report.splits)
            if not report.is_skipped:
                state.add_up(report.loss, report.gradient_norm > run.step.schedule.max_grad_norm)
            log_step(run, window, report)
            monitor.end_phase("log")
            check_numerics(run, report)
            saver.save_if_due()
    saver.save(is_final=True)


@contextmanager
def no_collection_of_what_stays() -> Iterator[None]:
    """The garbage collector leaves out what is there already.

    Of a quarter of a million objects, most of them torch's modules, a walk through all takes 0.14 s, every sixteenth
    step (docs/LOG.md).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def steps_kept(saver: "PeriodicSaver") -> Iterator[None]:
    """Audio that cannot be read, memory that runs out and signals cost none of the steps before: those are saved."""
    try:
        yield
    except (DataError, ResourceError):
        if not saver.run.is_sharded:  # else the others are needed, who have ended or wait for this rank elsewhere
            saver.save(is_final=True)
        raise
    except Interrupted as error:
        saver.save(is_final=True)
        agree(saver.run.topology, 0)  # no rank ends before the first one has saved: torchrun would then end that too
        step, number = saver.run.state.step, error.exit_code - 128
        raise Interrupted(f"Stopped by a signal at step {step}; --resume auto goes on from there.", number) from None


def stop_here(saver: "PeriodicSaver", error: Interrupted) -> None:
    """Ends the run as of the last whole step, in another thread than the one that is amid the next."""
    saver.run.progress.close()
    with steps_kept(saver):
        raise error


def finish_epoch(run: Run, breaking_off: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
    """Validates the epoch whose windows are all consumed; whether it is the best so far (by CER, else by loss)."""
    if run.validation is None:
        tell_failures(run, run.state.learning(run.step.total_steps))
        return run.state.finish_epoch(score=float(-run.state.epoch))
    with breaking_off():
        evaluation = run.validation.evaluate(run.step.forward, run.decode, run.interruption.check)
    score = evaluation.rates.cer
    learning = run.state.learning(run.step.total_steps, score, evaluation.blank_share)
    log_validation(run, evaluation, learning)
    tell_failures(run, learning)
    run.progress.lap()  # validation is not training time
    return run.state.finish_epoch(score if score == score else evaluation.loss)


def tell_failures(run: Run, learning: EpochLearning) -> None:
    """Tells whoever watches that the run does not learn, where it does not."""
    if run.topology.is_first:
        for failure in failures(learning):
            run.progress.tell(f"warning: {failure}")


def check_numerics(run: Run, report: StepReport) -> None:
    """Ends a run whose gradients are never finite any more."""
    state, scaler = run.state, run.step.scaler
    has_no_scale = scaler.is_enabled() and report.scale < SMALLEST_SCALE
    if state.consecutive_skips < MOST_SKIPS_IN_A_ROW and not has_no_scale:
        return
    reason = f"the loss scale fell to {report.scale:g}" if has_no_scale else f"{state.consecutive_skips} steps in a row"
    good = run.checkpointer.newest_before(state.step)
    raise NumericsError(
        f"The gradients are not finite ({reason}) at step {state.step}; log.jsonl names the utterances. "
        + (f"The last good checkpoint is {good}" if good else "No checkpoint was saved while they were finite")
        + f". Try {f'to go on from it with --resume {good}' if good else 'again with --fresh'} and a lower "
        + f"--learning_rate{', or --amp_dtype bf16 where the card has it' if scaler.is_enabled() else ''}."
    )


def log_step(run: Run, window: Window, report: StepReport) -> None:
    """Logs one consumed window; a skipped one has no step of its own and shows up in the next one's count too."""
    seconds, monitor = run.progress.lap(), run.step.forward.monitor
    run.progress.show(report, window.audio_seconds, seconds, monitor.overall_peak_mib())
    run.watch.look(monitor.overall_peak_mib())
    if report.is_skipped:
        run.logbook.log(skip_record(run, window, report))
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
        audio_seconds_per_second=window.audio_seconds / seconds,
        padding_share=window.padding_share,
        tokens=window.tokens,
        utterances=window.utterances,
        seconds=seconds,
        waiting_seconds=run.progress.last_wait,
        model_flops_utilisation=run.utilisation.model_flops_utilisation(window, seconds),
        gpu_utilisation=run.utilisation.gpu_utilisation(),
        splits=report.splits,
        cache_clearings=clearing.count if clearing else None,
        cache_clearing_seconds=clearing.seconds if clearing else None,
        memory=monitor.report(),
    )
    run.logbook.log(record)


def skip_record(run: Run, window: Window, report: StepReport) -> SkipRecord:
    """What is known of a window whose loss or gradient is not finite."""
    if not math.isfinite(report.loss):
        reason = f"its loss is {report.loss}"
    elif run.step.scaler.is_enabled():
        reason = f"its gradient overflowed; the loss scale falls from {report.scale:g}, which is usual now and then"
    else:
        reason = f"its gradient's norm is {report.gradient_norm}"
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
        utterances=tuple(name for share in gather(run.topology, window.utterance_ids) for name in share),
    )


def log_validation(run: Run, evaluation: Evaluation, learning: EpochLearning) -> None:
    """Logs the rates, five fixed utterances, and the first of them as a picture and as sound."""
    shown = sorted(evaluation.scored, key=lambda scored: scored.utterance.id)[:5]
    memory = [phase for phase in run.step.forward.monitor.report() if phase.phase == "validation"]
    record = ValidationRecord(
        step=run.state.step,
        epoch=run.state.epoch,
        loss=evaluation.loss,
        ctc_loss=evaluation.ctc_loss,
        attention_loss=evaluation.attention_loss,
        wer=evaluation.rates.wer,
        cer=evaluation.rates.cer,
        blank_share=evaluation.blank_share,
        clipped_share=learning.clipped_share,
        utterances=len(evaluation.scored),
        seconds=evaluation.seconds,
        hypotheses=tuple(HypothesisPair(s.utterance.text, s.hypothesis, s.utterance.id) for s in shown),
        memory=memory[0] if memory else None,
        rank_peaks_mib=run.rank_peaks_mib(),
    )
    run.logbook.log(record)
    log_spectrogram(run, shown[0].utterance.id)


@torch.no_grad()
def log_spectrogram(run: Run, utterance_id: str) -> None:
    """Logs one validation utterance's sound, features and CTC posteriors."""
    speech = run.validation.speech
    index = next(i for i, utterance in enumerate(speech.utterances) if utterance.id == utterance_id)
    waveform = speech[index].waveform
    forward = run.step.forward
    features, lengths = forward.front_end(waveform[None].to(forward.device), (len(waveform),), None)
    forward.model.eval()
    with whole_weights(forward.model), forward.autocast():
        logits, _ = forward.model.ctc_logits(features, lengths)
    posteriors = logits[0].float().softmax(dim=-1).cpu()
    run.logbook.log(SpectrogramRecord(run.state.step, utterance_id, waveform, features[0].float().cpu(), posteriors))


class PeriodicSaver:
    """Saves when the steps or minutes asked for have passed, and lives through a disk that is full for a while."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._saved_at = time.monotonic()
        self._failures = 0

    def save_if_due(self) -> None:
        """Saves checkpoint_last.pt when --save_steps or --save_minutes have passed."""
        config, state = self.run.config, self.run.state
        by_steps = config.save_steps and state.step % config.save_steps == 0
        by_time = config.save_minutes and time.monotonic() - self._saved_at >= 60 * config.save_minutes
        is_due = bool(by_steps or by_time)
        if self.run.is_sharded:  # all ranks save, so no clock may differ
            is_due = bool(agree(self.run.topology, is_due))
        # The end of an epoch is saved after its validation.
        if is_due and not state.has_epoch_to_finish:
            self.save()

    def save(self, epoch: int | None = None, is_best: bool = False, is_final: bool = False) -> None:
        """Saves now, the first rank for all; a failure is a warning, three in a row or the final save's an error."""
        self._saved_at = time.monotonic()
        checkpoint = self.run.checkpoint() if self.run.topology.is_first or self.run.is_sharded else None
        if not self.run.topology.is_first:
            return
        self.run.logbook.flush()
        try:
            self.run.checkpointer.save(checkpoint, epoch, is_best)
            self._failures = 0
        except ResourceError as error:
            self._failures += 1
            if is_final or self._failures >= MOST_FAILED_SAVES_IN_A_ROW:
                raise
            say(f"{error} Training goes on; the checkpoint before stays, the next save tries again.")
        finally:
            self.run.step.forward.monitor.end_phase("save")
