"""Saving of a run: periodically, before an error or a signal ends it, and despite a temporarily full disk."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from konkanivani.base.console import say
from konkanivani.base.distributed import all_reduce_max
from konkanivani.base.errors import DataError, Interrupted, ResourceError
from konkanivani.training.run import Run

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
