"""Devices and ranks: choice of device and precision, topology, collectives and the process group.

torchrun starts the processes and sets their environment variables; torch.distributed exchanges the data. A single
process has a world size of 1 and every operation returns at once. Numbers and objects are exchanged with gloo between
CPUs, even when training on GPUs, so that these operations never wait for a GPU.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from konkanivani.command_line import GRACE_SECONDS, silence_output
from konkanivani.config import MemoryConfig
from konkanivani.errors import KonkaniVaniError, ReportedByOtherRank, ResourceError, UsageError

# --------------------
# Choice of device and precision, and the check that this PyTorch build supports the GPU.


TORCH_RANGE = ">=2.10,<2.15"  # as in setup.cfg; a test checks that they agree
TORCHAUDIO_RANGE = ">=2.10,<2.12"
OLDEST_OF_DEFAULT_BUILD = (7, 5)  # CUDA 13 supports Turing and later, the CUDA 12.6 build also Maxwell
OLDEST_OF_ALL_BUILDS = (5, 0)


def choose_device(name: str) -> torch.device:
    """Return the device to train on.

    Raises UsageError if there is no usable GPU for --device cuda, and ResourceError if this PyTorch build does not
    support the GPU.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UsageError("--device cuda: PyTorch finds no usable NVIDIA GPU. Use --device cpu, or repair the driver.")
    # auto falls back to the CPU.
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    check_gpu_architecture(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list(), torch.__version__
    )
    torch.set_float32_matmul_precision("high")  # TF32 if the GPU supports it
    # cuDNN builds a plan for each new shape: 90 % of the step time, and 55 MiB of host memory (docs/experiments.md).
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", torch.cuda.current_device())  # with index: PyTorch's memory limit needs it


def choose_precision(config: MemoryConfig, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype, or None for full precision."""
    if not config.mixed_precision:
        return None
    if device.type == "cpu":
        return torch.bfloat16
    # torch.cuda.is_bf16_supported() is also true if PyTorch only emulates bf16.
    if config.amp_dtype == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UsageError(
            f"--amp_dtype bf16: {torch.cuda.get_device_name(device)} does not support bf16 (compute capability "
            "below 8.0). Use fp16."
        )
    return torch.bfloat16 if config.amp_dtype == "bf16" else torch.float16


def check_gpu_architecture(
    name: str, capability: tuple[int, int], architectures: list[str], torch_version: str
) -> None:
    """Raise ResourceError if the installed PyTorch contains no code for this GPU.

    Args:
        name: GPU name, for the message.
        capability: as torch.cuda.get_device_capability() returns it.
        architectures: as torch.cuda.get_arch_list() returns them.
        torch_version: for the message.

    Without this check the first kernel fails with "no kernel image is available", without a remedy.
    """
    if any(_runs_on(architecture, capability) for architecture in architectures):
        return
    supported = " ".join(architectures) or "no GPU code at all"
    problem = (
        f"{name} has architecture sm_{capability[0]}{capability[1]}; the installed PyTorch {torch_version} "
        f"contains {supported}."
    )
    raise ResourceError(f"{problem} {_remedy(capability)}")


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture such as "sm_86", "sm_90a" or "compute_120" runs on a GPU.

    A binary (sm) runs on its own and later minor versions of its major version, PTX (compute) on all later versions;
    code ending in "a" runs on its own architecture only.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if parts is None:
        return False
    kind = parts[1]
    built_for = (int(parts[2]), int(parts[3]))
    suffix = parts[4]
    if suffix == "a":
        return capability == built_for
    # Suffix "f" (family) is treated like a binary: it does not reach the next major version.
    is_later = built_for <= capability
    return is_later and (built_for[0] == capability[0] or (kind == "compute" and not suffix))


def _remedy(capability: tuple[int, int]) -> str:
    """Return the remedy as a sentence, with the exact command."""
    if capability < OLDEST_OF_ALL_BUILDS:
        return "No PyTorch build supports this GPU any more: use --device cpu, or another GPU."
    install = f'{sys.executable} -m pip install --force-reinstall "torch{TORCH_RANGE}" "torchaudio{TORCHAUDIO_RANGE}"'
    if capability < OLDEST_OF_DEFAULT_BUILD:
        return f"Install the build for older GPUs: {install} --index-url https://download.pytorch.org/whl/cu126"
    return (
        f"Install the default build, which is for newer GPUs and needs NVIDIA driver 580 or newer: {install}. "
        "If that build does not support the GPU either, the GPU is newer than this release of KonkaniVani: "
        "use --device cpu."
    )


# --------------------
# Rank and collective operations of the training processes.


Item = TypeVar("Item")

BUCKET_BYTES = 25 * 2**20  # gradients per all-reduce, and the memory of their copy


class RankLost(ResourceError):
    """Lost connection to another rank, which has ended or hangs; `process_group` finds out which rank, and why."""


@dataclass(frozen=True)
class Topology:
    """Position of this process: `rank` of `world_size`, and `local_rank` of `local_world_size` on its machine.

    `restarts` counts how often torchrun has restarted the ranks, `max_restarts` is its limit. A single rank started by
    torchrun (`is_launched`) runs the code of several ranks: torchrun can restart it, and one GPU suffices to test it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0
    max_restarts: int = 0
    is_launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reads and writes for all ranks."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether this process was started without torchrun."""
        return self.world_size == 1 and not self.is_launched


ALONE = Topology()


def read_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """Return the topology from torchrun's environment variables; ALONE if they are not set.

    Raises UsageError if they do not describe a valid rank.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return ALONE
    names = (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    )
    try:
        numbers = [int(environment.get(name, "1" if name.endswith("WORLD_SIZE") else "0")) for name in names]
        rank, world_size, local_rank, local_world_size, restarts, max_restarts = numbers
        topology = Topology(rank, world_size, local_rank, local_world_size, restarts, max_restarts, is_launched=True)
    except ValueError:
        # Not a number: fails the range check below, with the same message.
        topology = Topology(rank=-1)
    is_place = 0 <= topology.rank < topology.world_size and 0 <= topology.local_rank < topology.local_world_size
    if not is_place:
        values = " ".join(f"{name}={environment[name]}" for name in names[:4] if name in environment)
        raise UsageError(
            f"The environment variables {values} do not describe a valid rank. Start with torchrun, or unset them."
        )
    return topology


@contextlib.contextmanager
def raise_rank_lost() -> Iterator[None]:
    """Convert the errors of torch.distributed for a lost connection to RankLost; other errors pass through."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises a plain RuntimeError, which only its text identifies.
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        reason = str(error).splitlines()[0]
        raise RankLost(
            f"The connection to another rank was lost ({reason:.200}). Resume from the newest checkpoint with "
            "--resume auto."
        ) from None


def gather_numbers(topology: Topology, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, by rank; each rank must pass the same count."""
    if topology.is_single_process:
        return [list(numbers)]
    # A CPU tensor selects gloo also in a group with NCCL.
    own_numbers = torch.tensor(numbers, dtype=torch.int64)
    all_ranks = [torch.empty_like(own_numbers) for _ in range(topology.world_size)]
    with raise_rank_lost():
        dist.all_gather(all_ranks, own_numbers)
    return [rank_numbers.tolist() for rank_numbers in all_ranks]


def all_reduce_max(topology: Topology, number: int) -> int:
    """Return the maximum of `number` over ranks."""
    return max(rank_number for (rank_number,) in gather_numbers(topology, [number]))


def gather(topology: Topology, item: Item) -> list[Item]:
    """Return the items of all ranks, by rank, on every rank; an item must be picklable."""
    if topology.is_single_process:
        return [item]
    # all_gather_object replaces every item of this list.
    items = [item] * topology.world_size
    with raise_rank_lost():
        dist.all_gather_object(items, item)
    return items


def broadcast_from_rank0(topology: Topology, make: Callable[[], Item]) -> Item:
    """Call `make` on rank 0 only and return its result on every rank; it must be picklable."""
    if topology.is_single_process:
        return make()
    # broadcast_object_list writes the received object into this list.
    box: list[Any] = [make() if topology.is_first else None]
    with raise_rank_lost():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def sum_tensors(topology: Topology, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
    """Replace each tensor by its sum over ranks, bit-identical on all ranks, one bucket at a time.

    Args:
        tensors: all of one dtype, on one device.
        bucket: (N,) workspace of the same dtype and device. A tensor larger than it is summed in place.

    No other memory is allocated here, so a rank that has allocated its bucket does not run out of memory.
    """
    if topology.is_single_process:
        return
    with raise_rank_lost():
        for group in _group_into_buckets(tensors, bucket.numel()):
            # A single tensor needs no copy into the bucket.
            if len(group) == 1 and group[0].is_contiguous():
                dist.all_reduce(group[0])
                continue
            flat = bucket[: sum(tensor.numel() for tensor in group)]
            parts = flat.split([tensor.numel() for tensor in group])
            for part, tensor in zip(parts, group, strict=True):
                # One all-reduce per bucket: the latency of a collective would dominate for small tensors.
                part.view_as(tensor).copy_(tensor)
            dist.all_reduce(flat)
            for part, tensor in zip(parts, group, strict=True):
                tensor.copy_(part.view_as(tensor))


def new_bucket(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bucket for `sum_tensors`: the size of all tensors together, at most BUCKET_BYTES."""
    first = tensors[0]
    return first.new_empty(min(sum(tensor.numel() for tensor in tensors), BUCKET_BYTES // first.element_size()))


def _group_into_buckets(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Group the tensors in order: at most `size` elements per group, or one larger tensor."""
    group: list[torch.Tensor] = []
    bucket_size = 0
    for tensor in tensors:
        if group and bucket_size + tensor.numel() > size:
            yield group
            group = []
            bucket_size = 0
        group.append(tensor)
        bucket_size += tensor.numel()
    if group:
        yield group


def check_same(topology: Topology, digests: Mapping[str, str]) -> None:
    """Raise one UsageError on every rank if a digest differs from rank 0's; it names the rank and the digest."""
    ranks = gather(topology, dict(digests))
    differing = [
        f"rank {rank} has different {name}"
        for rank, rank_digests in enumerate(ranks)
        for name, digest in rank_digests.items()
        if digest != ranks[0][name]
    ]
    if differing:
        raise UsageError(
            f"The ranks disagree: {', '.join(differing)} than rank 0. Start all ranks with the same command "
            "line, source code, manifests and device type."
        )


@contextlib.contextmanager
def print_on_rank0(topology: Topology) -> Iterator[None]:
    """Discard the output of the block on stdout and stderr, except on rank 0."""
    with contextlib.nullcontext() if topology.is_first else silence_output():
        yield


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded; a collective in that case."""
    # Only a DTensor has this method; its class takes 0.7 s to import, which commands without ranks need not wait for.
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return gather() if gather else tensor


# --------------------
# Process group of the ranks: common start and end, and one report of the first error.


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


def _error_of_another_rank(store: dist.Store, rank: int, code: int) -> ReportedByOtherRank | None:
    """Record this rank's error as the first cause; if another rank was first, return the error to raise instead."""
    own_record = f"{rank} {code}"
    # compare_set is atomic: exactly one rank becomes the first cause.
    first = store.compare_set(FIRST_CAUSE_KEY, "", own_record).decode()
    return None if first == own_record else ReportedByOtherRank(int(first.split()[1]))


def _cause_of(error: BaseException, topology: Topology, store: dist.Store, timeout: float) -> BaseException:
    """Return the exception to raise: the error itself, ReportedByOtherRank, or an error that names a lost rank."""
    cause = error
    with contextlib.suppress(RuntimeError):  # the lost rank may have hosted the store
        code = error.exit_code if isinstance(error, KonkaniVaniError) else 1
        if isinstance(error, RankLost):
            cause = _error_of_lost_rank(error, topology, store, timeout)
        else:
            cause = _error_of_another_rank(store, topology.rank, code) or error
        store.add(QUERIES_KEY, 1)
    return cause


def _error_of_lost_rank(error: RankLost, topology: Topology, store: dist.Store, timeout: float) -> KonkaniVaniError:
    """Return ReportedByOtherRank if another rank reported a cause, else an error that names the silent ranks."""
    store.set(f"{PRESENT_KEY}{topology.rank}", "")
    until = time.monotonic() + ROLL_CALL_SECONDS
    while time.monotonic() < until and not store.check([FIRST_CAUSE_KEY]):
        time.sleep(0.05)
    if reported := _error_of_another_rank(store, topology.rank, ResourceError.exit_code):
        return reported
    missing = [str(rank) for rank in range(topology.world_size) if not store.check([f"{PRESENT_KEY}{rank}"])]
    if not missing:
        return error
    subject = f"Rank {missing[0]} is" if len(missing) == 1 else f"Ranks {', '.join(missing)} are"
    return ResourceError(
        f"{subject} not responding: killed (perhaps by the system, for lack of memory), disconnected, or stuck "
        f"for --rank_timeout {timeout:g} s. Resume from the newest checkpoint with --resume auto."
    )
