"""Composition root: every part of a run, built from its settings and the checkpoint that it begins with."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from konkanivani.assembly import build_front_end, build_step_parts
from konkanivani.budget import MIB
from konkanivani.checkpoint import Checkpoint, Checkpointer, first_free_name
from konkanivani.command_line import parse_share
from konkanivani.config import TrainConfig
from konkanivani.data.batching import EpochPlanner, choose_subset, plan_evaluation, same_size
from konkanivani.data.checking import (
    Limits,
    check_any_usable,
    check_utterances,
    evaluation_limits,
    training_limits,
)
from konkanivani.data.loading import EvaluationSpeech, LoaderConfig, TrainingSpeech, WindowStream
from konkanivani.data.manifest import Manifest, read_manifest
from konkanivani.data.rejections import Rejections
from konkanivani.data.selection import Selection
from konkanivani.data.surroundings import read_surroundings
from konkanivani.data.token_counts import Digits
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.errors import CheckpointError, DataError, ResourceError, UsageError
from konkanivani.flags import config_from_text, config_to_text
from konkanivani.logbook import Logbook
from konkanivani.memory.available import BudgetWatch, enforce_budget
from konkanivani.memory.monitor import keep_holes_out, resident_mib
from konkanivani.memory.plan import MemoryPlan
from konkanivani.model.asr import KonkaniVaniASR, parameter_count
from konkanivani.optimizer import OptimizerState
from konkanivani.preflight import announce_card, choose_device
from konkanivani.run_plan import SpeechSizes, plan_sentences, resolve_plan
from konkanivani.start import Start
from konkanivani.text import Tokenizer, normalize_text, train_tokenizer
from konkanivani.training.interruption import Interruption
from konkanivani.training.progress import Progress
from konkanivani.training.run import EvaluationSet, Run
from konkanivani.training.state import TrainState
from konkanivani.training.step import StepParts, recomputing
from konkanivani.weights import take_over

MOST_TOKENIZER_TEXTS = 500_000


@dataclass(frozen=True)
class RunSpeech:
    """What a run trains and validates on, the tokenizer of its texts, and what is left out."""

    tokenizer: Tokenizer
    train: TrainingSpeech
    validation: EvaluationSet | None
    rejections: Rejections


def build_run(start: Start) -> Run:
    """Every part of the run, the checkpoint's state loaded."""
    config, resident_before = start.config, resident_mib()
    device = choose_device(config.run.device)
    announce_card(device)
    run_directory = make_run_directory(config)
    speech = build_speech(start, device, run_directory / "rejected.jsonl")
    planner = EpochPlanner(speech.train.utterances.durations, config.window_size, config.run.seed)
    plan = plan_memory(start, speech, device) if config.is_planned else None
    front_end = build_front_end(config, device)
    step = build_step_parts(config, speech.tokenizer.size, device, _total_steps(config, planner), front_end)
    if plan:
        step = keep_to_plan(step, plan, resident_before)
    state = TrainState()
    stateful = {
        "model": step.model,
        "optimizer": OptimizerState(step.model, step.optimizer),
        "scaler": step.scaler,
        "progress": state,
        "splits": step.splits,
    }
    if start.resumed:
        forgotten = {"splits"} if config.memory.replan else set()
        load_states(start.resumed, {name: part for name, part in stateful.items() if name not in forgotten})
        _fit_cursor(state, start.resumed, planner)
    if start.initial:
        _take_weights(start.initial, step.model, speech.tokenizer)
    _tell_plan(config, step, speech.train, planner)
    if plan:
        print(plan_sentences(plan, blocks=len(step.model.blocks)), flush=True)
    checkpointer = Checkpointer(config.run.checkpoint_dir, config.run.keep_checkpoints)
    if not start.resumed:
        _move_aside(checkpointer, run_directory)
    limits = plan.size_limits() if plan else same_size(config.data.batch_size)
    validation = speech.validation
    if plan and validation:
        validation = validation.within(plan.validation_seconds)
    logbook = Logbook(run_directory, resumed_step=state.step)
    logbook.log_settings(config_to_text(config))
    return Run(
        config=config.run,
        config_text=config_to_text(config),
        tokenizer=speech.tokenizer,
        state=state,
        step=step,
        windows=WindowStream(speech.train, planner, limits, _loader(config, device), speech.rejections),
        plan=plan,
        watch=BudgetWatch(plan.budget / MIB if plan and device.type == "cpu" else float("inf"), resident_before),
        validation=validation,
        decode=greedy_ctc,
        stateful=stateful,
        plan_digest=planner.digest(),
        checkpointer=checkpointer,
        lock=start.lock,
        logbook=logbook,
        interruption=Interruption(),
        progress=Progress(state.step, step.total_steps),
    )


def build_speech(start: Start, device: torch.device, rejected: Path) -> RunSpeech:
    """The run's speech and tokenizer; what cannot be used is told and listed in the file `rejected`."""
    config = start.config
    if config.data.train_manifest is None:
        raise UsageError(
            "No --train_manifest is given. Give your JSONL manifest, or write the built-in corpus with "
            "python3 training_scripts/prepare_builtin_corpus.py and give data/builtin/train.jsonl."
        )
    rejections = Rejections(rejected, parse_share(config.data.max_rejected, "--max_rejected"))
    manifest = read_manifest(config.data.train_manifest)
    rejections.begin(manifest)
    tokenizer = choose_tokenizer(start, manifest)
    train = build_training_speech(config, manifest, tokenizer, rejections)
    validation = None
    if config.data.valid_manifest:
        validation = build_evaluation_set(config.data.valid_manifest, config, tokenizer, device, rejections)
    return RunSpeech(tokenizer, train, validation, rejections)


def plan_memory(start: Start, speech: RunSpeech, device: torch.device) -> MemoryPlan:
    """The run's memory plan: the checkpoint's, or a new one."""
    validation = speech.validation
    return resolve_plan(
        start.config,
        speech.tokenizer.size,
        device,
        train=sizes_of(speech.train.utterances, slowest=min(speech.train.speeds)),
        validation=sizes_of(validation.speech.utterances, slowest=1.0) if validation else None,
        stored=start.resumed.states.get("plan") if start.resumed else None,
    )


def keep_to_plan(step: StepParts, plan: MemoryPlan, resident_before: float) -> StepParts:
    """The step with the plan's recomputed blocks, its planned peaks shown, its budget enforced where that can be."""
    device = step.forward.device
    if device.type == "cpu":
        keep_holes_out()
    step.forward.monitor.expect(plan.planned_peaks(before=resident_before if device.type == "cpu" else 0.0))
    enforce_budget(device, plan.budget, plan.context)
    return recomputing(step, plan.recompute_policy())


def _move_aside(checkpointer: Checkpointer, run_directory: Path) -> None:
    """Moves an old run's files aside, once all that can go wrong with the new one's beginning has gone right."""
    checkpoints = checkpointer.move_aside()
    if checkpoints:
        print(f"The old checkpoints are now in {checkpoints}.", flush=True)
    logs = [path for path in run_directory.iterdir() if path.name != "rejected.jsonl"]
    if logs:
        aside = first_free_name(run_directory.parent, f"{run_directory.name}_replaced")
        aside.mkdir()
        for path in logs:
            path.rename(aside / path.name)
        print(f"The old logs of this run's name are now in {aside}.", flush=True)


def make_run_directory(config: TrainConfig) -> Path:
    """The run's log folder, made."""
    directory = Path(config.run.log_dir) / config.run.run_name
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"The log folder {directory} cannot be made: {error.strerror}. Give another --log_dir."
        ) from None
    if not os.access(directory, os.W_OK):
        raise ResourceError(f"The log folder {directory} cannot be written. Give another --log_dir.")
    return directory


def choose_tokenizer(start: Start, manifest: Manifest) -> Tokenizer:
    """The checkpoint's tokenizer where there is one that serves, else one trained on the manifest's texts."""
    if start.resumed:
        return Tokenizer(start.resumed.tokenizer)
    text = start.config.text
    texts = [normalized for normalized in (normalize_text(t, text.digits) for t in texts_of(manifest)) if normalized]
    if not texts:
        raise DataError(f"No transcript of {manifest.path} has any text after normalisation.")
    if start.initial and config_from_text(start.initial.config).text == text:
        tokenizer = Tokenizer(start.initial.tokenizer)
        if not any(Tokenizer.unknown in tokenizer.encode(text) for text in texts):
            return tokenizer
    return train_tokenizer(texts, text.tokenizer_type, text.vocab_size)


def texts_of(manifest: Manifest) -> Iterator[str]:
    """The transcripts that a tokenizer is trained on: all, of very many rows some, evenly apart."""
    if len(manifest) <= MOST_TOKENIZER_TEXTS:
        return (utterance.text for utterance in manifest)
    places = np.linspace(0, len(manifest) - 1, MOST_TOKENIZER_TEXTS).astype(np.int64)
    return (manifest[int(place)].text for place in places)


def build_training_speech(
    config: TrainConfig, manifest: Manifest, tokenizer: Tokenizer, rejections: Rejections
) -> TrainingSpeech:
    """The utterances to train on; those left out are added to the rejections."""
    limits = training_limits(config.data, config.augment.speed_perturbation)
    kept = choose_usable(manifest, tokenizer, limits, config.text.digits, rejections)
    if config.data.train_subset < 100:
        kept = kept.part(choose_subset(len(kept), config.data.train_subset, config.run.seed))
    return TrainingSpeech(
        kept,
        tokenizer,
        config.augment.speed_perturbation,
        config.run.seed,
        manifest.path,
        read_surroundings(config.augment, config.run.seed),
    )


def choose_usable(
    manifest: Manifest, tokenizer: Tokenizer, limits: Limits, digits: Digits, rejections: Rejections
) -> Selection:
    """The manifest's utterances that keep to the limits; the others are added to the rejections."""
    kept, left_out = check_utterances(manifest, tokenizer, limits, digits)
    rejections.add_many(left_out)
    check_any_usable(kept, left_out)
    return kept


def sizes_of(utterances: Selection, slowest: float) -> SpeechSizes:
    """The utterances' sizes, played at the slowest speed."""
    return SpeechSizes(utterances, utterances.durations / slowest, utterances.tokens.astype(np.int64))


def build_evaluation_set(
    path: str, config: TrainConfig, tokenizer: Tokenizer, device: torch.device, rejections: Rejections
) -> EvaluationSet:
    """The manifest's utterances laid into batches for evaluation; those left out are added to the rejections."""
    limits, digits = evaluation_limits(config.data), config.text.digits
    manifest = read_manifest(path)
    rejections.begin(manifest)
    kept = choose_usable(manifest, tokenizer, limits, digits, rejections)
    plan = plan_evaluation(kept.durations, config.data.validation_batch_seconds)
    return EvaluationSet(EvaluationSpeech(kept, tokenizer, path), plan, _loader(config, device), rejections)


def load_states(checkpoint: Checkpoint, stateful: dict) -> None:
    """Loads every part's state; a CheckpointError where one is missing or does not fit."""
    for name, part in stateful.items():
        if name == "splits" and name not in checkpoint.states:
            continue  # of a version that remembered none
        if name not in checkpoint.states:
            raise CheckpointError(
                f"The checkpoint holds no state of the {name} (an averaged one does not), and resuming needs it. "
                "Begin anew from its weights with --init_from."
            )
        try:
            if name == "scaler" and not checkpoint.states[name]:
                continue  # saved without loss scaling, gone on with it
            part.load_state_dict(checkpoint.states[name])
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"The checkpoint's {name} cannot be loaded: {reason} Use another checkpoint."
            ) from None


def _fit_cursor(state: TrainState, checkpoint: Checkpoint, planner: EpochPlanner) -> None:
    """Begins the epoch again where the data is not what the cursor was counted in."""
    if checkpoint.plan_digest != planner.digest() and state.window:
        print(
            f"The training data or its order has changed since the checkpoint: epoch {state.epoch + 1} begins again.",
            flush=True,
        )
        state.window = 0


def _take_weights(initial: Checkpoint, model: KonkaniVaniASR, tokenizer: Tokenizer) -> None:
    heads = config_from_text(initial.config).model.attention_heads
    takeover = take_over(model, initial.states["model"], heads, initial.tokenizer == tokenizer.model)
    print(f"Weights from the checkpoint of step {initial.step}:\n{takeover.summary()}", flush=True)


def _total_steps(config: TrainConfig, planner: EpochPlanner) -> int:
    steps = config.run.epochs * planner.windows_per_epoch()
    return steps if config.run.max_steps is None else min(steps, config.run.max_steps)


def _loader(config: TrainConfig, device: torch.device) -> LoaderConfig:
    return LoaderConfig(config.data.num_workers, config.data.loader_timeout, pin_memory=device.type == "cuda")


def _tell_plan(config: TrainConfig, step: StepParts, speech: TrainingSpeech, planner: EpochPlanner) -> None:
    model, hours = config.model, planner.durations.sum() / 3600
    cut = f"{config.data.batch_size} x {config.data.gradient_accumulation_steps}"
    cut = str(config.window_size) if config.data.batch_size == "auto" else cut
    amp = {None: "", torch.float16: " in fp16", torch.bfloat16: " in bf16"}[step.forward.amp_dtype]
    print(
        f"{model.encoder_type} {model.d_model}, {model.encoder_layers}+{model.decoder_layers} layers, "
        f"{parameter_count(step.model) / 1e6:.1f} M parameters, {step.model.vocab_size} tokens, "
        f"on {step.forward.device}{amp}; "
        f"{len(speech.utterances)} utterances, {hours:.2f} h; {cut} utterances a step, "
        f"{planner.windows_per_epoch()} steps an epoch, "
        f"{step.total_steps} in all.",
        flush=True,
    )
