"""A step synchronizes with its device once, to read the norm and the losses that decide about the update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring.common import build_global_batch, build_speech, take_features_as_given
from konkanivani.config import LossConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.models.architecture import architecture_of
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.gradient import local_gradient
from konkanivani.training.step import StepParts, train_step

VOCABULARY = 1000
BOTH_LOSSES = LossConfig()
SHAPE = ModelConfig(d_model=48, encoder_layers=2, decoder_layers=1, attention_heads=2, subsampling_channels=16)
# Operations that synchronize on any device: they return a number, or a shape that depends on data.
WAITING_OPERATIONS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "item",
)


class HostReads(TorchDispatchMode):
    """Dispatch mode that records the operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, operation: Callable, types: tuple, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        name = operation.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING_OPERATIONS or by_mask:
            self.found.append(name)
        return operation(*args, **(kwargs or {}))


def step_on(device: str, memory: MemoryConfig, loss: LossConfig = BOTH_LOSSES) -> tuple[StepParts, list[int]]:
    config = TrainConfig(model=SHAPE, memory=memory, loss=loss)
    parts = build_step_parts(
        config, architecture_of(config, VOCABULARY), torch.device(device), 10, take_features_as_given
    )
    reads: list[int] = []

    def read(tensor: torch.Tensor) -> list[float]:
        reads.append(tensor.numel())
        return tensor.tolist()

    return dataclasses.replace(parts, compute_gradient=functools.partial(local_gradient, read=read)), reads


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_host_reads_four_numbers_once_per_step(recompute, scaled):
    parts, reads = step_on("cpu", MemoryConfig(gradient_checkpointing=recompute))
    parts = dataclasses.replace(parts, scaler=torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled))
    global_batch = build_global_batch(build_speech(4), 2)  # two utterances of different lengths: masks, padding
    with HostReads() as mode:
        assert not train_step(parts, global_batch, 0).is_skipped
    # Fused AdamW reads its step counts on a CPU, which needs no synchronisation.
    assert reads == [4] and set(mode.found) <= {"_local_scalar_dense"} and len(mode.found) == reads_of_update(parts)


def reads_of_update(parts: StepParts) -> int:
    """Return the number of reads by the optimizer alone."""
    with HostReads() as mode:
        parts.optimizer.step()
    return len(mode.found)


def test_negative_control_a_read_in_the_loss_is_detected():
    parts, _ = step_on("cpu", MemoryConfig())
    output = torch.ones(3, requires_grad=True)
    with HostReads() as mode:
        float(output.sum().detach())
        output[output > 0].sum()
    assert mode.found == ["_local_scalar_dense", "index"] and parts is not None


@pytest.mark.card
def test_step_on_cuda_synchronizes_only_once():
    """Without CTC, for which PyTorch copies the lengths to the GPU and waits."""
    parts, reads = step_on("cuda", MemoryConfig(mixed_precision=True), LossConfig(ctc_weight=0.0))
    global_batch = build_global_batch(build_speech(4), 2)
    for step in range(8):  # selects kernels and adapts the loss scale
        train_step(parts, global_batch, step)
    reads.clear()

    def read(tensor: torch.Tensor) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        reads.append(tensor.numel())
        values = tensor.tolist()
        torch.cuda.set_sync_debug_mode("error")
        return values

    torch.cuda.set_sync_debug_mode("error")
    try:
        watched = dataclasses.replace(parts, compute_gradient=functools.partial(local_gradient, read=read))
        train_step(watched, global_batch, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reads == [3]  # one number less without CTC
