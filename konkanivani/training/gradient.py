"""Three ways to the gradient of a window: of one process alone, summed over ranks, of weights that ranks share.

Where memory runs out, all of it is done again in smaller micro-batches. Ranks agree that all have their portion of the
gradient before they sum it: one that ran out of memory inside of a sum would leave the others waiting in it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial

import torch

from konkanivani.base.distributed import all_reduce_max, gather, new_bucket, raise_rank_lost, sum_tensors
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.randomness import derive_seed, dropout_seed, seed_step
from konkanivani.data.batch import Batch, Example, collate
from konkanivani.data.text import SpecialTokens
from konkanivani.memory.recovery import MicroBatchPlan, OomAttempt, OomRetry, Outcome
from konkanivani.model.asr import KonkaniVaniASR, trained_parameters
from konkanivani.model.losses import LossCounts, LossSums
from konkanivani.training.concurrent import map_ordered
from konkanivani.training.sharding import full_tensor
from konkanivani.training.step import GradientTask, StepGradient, StepParts, loss_counts


def local_gradient(task: GradientTask) -> StepGradient | None:
    """The gradient of a process that trains alone; see ComputeGradient."""
    parts = task.parts
    for attempt in (attempts := OomRetry(task.plan, parts.oom_history, partial(drop_gradient, parts))):
        with attempt:
            totals = accumulate(task, attempt.plan)
            attempt.result = None if totals is None else finish_gradient(parts, totals)
    return attempts.result and dataclasses.replace(attempts.result, splits=attempts.retries)


def summed_gradient(task: GradientTask) -> StepGradient | None:
    """The sum of all ranks' gradients; each rank has all weights and some micro-batches; see ComputeGradient."""
    parts, topology = task.parts, task.parts.topology
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
        for sizes in gather(topology, parts.oom_history.sizes()):
            parts.oom_history.learn(sizes)
    if attempts.result is None:
        return None
    totals, bucket = attempts.result
    sum_tensors(topology, [parameter.grad for parameter in trained_parameters(parts.model)], bucket)
    sum_tensors(topology, [totals], totals)
    return dataclasses.replace(finish_gradient(parts, totals), splits=attempts.retries)


def _bucket(parts: StepParts, plan: MicroBatchPlan, totals: torch.Tensor) -> torch.Tensor:
    """The room in which this rank's gradient will be summed: then it has all the memory that the step needs."""
    if not plan.micro_batches:  # a rank without utterances
        parts.scaler.scale(totals)  # only this makes the scale exist
        for parameter in trained_parameters(parts.model):
            parameter.grad = torch.zeros_like(parameter)
    return new_bucket([parameter.grad for parameter in trained_parameters(parts.model)])


def sharded_gradient(task: GradientTask) -> StepGradient | None:
    """The gradient of weights sharded over the ranks, which take each step to its end together; see ComputeGradient.

    A rank that runs out of memory would leave the others waiting in a collective, so all ranks end with
    RestartAfterOom, and the size is recorded. A ResourceError names an utterance that does not fit even alone.
    """
    parts = task.parts
    plan = parts.oom_history.fit_to_memory(task.plan)
    passes = all_reduce_max(parts.topology, max(1, len(plan.micro_batches)))
    with raise_rank_lost():
        with (attempt := OomAttempt(plan)):
            attempt.result = accumulate(dataclasses.replace(task, is_interrupted=lambda: False), plan)
            # A pass too few would leave the others waiting for this rank's part of the weights.
            for _ in range(passes - len(plan.micro_batches)):  # infinite counts make of any loss a zero
                task.forward_and_backward(parts, dummy_batch(parts.model), LossCounts(math.inf, math.inf))
        totals = attempt.result_or_raise(parts.oom_history)
        sum_tensors(parts.topology, [totals], totals)
        return finish_gradient(parts, totals, full_tensor)


def dummy_batch(model: KonkaniVaniASR) -> Batch:
    """The smallest batch that the model takes: half a second of nothing, and one token."""
    waveform = torch.zeros(SAMPLE_RATE // 2, dtype=next(model.parameters()).dtype)
    return collate([Example("silence", waveform, [1], None)], SpecialTokens(start=1, end=1))


def accumulate(task: GradientTask, plan: MicroBatchPlan) -> torch.Tensor | None:
    """The micro-batches' summed losses (terms,); their gradients, scaled, in the parameters' `.grad`.

    The losses are divided by the counts of the whole window, so the gradient does not depend on how it is cut and
    divided. None, and no gradient there, if interrupted.
    """
    parts = dataclasses.replace(task.parts, forward=task.parts.forward.with_plan(plan))
    seed_step(parts.seed, task.step, parts.topology.rank)
    parts.model.train()
    parts.forward.refresh_weights()
    parts.optimizer.zero_grad()
    terms, seed = len(parts.forward.objective.terms), torch.initial_seed()
    totals = torch.zeros(terms, dtype=torch.float64, device=parts.forward.device)

    def masks(number: int) -> AbstractContextManager[None]:
        # Elsewhere than on a CPU dropout draws from the device's own generator.
        return dropout_seed(derive_seed(seed, number)) if parts.forward.device.type == "cpu" else nullcontext()

    work = partial(task.forward_and_backward, parts, counts=loss_counts(task.global_batch))
    if plan.concurrent_micro_batches > 1:
        results = map_ordered(
            plan.concurrent_micro_batches, work, plan.micro_batches, masks, trained_parameters(parts.model)
        )
    else:
        results = one_after_another(work, plan.micro_batches, masks)
    with closing(results):
        for _ in plan.micro_batches:
            if task.is_interrupted():
                results.close()
                parts.optimizer.zero_grad()
                return None
            totals += torch.stack(next(results))
            parts.forward.monitor.maybe_empty_cache()
    return totals


def one_after_another(
    work: Callable[[Batch], LossSums],
    micro_batches: Sequence[Batch],
    within: Callable[[int], AbstractContextManager[None]],
) -> Iterator[LossSums]:
    """What work(batch) returns for each micro-batch; that of each number, from 0, is worked on in within(number)."""
    for number, batch in enumerate(micro_batches):
        with within(number):
            sums = work(batch)
        yield sums


def finish_gradient(
    parts: StepParts, totals: torch.Tensor, whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> StepGradient:
    """The gradient in the parameters' `.grad`, unscaled and clipped, of a window of these summed losses (terms,).

    `whole` makes the norm of all ranks of that of this rank's part.
    """
    parts.scaler.unscale_(parts.optimizer)
    norm = whole(torch.nn.utils.clip_grad_norm_(trained_parameters(parts.model), parts.schedule.max_grad_norm))
    norm = norm.to(totals.device)
    scale = parts.scaler.scale(torch.ones_like(norm))  # get_scale() would wait for the device once more
    *sums, norm, scale = parts.read(torch.cat([totals, torch.stack([norm, scale]).double()]))
    return StepGradient(tuple(sums), norm, scale)


def drop_gradient(parts: StepParts) -> None:
    """Takes back a gradient that was not finished: a part of it would count twice."""
    parts.optimizer.zero_grad()
    if parts.scaler.is_enabled():
        # Set to what it is, the scale forgets that a gradient was unscaled; only scale() makes it exist.
        parts.scaler.scale(torch.zeros((), device=parts.forward.device))
        parts.scaler.update(parts.scaler.get_scale())
