"""Bytes that cross the network in a step, and their time according to a model of the network.

Runs on one machine, without any network.
"""

from benchmarks.measuring.faults.effort import Effort, FaultTable
from konkanivani.base.config import PRESETS, TextConfig, TrainConfig
from konkanivani.model.architecture import architecture_of
from konkanivani.planning.sizes import Ranks, traffic_bytes

WORLDS = (2, 4, 8, 64)
GIGABITS = (1, 10, 100)
LATENCY = 50e-6  # seconds per message; a sum over N ranks in a ring has 2 (N - 1) consecutive messages
MICRO_BATCHES = 4
COMPUTING = 1.0  # seconds of computation in a step


def seconds(sent: int, ranks: Ranks, gigabits: float) -> float:
    """Return the seconds for `sent` bytes from each rank of a ring: bytes / bandwidth + messages x latency."""
    return sent / (gigabits * 1e9 / 8) + 2 * (ranks.world_size - 1) * LATENCY


def measure(_: Effort) -> FaultTable:
    """Return a table with a row per preset, kind of parallelism and world size."""
    rows = []
    for preset, shape in PRESETS.items():
        architecture = architecture_of(TrainConfig(model=shape), TextConfig().vocab_size)
        for sharded in (False, True):
            for world_size in WORLDS:
                ranks = Ranks(world_size, sharded)
                # Sharded weights are gathered for every micro-batch; otherwise gradients are summed once per step.
                sent = traffic_bytes(architecture, ranks) * (MICRO_BATCHES if sharded else 1)
                taken = [seconds(sent, ranks, gigabits) for gigabits in GIGABITS]
                shares = [f"{time:.3f} s, {time / (COMPUTING + time):.0%}" for time in taken]
                rows.append(
                    (preset, "FSDP2" if sharded else "data parallel", str(world_size), f"{sent / 2**20:.0f}", *shares)
                )
    return FaultTable(
        title="What one rank sends a step, and its time and share of a step that computes for 1 s",
        columns=("preset", "way", "ranks", "MiB", *(f"at {gigabits} Gbit/s" for gigabits in GIGABITS)),
        rows=tuple(rows),
        notes=(
            f"A model, not a measurement: a ring, bytes / bandwidth + 2 (N - 1) x {LATENCY * 1e6:.0f} µs, nothing "
            f"hidden behind computing; FSDP2 with {MICRO_BATCHES} micro-batches a step.",
        ),
    )
