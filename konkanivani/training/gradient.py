"""Gradient of a global batch: in a single process, summed over ranks, or with sharded weights.

If memory runs out, all micro-batches are computed again with smaller ones. Ranks agree that each has computed its part
of the gradient before they sum it, because a rank that ran out of memory during the all-reduce would block the others.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import cast

import torch

from konkanivani.base.distributed import all_reduce_max, full_tensor, gather, new_bucket, raise_rank_lost, sum_tensors
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.randomness import derive_seed, dropout_seed, seed_step
from konkanivani.data.batch import Batch, Example, collate
from konkanivani.data.text import SpecialTokens
from konkanivani.memory.recovery import MicroBatchPlan, OomAttempt, OomRetry, Outcome
from konkanivani.model.asr import SpeechNetwork, trained_parameters
from konkanivani.model.losses import LossCounts, LossSums
from konkanivani.training.concurrent import map_ordered
from konkanivani.training.optimizer import gradient_of
from konkanivani.training.step import GradientTask, StepGradient, StepParts, loss_counts


def local_gradient(
    task: GradientTask, read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist
) -> StepGradient | None:
    """Return the gradient in a single process; see ComputeGradient.

    `read` copies the numbers of the step from the device; in a memory trace, tensors have no values to copy.
    """
    parts = task.parts
    attempts: OomRetry[StepGradient] = OomRetry(task.plan, parts.oom_history, partial(drop_gradient, parts))
    for attempt in attempts:
        with attempt:
            totals = accumulate(task, attempt.plan)
            attempt.result = None if totals is None else finish_gradient(parts, totals, read=read)
    if attempts.result is None:
        return None
    return dataclasses.replace(attempts.result, splits=attempts.retries)


def summed_gradient(task: GradientTask) -> StepGradient | None:
    """Return the sum of all ranks' gradients; each rank has all weights and some micro-batches; see ComputeGradient."""
    parts = task.parts
    topology = task.parts.topology
    attempts: OomRetry[tuple[torch.Tensor, torch.Tensor]] = OomRetry(
        task.plan,
        parts.oom_history,
        partial(drop_gradient, parts),
        lambda outcome: Outcome(all_reduce_max(topology, outcome)),
    )
    for attempt in attempts:
        with attempt:
            totals = accumulate(task, attempt.plan)
            attempt.result = None if totals is None else (totals, _bucket(parts, attempt.plan, totals))
    if attempts.retries:
        # Any rank may get a micro-batch of that size next.
        for sizes in gather(topology, parts.oom_history.sizes()):
            parts.oom_history.learn(sizes)
    if attempts.result is None:
        return None
    totals, bucket = attempts.result
    sum_tensors(topology, [gradient_of(parameter) for parameter in trained_parameters(parts.model)], bucket)
    sum_tensors(topology, [totals], totals)
    return dataclasses.replace(finish_gradient(parts, totals), splits=attempts.retries)


def _bucket(parts: StepParts, plan: MicroBatchPlan, totals: torch.Tensor) -> torch.Tensor:
    """Return the buffer of the all-reduce, allocated first, so that this rank has all memory that the step needs."""
    if not plan.micro_batches:  # a rank without utterances
        parts.scaler.scale(totals)  # initializes the scale, which GradScaler creates lazily
        for parameter in trained_parameters(parts.model):
            parameter.grad = torch.zeros_like(parameter)
    return new_bucket([gradient_of(parameter) for parameter in trained_parameters(parts.model)])


def sharded_gradient(task: GradientTask) -> StepGradient | None:
    """Return the gradient of weights that are sharded over the ranks; see ComputeGradient.

    The ranks complete each step together: a rank that ran out of memory would block the others in a collective.
    Therefore the size is recorded and all ranks end with RestartAfterOom. A ResourceError names an utterance that does
    not fit even alone.
    """
    parts = task.parts
    plan = parts.oom_history.fit_to_memory(task.plan)
    passes = all_reduce_max(parts.topology, max(1, len(plan.micro_batches)))
    with raise_rank_lost():
        attempt: OomAttempt[torch.Tensor] = OomAttempt(plan)
        with attempt:
            attempt.result = accumulate(dataclasses.replace(task, is_interrupted=lambda: False), plan)
            # Every rank makes the same number of passes: in each pass the others need this rank's shards.
            for _ in range(passes - len(plan.micro_batches)):  # infinite counts make the loss 0
                task.forward_and_backward(parts, dummy_batch(parts.model), LossCounts(math.inf, math.inf))
        totals = attempt.result_or_raise(parts.oom_history)
        sum_tensors(parts.topology, [totals], totals)
        return finish_gradient(parts, totals, full_tensor)


def dummy_batch(model: SpeechNetwork) -> Batch:
    """Return the smallest batch that the model accepts: half a second of silence, and one token."""
    waveform = torch.zeros(SAMPLE_RATE // 2, dtype=next(model.parameters()).dtype)
    return collate([Example("silence", waveform, [1], None)], SpecialTokens(start=1, end=1))


def accumulate(task: GradientTask, plan: MicroBatchPlan) -> torch.Tensor | None:
    """Run forward and backward of all micro-batches; return their summed losses (terms,), or None if interrupted.

    The scaled gradients are in the parameters' `.grad`; there are none after an interruption. The losses are divided by
    the counts of the whole global batch, so the gradient does not depend on its division into micro-batches and ranks.
    """
    parts = dataclasses.replace(task.parts, forward=task.parts.forward.with_plan(plan))
    seed_step(parts.seed, task.step, parts.topology.rank)
    parts.model.train()
    parts.forward.refresh_weights()
    parts.optimizer.zero_grad()
    terms = len(parts.forward.objective.terms)
    seed = torch.initial_seed()
    totals = torch.zeros(terms, dtype=torch.float64, device=parts.forward.device)

    def masks(number: int) -> AbstractContextManager[None]:
        # Only on a CPU: elsewhere dropout draws from the generator of the device.
        return dropout_seed(derive_seed(seed, number)) if parts.forward.device.type == "cpu" else nullcontext()

    work = partial(task.forward_and_backward, parts, counts=loss_counts(task.global_batch))
    results: AbstractContextManager[Iterator[LossSums]] = nullcontext(map(work, plan.micro_batches))
    if plan.concurrent_micro_batches > 1:
        trained = trained_parameters(parts.model)
        results = closing(map_ordered(plan.concurrent_micro_batches, work, plan.micro_batches, masks, trained))
    with results as sums:
        for number in range(len(plan.micro_batches)):
            if task.is_interrupted():
                break
            # Concurrent micro-batches set their masks in their own threads.
            with masks(number):
                totals += torch.stack(next(sums))
            parts.monitor.maybe_empty_cache()
        else:
            return totals
    parts.optimizer.zero_grad()
    return None


def finish_gradient(
    parts: StepParts,
    totals: torch.Tensor,
    whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist,
) -> StepGradient:
    """Unscale and clip the gradient in the parameters' `.grad`; return it with the summed losses (terms,) of `totals`.

    `whole` reduces the norm of this rank's shards to the norm over all ranks; `read` copies numbers from the device.
    """
    # GradScaler uses nothing of an optimizer but its `param_groups`.
    parts.scaler.unscale_(cast("torch.optim.Optimizer", parts.optimizer))
    norm = whole(torch.nn.utils.clip_grad_norm_(trained_parameters(parts.model), parts.schedule.max_grad_norm))
    norm = norm.to(totals.device)
    scale = parts.scaler.scale(torch.ones_like(norm))  # get_scale() would synchronize with the device once more
    # One read for all numbers of the step.
    numbers = read(torch.cat([totals, torch.stack([norm, scale]).double()]))
    return StepGradient(tuple(numbers[:-2]), norm=numbers[-2], scale=numbers[-1])


def drop_gradient(parts: StepParts) -> None:
    """Discard an incomplete gradient, which would otherwise be added to the next attempt's."""
    parts.optimizer.zero_grad()
    if parts.scaler.is_enabled():
        # update() with the current scale resets the scaler's record of unscale_(). scale() must run once before it,
        # because GradScaler creates the scale lazily.
        parts.scaler.scale(torch.zeros((), device=parts.forward.device))
        parts.scaler.update(parts.scaler.get_scale())
