"""The formulas of a step's arithmetic against PyTorch's counts, by kind of layer."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measuring.fixed_step import build_global_batch, build_speech, take_features_as_given
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
    "change", [{}, {"encoder_type": "transformer"}, OTHER_PARTS], ids=["ours", "transformer", "other"]
)
def test_matrix_products_of_a_step_are_what_the_formulas_say(change, recompute, seconds):
    shape = dataclasses.replace(SHAPE, **change)
    # One at a time: PyTorch's counter sees only the products of its own thread.
    data, memory = DataConfig(concurrent_micro_batches=1), MemoryConfig(gradient_checkpointing=recompute)
    config = TrainConfig(model=shape, memory=memory, data=data)
    speech = build_speech(2, *seconds)
    global_batch = build_global_batch(speech, 1)
    architecture = architecture_of(config, VOCABULARY)
    parts = build_step_parts(config, architecture, torch.device("cpu"), 10, take_features_as_given)
    # oneDNN computes the same products, but PyTorch does not count its operators.
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
def test_padded_convolutions_are_what_pytorch_counts(kind):
    shape = dataclasses.replace(SHAPE, subsampling=kind)
    subsampling = build_subsampling(shape, MEL_BINS)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        subsampling(torch.randn(2, 301, MEL_BINS))
    layers = forward_layers(shape, VOCABULARY, MEL_BINS, (301, 301), 5)
    own = [layer for layer in layers if layer.name.endswith(" convolution") or layer.name == "subsampling's output"]
    assert counter.get_total_flops() == sum(layer.flop for layer in own)


def test_dense_convolutions_are_what_pytorch_counts():
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


def test_negative_control_another_width_is_another_count():
    one = step_flop(forward_layers(SHAPE, VOCABULARY, MEL_BINS, (301, 301), 12), recomputes=False)
    other = step_flop(
        forward_layers(dataclasses.replace(SHAPE, d_model=64), VOCABULARY, MEL_BINS, (301, 301), 12), recomputes=False
    )
    assert other > 1.2 * one


def test_a_steps_use_of_the_device_counts_each_utterance_without_padding():
    spoken = speeches(5, seed=3)
    use = Utilisation(ARCHITECTURE, torch.device("cpu"), torch.float32)
    together, alone = use.global_batch_flop(global_batch(spoken, 4)), use.global_batch_flop(global_batch(spoken, 1))
    assert together == alone
    lengths = [(ARCHITECTURE.framing.feature_length(len(speech.waveform)), len(speech.tokens)) for speech in spoken]
    of_each = (forward_layers(SHAPE, VOCABULARY, MEL_BINS, (frames,), tokens) for frames, tokens in lengths)
    assert alone == sum(step_flop(layers, recomputes=False) for layers in of_each)
    padded = forward_layers(SHAPE, VOCABULARY, MEL_BINS, tuple(n for n, _ in lengths), max(n for _, n in lengths))
    assert step_flop(padded, recomputes=False) > alone  # negative control: padding would count


def test_a_step_as_fast_as_the_devices_products_has_a_share_of_one():
    use = Utilisation(ARCHITECTURE, torch.device("cpu"), torch.float32)
    spoken = global_batch(speeches(2, seed=3), 1)
    seconds = use.global_batch_flop(spoken) / use.rate
    assert use.model_flops_utilisation(spoken, seconds) == pytest.approx(1.0)
    assert use.model_flops_utilisation(spoken, 4 * seconds) == pytest.approx(0.25)
    assert use.rate > 1e8


def test_on_a_cpu_no_card_is_asked_and_a_silent_card_is_asked_once(monkeypatch):
    use = Utilisation(ARCHITECTURE, torch.device("cpu"), torch.float32)
    asked = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 37)
    assert use.gpu_utilisation() is None and not asked
    use._is_card_silent = False  # as on a GPU
    assert use.gpu_utilisation() == 0.37
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 1 / 0)
    assert use.gpu_utilisation() is None and use.gpu_utilisation() is None
    assert len(asked) == 2
