"""A small model, its step parts and batches of random audio for the invariants, in float64 without dropout."""

import dataclasses

import torch

from konkanivani.config import DataConfig, FeatureConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.distributed import ALONE, Topology
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.architecture import architecture_of
from konkanivani.ops.passes import ALL_PASSES, Passes
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import StepParts, train_step

VOCAB_SIZE = 20
ADAMW = OptimizerConfig()
CPU = torch.device("cpu")
MODEL = ModelConfig(
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    attention_heads=2,
    convolution_kernel=7,
    subsampling_channels=4,
    dropout=0.0,
)
# The options of NeMo's Conformers that differ from the project's model, and the front end of NeMo.
OTHER_PARTS = dataclasses.replace(
    MODEL,
    attention_positions="relative",
    convolution_norm="none",
    subsampling="striding",
    scaled_input=True,
    entry_norm=False,
    biases=False,
)
OTHER_FEATURES = FeatureConfig(
    smallest_power=2**-24,
    log_floor_mode="added",
    preemphasis=0.97,
    window="symmetric",
    frame_padding="reflected",
    mel_scale="slaney",
    std_ddof="sample",
    dynamic_range=0.0,
    dc_removal="none",
    normalization="utterance",
)
PLACEMENTS = {
    "card": ON_CARD,
    "partly on host": Placement(offloaded_blocks=2),
    "host": Placement(offloaded_blocks=99),
    "prefetched": Placement(offloaded_blocks=99, prefetch=True),
    "half": Placement(half_precision=True),
    "host and half": Placement(offloaded_blocks=2, half_precision=True),
}
KINDS = {
    "conformer": MODEL,
    "transformer": dataclasses.replace(MODEL, encoder_type="transformer"),
    "other parts": OTHER_PARTS,
    "other parts, by 8": dataclasses.replace(OTHER_PARTS, subsampling="separable", biases=True),
}


def features_of(model: ModelConfig) -> FeatureConfig:
    """Return the features of a model: for NeMo's parts, NeMo's features with one of its two kinds of edge padding."""
    if model.subsampling == "valid":
        return FeatureConfig()
    return dataclasses.replace(OTHER_FEATURES, frame_padding="zeros" if model.biases else "reflected")


def double_parts(
    model: ModelConfig = MODEL,
    recompute: str = "never",
    vocab_size: int = VOCAB_SIZE,
    topology: Topology = ALONE,
    sharded: bool = False,
    placement: Placement = ON_CARD,
    optimizer: OptimizerConfig = ADAMW,
    device: torch.device = CPU,
    passes: Passes = ALL_PASSES,
    features: FeatureConfig | None = None,
) -> StepParts:
    """Return step parts in float64, by default on the CPU, with consecutive micro-batches and SpecAugment."""
    consecutive = DataConfig(concurrent_micro_batches=1)
    memory = MemoryConfig(gradient_checkpointing=recompute)
    features = features or features_of(model)
    config = TrainConfig(model=model, features=features, data=consecutive, memory=memory, optimizer=optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        architecture = architecture_of(config, vocab_size)
        layout = StateLayout(topology, sharded, placement)
        return build_step_parts(config, architecture, device, 100, layout=layout, passes=passes)
    finally:
        torch.set_default_dtype(torch.float32)


def speeches(count: int, seed: int = 0, augmented: bool = True) -> list[Example]:
    """Return utterances of 0.4 to 2 s of noise in float64 with 1 to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [
        Example(
            utterance_id=f"u{number}",
            waveform=torch.randn(draw(6_400, 32_000), generator=generator, dtype=torch.float64),
            tokens=torch.randint(4, VOCAB_SIZE, (draw(1, 6),), generator=generator).tolist(),
            augment_seed=number if augmented else None,
        )
        for number in range(count)
    ]


def long_speeches() -> list[Example]:
    """Return four utterances of 4.4 to 5.6 s with 60 to 140 tokens, about three small chunks."""
    generator = torch.Generator().manual_seed(1)
    return [
        Example(
            utterance_id=f"long{number}",
            waveform=torch.randn(samples, generator=generator, dtype=torch.float64),
            tokens=torch.arange(tokens).remainder(VOCAB_SIZE - 4).add(4).tolist(),
            augment_seed=number,
        )
        for number, (samples, tokens) in enumerate([(70_400, 105), (76_800, 60), (83_200, 120), (90_000, 130)])
    ]


def global_batch(spoken: list[Example], batch_size: int) -> GlobalBatch:
    """Return these utterances as one global batch in micro-batches of `batch_size`."""
    return split_into_micro_batches(spoken, same_size(batch_size), OUR_TOKENS)


def weights_after(parts: StepParts, steps: int = 3, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return weights, second moments, last loss and gradient norm after steps on different utterances, on the CPU."""
    for step in range(steps):
        spoken = [dataclasses.replace(s, waveform=s.waveform.to(dtype)) for s in speeches(4, seed=step)]
        report = train_step(parts, global_batch(spoken, 2), step)
        assert report and not report.is_skipped
    moments = {f"moment {n}": state["exp_avg_sq"] for n, state in enumerate(parts.optimizer.state.values())}
    last = {"loss": torch.tensor(report.loss), "norm": torch.tensor(report.gradient_norm)}
    values = {**dict(parts.model.named_parameters()), **moments, **last}
    return {name: tensor.detach().cpu() for name, tensor in values.items()}


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of `one`."""
    return float(((one - other).norm() / one.norm().clamp_min(1e-300)).detach())


def max_relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference between tensors of the same name."""
    assert one.keys() == other.keys() and one
    return max(relative_difference(tensor, other[name]) for name, tensor in one.items())


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether the names are equal, and the tensors bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def with_dropout(model: ModelConfig, dropout: float) -> ModelConfig:
    return dataclasses.replace(model, dropout=dropout)


def measured_peak(parts: StepParts, global_batch: GlobalBatch) -> int:
    """Return the peak of live bytes in a second step: weights, gradients, optimizer state and largest micro-batch."""
    train_step(parts, global_batch, 0)
    live = LiveBytes()
    live.count(parts.state_tensors())
    before = live.live
    batches = [batch.tensors() for batch in global_batch.micro_batches]
    live.count(tensor for tensors in batches for tensor in tensors)
    with live:
        train_step(parts, global_batch, 1)
    assert live.peak > live.live > before
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in batches]
    return live.peak - sum(sizes) + max(sizes)
