"""Initial state of a run: a resumed checkpoint or initial weights, and the steps that train only a new head."""

import sys
from collections.abc import Mapping
from dataclasses import replace

import torch

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import TrainConfig, TuningConfig
from konkanivani.base.console import say
from konkanivani.base.errors import UsageError
from konkanivani.base.flags import config_from_text
from konkanivani.data.batching import EpochPlanner
from konkanivani.data.fingerprint import CorpusChange, Fingerprint
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.model.adapters import reset_output_heads
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.transfer import transfer_weights
from konkanivani.recipe.build_step import build_forward
from konkanivani.recipe.corpus import remembered_corpus
from konkanivani.recipe.start import Start
from konkanivani.training.checkpoint.checkpoint import Checkpoint, Stateful, check_finite, check_states, load_states
from konkanivani.training.optimizer import resolve_warmup
from konkanivani.training.sharding import is_sharded
from konkanivani.training.state import TrainState
from konkanivani.training.step import StepParts


def count_steps(config: TrainConfig, planner: EpochPlanner) -> int:
    """Return the number of optimizer steps of the whole run."""
    return limit_steps(config, resolved(config.run.epochs) * planner.global_batches_per_epoch())


def limit_steps(config: TrainConfig, steps: int) -> int:
    """Return `steps`, or --max_steps if that is less."""
    return min(steps, config.run.max_steps or sys.maxsize)


def settle_stages(config: TrainConfig, planner: EpochPlanner) -> TrainConfig:
    """Return the configuration with `freeze_steps` set; by default, a new head trains alone during the warm-up."""
    if config.tuning.freeze_steps is not None:
        return config
    steps = resolve_warmup(config.optimizer, count_steps(config, planner)) if config.tuning.new_tokenizer else 0
    return replace(config, tuning=replace(config.tuning, freeze_steps=steps))


def whole_model(start: Start, step: StepParts) -> torch.nn.Module:
    """Return the step's model, or an unsharded copy of its architecture on the CPU if it is sharded."""
    if not is_sharded(step.model):
        return step.model
    return build_forward(start.config, step.architecture, torch.device("cpu")).model


def load_weights(
    start: Start,
    tokenizer: Vocabulary,
    planner: EpochPlanner,
    step: StepParts,
    state: TrainState,
    stateful: Mapping[str, Stateful],
    corpus: Fingerprint,
) -> None:
    """Load the checkpoint named by --resume or --init_from, if any, into the parts of the run."""
    if start.resumed:
        check_states(start.resumed, {*stateful, "plan", "corpus", "schedule"})
        # The out-of-memory limits ("splits") of the former memory plan do not apply to a new plan.
        forgotten = {"splits"} if start.config.memory.replan else set()
        load_states(start.resumed, {name: part for name, part in stateful.items() if name not in forgotten})
        remembered = remembered_corpus(start)
        change = None if remembered is None else remembered.change_to(corpus)
        _fit_cursor(state, start.resumed, planner, change)
    if start.initial:
        whole = whole_model(start, step)
        # The rules of the flags reject --init_from with --pretrained.
        assert isinstance(whole, KonkaniVaniASR)
        _take_weights(start.initial, start.config.tuning, stateful["model"], whole, tokenizer)


def _fit_cursor(state: TrainState, checkpoint: Checkpoint, planner: EpochPlanner, change: CorpusChange | None) -> None:
    """Restart the epoch if its plan differs from the checkpoint's; print how the corpus has changed."""
    is_replanned = checkpoint.plan_digest != planner.digest()
    # At the start of an epoch, no utterance has been consumed that a new plan could repeat.
    is_restarted = is_replanned and state.consumed > 0
    if is_restarted:
        epoch = f"epoch {state.epoch + 1} is restarted"
        state.begin_epoch()
    else:
        epoch = f"epoch {state.epoch + 1} has a new plan" if is_replanned else "the order of the epoch is unchanged"
    if change is not None:
        planned = f"{epoch} with a new plan" if is_restarted else epoch
        say(f"The training corpus has changed since the checkpoint: {change.sentence()}; {planned}.")
    elif is_restarted:
        say(f"The training data or its order has changed since the checkpoint: {epoch}.")


def _take_weights(
    initial: Checkpoint, tuning: TuningConfig, stateful: Stateful, whole: KonkaniVaniASR, tokenizer: Vocabulary
) -> None:
    """Copy the checkpoint weights that fit into `whole`, and load them into `stateful` if that is sharded."""
    config = config_from_text(initial.config)
    # Low-rank products are merged into the weights, since the new run may have no adapters.
    stored = {name: value for name, value in initial.states["model"].items() if isinstance(value, torch.Tensor)}
    _, weights = architecture_of(config, initial.vocab_size).plain(stored)
    transfer = transfer_weights(
        whole, weights, config.model, initial.tokenizer == tokenizer.model and not tuning.new_tokenizer
    )
    # If no encoder block fits, the shapes are too different for a useful transfer.
    if not any(name.startswith("encoder.blocks") for name in transfer.taken + transfer.cut):
        raise UsageError(
            "No block of the --init_from checkpoint fits the model shape given: it may be smaller, never "
            "larger. Omit --preset and the model shape flags to use the checkpoint's shape, or omit "
            "--init_from."
        )
    if tuning.new_tokenizer:
        reset_output_heads(whole)
    # A value beyond 65504 becomes inf in float16.
    if tuning.frozen_dtype == "half":
        check_finite(f"the checkpoint of step {initial.step}, rounded to half precision,", whole.state_dict())
    # A sharded model distributes the whole state to its ranks.
    if stateful is not whole:
        stateful.load_state_dict(whole.state_dict())
    print(f"Weights from the checkpoint of step {initial.step}:\n{transfer.summary()}", flush=True)
