"""Checkpoints and logs of a run."""

from collections.abc import Mapping
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE, Stateful, provenance_part
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.config import TrainConfig
from konkanivani.flags import config_to_text
from konkanivani.memory.monitor import BudgetWatch
from konkanivani.recipe.resume import make_origin, stored_state
from konkanivani.recipe.run_folders import move_aside, move_newer_aside
from konkanivani.recipe.startup import Start
from konkanivani.training.logbook import Logbook
from konkanivani.training.optimizer_state import FullState, OptimizerState, TrainedPart, is_sharded
from konkanivani.training.progress import Progress, Resumed, Utilisation
from konkanivani.training.run import RunLogs, TrainState
from konkanivani.training.step import StepParts


def stateful_parts(start: Start, step: StepParts, state: TrainState) -> Mapping[str, Stateful]:
    """Return the stateful parts of a run by their names in checkpoints, with the provenance of its initial weights."""
    optimizer = OptimizerState(step.model, step.optimizer)
    sharded = is_sharded(step.model)
    model: Stateful = TrainedPart(step.model) if step.architecture.has_base else step.model
    origin = make_origin(start.pretrained, start.resumed, step.architecture, step.model)
    origins: dict[str, Stateful] = {PRETRAINED_STATE: origin} if origin else {}
    return {
        **origins,
        **provenance_part(start.resumed or start.initial),
        "model": FullState(model, step.topology) if sharded else model,
        "optimizer": FullState(optimizer, step.topology) if sharded else optimizer,
        "scaler": step.scaler,
        "progress": state,
        "splits": step.oom_history,
    }


def take_checkpoint_folder(start: Start, run_directory: Path | None) -> Checkpointer:
    """Return the checkpointer; on the first rank, move aside files of an earlier run or of later steps."""
    run = start.config.run
    resumed_step = start.resumed.step if start.resumed else None
    checkpointer = Checkpointer(run.checkpoint_dir, run.keep_checkpoints, resumed_step)
    if run_directory is not None:  # first: a partial file of a killed run is no checkpoint to keep
        checkpointer.discard_unfinished()
    if run_directory is not None and start.resumed:
        assert start.resumed_path is not None  # it is set together with `resumed`
        move_newer_aside(checkpointer, run_directory, start.resumed_path, start.resumed)
        saved = stored_state(start.resumed)
        checkpointer.restore_best(saved.epochs_finished - saved.epochs_without_improvement)
    elif run_directory is not None:
        move_aside(checkpointer, run_directory)
    return checkpointer


def open_logs(
    config: TrainConfig, step: StepParts, state: TrainState, run_directory: Path | None, watch: BudgetWatch
) -> RunLogs:
    """Return the logs of a run; they are written to `run_directory`, on the first rank only."""
    logbook = Logbook(run_directory, resumed=Resumed(state.step, state.skipped_steps, state.epochs_finished))
    logbook.log_settings(config_to_text(config))
    forward = step.forward
    return RunLogs(
        logbook=logbook,
        progress=Progress(state.step, step.total_steps, step.architecture.framing.unit),
        utilisation=Utilisation(step.architecture, forward.device, forward.amp_dtype or torch.float32),
        watch=watch,
    )
