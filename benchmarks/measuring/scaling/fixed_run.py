"""Optimizer steps of the minimal preset on a fixed global batch of noise, by one process or as one of several ranks.

    python3 -m benchmarks.measuring.scaling.fixed_run OUTCOME.json UTTERANCES STEPS SHARDED

is one rank; the first rank writes the step times to OUTCOME.json.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.measuring.random_speech import build_speech
from konkanivani.base.command_line import end_script
from konkanivani.base.config import PRESETS, TrainConfig
from konkanivani.base.distributed import ALONE, Topology, read_topology
from konkanivani.base.process_group import process_group
from konkanivani.data.batch import Example, GlobalBatch
from konkanivani.data.batching import partition, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.model.architecture import architecture_of
from konkanivani.training import step as training_step
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import StepParts, train_step

VOCABULARY, MICRO_BATCH, WARM_UP = 1000, 4, 3
MIN_SECONDS, MAX_SECONDS = 3.0, 12.0
TIMEOUT = 600.0


def fixed_speech(utterances: int) -> list[Example]:
    """Return utterances of noise, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    seconds = torch.linspace(MIN_SECONDS, MAX_SECONDS, utterances).tolist()
    return [build_speech(length, VOCABULARY, generator) for length in seconds]


def fixed_global_batch(utterances: int, topology: Topology = ALONE) -> GlobalBatch:
    """Return a rank's share of the global batch, in micro-batches of four.

    Tokens and utterances are counted over all ranks, since the losses are divided by the counts of the whole.
    """
    speeches = fixed_speech(utterances)
    whole = split_into_micro_batches(speeches, same_size(MICRO_BATCH), OUR_TOKENS)
    # The same partition as in training.
    own = partition(np.array([speech.seconds for speech in speeches]), topology.world_size)[topology.rank]
    portion = split_into_micro_batches([speeches[number] for number in own], same_size(MICRO_BATCH), OUR_TOKENS)
    return dataclasses.replace(whole, micro_batches=portion.micro_batches)


def build_parts(topology: Topology = ALONE, sharded: bool = False) -> StepParts:
    """Return the step parts of the minimal preset on the CPU."""
    config, cpu = dataclasses.replace(TrainConfig(), model=PRESETS["minimal"]), torch.device("cpu")
    return build_step_parts(
        config, architecture_of(config, VOCABULARY), cpu, 1000, layout=StateLayout(topology, sharded)
    )


class SumClock:
    """Timer of the gradient sum over ranks.

    The sum does not overlap with computation, so that its time adds to the step time.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._sum = training_step.sum_tensors

    def __call__(self, topology: Topology, tensors: list[torch.Tensor], bucket: torch.Tensor) -> None:
        started = time.perf_counter()
        self._sum(topology, tensors, bucket)
        self.seconds.append(time.perf_counter() - started)


def main(outcome: str, utterances: str, steps: str, sharded: str) -> None:
    """Run one rank: warm up and time the steps; the first rank writes the median and the share of the sums."""
    topology, clock = read_topology(), SumClock()
    # Replaced in the module that calls it, where the name is looked up.
    training_step.sum_tensors = clock
    with process_group(topology, TIMEOUT):
        parts, global_batch = build_parts(topology, sharded == "True"), fixed_global_batch(int(utterances), topology)
        for step in range(WARM_UP):
            train_step(parts, global_batch, step)
        # The warm-up does not count.
        clock.seconds.clear()
        times = []
        for step in range(int(steps)):
            started = time.perf_counter()
            train_step(parts, global_batch, WARM_UP + step)
            times.append(time.perf_counter() - started)
    if topology.is_first:
        found = {"step": statistics.median(times), "sums": sum(clock.seconds) / sum(times)}
        Path(outcome).write_text(json.dumps(found | {"audio": global_batch.audio_seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_script(0)
