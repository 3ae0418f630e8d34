"""Process group of the ranks: common start and end, and one report of the first error."""

import contextlib
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from konkanivani.base.command_line import GRACE_SECONDS
from konkanivani.base.distributed import RankLost, Topology, raise_rank_lost
from konkanivani.base.errors import KonkaniVaniError, ReportedByOtherRank, ResourceError

STARTS_KEY = "konkanivani/starts_"
SEEN_KEY = "konkanivani/seen"
FOUND_KEY = "konkanivani/found_"
FIRST_CAUSE_KEY = "konkanivani/first_cause"
PRESENT_KEY = "konkanivani/here_"
QUERIES_KEY = "konkanivani/asked"
ROLL_CALL_SECONDS = 3.0  # time for the remaining ranks to register after a connection was lost


@contextlib.contextmanager
def process_group(topology: Topology, timeout: float) -> Iterator[None]:
    """Run the block inside an initialized process group; operations between ranks wait at most `timeout` seconds.

    An error ends all ranks. Only the rank that failed first reports it; the others raise ReportedByOtherRank with the
    same exit code. If a rank dies without a message or hangs, one of the remaining ranks names it.
    """
    if topology.is_single_process:
        yield
        return
    limit = timedelta(seconds=timeout)
    with raise_rank_lost():
        common, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
        # torchrun keeps its store across restarts, with the addresses of ended ranks, to which the new ranks would
        # connect forever. TORCHELASTIC_RESTART_COUNT is not the same on all machines, hence `_attempt`.
        store = dist.PrefixStore(f"konkanivani/{_attempt(common, topology, timeout)}", common)
        # gloo exchanges numbers between CPUs, NCCL the gradients on GPUs.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        yield
    except BaseException as error:
        cause = _cause_of(error, topology, store, timeout)
        if topology.is_first:  # without torchrun rank 0 hosts the store: keep it until all ranks have read the cause
            until = time.monotonic() + GRACE_SECONDS / 2
            with contextlib.suppress(RuntimeError):
                while store.add(QUERIES_KEY, 0) < topology.world_size and time.monotonic() < until:
                    time.sleep(0.02)
        if isinstance(cause, ReportedByOtherRank):
            # torchrun kills all ranks when one ends: the reporting rank should be that one. Its SIGTERM, with the
            # default action, cuts this sleep short.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(GRACE_SECONDS)
        if cause is error:
            raise
        raise cause from None
    dist.destroy_process_group()


def _attempt(store: dist.Store, topology: Topology, timeout: float) -> int:
    """Return the number of this start: the same on all ranks, and different from every earlier start.

    Each rank counts its starts in the store. Rank 0 publishes the counts that it reads; a rank that finds its own
    current count there belongs to this start of rank 0 and returns rank 0's count. Rank 0 waits for all of them.
    """
    own = store.add(f"{STARTS_KEY}{topology.rank}", 1)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if topology.is_first:
            # add(key, 0) reads a counter without blocking; get() would wait for the key.
            seen = [store.add(f"{STARTS_KEY}{rank}", 0) for rank in range(topology.world_size)]
            store.set(SEEN_KEY, " ".join(map(str, seen)))
            if store.add(f"{FOUND_KEY}{own}", 0) == topology.world_size - 1:
                return own
        elif store.check([SEEN_KEY]):
            first, *_ = seen = [int(count) for count in store.get(SEEN_KEY).split()]
            if len(seen) == topology.world_size and seen[topology.rank] == own:
                store.add(f"{FOUND_KEY}{first}", 1)
                return first
        time.sleep(0.02)
    raise RankLost(
        f"Rank {topology.rank} waited {timeout:g} s for all {topology.world_size} ranks. Check that torchrun "
        "runs on every machine with the same --rdzv_endpoint, or use a longer --rank_timeout."
    )


def _told_by_another(store: dist.Store, rank: int, code: int) -> ReportedByOtherRank | None:
    """Record this rank's error as the first cause; if another rank was first, return the error to raise instead."""
    mine = f"{rank} {code}"
    # compare_set is atomic: exactly one rank becomes the first cause.
    first = store.compare_set(FIRST_CAUSE_KEY, "", mine).decode()
    return None if first == mine else ReportedByOtherRank(int(first.split()[1]))


def _cause_of(error: BaseException, topology: Topology, store: dist.Store, timeout: float) -> BaseException:
    """Return the exception to raise: the error itself, ReportedByOtherRank, or an error that names a lost rank."""
    cause = error
    with contextlib.suppress(RuntimeError):  # the lost rank may have hosted the store
        code = error.exit_code if isinstance(error, KonkaniVaniError) else 1
        if isinstance(error, RankLost):
            cause = _error_of_lost_rank(error, topology, store, timeout)
        else:
            cause = _told_by_another(store, topology.rank, code) or error
        store.add(QUERIES_KEY, 1)
    return cause


def _error_of_lost_rank(error: RankLost, topology: Topology, store: dist.Store, timeout: float) -> KonkaniVaniError:
    """Return ReportedByOtherRank if another rank reported a cause, else an error that names the silent ranks."""
    store.set(f"{PRESENT_KEY}{topology.rank}", "")
    until = time.monotonic() + ROLL_CALL_SECONDS
    while time.monotonic() < until and not store.check([FIRST_CAUSE_KEY]):
        time.sleep(0.05)
    if told := _told_by_another(store, topology.rank, ResourceError.exit_code):
        return told
    missing = [str(rank) for rank in range(topology.world_size) if not store.check([f"{PRESENT_KEY}{rank}"])]
    if not missing:
        return error
    named = f"Rank {missing[0]} is" if len(missing) == 1 else f"Ranks {', '.join(missing)} are"
    return ResourceError(
        f"{named} not responding: killed (perhaps by the system, for lack of memory), disconnected, or stuck "
        f"for --rank_timeout {timeout:g} s. Resume from the newest checkpoint with --resume auto."
    )
