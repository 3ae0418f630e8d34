"""FLOP formulas of a training step against PyTorch's counts, by kind of layer."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measuring.common import build_global_batch, build_speech, take_features_as_given
from konkanivani.config import DataConfig, FeatureConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.models.architecture import HybridArchitecture, architecture_of, forward_layers, step_flop
from konkanivani.models.conformer import Subsampling, build_subsampling
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.progress import Utilisation
from konkanivani.training.step import train_step
from tests.invariants.parts import global_batch, speeches

MEL_BINS = FeatureConfig().mel_bins

VOCABULARY = 1000
SHAPE = ModelConfig(d_model=48, encoder_layers=2, decoder_layers=1, attention_heads=2, subsampling_channels=16)
ARCHITECTURE = HybridArchitecture(SHAPE, FeatureConfig(), VOCABULARY)
OTHER_PARTS = {"attention_positions": "relative", "subsampling": "separable", "biases": False}
MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


@pytest.mark.parametrize("seconds", [(3.0, 3.0), (2.0, 6.0)])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    "change", [{}, {"encoder_type": "transformer"}, OTHER_PARTS], ids=["conformer", "transformer", "other parts"]
)
def test_flop_formulas_of_a_step_equal_pytorch_counts(change, recompute, seconds):
    shape = dataclasses.replace(SHAPE, **change)
    # One micro-batch at a time: PyTorch's counter counts only the operators of its own thread.
    data, memory = DataConfig(concurrent_micro_batches=1), MemoryConfig(gradient_checkpointing=recompute)
    config = TrainConfig(model=shape, memory=memory, data=data)
    speech = build_speech(2, *seconds)
    global_batch = build_global_batch(speech, 1)
    architecture = architecture_of(config, VOCABULARY)
    parts = build_step_parts(config, architecture, torch.device("cpu"), 10, take_features_as_given)
    # PyTorch does not count the operators of oneDNN, which compute the same products.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        train_step(parts, global_batch, 0)
    counted = sum(flop for kind, flop in counter.get_flop_counts()["Global"].items() if kind in MATRIX_PRODUCTS)
    layers = forward_layers(shape, VOCABULARY, MEL_BINS, tuple(speech.frames.tolist()), int(speech.token_lengths.max()))
    by_onednn = "first convolution", "second convolution"
    dense = tuple(layer for layer in layers if layer.is_dense and layer.name not in by_onednn)
    expected = step_flop(dense, recompute == "always")
    if change == OTHER_PARTS:  # their attention consists of PyTorch products
        flop = {layer.name: layer.flop for layer in layers}
        expected += (3 + (recompute == "always")) * (flop["attention"] + flop["attention by distance"])
    if recompute == "never":
        assert counted == expected
    else:  # the heads are outside the blocks
        assert step_flop(dense, False) < counted < expected


@pytest.mark.parametrize("kind", ["striding", "separable"])
def test_flop_formulas_of_padded_convolutions_equal_pytorch_counts(kind):
    shape = dataclasses.replace(SHAPE, subsampling=kind)
    subsampling = build_subsampling(shape, MEL_BINS)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        subsampling(torch.randn(2, 301, MEL_BINS))
    layers = forward_layers(shape, VOCABULARY, MEL_BINS, (301, 301), 5)
    own = [layer for layer in layers if layer.name.endswith(" convolution") or layer.name == "subsampling's output"]
    assert counter.get_total_flops() == sum(layer.flop for layer in own)


def test_flop_formulas_of_dense_convolutions_equal_pytorch_counts():
    subsampling = Subsampling(MEL_BINS, SHAPE.subsampling_channels, SHAPE.d_model)
    layers = {layer.name: layer for layer in forward_layers(SHAPE, VOCABULARY, MEL_BINS, (301, 301), 5)}
    features = torch.randn(2, 301, MEL_BINS)
    with FlopCounterMode(display=False) as counter:
        halved = subsampling.first(features[:, None])
    assert counter.get_total_flops() == layers["first convolution"].flop
    quartered = subsampling.depthwise(halved)
    with FlopCounterMode(display=False) as counter:
        subsampling.pointwise(quartered)
    assert counter.get_total_flops() == layers["pointwise convolution"].flop


def test_negative_control_larger_width_has_more_flop():
    one = step_flop(forward_layers(SHAPE, VOCABULARY, MEL_BINS, (301, 301), 12), recomputes=False)
    other = step_flop(
        forward_layers(dataclasses.replace(SHAPE, d_model=64), VOCABULARY, MEL_BINS, (301, 301), 12), recomputes=False
    )
    assert other > 1.2 * one


def test_global_batch_flop_excludes_padding():
    spoken = speeches(5, seed=3)
    use = Utilisation(ARCHITECTURE, torch.device("cpu"), torch.float32)
    together, alone = use.global_batch_flop(global_batch(spoken, 4)), use.global_batch_flop(global_batch(spoken, 1))
    assert together == alone
    lengths = [(ARCHITECTURE.framing.feature_length(len(speech.waveform)), len(speech.tokens)) for speech in spoken]
    layers_of_each = (forward_layers(SHAPE, VOCABULARY, MEL_BINS, (frames,), tokens) for frames, tokens in lengths)
    assert alone == sum(step_flop(layers, recomputes=False) for layers in layers_of_each)
    padded = forward_layers(SHAPE, VOCABULARY, MEL_BINS, tuple(n for n, _ in lengths), max(n for _, n in lengths))
    assert step_flop(padded, recomputes=False) > alone  # negative control: padding would count


def test_step_at_device_matmul_rate_has_utilisation_one():
    use = Utilisation(ARCHITECTURE, torch.device("cpu"), torch.float32)
    spoken = global_batch(speeches(2, seed=3), 1)
    seconds = use.global_batch_flop(spoken) / use.rate
    assert use.model_flops_utilisation(spoken, seconds) == pytest.approx(1.0)
    assert use.model_flops_utilisation(spoken, 4 * seconds) == pytest.approx(0.25)
    assert use.rate > 1e8


def test_gpu_utilisation_is_not_queried_on_cpu_or_after_an_error(monkeypatch):
    use = Utilisation(ARCHITECTURE, torch.device("cpu"), torch.float32)
    queries = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: queries.append(device) or 37)
    assert use.gpu_utilisation() is None and not queries
    use._is_card_silent = False  # as on a GPU
    assert use.gpu_utilisation() == 0.37
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: queries.append(device) or 1 / 0)
    assert use.gpu_utilisation() is None and use.gpu_utilisation() is None
    assert len(queries) == 2
