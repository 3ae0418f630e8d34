"""Global batches trained by several processes, as the ranks of a run do, and the resulting weights.

Run with OUTCOME.pt CASES.json, it is one of the ranks that `train_in_ranks` starts; each rank trains many cases.
"""

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from konkanivani.command_line import end_script
from konkanivani.data.batching import GlobalBatch, partition
from konkanivani.data.loading import NO_UTTERANCES
from konkanivani.distributed import ALONE, Topology, process_group, read_topology
from konkanivani.training.optimizer_state import FullState
from konkanivani.training.step import StepParts, train_step
from tests.fork_server import Job, fork_server
from tests.invariants.failing import ERRORS, fail_at, failing_forward
from tests.invariants.parts import KINDS, double_parts, global_batch, speeches
from tests.t5 import parts as t5
from tests.timeouts import PROCESS_TIMEOUT

TEXT_KINDS = {"T5": "full", "T5, LoRA": "LoRA"}  # with the trained part


@dataclass(frozen=True)
class Case:
    """Training run of `steps` steps in micro-batches of `batch_size`, its weights sharded over the ranks or not.

    `recompute` as --gradient_checkpointing. `out_of_memory_rank` runs out of memory in its third micro-batch.
    `own_divisor` is the negative control: each rank divides its losses by its own number of tokens. `kind` is one of
    KINDS or TEXT_KINDS.
    """

    steps: int
    batch_size: int
    sharded: bool = False
    recompute: str = "never"
    out_of_memory_rank: int | None = None
    own_divisor: bool = False
    kind: str = "conformer"


@dataclass(frozen=True)
class Trained:
    """Weights and losses of a case, and the number of its retries."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    splits: int


def utterance_count(step: int) -> int:
    """Return the number of utterances of a step: eight, five in every fifth step, one in the third step."""
    return 1 if step == 2 else 5 if step % 5 == 4 else 8


def share_of(step: int, case: Case, topology: Topology) -> GlobalBatch:
    """Return the share of a rank in the global batch of a step, with the counts of the whole."""
    is_text = case.kind in TEXT_KINDS
    spoken = t5.pairs(utterance_count(step), seed=step) if is_text else speeches(utterance_count(step), seed=step)
    split = t5.global_batch if is_text else global_batch
    whole = split(spoken, case.batch_size)
    own = partition(np.array([speech.seconds for speech in spoken]), topology.world_size)[topology.rank]
    portion = split([spoken[number] for number in own], case.batch_size) if len(own) else NO_UTTERANCES
    if case.own_divisor:
        return portion if len(own) else dataclasses.replace(portion, tokens=1, utterances=1)
    return dataclasses.replace(whole, micro_batches=portion.micro_batches)


def parts_of(case: Case, topology: Topology) -> StepParts:
    if case.kind in TEXT_KINDS:
        mode = TEXT_KINDS[case.kind]
        parts = t5.t5_parts(mode, t5.t5_config(case.recompute), topology=topology, sharded=case.sharded)
    else:
        parts = speech_parts(case, topology)
    if case.out_of_memory_rank == topology.rank and not topology.is_single_process:
        return failing_forward(parts, fail_at(2), ERRORS["cpu"])
    return parts


def speech_parts(case: Case, topology: Topology) -> StepParts:
    return double_parts(KINDS[case.kind], case.recompute, topology=topology, sharded=case.sharded)


def train_case(case: Case, topology: Topology = ALONE) -> Trained:
    """Train the case as one rank; the first rank returns the whole weights."""
    parts = parts_of(case, topology)
    reports = [train_step(parts, share_of(step, case, topology), step) for step in range(case.steps)]
    weights = FullState(parts.model, topology).state_dict()
    return Trained(dict(weights), [report.loss for report in reports], sum(report.splits for report in reports))


def environments_of(world_size: int) -> list[dict[str, str]]:
    """Return the environment of each rank on this machine, as torchrun sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared = {**os.environ, **shared, "LOCAL_WORLD_SIZE": str(world_size)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def train_in_ranks(cases: Sequence[Case], world_size: int, folder: Path) -> list[Trained]:
    """Train all cases in order in `world_size` processes."""
    outcome, listed = folder / "outcome.pt", folder / "cases.json"
    listed.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    words, output = (str(outcome), str(listed)), folder / "output.txt"
    ranks = [
        fork_server().start(Job(Path(__file__), words, output, environment=place, threads=1))
        for place in environments_of(world_size)
    ]
    codes = [rank.wait(2 * PROCESS_TIMEOUT) for rank in ranks]
    assert not any(codes), output.read_text(encoding="utf-8")
    return [Trained(**trained) for trained in torch.load(outcome, weights_only=True)]  # noqa: TID251


def main(outcome: str, listed: str) -> None:
    """Train the cases as one rank; the first rank saves the results."""
    torch.set_num_threads(1)
    cases = [Case(**case) for case in json.loads(Path(listed).read_text())]
    topology = read_topology()
    with process_group(topology, PROCESS_TIMEOUT):
        trained = [train_case(case, topology) for case in cases]
    if topology.is_first:
        torch.save([vars(one) for one in trained], outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_script(0)
