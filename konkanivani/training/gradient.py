"""Gradient of a global batch, from its micro-batches in sequence or concurrently.

Intra-operator parallelism synchronises the threads at every operator, thousands of times per step; threads with one
micro-batch each wait much less. Memory then contains the activations of both, but weights and gradients of the model
only once.

If memory runs out in a micro-batch, all are computed again by a plan that needs less memory (`OomRetry` in
memory/recovery.py), except with sharded weights. Ranks agree that each has computed its part of the gradient before
they sum it, because a rank that ran out of memory during the all-reduce would block the others.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from konkanivani.data.batching import Batch, Example, collate
from konkanivani.data.text import SpecialTokens
from konkanivani.distributed import all_reduce_max, full_tensor, gather, new_bucket, raise_rank_lost, sum_tensors
from konkanivani.memory.recovery import MicroBatchPlan, OomAttempt, OomRetry, Outcome
from konkanivani.models.asr import LossCounts, LossSums, SpeechNetwork, trained_parameters
from konkanivani.randomness import derive_seed, dropout_seed, seed_step
from konkanivani.training.optimizer_state import gradient_of
from konkanivani.training.step import GradientTask, StepGradient, StepParts, loss_counts

# --------------------
# Concurrent micro-batches on a CPU: one thread per micro-batch, each with its share of the cores.


Item = TypeVar("Item")
Result = TypeVar("Result")


class Abandoned(RuntimeError):
    """Raised in waiting threads after another micro-batch of the step has failed."""


class OrderedAccumulation:
    """Synchronization that adds the gradients of concurrent micro-batches to each `.grad` in micro-batch order.

    A floating-point sum depends on its order; without this, it would depend on thread timing.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._next = [0] * len(self._parameters)  # per parameter, the micro-batch whose gradient is added next
        self._passed = threading.Condition()
        self._thread_state = threading.local()
        self._is_abandoned = False

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Install the hooks that order gradients of backward passes in threads inside of `turn`."""
        hooks = []
        for index, parameter in enumerate(self._parameters):
            # The tensor hook runs before the gradient is added to `.grad`, the post-accumulate hook after it.
            hooks.append(parameter.register_hook(functools.partial(self._wait, index)))
            hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._advance, index)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Bind this thread to micro-batch `number`; at the end, release the turns of parameters without a gradient."""
        # Thread-local: hooks run in the thread that called backward(), since all tensors are on the CPU.
        self._thread_state.number = number
        yield
        # Parameters without a gradient in this micro-batch run no hook, so their turn is released here.
        for index in range(len(self._parameters)):
            if self._next[index] <= number:
                self._wait(index)
                self._advance(index)

    def abandon(self) -> None:
        """Make all threads that wait, now or later, raise Abandoned."""
        with self._passed:
            self._is_abandoned = True
            self._passed.notify_all()

    def _wait(self, index: int, _gradient: torch.Tensor | None = None) -> None:
        number = self._thread_state.number
        # Checked without the lock first: only this thread can advance a turn that is its own.
        if self._next[index] != number or self._is_abandoned:
            with self._passed:
                self._passed.wait_for(lambda: self._is_abandoned or self._next[index] == number)
        if self._is_abandoned:
            raise Abandoned("Another micro-batch of this step failed.")

    def _advance(self, index: int, _parameter: torch.Tensor | None = None) -> None:
        with self._passed:
            self._next[index] += 1
            self._passed.notify_all()


def map_ordered(
    count: int,
    work: Callable[[Item], Result],
    items: Sequence[Item],
    within: Callable[[int], contextlib.AbstractContextManager[None]],
    parameters: Iterable[torch.nn.Parameter],
) -> Generator[Result, None, None]:
    """Yield work(item) for each item in order, with `count` items in parallel, one per thread.

    Item number n (from 0) is processed inside of within(n). The result is bitwise equal to sequential
    processing with the same number of threads per item, because each parameter's gradients are added in the order of
    the items. An error ends all threads.
    """
    count = min(count, torch.get_num_threads())
    turns = OrderedAccumulation(parameters)
    modes = _get_current_dispatch_mode_stack()

    def run(number: int, item: Item) -> Result:
        # Dispatch modes are thread-local.
        with _inherit_modes(modes), turns.turn(number), within(number):
            return work(item)

    with _divide_threads(count) as limit, turns.ordered(), ThreadPoolExecutor(count, "micro-batch", limit) as threads:
        results = [threads.submit(run, number, item) for number, item in enumerate(items)]
        try:
            for result in results:
                yield result.result()
        finally:
            # Before shutdown: a thread that waits for its turn would otherwise never end.
            turns.abandon()
            threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _divide_threads(count: int) -> Iterator[Callable[[], None]]:
    """Limit each thread to its share of the cores; yield the function that each thread must call."""
    threads = torch.get_num_threads()
    limit = functools.partial(torch.set_num_threads, threads // count)
    # MKL has one thread limit for the whole process, so the caller needs it as well.
    limit()
    try:
        yield limit
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _inherit_modes(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Activate the caller's dispatch modes in this thread, so that a mode that counts tensors also counts these."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


# --------------------
# Gradient of a global batch: in a single process, summed over ranks, or with sharded weights.


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
            attempt.result = None if totals is None else finish_gradient(parts, totals, read_numbers=read)
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
    # A rank cannot retry alone from here on. Nothing large is allocated: the buffer exists, and clipping needs one
    # number per parameter.
    sum_tensors(topology, [gradient_of(parameter) for parameter in trained_parameters(parts.model)], bucket)
    sum_tensors(topology, [totals], totals)
    return dataclasses.replace(finish_gradient(parts, totals), splits=attempts.retries)


def _bucket(parts: StepParts, plan: MicroBatchPlan, totals: torch.Tensor) -> torch.Tensor:
    """Return the buffer of the all-reduce, allocated within the attempt: it is the last memory that the step needs."""
    if not plan.micro_batches:  # a rank without utterances
        parts.scaler.scale(totals)  # initializes the scale, which GradScaler creates lazily
        for parameter in trained_parameters(parts.model):
            parameter.grad = torch.zeros_like(parameter)
    return new_bucket([gradient_of(parameter) for parameter in trained_parameters(parts.model)])


def sharded_gradient(task: GradientTask) -> StepGradient | None:
    """Return the gradient of weights that are sharded over the ranks; see ComputeGradient.

    The ranks complete each step together: a rank that ran out of memory would block the others in a collective.
    Therefore the size of the failed micro-batch is recorded and all ranks end with RestartAfterOom; torchrun
    --max_restarts or the user resumes from the last checkpoint. A ResourceError names an utterance that does not fit
    even alone.
    """
    parts = task.parts
    plan = parts.oom_history.fit_to_memory(task.plan)
    passes = all_reduce_max(parts.topology, max(1, len(plan.micro_batches)))
    with raise_rank_lost():
        attempt: OomAttempt[torch.Tensor] = OomAttempt(plan)
        with attempt:
            # Never interrupted: every rank makes the same number of passes, as the others need its shards in each.
            attempt.result = accumulate(dataclasses.replace(task, is_interrupted=lambda: False), plan)
            for _ in range(passes - len(plan.micro_batches)):  # infinite counts make the loss 0
                task.forward_and_backward(parts, dummy_batch(parts.model), LossCounts(math.inf, math.inf))
        totals = attempt.result_or_raise(parts.oom_history)
        sum_tensors(parts.topology, [totals], totals)
        return finish_gradient(parts, totals, full_tensor)


def dummy_batch(model: SpeechNetwork) -> Batch:
    """Return a small batch that the model accepts, of one utterance with one token."""
    return collate([Example("silence", model.example_input(), [1], None)], SpecialTokens(start=1, end=1))


def accumulate(task: GradientTask, plan: MicroBatchPlan) -> torch.Tensor | None:
    """Run forward and backward of all micro-batches; return their summed losses (terms,), or None if interrupted.

    The scaled gradients are in the parameters' `.grad`; there are none after an interruption. The losses are divided by
    the counts of the whole global batch, so the gradient does not depend on its division into micro-batches and ranks,
    except for rounding and, with dropout, for the masks.
    """
    parts = dataclasses.replace(task.parts, forward=task.parts.forward.with_plan(plan))
    seed_step(parts.seed, task.step, parts.topology.rank)
    parts.model.train()
    parts.forward.refresh_weights()
    parts.optimizer.zero_grad()
    terms = len(parts.forward.objective.terms)
    # The seed of this step, which seed_step has set. On a CPU each micro-batch draws from a generator of its own, so
    # that masks do not depend on the order of concurrent ones.
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
    reduce_norm: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    read_numbers: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist,
) -> StepGradient:
    """Unscale and clip the gradient in the parameters' `.grad`; return it with the summed losses (terms,) of `totals`.

    `reduce_norm` reduces the norm of this rank's shards to the norm over all ranks; `read_numbers` copies a tensor from
    the device.
    """
    # GradScaler uses nothing of an optimizer but its `param_groups`.
    parts.scaler.unscale_(cast("torch.optim.Optimizer", parts.optimizer))
    norm = reduce_norm(torch.nn.utils.clip_grad_norm_(trained_parameters(parts.model), parts.schedule.max_grad_norm))
    norm = norm.to(totals.device)
    scale = parts.scaler.scale(torch.ones_like(norm))  # get_scale() would synchronize with the device once more
    # One read for all numbers of the step.
    numbers = read_numbers(torch.cat([totals, torch.stack([norm, scale]).double()]))
    return StepGradient(tuple(numbers[:-2]), norm=numbers[-2], scale=numbers[-1])


def drop_gradient(parts: StepParts) -> None:
    """Free an incomplete gradient before the next attempt, and reset GradScaler's record of unscale_()."""
    parts.optimizer.zero_grad()
    if parts.scaler.is_enabled():
        # update() with the current scale resets the scaler's record of unscale_(). scale() must run once before it,
        # because GradScaler creates the scale lazily.
        parts.scaler.scale(torch.zeros((), device=parts.forward.device))
        parts.scaler.update(parts.scaler.get_scale())
