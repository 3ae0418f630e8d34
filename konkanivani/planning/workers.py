"""Worker processes that trace steps for a memory plan."""

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from konkanivani.errors import end_worker_with_parent


def two_processes() -> ProcessPoolExecutor:
    """Return a pool of two worker processes: tracing is single-threaded Python, so that two of them halve the time."""
    return ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=_prepare_worker)


def _prepare_worker() -> None:
    """Prepare a forked worker: use one thread, freeze the garbage collector's objects, and end with the parent."""
    end_worker_with_parent()
    # OpenMP's threads do not survive the fork, and waiting for them would deadlock.
    torch.set_num_threads(1)
    # Inherited objects are never freed, so the garbage collector need not scan them.
    gc.freeze()
