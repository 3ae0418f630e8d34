"""Invariant: weights on the GPU, in half precision or in host memory give the same weights after some steps.

For the project's model and Whisper, with all weights trained, a frozen encoder or LoRA; several micro-batches per step,
every block recomputed or only the required ones, dropout, and an out-of-memory error within a step.
"""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from konkanivani.config import MemoryConfig, TrainConfig
from konkanivani.decoding.decode import Decode
from konkanivani.memory import weights as placements
from konkanivani.memory.devices import cuda_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.weights import ON_CARD, OffloadedBlock, Placement, WeightPrefetcher
from konkanivani.models.architecture import architecture_of
from konkanivani.models.conformer import RunBlock
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.optimizer_state import set_learning_rate
from konkanivani.training.step import StepParts
from konkanivani.training.validation import recognize
from tests.conftest import parameter_grid
from tests.invariants.failing import ERRORS, fail_above, failing_forward
from tests.invariants.parts import (
    KINDS,
    PLACEMENTS,
    double_parts,
    features_of,
    global_batch,
    speeches,
    weights_after,
    with_dropout,
)
from tests.pretrained_parts import MODES
from tests.whisper.parts import whisper_config, whisper_parts

ALL, SOME, PREFETCHED, HALF = (
    PLACEMENTS["host"],
    PLACEMENTS["partly on host"],
    PLACEMENTS["prefetched"],
    PLACEMENTS["half"],
)
OFFLOADED, IN_HALF = ("partly on host", "host", "prefetched"), ("host", "prefetched", "half", "host and half")
NATIVE = ("conformer", "other parts")


def different_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not bit for bit equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


STEPS = 2  # the second step must prefetch the updated weights again


@functools.cache
def on_gpu(build: Callable[..., StepParts], *given: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return the reference: the weights after some steps with all weights on the GPU."""
    return weights_after(build(ON_CARD, *given), STEPS, dtype)


def native(placement: Placement, recompute: str = "never", kind: str = "conformer", dropout: float = 0.1) -> StepParts:
    """Return step parts of the project's model in float64."""
    return double_parts(with_dropout(KINDS[kind], dropout), recompute, placement=placement)


def native_in_half(placement: Placement, kind: str) -> StepParts:
    """Return step parts of the project's model with products in half precision."""
    memory = MemoryConfig(mixed_precision=True, amp_dtype="bf16", gradient_checkpointing="always")
    config = TrainConfig(model=KINDS[kind], features=features_of(KINDS[kind]), memory=memory)
    architecture, layout = architecture_of(config, 40), StateLayout(placement=placement)
    parts = build_step_parts(config, architecture, torch.device("cpu"), 10, layout=layout)
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, concurrent_micro_batches=1))


def native_in_chunks(placement: Placement, kind: str) -> StepParts:
    """Return step parts with every block recomputed and long operations in chunks of 13 frames."""
    parts = native(placement, "always", kind)
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, chunk_frames=13))


def whisper(placement: Placement, mode: str) -> StepParts:
    """Return step parts of a small Whisper in float64."""
    return whisper_parts(mode, placement=placement)


def whisper_in_half(placement: Placement, mode: str) -> StepParts:
    """Return step parts of a small Whisper with products in half precision."""
    return whisper_parts(mode, whisper_config("always", half=True), torch.float32, placement=placement)


@pytest.mark.parametrize(("place", "recompute", "kind"), parameter_grid(OFFLOADED, ["always", "never"], NATIVE))
def test_native_model_with_offloaded_weights_is_bitwise_equal(place: str, recompute: str, kind: str) -> None:
    assert not different_tensors(
        on_gpu(native, recompute, kind), weights_after(native(PLACEMENTS[place], recompute, kind), STEPS)
    )


@pytest.mark.parametrize(("place", "mode"), parameter_grid(OFFLOADED, MODES))
def test_whisper_with_offloaded_weights_is_bitwise_equal(place: str, mode: str) -> None:
    assert not different_tensors(on_gpu(whisper, mode), weights_after(whisper(PLACEMENTS[place], mode), STEPS))


@pytest.mark.parametrize(("place", "mode"), parameter_grid(IN_HALF, MODES))
def test_whisper_in_half_precision_is_equal_for_every_placement(place: str, mode: str) -> None:
    placed = weights_after(whisper_in_half(PLACEMENTS[place], mode), STEPS, torch.float32)
    assert not different_tensors(on_gpu(whisper_in_half, mode, dtype=torch.float32), placed)


@pytest.mark.parametrize(("place", "kind"), parameter_grid(IN_HALF, NATIVE))
def test_native_model_in_half_precision_is_equal_for_every_placement(place: str, kind: str) -> None:
    placed = weights_after(native_in_half(PLACEMENTS[place], kind), STEPS, torch.float32)
    assert not different_tensors(on_gpu(native_in_half, kind, dtype=torch.float32), placed)


@pytest.mark.parametrize("kind", NATIVE)
def test_offloaded_weights_in_chunks_are_bitwise_equal(kind: str) -> None:
    """Nested recomputation uses the weights that were fetched for the outer block."""
    assert not different_tensors(on_gpu(native_in_chunks, kind), weights_after(native_in_chunks(ALL, kind), STEPS))


@pytest.mark.parametrize("kind", NATIVE)
def test_plan_with_offloaded_weights_needs_less_gpu_memory(kind: str) -> None:
    """Tracing uses two devices, for GPU and host: every multiplied tensor must be on the GPU one."""
    config = TrainConfig(model=KINDS[kind], features=features_of(KINDS[kind]))
    tracer = build_tracer(config, architecture_of(config, 40), cuda_costs("a card", (7, 5)), ALL)
    peak = tracer.trace(BatchShape(1, 130.0, 300), RecomputePolicy("always"))
    all_on_gpu = build_tracer(config, architecture_of(config, 40), cuda_costs("a card", (7, 5)))
    assert peak.host > 0 and peak.bytes < all_on_gpu.trace(BatchShape(1, 130.0, 300), RecomputePolicy("always")).bytes


def test_out_of_memory_with_offloaded_weights_gives_equal_weights() -> None:
    whole = weights_after(native(ON_CARD, dropout=0.0), STEPS)
    split = weights_after(failing_forward(native(ALL, dropout=0.0), fail_above(1), ERRORS["cpu"]), STEPS)
    assert all(torch.allclose(whole[name], split[name], rtol=1e-9, atol=1e-12) for name in whole)


def test_negative_control_stale_half_precision_copies_are_detected() -> None:
    """Negative control: the half-precision copies stay at their initial values."""
    parts = whisper_in_half(HALF, "full")
    parts.forward.weights.refresh = lambda: None
    assert different_tensors(
        on_gpu(whisper_in_half, "full", dtype=torch.float32), weights_after(parts, STEPS, torch.float32)
    )


def test_negative_control_lost_gradients_of_offloaded_weights_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: fetched weights are unknown to autograd."""
    monkeypatch.setattr(placements.OffloadedWeights, "_copy_in_dtype", lambda self, master, copy: copy)
    assert different_tensors(on_gpu(native, "never", "conformer"), weights_after(native(ALL), STEPS))


def test_negative_control_stale_prefetched_weights_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a block prefetched before an update is used after it."""
    monkeypatch.setattr(WeightPrefetcher, "forget", lambda self: None)
    monkeypatch.setattr(WeightPrefetcher, "get", return_first_copy)
    assert different_tensors(on_gpu(native, "never", "conformer"), weights_after(native(PREFETCHED), STEPS))


def return_first_copy(self: WeightPrefetcher, number: int) -> dict[str, torch.Tensor]:
    """Return the copy that was fetched first."""
    kept = self.__dict__.setdefault("kept", {})
    return kept.setdefault(number, self._start(number).weights)


def test_small_updates_accumulate_in_master_weights() -> None:
    """Updates a hundred times below the half-precision resolution accumulate in the master weights."""
    parts = whisper_parts("full", whisper_config("always"), torch.float32, placement=HALF)
    parts = dataclasses.replace(parts, schedule=dataclasses.replace(parts.schedule, learning_rate=2e-7))
    weight = parts.model.encoder.blocks[0].self_attention.query.weight
    torch.nn.init.ones_(weight)
    set_learning_rate(parts.optimizer, 2e-7)
    weights_after(parts, steps=10, dtype=torch.float32)
    moved = (weight.detach() - 1).abs()
    assert 1e-6 < float(moved.mean()) < 4e-6
    # Negative control: the half-precision weights alone would not change.
    assert weight.detach().to(torch.bfloat16).eq(1).all()


def greedy(recorded: list[torch.Tensor]) -> Decode:
    """Return a decoder of two tokens that records its logits."""

    def decode(model: torch.nn.Module, encoded: torch.Tensor, lengths: tuple[int, ...]) -> list[list[int]]:
        cache = model.decoder.begin(encoded, lengths, beam=1)
        tokens = torch.ones(len(encoded), 1, dtype=torch.long)
        for _ in range(2):
            logits = model.decoder.output(model.decoder.step(tokens, cache))
            recorded.append(logits)
            tokens = logits.argmax(-1)
        return []

    return decode


@pytest.mark.parametrize("placement", [ALL, HALF, SOME], ids=["all", "half", "some"])
@torch.no_grad()
def test_recognition_is_bitwise_equal_for_every_placement(placement: Placement) -> None:
    logits: dict[Placement, list[torch.Tensor]] = {ON_CARD: [], placement: []}
    batch = global_batch([dataclasses.replace(s, waveform=s.waveform.float()) for s in speeches(2)], 2).micro_batches[0]
    for place, item in logits.items():
        forward = whisper_in_half(place, "full").forward
        forward.model.eval()
        names = [name for name, _ in forward.model.named_parameters()]
        before = list(forward.model.parameters())
        with forward.decoder_on_device():
            item.append(recognize(forward, batch, greedy(item)).loss_sums)
        assert all(one is other for one, other in zip(before, forward.model.parameters(), strict=True))
        assert names == [name for name, _ in forward.model.named_parameters()]
    assert all(torch.equal(one, other) for one, other in zip(*logits.values(), strict=True))


@torch.no_grad()
def test_ctc_logits_of_offloaded_blocks_use_fetched_weights() -> None:
    """As logged with the spectrogram of a validation: a kernel on a GPU cannot read weights in host memory."""
    logits = []
    for place in (ON_CARD, ALL):
        forward = native(place).forward
        forward.model.eval()
        forward.refresh_weights()
        fetched: list[int] = []

        def recording(number: int, block: RunBlock, fetched: list[int] = fetched) -> RunBlock:
            fetched.extend([number] if isinstance(block, OffloadedBlock) else [])
            return block

        waveform = speeches(1)[0].waveform
        features, lengths = forward.front_end(waveform[None], (len(waveform),), None)
        logits.append(forward.model.ctc_logits(features, lengths, forward.with_weights(recording))[0])
    assert torch.equal(*logits) and fetched == list(range(1 + len(forward.model.encoder.blocks)))
