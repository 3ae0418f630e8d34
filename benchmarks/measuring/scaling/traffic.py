"""What crosses the network in a step, and how long that takes by a model of the network: no other is needed here."""

from benchmarks.measuring.faults.effort import Effort, FaultTable
from konkanivani.base.config import PRESETS, TextConfig, TrainConfig
from konkanivani.model.architecture import architecture_of
from konkanivani.recipe.planning.ranks import Ranks, traffic_bytes

WORLDS = (2, 4, 8, 64)
GIGABITS = (1, 10, 100)
LATENCY = 50e-6  # seconds a message, of which a sum over N ranks is 2 (N - 1) in a row
MICRO_BATCHES = 4
COMPUTING = 1.0  # seconds of a step that are not the network's


def seconds(sent: int, ranks: Ranks, gigabits: float) -> float:
    """The time of so many bytes sent by each rank of a ring: bytes / bandwidth + messages x latency."""
    return sent / (gigabits * 1e9 / 8) + 2 * (ranks.world_size - 1) * LATENCY


def measure(_: Effort) -> FaultTable:
    """A row for each preset, way and world."""
    rows = []
    for preset, shape in PRESETS.items():
        architecture = architecture_of(TrainConfig(model=shape), TextConfig().vocab_size)
        for sharded in (False, True):
            for world_size in WORLDS:
                ranks = Ranks(world_size, sharded)
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
