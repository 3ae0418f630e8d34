"""Concurrent micro-batches on a CPU: one thread per micro-batch, each with its share of the cores.

Two threads that share every operator wait for each other, and both for Python, thousands of times per step; two threads
with one micro-batch each wait much less. Memory then contains the activations of both, but weights and gradients of the
model only once.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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
        self._mine = threading.local()
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
        self._mine.number = number
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
        number = self._mine.number
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
