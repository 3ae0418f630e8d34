"""Invariant 9: two processes equal one: split batches, summed gradients, sharded weights, a retry; to 1e-9.

Over 50 steps, and with four processes: benchmarks/scaling.py --parts invariant --full.
"""

import pytest

from konkanivani.data.batching import partition
from tests.invariants.parts import relative_difference
from tests.invariants.ranks import Case, Trained, train_case, train_in_ranks

BOUND = 1e-9
STEPS = 5  # the third global batch has one utterance for two ranks, the fifth has five
CASES = {
    "one micro-batch": Case(STEPS, batch_size=8),
    "accumulated": Case(STEPS, batch_size=2),
    "out of memory on one rank": Case(STEPS, batch_size=2, out_of_memory_rank=1),
    "sharded weights": Case(STEPS, batch_size=8, sharded=True),
    "sharded weights, accumulated": Case(STEPS, batch_size=2, sharded=True),
    "sharded weights, recomputed": Case(STEPS, batch_size=2, sharded=True, recompute="always"),
    "sharded weights of other parts": Case(STEPS, batch_size=2, sharded=True, recompute="always", kind="other parts"),
}
for kind in ("T5", "T5, LoRA"):
    CASES[kind] = Case(STEPS, batch_size=2, recompute="always", kind=kind)
    CASES[f"{kind}, sharded"] = Case(STEPS, batch_size=2, sharded=True, kind=kind)
OWN_DIVISOR = Case(STEPS, batch_size=2, own_divisor=True)


@pytest.fixture(scope="module")
def trained_by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Trained]:
    cases = [*CASES.values(), OWN_DIVISOR]
    return dict(zip(cases, train_in_ranks(cases, 2, tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.fixture(scope="module")
def trained_by_one_process() -> dict[tuple[int, int, str], Trained]:
    shapes = {(case.steps, case.batch_size, case.kind) for case in CASES.values()}
    return {(steps, size, kind): train_case(Case(steps, size, kind=kind)) for steps, size, kind in shapes}


def weight_difference(one: Trained, other: Trained) -> float:
    assert one.weights.keys() == other.weights.keys()
    return max(relative_difference(weight, other.weights[name]) for name, weight in one.weights.items())


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_weights_and_losses_of_one(name, trained_by_two_ranks, trained_by_one_process):
    case = CASES[name]
    one, two = trained_by_one_process[case.steps, case.batch_size, case.kind], trained_by_two_ranks[case]
    assert weight_difference(one, two) < BOUND
    assert two.losses == pytest.approx(one.losses, rel=BOUND, abs=0)
    assert two.splits == (1 if case.out_of_memory_rank is not None else 0)


def test_negative_control_local_loss_divisor_changes_weights(trained_by_two_ranks, trained_by_one_process):
    one = trained_by_one_process[OWN_DIVISOR.steps, OWN_DIVISOR.batch_size, OWN_DIVISOR.kind]
    assert weight_difference(one, trained_by_two_ranks[OWN_DIVISOR]) > 1e-3


def test_global_batch_is_split_evenly_between_ranks():
    seconds = [9.0, 1.0, 5.0, 4.0, 3.0, 8.0, 2.0]
    shares = partition(seconds, 3)
    assert sorted(int(number) for share in shares for number in share) == list(range(7))
    loads = [sum(seconds[number] for number in share) for share in shares]
    assert max(loads) <= 4 / 3 * sum(seconds) / 3
    assert [len(share) for share in partition([1.0], 3)] == [1, 0, 0]
