"""Composition root: builds all parts of a run from its settings and the checkpoint that it starts from."""

from dataclasses import replace

import numpy as np

from konkanivani.config import TrainConfig
from konkanivani.console import Report, count, peak_text, say, silent
from konkanivani.data.batching import EpochPlanner, SizeLimit, largest_batch_bytes
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.shape_grid import choose_grid, measure_padding, micro_batch_sizes
from konkanivani.data.staging import CudaCopies, StagingBuffers
from konkanivani.decoding.decode import greedy_decode
from konkanivani.distributed import choose_device
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import announce_card, resident_mib
from konkanivani.memory.plan import MemoryPlan
from konkanivani.recipe.planned_step import (
    budget_watch,
    build_planned_step,
    learn_sizes,
    micro_batch_limits,
    print_plan,
)
from konkanivani.recipe.resume import (
    load_weights,
    schedule_rates,
    settle_stages,
    stateful_parts,
    take_checkpoint_folder,
)
from konkanivani.recipe.run_data import RunData, build_speech, loader_config, more_tokens
from konkanivani.recipe.run_folders import listing_rejected, make_run_directory, open_logs
from konkanivani.recipe.startup import Start
from konkanivani.training.graphs import GraphedGradient
from konkanivani.training.interruption import Interruption
from konkanivani.training.run import Run, RunStorage, TrainingData, TrainState
from konkanivani.training.step import StepParts
from konkanivani.training.validation import EvaluationSet


def build_run(start: Start, report: Report = silent) -> Run:
    """Build all parts of the run and load the checkpoint's state; `report` is called after each stage.

    Paths and disk space have been checked by `resolve_start`; data is checked here first, then the memory plan is made.
    """
    resident_before = resident_mib()
    device = choose_device(start.config.run.device)
    announce_card(device)
    run_directory = make_run_directory(start.config.run) if start.topology.is_first else None
    # A dry run keeps no list of rejected utterances; a new run renames the list of an earlier one.
    with listing_rejected(None if start.config.run.dry_run else run_directory, bool(start.resumed)) as rejected:
        speech = build_speech(start, device, rejected)
        report("data", speech.sentence())
        planner = speech.epoch_planner()
        start = replace(start, config=(config := settle_stages(speech.config, planner)))
        step, plan = build_planned_step(start, device, speech, planner, resident_before, report)
        state = TrainState()
        stateful = stateful_parts(start, step, state)
        load_weights(start, speech.tokenizer, planner, step, state, stateful, speech.corpus)
        # The schedule of a resumed run depends on the state just loaded.
        step = replace(step, rates=schedule_rates(start, config, planner, state))
    learn_sizes(config, step)
    print_plan(config, step, speech.train, planner)
    limits = micro_batch_limits(config, step, plan)
    learn_shapes(config, step, speech.train, planner, limits)
    # From here on, files of an earlier run are moved: all checks have passed.
    checkpointer = take_checkpoint_folder(start, run_directory)
    data = TrainingData(
        tokenizer=speech.tokenizer,
        corpus=speech.corpus,
        global_batches=_global_batches(start, speech, planner, limits, staged_loader(config, step, speech, limits)),
        validation=validation_within(plan, speech.validation),
    )
    logs = open_logs(config, step, state, run_directory, budget_watch(plan, device, resident_before))
    return Run(
        config=config,
        state=state,
        step=step,
        data=data,
        plan=plan,
        decode=greedy_decode(step.architecture, speech.tokenizer),
        storage=RunStorage(checkpointer, stateful, planner.digest(), start.locks),
        logs=logs,
        interruption=Interruption(start.topology, checkpointer.discard_unfinished),
        topology=start.topology,
    )


def _global_batches(
    start: Start, speech: RunData, planner: EpochPlanner, limits: tuple[SizeLimit, ...], loader: LoaderConfig
) -> GlobalBatchStream:
    return GlobalBatchStream(speech.train, planner, limits, loader, speech.rejections, start.topology)


def staged_loader(config: TrainConfig, step: StepParts, speech: RunData, limits: tuple[SizeLimit, ...]) -> LoaderConfig:
    """Return the data loader settings for training; on a GPU, batches are copied through buffers of the largest's size.

    Validation repeats the same sizes in each epoch, for which PyTorch's cache of page-locked memory suffices.
    """
    device = step.forward.device
    loader = loader_config(config, device)
    if device.type != "cuda":
        return loader
    utterances = speech.train.utterances
    longest = float(utterances.durations.max()) / min(speech.train.speeds)
    most_tokens = int(utterances.tokens.max()) + more_tokens(config)
    limits = tuple(replace(limit, utterances=min(limit.utterances, config.global_batch_size)) for limit in limits)
    size = largest_batch_bytes(limits, longest, most_tokens, step.architecture.framing.unit)
    return replace(loader, staging=StagingBuffers(size, CudaCopies(device)))


def validation_within(plan: MemoryPlan | None, validation: EvaluationSet | None) -> EvaluationSet | None:
    """Return the validation with batches that fit the memory plan, without a search if the decoder does not fit."""
    if plan is None or validation is None:
        return validation
    if not plan.has_memory_for_search:
        needed = peak_text(plan.validation)
        budget = peak_text(plan.budget - plan.context)
        say(
            f"Validation computes only the loss: to generate texts, it would need {needed} of {budget}. For error "
            "rates, use konkanivani evaluate --device cpu."
        )
    return replace(validation.within(plan.validation_seconds), has_search=plan.has_memory_for_search)


def learn_shapes(
    config: TrainConfig, step: StepParts, speech: TrainDataset, planner: EpochPlanner, limits: tuple[SizeLimit, ...]
) -> None:
    """Choose the shapes to capture, from the utterances; with --cuda_graphs, print why nothing is captured."""
    if config.memory.cuda_graphs == "off":
        return
    gradient = step.compute_gradient
    if not isinstance(gradient, GraphedGradient):
        print(
            "CUDA graphs: not used; they need a GPU, one process, speech, and weights on the GPU in full precision.",
            flush=True,
        )
        return
    framing = step.architecture.framing
    has_fixed_length = framing.feature_length(1) == framing.feature_length(SAMPLE_RATE)
    tokens = speech.utterances.tokens.astype(np.int64) + more_tokens(config)
    sizes = micro_batch_sizes(planner, tokens, limits, speech.speeds, has_fixed_length)
    longest = int(np.ceil(planner.durations.max() / min(speech.speeds) * SAMPLE_RATE))
    gradient.grid = choose_grid(sizes, longest)
    padding = measure_padding(gradient.grid, sizes)
    print(
        f"CUDA graphs (not yet run on a GPU by the project): {count(len(gradient.grid.shapes), 'shape')}, "
        f"{padding.added_frames:.1%} more frames; {padding.uncaptured:.1%} of the frames in other shapes, without "
        "graphs. Front end, SpecAugment and CTC run between the graphs.",
        flush=True,
    )
