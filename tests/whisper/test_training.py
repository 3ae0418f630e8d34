"""Whisper in the training step that all models share. Needs no transformers."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from konkanivani.config import AugmentConfig, DataConfig, LossConfig, MemoryConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import FREE, SpecialTokens
from konkanivani.decoding.decode import greedy_decode
from konkanivani.errors import DataError
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import step_flop
from konkanivani.models.asr import frozen_count, trained_parameters
from konkanivani.models.conformer import keep_activations
from konkanivani.models.whisper.architecture import WhisperArchitecture, WhisperFrontEnd
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.planning.traces import build_tracer
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.optimizers import build_optimizer
from konkanivani.training.step import StepParts, forward_and_backward, loss_counts, train_step
from tests.invariants.parts import measured_peak, relative_difference

CPU = torch.device("cpu")
ONLY_TENSORS = DeviceCosts("a CPU", is_cuda=False, rounding=1, workspace=0, context=0)
SHAPE = WhisperShape(32, 4, 2, 2, 64, 80, 60, source_positions=50, target_positions=40)
ARCHITECTURE = WhisperArchitecture(SHAPE)
SPECIAL = SpecialTokens(blank=51, unknown=51, start=51, end=50)


class UnconstrainedTokens:
    """Vocabulary without rules on allowed tokens."""

    special, rules = SPECIAL, FREE


MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


def step_config(recompute: str = "never", rate: float = 1e-3) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(concurrent_micro_batches=1),
        loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1),
        memory=MemoryConfig(gradient_checkpointing=recompute),
    )


def parts_of(dtype: torch.dtype = torch.float64, recompute: str = "never", rate: float = 1e-3) -> StepParts:
    torch.set_default_dtype(dtype)
    try:
        return build_step_parts(step_config(recompute, rate), ARCHITECTURE, CPU, 100)
    finally:
        torch.set_default_dtype(torch.float32)


def speeches(count: int = 4, dtype: torch.dtype = torch.float64, augmented: bool = True) -> list[Example]:
    """Return utterances of 0.4 to 1 s with 1 to 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6_400, 16_001, (count,), generator=generator).tolist()
    return [
        Example(
            utterance_id=f"u{number}",
            waveform=torch.randn(length, generator=generator, dtype=dtype),
            tokens=torch.randint(50, (1 + 19 * (number % 2),), generator=generator).tolist(),
            augment_seed=number if augmented else None,
        )
        for number, length in enumerate(lengths)
    ]


def global_batch(batch_size: int, examples: list[Example] | None = None) -> GlobalBatch:
    return split_into_micro_batches(examples or speeches(), same_size(batch_size), SPECIAL)


def gradients(parts: StepParts, full_batch: GlobalBatch) -> dict[str, torch.Tensor]:
    parts.model.train()
    parts.model.zero_grad()
    for batch in full_batch.micro_batches:
        forward_and_backward(parts, batch, loss_counts(full_batch))
    return {name: p.grad.clone() for name, p in parts.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_gradients_do_not_depend_on_micro_batch_size(recompute):
    parts = parts_of(recompute=recompute)
    whole = gradients(parts, global_batch(4))
    assert len(whole) == len(trained_parameters(parts.model)) and "encoder.positions" not in whole
    for size in (1, 2):
        batch = gradients(parts, global_batch(size))
        assert max(relative_difference(whole[name], batch[name]) for name in whole) < 1e-9
    first, *_ = global_batch(1).micro_batches
    alone = dataclasses.replace(global_batch(1), micro_batches=(first,), tokens=first.token_lengths[0], utterances=1)
    assert relative_difference(whole["decoder.norm.bias"], gradients(parts, alone)["decoder.norm.bias"]) > 1e-3


def test_loss_falls_and_decoding_between_steps_changes_nothing():
    results = []
    for decodes in (False, True):
        parts, decode = parts_of(rate=3e-3), greedy_decode(ARCHITECTURE, UnconstrainedTokens())
        examples = speeches(augmented=False)
        torch.manual_seed(0)
        losses = []
        for number in range(24):
            losses.append(train_step(parts, global_batch(2, examples), number).attention_loss)
            if decodes and number % 8 == 5:
                features, lengths = parts.forward.front_end(
                    examples[0].waveform[None], (len(examples[0].waveform),), None
                )
                with torch.no_grad():
                    encoded = parts.model.encoder(features, lengths, keep_activations)
                assert len(decode(parts.model, *encoded)) == 1
        results.append((losses, torch.cat([p.detach().flatten() for p in parts.model.parameters()])))
    (alone, weights), (between, weights_between) = results
    assert alone == between and torch.equal(weights, weights_between) and alone[-1] < 0.5 * alone[0]


@pytest.mark.parametrize("trained", ["decoder", "encoder.blocks.1", "decoder.blocks.1.cross_attention"])
def test_freezing_does_not_change_other_gradients(trained):
    parts = parts_of()
    whole = gradients(parts, global_batch(2))
    for name, parameter in parts.model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    parts = dataclasses.replace(parts, optimizer=build_optimizer(parts.model, parts.schedule))
    parts.model.zero_grad()
    alone = gradients(parts, global_batch(2))
    assert alone and alone.keys() == {name for name in whole if name.startswith(trained)}
    assert all(torch.equal(gradient, whole[name]) for name, gradient in alone.items())
    assert frozen_count(parts.model) > SHAPE.source_positions * SHAPE.d_model


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_planned_peak_is_within_2_percent_of_measured(recompute):
    config = step_config(recompute)
    parts = build_step_parts(config, ARCHITECTURE, CPU, 100)
    batch = global_batch(2, speeches(4, torch.float32, augmented=False))
    policy = RecomputePolicy(recompute)
    measured = measured_peak(parts, batch)
    planned = build_tracer(config, ARCHITECTURE, ONLY_TENSORS).trace_global_batch(batch, policy).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_flop_formulas_equal_counted_flops(recompute):
    parts, examples = parts_of(torch.float32, recompute), speeches(3, torch.float32)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        train_step(parts, global_batch(3, examples), 0)
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flop for kind, flop in counts.items() if kind in MATRIX_PRODUCTS)
    layers = ARCHITECTURE.forward_layers(tuple(len(one.waveform) for one in examples), 20)
    dense = tuple(layer for layer in layers if layer.is_dense and "convolution" not in layer.name)
    log_mel = ARCHITECTURE.build_front_end(AugmentConfig()).log_mel  # does not count padding
    frame_count = sum(log_mel(one.waveform[None], (len(one.waveform),))[0].shape[2] for one in examples)
    bands = 2 * frame_count * SHAPE.mel_bins * 201
    expected = step_flop(dense, recompute == "always")
    (head,) = (layer.flop for layer in layers if layer.name == "decoder's output")
    # Without recomputation of blocks, the loss still recomputes the product of the head.
    again = head if recompute == "never" else 0
    assert counted == expected + bands + again
    wider = WhisperArchitecture(dataclasses.replace(SHAPE, d_model=40)).forward_layers((16_000,) * 3, 20)
    assert step_flop(wider, False) > 1.2 * step_flop(layers, False)  # negative control


def test_convolution_flops_equal_pytorch_count():
    layers = {layer.name: layer for layer in ARCHITECTURE.forward_layers((16_000,) * 2, 5)}
    subsampling = ARCHITECTURE.build().encoder.subsampling
    features = torch.randn(2, 80, 100)
    for name, convolution in (("first", subsampling.first), ("second", subsampling.second)):
        with FlopCounterMode(display=False) as counter:
            features = convolution(features)
        assert counter.get_total_flops() == layers[f"{name} convolution"].flop


def test_window_has_fixed_number_of_frames():
    framing = WhisperArchitecture(dataclasses.replace(SHAPE, source_positions=1500)).framing
    assert (framing.feature_length(1), framing.encoded_length(480_000)) == (3000, 1500)
    assert framing.encoded_length(torch.tensor([1, 2])).tolist() == [1500, 1500]
    assert framing.encoder_hop == 320 and framing.encoder_frame_seconds(50) == 1.0


def test_wrong_frame_count_long_audio_and_many_tokens_are_rejected():
    model, front_end = ARCHITECTURE.build(), ARCHITECTURE.build_front_end(AugmentConfig())
    with pytest.raises(ValueError, match="98 frames do not match the window of 100"):
        model.encoder(torch.randn(1, 98, 80), (98,), keep_activations)
    with pytest.raises(DataError, match=r"1\.00 s is longer than the model's window of 1 s"):
        front_end(torch.zeros(1, 16_001), (16_001,), None)
    tokens = torch.zeros(1, 41, dtype=torch.long)
    model(torch.zeros(1, 100, 80), (100,), tokens[:, :40])
    with pytest.raises(DataError, match="40 tokens is longer than the model's limit of 39"):
        model(torch.zeros(1, 100, 80), (100,), tokens)


def test_model_on_meta_device_has_the_same_shapes():
    large = WhisperArchitecture(WhisperShape(1280, 20, 32, 32, 5120, 128, 51_866)).build_without_values()
    assert all(parameter.is_meta for parameter in large.parameters())
    assert sum(parameter.numel() for parameter in trained_parameters(large)) == 1_541_570_560
    assert {n: p.shape for n, p in ARCHITECTURE.build().named_parameters()} == {
        n: p.shape for n, p in ARCHITECTURE.build_without_values().named_parameters()
    }


def test_build_without_values_does_not_import_torch_dynamo(torch_only_parent):
    program = """
import sys
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import WhisperShape
WhisperArchitecture(WhisperShape(64, 4, 2, 2, 64, 80, 60)).build_without_values()
print("torch._dynamo" in sys.modules)
"""
    assert torch_only_parent.run_program(program).stdout == "False\n"


def test_masked_features_equal_padding_value():
    front_end = WhisperFrontEnd(SHAPE, AugmentConfig(time_mask_share=0.3))
    waves = torch.nn.utils.rnn.pad_sequence([torch.randn(15_000), 0.01 * torch.randn(8_000)], batch_first=True)
    plain, _ = front_end(waves, (15_000, 8_000), None)
    masked, lengths = front_end(waves, (15_000, 8_000), (4, 9))
    alone, _ = front_end(waves[1:, :8_000], (8_000,), (9,))
    assert lengths == (100, 100) and torch.equal(masked[1] == plain[1], alone[0] == plain[1])
    for before, after, speech in zip(plain, masked, (94, 50), strict=True):
        changed = before != after
        assert 0.02 < changed[:speech].float().mean() < 0.9 and not changed[speech + 3 :].any()
        assert (after[changed] == before.min()).all()
    unmasked, _ = front_end(waves, (15_000, 8_000), (4, 10))
    assert torch.equal(unmasked[0], masked[0]) and not torch.equal(unmasked[1], masked[1])
