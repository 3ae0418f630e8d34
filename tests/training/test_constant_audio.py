"""Rows of constant audio, digital silence or full-scale DC, give finite numbers and do not change the other rows.

Such rows occur in real corpora and gave infinite losses in mixed precision in icefall (#1886, #2069): the
variance of their features is zero or only rounding noise.
"""

import dataclasses
import math

import pytest
import torch

from konkanivani.config import LossConfig, MemoryConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.models import front_end
from konkanivani.models.architecture import Architecture, architecture_of
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.training import build_step
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.gradient import GradientTask
from konkanivani.training.step import StepParts, StepReport, forward_and_backward, train_step
from tests.conftest import parameter_grid
from tests.invariants.parts import KINDS, VOCAB_SIZE, features_of, relative_difference, speeches
from tests.whisper.parts import SHAPE

CPU = torch.device("cpu")
WHISPER = ("Whisper, window", "Whisper, speech")
MODELS = (*KINDS, *WHISPER)
LEVELS = {"DC": 1.0, "negative DC": -1.0, "zeros": 0.0}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
EXACT = 1e-9  # relative, in float64: the bound of the padding invariant
FEATURES = {None: EXACT, "bf16": 1e-5, "fp16": 1e-3}  # in fp32; rounded to fp16 a difference can be one step of 2^-11
# Relative, in half precision: rows are packed and padded differently, and roundings of 2^-9 add up over four blocks.
ROUNDED = {None: EXACT, "bf16": 3e-2, "fp16": 5e-3}


class HalvedFeatures(torch.nn.Module):
    """Front end that rounds its features to fp16."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: object) -> tuple[torch.Tensor, tuple[int, ...]]:
        features, lengths = self.inner(*arguments)
        return features.half().to(features.dtype), lengths


def configured(kind: str, precision: str | None) -> tuple[TrainConfig, Architecture]:
    config = TrainConfig(
        memory=MemoryConfig(mixed_precision=precision is not None),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1),
    )
    if kind in WHISPER:
        context = "speech" if kind == "Whisper, speech" else "window"
        config = dataclasses.replace(config, loss=LossConfig(ctc_weight=0.0))
        return config, WhisperArchitecture(SHAPE, audio_context=context)
    model = KINDS[kind]
    config = dataclasses.replace(config, model=model, features=features_of(model))
    return config, architecture_of(config, VOCAB_SIZE)


def parts_of(kind: str, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> StepParts:
    """Return step parts in float64, or in fp32 under autocast; fp16 has fp16 features and a loss scaler."""
    if precision is not None:
        monkeypatch.setattr(build_step, "choose_precision", lambda config, device: AUTOCAST[precision])
    config, architecture = configured(kind, precision)
    torch.set_default_dtype(torch.float64 if precision is None else torch.float32)
    try:
        parts = build_step_parts(config, architecture, CPU, 100)
    finally:
        torch.set_default_dtype(torch.float32)
    if precision == "fp16":
        forward = dataclasses.replace(parts.forward, front_end=HalvedFeatures(parts.forward.front_end))
        parts = dataclasses.replace(parts, forward=forward)
    return parts


def spoken(parts: StepParts) -> list[Example]:
    dtype = next(parts.model.parameters()).dtype
    result = speeches(3, augmented=False)
    return [dataclasses.replace(one, waveform=0.1 * one.waveform.to(dtype)) for one in result]


def with_constant_rows(normal: list[Example]) -> list[Example]:
    """Return the utterances alternating with constant rows, some shorter and some longer."""
    lengths = (8_000, 32_000, 31_999)
    rows = [
        Example(name, torch.full((length,), level, dtype=normal[0].waveform.dtype), [5, 6], None)
        for (name, level), length in zip(LEVELS.items(), lengths, strict=True)
    ]
    return [one for pair in zip(rows, normal, strict=True) for one in pair]


def in_one_micro_batch(speech: list[Example]) -> GlobalBatch:
    return split_into_micro_batches(speech, same_size(len(speech)), OUR_TOKENS)


@torch.no_grad()
def outputs(parts: StepParts, global_batch: GlobalBatch) -> dict[str, list[torch.Tensor]]:
    """Return the features, encoded frames and decoded tokens of each utterance, without padding."""
    values = {}
    (batch,) = global_batch.micro_batches
    parts.model.eval()
    features, lengths = parts.forward.front_end(batch.waveforms, batch.sample_lengths, None)
    output, _ = parts.forward(batch)
    for row, name in enumerate(batch.utterance_ids):
        frames, tokens = output.encoded_lengths[row], batch.token_lengths[row] + 1
        values[name] = [features[row, : lengths[row]], output.encoded[row, :frames], output.decoded[row, :tokens]]
    return values


@pytest.mark.parametrize(("kind", "precision"), parameter_grid(MODELS, [None, *AUTOCAST]))
def test_constant_rows_are_finite_and_do_not_change_the_other_rows(kind, precision, monkeypatch):
    parts = parts_of(kind, precision, monkeypatch)
    normal = spoken(parts)
    alone = outputs(parts, in_one_micro_batch(normal))
    beside = outputs(parts, in_one_micro_batch(with_constant_rows(normal)))
    assert beside.keys() == alone.keys() | LEVELS.keys()
    for name, item in beside.items():
        assert all(tensor.isfinite().all() for tensor in item), name
    for name, item in alone.items():
        assert relative_difference(item[0], beside[name][0]) < FEATURES[precision], name
        for one, other in zip(item[1:], beside[name][1:], strict=True):
            assert one.shape == other.shape
            assert relative_difference(one.double(), other.double()) < ROUNDED[precision], name


def train_steps(parts: StepParts, global_batch: GlobalBatch, count: int = 8) -> list[StepReport]:
    parts.model.train()
    return [train_step(parts, global_batch, number) for number in range(count)]


@pytest.mark.parametrize(("kind", "precision"), parameter_grid(MODELS, AUTOCAST))
def test_steps_over_constant_rows_have_finite_losses_and_gradients(kind, precision, monkeypatch):
    parts = parts_of(kind, precision, monkeypatch)
    reports = train_steps(parts, in_one_micro_batch(with_constant_rows(spoken(parts))))
    # A skipped step is how the loss scaler finds a scale at which no gradient overflows; its loss is finite.
    assert all(math.isfinite(report.loss) for report in reports)
    applied = [report for report in reports if not report.is_skipped]
    assert all(math.isfinite(report.gradient_norm) for report in applied)
    assert applied == reports[-len(applied) :] and applied[-1].loss < applied[0].loss
    assert all(weight.isfinite().all() for weight in parts.model.parameters())
    # Doubling the rows halves the scale at most once; a row of extreme values would halve it more often.
    without = parts_of(kind, precision, monkeypatch)
    assert reports[-1].scale >= 0.5 * train_steps(without, in_one_micro_batch(spoken(without)))[-1].scale


def test_batch_of_only_constant_rows_has_finite_gradients(monkeypatch):
    for kind in MODELS:
        parts = parts_of(kind, "bf16", monkeypatch)
        rows = [one for one in with_constant_rows(spoken(parts)) if one.utterance_id in LEVELS]
        global_batch = in_one_micro_batch(rows)
        task = GradientTask(parts, global_batch, 0, forward_and_backward)
        assert parts.compute_gradient(task).is_finite, kind


def test_negative_control_without_a_power_floor_silence_is_not_finite(monkeypatch):
    monkeypatch.setattr(front_end, "log_power", lambda power, config, out=None: torch.log(power))
    parts = parts_of("conformer", "bf16", monkeypatch)
    rows = [one for one in with_constant_rows(spoken(parts)) if one.utterance_id == "zeros"]
    assert not outputs(parts, in_one_micro_batch(rows))["zeros"][0].isfinite().all()
