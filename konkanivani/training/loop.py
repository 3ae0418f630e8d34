"""The training loop: windows in, steps, validation, checkpoints and logs out, in the order in which they happen."""

import gc
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

from konkanivani.base.errors import Interrupted, NumericsError
from konkanivani.training.logs.learning import EpochLearning, failures
from konkanivani.training.reporting import log_step, log_validation
from konkanivani.training.run import Run
from konkanivani.training.saving import PeriodicSaver, save_on_error
from konkanivani.training.step import StepReport, train_step

MAX_SKIPS_IN_A_ROW = 25
MIN_SCALE = 1e-5


def train(run: Run) -> None:
    """Trains until `run.is_finished()`; what it has learned is in the newest checkpoint when it returns."""
    state, saver, monitor = run.state, PeriodicSaver(run), run.step.forward.monitor
    monitor.end_phase("start")
    interruptible = partial(run.interruption.interruptible, partial(save_and_exit_from_signal_thread, saver))
    # An error too must end the workers, and leave the progress bar's line.
    with (
        closing(run.progress),
        closing(run.global_batches.from_cursor(state.cursor, run.interruption.check)) as global_batches,
        freeze_gc(),
    ):
        score_beginning(run, interruptible)
        while True:
            if state.has_epoch_to_finish:
                with save_on_error(saver):
                    is_best = finish_epoch(run, interruptible)
                saver.save(epoch=state.epoch, is_best=is_best)
            if run.is_finished():
                break
            with save_on_error(saver):
                with interruptible():
                    global_batch, cursor = run.progress.wait_for_next(global_batches)
                monitor.end_phase("data")
                report = train_step(run.step, global_batch, state.step, run.interruption.is_requested, interruptible)
                if report is None:
                    run.interruption.check()
                    raise Interrupted("Another rank was stopped by a signal.", signal.SIGTERM)
            state.advance(cursor, global_batch.audio_seconds, report.is_skipped, report.splits)
            if not report.is_skipped:
                state.add_up(report.loss, report.gradient_norm > run.step.schedule.max_grad_norm)
            log_step(run, global_batch, report)
            monitor.end_phase("log")
            check_numerics(run, report)
            saver.save_if_due()
    saver.save(is_final=True)


@contextmanager
def freeze_gc() -> Iterator[None]:
    """The garbage collector leaves out what is there already.

    Of a quarter of a million objects, most of them torch's modules, a walk through all takes 0.14 s, every sixteenth
    step (docs/experiments.md). Where a caller has left something out already, what is left out stays its own affair.
    """
    if not any(found is gc for found in gc.get_objects()):  # gc.get_freeze_count() walks through all of it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def save_and_exit_from_signal_thread(saver: "PeriodicSaver", error: Interrupted) -> None:
    """Ends the run as of the last whole step, in another thread than the one that is amid the next."""
    saver.run.progress.close()
    with save_on_error(saver):
        raise error


def score_beginning(run: Run, interruptible: Callable[[], AbstractContextManager[None]]) -> None:
    """Validates the weights that a run begins with, before its first step: what it loses of them is seen beside."""
    state, begins = run.state, run.config.init_from or run.settings.pretrained.pretrained
    if run.validation is None or not begins or state.step or state.initial_cer < math.inf:
        return
    with interruptible():
        evaluation = run.validation.evaluate(run.step.forward, run.decode, run.interruption.check)
    state.initial_wer, state.initial_cer = evaluation.rates.wer, evaluation.rates.cer
    log_validation(run, evaluation, state.learning(run.step.total_steps))
    run.progress.lap()


def finish_epoch(run: Run, interruptible: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
    """Validates the epoch whose windows are all consumed; whether it is the best so far (by CER, else by loss)."""
    if run.validation is None:
        tell_failures(run, run.state.learning(run.step.total_steps))
        return run.state.finish_epoch(score=float(-run.state.epoch))
    with interruptible():
        evaluation = run.validation.evaluate(run.step.forward, run.decode, run.interruption.check)
    score = evaluation.rates.cer
    learning = run.state.learning(run.step.total_steps, score, evaluation.blank_share)
    log_validation(run, evaluation, learning)
    tell_failures(run, learning)
    run.progress.lap()  # validation is not training time
    return run.state.finish_epoch(score if score == score else evaluation.losses.all)


def tell_failures(run: Run, learning: EpochLearning) -> None:
    """Warns on the screen where the run does not learn."""
    if run.topology.is_first:
        for failure in failures(learning):
            run.progress.tell(f"warning: {failure}")


def check_numerics(run: Run, report: StepReport) -> None:
    """Ends a run whose gradients are never finite any more."""
    state, scaler = run.state, run.step.scaler
    has_no_scale = scaler.is_enabled() and report.scale < MIN_SCALE
    if state.consecutive_skips < MAX_SKIPS_IN_A_ROW and not has_no_scale:
        return
    reason = f"the loss scale fell to {report.scale:g}" if has_no_scale else f"{state.consecutive_skips} steps in a row"
    good = run.checkpointer.newest_before(state.step)
    known = f"The last good checkpoint is {good}" if good else "No checkpoint was saved before"
    retry = f"Resume from it with --resume {good}" if good else "Start again with --fresh"
    other = ", or --amp_dtype bf16 if the GPU supports it" if scaler.is_enabled() else ""
    raise NumericsError(
        f"The gradients are not finite ({reason}) at step {state.step}; log.jsonl lists the utterances. {known}. "
        f"{retry} and a lower --learning_rate{other}."
    )
