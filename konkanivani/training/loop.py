"""Training loop: global batches, steps, validation, checkpoints and logs, in the order in which they happen."""

import gc
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

from konkanivani.errors import Interrupted, NumericsError
from konkanivani.training.progress import EpochLearning, failures
from konkanivani.training.reporting import PeriodicSaver, log_step, log_validation, save_on_error
from konkanivani.training.run import Run
from konkanivani.training.step import StepReport, train_step

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
        while True:
            if state.has_epoch_to_finish:
                with save_on_error(saver):
                    is_best = finish_epoch(run, interruptible)
                # Outside of save_on_error: a failure of this save must not trigger another one.
                saver.save(epoch=state.epoch, is_best=is_best)
            if run.is_finished(last_step):
                break
            with save_on_error(saver):
                with interruptible():
                    global_batch, cursor = run.logs.progress.wait_for_next(global_batches)
                run.monitor.end_phase("data")
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
    run.logs.progress.lap()


def finish_epoch(run: Run, interruptible: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
    """Validate the epoch just consumed; return whether it is the best so far (by CER, else by loss)."""
    if run.data.validation is None:
        tell_failures(run, run.state.learning(run.step.total_steps))
        # Without validation every epoch counts as the best one.
        return run.state.finish_epoch(score=float(-run.state.epoch))
    with interruptible():
        evaluation = run.evaluate(run.data.validation)
    score = evaluation.rates.cer
    learning = run.state.learning(run.step.total_steps, score, evaluation.blank_share)
    log_validation(run, evaluation, learning)
    tell_failures(run, learning)
    run.logs.progress.lap()  # validation is not training time
    # The CER is NaN if no reference has a character.
    return run.state.finish_epoch(score if score == score else evaluation.losses.all)


def tell_failures(run: Run, learning: EpochLearning) -> None:
    """Print warnings if the run does not learn."""
    if run.topology.is_first:
        for failure in failures(learning):
            run.logs.progress.tell(f"warning: {failure}")


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
    known = f"The last good checkpoint is {good}" if good else "No checkpoint was saved before"
    retry = f"Resume from it with --resume {good}" if good else "Start again with --fresh"
    other = ", or --amp_dtype bf16 if the GPU supports it" if scaler.is_enabled() else ""
    raise NumericsError(
        f"The gradients are not finite ({reason}) at step {state.step}; log.jsonl lists the utterances. {known}. "
        f"{retry} and a lower --learning_rate{other}."
    )
