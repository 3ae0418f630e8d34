"""On a GPU, the plan takes the fewest micro-batches, and with memory to spare leaves out the passes that save it."""

import numpy as np
import pytest
import torch

from konkanivani.config import PRESETS, DataConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.data.batching import SizeLimit, cut_sizes
from konkanivani.memory.devices import cuda_costs, find_gpu
from konkanivani.memory.plan import MemoryPlan, plan_sentences, read_plan
from konkanivani.models.architecture import architecture_of
from konkanivani.ops.fused import FusedFeedForward
from konkanivani.ops.passes import ALL_PASSES, ROOMY_PASSES
from konkanivani.planning import plan as planning
from konkanivani.planning.plan import SpeechSizes, resolve_plan
from konkanivani.planning.sizes import ONE_RANK, Ranks
from konkanivani.training.build_step import build_forward
from tests.planning.test_planner import SMALL

UTTERANCES = 64
SECONDS = np.linspace(22.0, 30.0, UTTERANCES)
SIZES = SpeechSizes(None, SECONDS, np.round(4 * SECONDS).astype(np.int64))


def planned(
    monkeypatch: pytest.MonkeyPatch,
    model: ModelConfig,
    gpu: str,
    budget: int | None = None,
    ranks: Ranks = ONE_RANK,
    cuda_graphs: str = "off",
) -> MemoryPlan:
    """Return the plan of steps of 64 utterances of 22 to 30 s on a GPU, in fp16."""
    card = find_gpu(gpu)
    memory = MemoryConfig(mixed_precision=True, gradient_checkpointing="auto", cuda_graphs=cuda_graphs)
    config = TrainConfig(
        model=model, data=DataConfig(batch_size="auto", effective_batch_size=UTTERANCES), memory=memory
    )
    costs = cuda_costs(card.name, card.capability)
    # Both functions would query the driver of the GPU.
    monkeypatch.setattr(planning, "device_costs", lambda _: costs)
    monkeypatch.setattr(planning, "memory_conditions", lambda *_: 0)
    architecture = architecture_of(config, 200)
    device = torch.device("cuda")
    return resolve_plan(config, architecture, device, budget or card.memory, ranks, SIZES, None, None)


def micro_batches(plan: MemoryPlan) -> list[int]:
    """Return the sizes of the micro-batches of the step."""
    return cut_sizes(SECONDS.tolist(), tuple(SizeLimit(bucket.seconds, bucket.utterances) for bucket in plan.buckets))


@pytest.mark.parametrize("gpu", ["T4", "H100"])
def test_large_gpu_runs_one_micro_batch_without_memory_saving_passes(gpu, monkeypatch):
    plan = planned(monkeypatch, PRESETS["minimal"], gpu)
    assert micro_batches(plan) == [UTTERANCES] and {bucket.recomputed_blocks for bucket in plan.buckets} == {0}
    assert plan.has_spare_memory and "without the passes that save memory" in plan_sentences(plan, 10)
    assert plan.peak <= plan.budget and read_plan(plan.state_dict()) == plan


def test_small_gpu_runs_smaller_micro_batches_with_all_passes(monkeypatch):
    plan = planned(monkeypatch, PRESETS["minimal"], "GTX 980")
    assert len(micro_batches(plan)) > 1
    assert not plan.has_spare_memory and "without the passes" not in plan_sentences(plan, 10)


def test_passes_are_omitted_only_if_the_same_micro_batches_fit(monkeypatch):
    saving = planned(monkeypatch, SMALL, "H100", cuda_graphs="on")
    roomy = planned(monkeypatch, SMALL, "H100")
    assert roomy.has_spare_memory and micro_batches(roomy) == [UTTERANCES]
    tight = planned(monkeypatch, SMALL, "H100", budget=roomy.peak - MIB)
    assert not tight.has_spare_memory and micro_batches(tight) == [UTTERANCES] and tight.peak < roomy.peak - MIB
    # A captured step launches no kernels one by one; several ranks keep all passes.
    assert not saving.has_spare_memory
    assert not planned(monkeypatch, SMALL, "H100", ranks=Ranks(2)).has_spare_memory


def test_plans_of_older_checkpoints_have_all_passes(monkeypatch):
    state = planned(monkeypatch, SMALL, "H100").state_dict()
    del state["spare_memory"]
    assert not read_plan(state).has_spare_memory


def test_omitted_passes_leave_feed_forward_layers_unfused():
    config = TrainConfig(model=SMALL)
    architecture = architecture_of(config, 200)
    kinds = []
    for passes in (ROOMY_PASSES, ALL_PASSES):
        model = build_forward(config, architecture, torch.device("cpu"), passes=passes).model
        kinds.append(any(isinstance(module, FusedFeedForward) for module in model.modules()))
    assert kinds == [False, True]
