"""Small steps whose micro-batches are captured by the operator recorder, and the same steps without capture."""

import dataclasses

import torch

from konkanivani.config import AudioContext, LossConfig, ModelConfig
from konkanivani.data.batching import Batch, GlobalBatch
from konkanivani.data.shape_grid import GridShape, ShapeGrid
from konkanivani.models.asr import LossCounts, LossSums, ctc_loss_sum
from konkanivani.ops.capturable import Capture, make_capturable
from konkanivani.ops.graph_backends import RecorderBackend
from konkanivani.randomness import seed_step
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.graphs import CapturedMicroBatch, GraphedGradient, graph_key, run_network
from konkanivani.training.step import GradientTask, StepParts, forward_and_backward, loss_counts
from tests.invariants.parts import CPU, KINDS, double_parts, global_batch, speeches, with_dropout
from tests.pretrained_parts import MODES
from tests.whisper.parts import SHAPE, NonZeroLoraWhisper, whisper_config

GRID = ShapeGrid(tuple(GridShape(samples, rows, 8) for samples in (20_000, 32_000) for rows in (1, 2, 4)))
# Whisper's training mode, audio context, and whether it runs in half precision.
WHISPERS: dict[str, tuple[str, AudioContext, bool]] = {
    "whisper": ("full", "window", False),
    "whisper, speech": ("full", "speech", False),
    "whisper, LoRA": ("LoRA", "window", False),
    "whisper, frozen encoder": ("encoder", "window", False),
    "whisper, bf16": ("full", "window", True),
}
MODELS = (*KINDS, *WHISPERS)


def parts_of(kind: str, recompute: str = "never", dropout: float = 0.2, middle: float = 0.3) -> StepParts:
    """Return step parts in float64 with a capturable model; Whisper has neither dropout nor intermediate CTC."""
    if kind in WHISPERS:
        parts = whisper_of(*WHISPERS[kind], recompute)
    else:
        parts = conformer_parts(with_dropout(KINDS[kind], dropout), recompute, middle)
    make_capturable(parts.model)
    return parts


def whisper_of(mode: str, context: AudioContext, is_half: bool, recompute: str) -> StepParts:
    """Return step parts of a small Whisper; in half precision, the weights are float32."""
    dtype = torch.float32 if is_half else torch.float64
    torch.set_default_dtype(dtype)
    try:
        architecture = NonZeroLoraWhisper(SHAPE, MODES[mode], audio_context=context)
        return build_step_parts(whisper_config(recompute, half=is_half), architecture, CPU, 100)
    finally:
        torch.set_default_dtype(torch.float32)


def conformer_parts(model: ModelConfig, recompute: str, middle: float) -> StepParts:
    parts = double_parts(model, recompute)
    objective = parts.architecture.objective(LossConfig(ctc_weight=0.4, intermediate_ctc_weight=middle))
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, objective=objective))


def task_of(parts: StepParts, batch: GlobalBatch, step: int = 0) -> GradientTask:
    return GradientTask(parts, batch, step, forward_and_backward)


def graphed(parts: StepParts, grid: ShapeGrid = GRID) -> tuple[StepParts, GraphedGradient, RecorderBackend]:
    """Return the parts with a gradient captured by the operator recorder."""
    backend = RecorderBackend()
    gradient = GraphedGradient(backend, grid)
    return dataclasses.replace(parts, compute_gradient=gradient), gradient, backend


class InGraphCtc(Capture):
    """Capture that records nothing, and computes CTC in order, like the eager step."""

    def __init__(self, parts: StepParts, batch: Batch) -> None:
        super().__init__(RecorderBackend())
        lengths = tuple(parts.architecture.framing.encoded_length(samples) for samples in batch.sample_lengths)
        self._targets = lengths, batch.tokens, batch.token_lengths

    def loss_between(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        return ctc_loss_sum(log_probabilities, *self._targets)


def eager_on_grid(parts: StepParts, batch: Batch, counts: LossCounts, grid: ShapeGrid = GRID) -> LossSums:
    """Add the gradient of a micro-batch, padded to its shape of the grid, without any capture."""
    key = graph_key(parts, grid.shape_of(batch))
    capture = InGraphCtc(parts, batch)
    micro_batch = CapturedMicroBatch(parts, key, RecorderBackend())
    micro_batch.fill(parts, batch, counts)
    with capture.in_place():
        return run_network(parts, micro_batch.inputs, key.recompute)


def eager_gradients(
    parts: StepParts, full_batch: GlobalBatch, step: int = 0, on_grid: bool = True
) -> dict[str, torch.Tensor]:
    """Return the gradients of a global batch without graphs, on the grid or at the batches' own lengths."""
    seed_step(parts.seed, step)
    parts.model.train()
    parts.optimizer.zero_grad()
    run = eager_on_grid if on_grid else GraphedGradient(RecorderBackend(), GRID).run_eagerly
    for batch in full_batch.micro_batches:
        run(parts, batch, loss_counts(full_batch))
    return gradients_of(parts)


def gradients_of(parts: StepParts) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in parts.model.named_parameters() if p.grad is not None}


def spoken_batch(seed: int, size: int, dtype: torch.dtype = torch.float64) -> GlobalBatch:
    """Return four utterances of 0.4 to 2 s in micro-batches of `size`."""
    spoken = [dataclasses.replace(speech, waveform=speech.waveform.to(dtype)) for speech in speeches(4, seed)]
    return global_batch(spoken, size)
