"""A step traced on the project's shape tensors equals one traced on PyTorch's fake tensors, byte for byte."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from konkanivani.config import MemoryConfig, ModelConfig, TrainConfig
from konkanivani.memory.devices import cpu_costs, cuda_costs
from konkanivani.models.architecture import architecture_of
from konkanivani.planning import tensors, tracer
from konkanivani.planning.plan import ALWAYS, NEVER
from konkanivani.planning.tensors import Shape, Shapes
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import build_tracer
from tests.conftest import mark_full

MODEL = ModelConfig(d_model=32, encoder_layers=1, decoder_layers=1, attention_heads=2, subsampling_channels=8)
SMALL_BATCH = BatchShape(3, 4.0, 20)
TRACED_BATCHES = (
    (BatchShape(1, 20.0, 90), NEVER),
    (SMALL_BATCH, ALWAYS),
    (BatchShape(1, 61.0, 240), NEVER),
)  # the last one is in chunks


class FakeTensorsWithCtc(FakeTensorMode):
    """PyTorch's fake tensors with the shapes of CTC kernels, which PyTorch cannot infer without the length tensors."""

    def dispatch(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._ctc_loss.default:
            scores, (frames, batch, _), most = args[0], args[0].shape, max(args[3])
            return scores.new_empty(batch), scores.new_empty(batch, frames, 2 * most + 1)
        if func is tensors.CTC_BACKWARD:
            return torch.empty_like(args[1])
        return super().dispatch(func, types, args, kwargs)


def trace_peaks(mode: type, half: bool, is_card: bool, monkeypatch: pytest.MonkeyPatch) -> list[Peak | int]:
    """Return the peaks of every batch shape, validation last, on tensors of this mode."""
    monkeypatch.setattr(tracer, "Shapes", mode)
    config = TrainConfig(model=MODEL, memory=MemoryConfig(mixed_precision=half))
    built = build_tracer(config, architecture_of(config, 40), cuda_costs("T4", (7, 5)) if is_card else cpu_costs())
    return [*(built.trace(*load) for load in TRACED_BATCHES), built.trace_validation(SMALL_BATCH)]


@functools.cache
def reference_peaks(half: bool, is_card: bool) -> list[Peak | int]:
    """Return the peaks on the project's shape tensors, the reference of the negative controls."""
    with pytest.MonkeyPatch.context() as patch:
        return trace_peaks(Shapes, half, is_card, patch)


@pytest.mark.parametrize("half, is_card", [(False, False), (True, True), *mark_full((True, False), (False, True))])
def test_peaks_equal_those_of_fake_tensors(half, is_card, monkeypatch):
    assert reference_peaks(half, is_card) == trace_peaks(FakeTensorsWithCtc, half, is_card, monkeypatch)


def test_negative_control_a_view_counted_as_new_memory_is_detected(monkeypatch):
    expected = reference_peaks(half=False, is_card=False)
    kind_of = tensors._kind_of
    monkeypatch.setattr(tensors, "_kind_of", lambda one: {"views": "makes new"}.get(kind_of(one), kind_of(one)))
    assert trace_peaks(Shapes, False, False, monkeypatch) != expected


def test_negative_control_ignoring_layouts_of_kernels_is_detected(monkeypatch):
    expected = reference_peaks(half=True, is_card=False)
    monkeypatch.setattr(tensors, "KERNEL_DEPENDENT", frozenset())
    assert trace_peaks(Shapes, True, False, monkeypatch) != expected


def test_traced_ctc_shapes_equal_the_real_ones():
    given = torch.randn(30, 3, 11).log_softmax(-1), torch.randint(1, 11, (3, 7)), (30, 21, 9), (7, 5, 3), 0, False
    losses, alphas = torch.ops.aten._ctc_loss(*given)
    gradient = tensors.CTC_BACKWARD(torch.ones(3), *given[:4], losses, alphas, 0)
    with (mode := Shapes()):
        scores, tokens, *others = *map(mode.from_tensor, given[:2]), *given[2:]
        made = torch.ops.aten._ctc_loss(scores, tokens, *others)
        by_scores = tensors.CTC_BACKWARD(torch.ones(3), scores, tokens, *others[:2], *made, 0)
        results = [(one.shape, one.dtype) for one in (*made, by_scores)]
    assert results == [(one.shape, one.dtype) for one in (losses, alphas, gradient)]


def test_shape_tensors_have_a_layout_and_a_cpu_device_but_no_data():
    real = torch.randn(3, 4)
    with (mode := Shapes()):
        x = mode.from_tensor(real)
        made = x.t() @ torch.randn(3, 5) + 1
        assert isinstance(made, Shape) and made.meta.is_meta
        assert (made.shape, made.device.type, made.dtype) == ((4, 5), "cpu", torch.float32)
        view = made[1:]
        assert view.untyped_storage()._cdata == made.untyped_storage()._cdata
        assert made.add_(1) is made and made.transpose_(0, 1).shape == (5, 4)
        with pytest.raises(Exception, match="cannot be called on meta tensors"):
            float(made.sum())
    with pytest.raises(RuntimeError, match="outside of their mode"):
        made + 1
