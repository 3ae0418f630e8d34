"""Optimizer steps of a Whisper model equal a manual AdamW on transformers' model."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from konkanivani.config import LossConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batching import Batch, GlobalBatch, split_batch
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import name_in_file
from konkanivani.models.whisper.model import EncoderBlock
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step
from tests.whisper.folders import KINDS, labels_of, random_batch, reference, to_project_model

KIND = dataclasses.replace(KINDS["tiny"], vocab_size=300, end=280)
STEPS, WARMUP, PEAK, DECAY, LARGEST_NORM = 20, 4, 3e-4, 0.1, 3.3  # the norms of some gradients are larger
LABELS = (9, 3, 1, 14)
SCHEDULE = OptimizerConfig(
    learning_rate=PEAK, warmup_steps=WARMUP, weight_decay=DECAY, max_grad_norm=LARGEST_NORM, schedule="cosine"
)


@dataclasses.dataclass
class ManualAdamW:
    """transformers' model with AdamW, weight decay on matrices only, and gradient clipping."""

    model: torch.nn.Module
    largest_norm: float = LARGEST_NORM

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": DECAY},
            {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98), eps=1e-8)

    def loss(self, parts: StepParts, batch: Batch) -> torch.Tensor:
        """Return the mean loss per label of a batch, with the project's features."""
        features, _ = parts.forward.front_end(batch.waveforms, batch.sample_lengths, None)
        given = {"decoder_input_ids": batch.decoder_tokens, "labels": labels_of(batch.targets)}
        return self.model(features.transpose(1, 2), **given).loss

    def step(self, loss: torch.Tensor, number: int) -> float:
        """Update the weights and return the gradient norm."""
        self.optimizer.zero_grad()
        loss.backward()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.largest_norm)
        rate = PEAK * (number + 1) / WARMUP
        if number >= WARMUP:
            falling = 0.5 * (1 + math.cos(math.pi * (number - WARMUP) / (STEPS - 1 - WARMUP)))
            rate = PEAK * (0.01 + 0.99 * falling)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm.item()


def build_both() -> tuple[StepParts, ManualAdamW]:
    """Return the same random model in the project and in transformers."""
    model = reference(KIND)
    config = TrainConfig(loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0), optimizer=SCHEDULE)
    ours = to_project_model(model, KIND)
    parts = build_step_parts(config, WhisperArchitecture(ours.shape), torch.device("cpu"), STEPS)
    parts.model.load_state_dict(ours.state_dict())
    return parts, ManualAdamW(model)


def global_batches() -> Iterator[tuple[Batch, tuple[Batch, ...]]]:
    """Yield each global batch as one batch, and split into one, two or three micro-batches."""
    for number in range(STEPS):
        batch = random_batch(KIND, *LABELS, seed=number % 4)
        first, second = split_batch(batch)
        yield batch, ((batch,), (first, second), (*split_batch(first), second))[number % 3]


def global_batch_of(micro_batches: tuple[Batch, ...]) -> GlobalBatch:
    return GlobalBatch(micro_batches, sum(LABELS), len(LABELS), 0.0, 0.0)


def max_relative_difference(parts: StepParts, manual: ManualAdamW) -> float:
    """Return the largest relative difference between weights of the same name."""
    theirs = manual.model.state_dict()
    pairs = [(theirs[name_in_file(name)], weight) for name, weight in parts.model.state_dict().items()]
    return max(float((one - other).norm() / one.norm()) for one, other in pairs)


def test_20_steps_equal_manual_adamw_on_transformers():
    """The manual AdamW uses whole global batches, the project splits some of them."""
    parts, manual = build_both()
    losses, norms = [], []
    for number, (batch, micro_batches) in enumerate(global_batches()):
        report = train_step(parts, global_batch_of(micro_batches), number)
        loss = manual.loss(parts, batch)
        norm = manual.step(loss, number)
        assert report.loss == pytest.approx(loss.item(), rel=1e-5), number
        assert report.gradient_norm == pytest.approx(norm, rel=1e-4), number
        losses.append(report.loss)
        norms.append(norm)
    assert max_relative_difference(parts, manual) < 1e-5
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]) and min(norms) < LARGEST_NORM < max(norms)


@pytest.mark.parametrize("change", ["mean of means", "decay of all", "no decay", "no clipping"])
def test_negative_control_changed_step_is_detected(change):
    parts, manual = build_both()
    matrices, others = manual.optimizer.param_groups
    matrices["weight_decay"] = 0.0 if change == "no decay" else DECAY
    others["weight_decay"] = DECAY if change == "decay of all" else 0.0
    manual.largest_norm = math.inf if change == "no clipping" else LARGEST_NORM
    for number, (batch, micro_batches) in itertools.islice(enumerate(global_batches()), 10):
        train_step(parts, global_batch_of(micro_batches), number)
        taken = micro_batches if change == "mean of means" else (batch,)
        manual.step(sum(manual.loss(parts, one) for one in taken) / len(taken), number)
    assert max_relative_difference(parts, manual) > 1e-4


def test_recomputation_without_random_ops_saves_no_generator_state(monkeypatch):
    """Saving and restoring all generators takes 0.1 ms of the host per block."""
    parts = build_both()[0].recomputing(RecomputePolicy("always"))
    batch, _ = next(global_batches())
    get_state = torch.get_rng_state
    saved = []

    def counted() -> torch.Tensor:
        saved.append(1)
        return get_state()

    monkeypatch.setattr(torch, "get_rng_state", counted)
    before = get_state()
    parts.forward(batch)[1][0].backward()
    assert saved == [] and torch.equal(before, get_state())
    # Negative control: blocks that may draw random numbers.
    monkeypatch.setattr(EncoderBlock, "draws_random_numbers", True)
    parts.forward(batch)[1][0].backward()
    assert len(saved) >= len(parts.model.encoder.blocks)
