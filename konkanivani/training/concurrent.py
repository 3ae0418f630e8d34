"""Micro-batches side by side on a CPU: a thread for each, with its share of the cores.

Two threads that share every operator wait for each other, and both for Python, thousands of times a step; two that take
a micro-batch each have far less to wait for. In memory are then the activations of both, the weights and gradients of
the model once.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Item, Result = TypeVar("Item"), TypeVar("Result")


class Abandoned(RuntimeError):
    """Another micro-batch of the step has failed: this one waits for nothing any more."""


class OrderedAccumulation:
    """Lets micro-batches add to each parameter's `.grad` one after another, in their own order.

    A sum of floats depends on its order: without turns, on which thread happened to be the first.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._next = [0] * len(self._parameters)  # the number of the micro-batch whose turn it is
        self._passed = threading.Condition()
        self._mine = threading.local()
        self._is_abandoned = False

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Backward passes in threads that work within `turn` add their gradients in order."""
        hooks = []
        for index, parameter in enumerate(self._parameters):
            hooks.append(parameter.register_hook(functools.partial(self._wait, index)))
            hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._advance, index)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """This thread works on micro-batch `number`; in the end the turns it has not needed are passed on as well."""
        self._mine.number = number
        yield
        for index in range(len(self._parameters)):
            if self._next[index] <= number:
                self._wait(index)
                self._advance(index)

    def abandon(self) -> None:
        """Threads that wait, now or later, end with Abandoned."""
        with self._passed:
            self._is_abandoned = True
            self._passed.notify_all()

    def _wait(self, index: int, _gradient: torch.Tensor | None = None) -> None:
        number = self._mine.number
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
) -> Iterator[Result]:
    """What work(piece) returns for each piece, in their order, `count` of them at work at a time, each in a thread.

    The piece of each number, from 0, is worked on inside of within(number).

    With the same result as one after another on as few threads, bit for bit: each parameter's gradients are added in
    the pieces' order. An error ends all of them.
    """
    count = min(count, torch.get_num_threads())
    turns, modes = OrderedAccumulation(parameters), _get_current_dispatch_mode_stack()

    def run(number: int, item: Item) -> Result:
        with _inherit_modes(modes), turns.turn(number), within(number):
            return work(item)

    with _divide_threads(count) as limit, turns.ordered(), ThreadPoolExecutor(count, "micro-batch", limit) as threads:
        results = [threads.submit(run, number, item) for number, item in enumerate(items)]
        try:
            for result in results:
                yield result.result()
        finally:
            turns.abandon()
            threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _divide_threads(count: int) -> Iterator[Callable[[], None]]:
    """Operators take their share of the threads; yields what each thread has to call. MKL's number is one for all."""
    threads = torch.get_num_threads()
    limit = functools.partial(torch.set_num_threads, threads // count)
    limit()
    try:
        yield limit
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _inherit_modes(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """The modes that are on in the thread that asked: what counts its tensors counts these too."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield
