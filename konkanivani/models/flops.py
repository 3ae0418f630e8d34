"""Arithmetic of a training step, by a formula per layer, and the machine's measured rate to compare it with.

A multiply-add is 2 FLOP. The forward pass counts once, the backward pass twice (gradients by the input and by the
weight); only the first convolution's input needs no gradient. Norms, activations, softmax, dropout, CTC and the
optimizer are left out: they are bound by memory, and the time that they take shows up as lost efficiency.

B batch, T feature frames, T' encoder frames, N encoder frames of all utterances, U tokens, D model width.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.config import ModelConfig
from konkanivani.lengths import subsampled_length

CTC_HEAD = "CTC head"
MAX_TIMING = 1.0  # seconds; a dtype without native instructions takes that for each product
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Forward FLOP of a layer in one micro-batch; the backward pass is `backwards` times that."""

    name: str
    formula: str
    flop: float
    backwards: int = 2
    is_dense: bool = True


def forward_layers(
    config: ModelConfig, vocab_size: int, mel_bins: int, frames: tuple[int, ...], tokens: int
) -> tuple[Layer, ...]:
    """Return every matrix product of a forward pass over utterances of `frames` feature frames, `tokens` tokens each.

    The encoder's blocks process N encoder frames, without padding, as on a CPU; everything else processes B T'.
    """
    width = config.d_model
    inner = config.resolved_feedforward_dim
    kernel = config.convolution_kernel
    kind = config.subsampling
    batch = len(frames)
    lengths = tuple(subsampled_length(length, kind) for length in frames)
    encoded = max(lengths)
    rows = batch * encoded
    packed = sum(lengths)
    spoken = batch * (tokens + 1)
    pairs = sum(length**2 for length in lengths)
    blocks = config.encoder_layers
    decoders = config.decoder_layers
    feed_forward = Layer("feed-forward", "L 4 N D I", blocks * 4 * packed * width * inner)
    more: tuple[Layer, ...] = ()
    if config.encoder_type == "conformer":
        feed_forward = Layer("feed-forward", "L 2 (4 N D I)", blocks * 2 * 4 * packed * width * inner)
        more = (
            Layer("convolution's gate, output", "L 6 N D^2", blocks * 6 * packed * width**2),
            Layer("depthwise along time", "L 2 N K D", blocks * 2 * packed * kernel * width, is_dense=False),
        )
    if config.attention_positions == "relative":
        by_distance = blocks * 2 * sum(length * (2 * length - 1) for length in lengths) * width
        more += (
            # Not multiplied by the batch: all utterances share the longest one's table, a constant, hence one backward.
            Layer("distances' projection", "L 2 (2 T' - 1) D^2", blocks * 2 * (2 * encoded - 1) * width**2, 1),
            Layer("attention by distance", "L 2 sum T' (2 T' - 1) D", by_distance, is_dense=False),
        )
    return (
        *_subsampling_layers(config, mel_bins, batch, max(frames)),
        feed_forward,
        Layer("attention's projections", "L 8 N D^2", blocks * 8 * packed * width**2),
        Layer("attention", "L 4 sum T'^2 D", blocks * 4 * pairs * width, is_dense=False),
        *more,
        Layer(CTC_HEAD, "2 B T' D V", 2 * rows * width * vocab_size),
        Layer("decoder's self-attention", "M 8 B U D^2", decoders * 8 * spoken * width**2),
        Layer("its products", "M 4 B U^2 D", decoders * 4 * spoken * (tokens + 1) * width, is_dense=False),
        Layer("cross-attention", "M 4 B (U + T') D^2", decoders * 4 * (spoken + rows) * width**2),
        Layer("its products over frames", "M 4 B U T' D", decoders * 4 * spoken * encoded * width, is_dense=False),
        Layer("decoder's feed-forward", "M 4 B U D I", decoders * 4 * spoken * width * inner),
        Layer("decoder's output", "2 B U D V", 2 * spoken * width * vocab_size if decoders else 0),
    )


def _subsampling_layers(config: ModelConfig, mel_bins: int, batch: int, frames: int) -> tuple[Layer, ...]:
    """Return the layers before the blocks, for T = `frames` and F = `mel_bins`; each stride halves both."""
    channels = config.subsampling_channels
    kind = config.subsampling
    sizes = []
    made: tuple[int, ...] = (frames, mel_bins)
    for _ in range(3 if kind == "separable" else 2):
        made = tuple((size - 3) // 2 + 1 if kind == "valid" else -(-size // 2) for size in made)
        sizes.append(batch * made[0] * made[1])
    # The input needs no gradient: one backward product.
    layers = [Layer("first convolution", "2 B T/2 F/2 9 C", 2 * sizes[0] * 9 * channels, 1)]
    for size in sizes[1:]:
        if kind == "striding":
            layers.append(Layer("second convolution", "2 B T' F' 9 C^2", 2 * size * 9 * channels**2))
            continue
        layers.append(Layer("depthwise convolution", "2 B T' F' 9 C", 2 * size * 9 * channels, is_dense=False))
        layers.append(Layer("pointwise convolution", "2 B T' F' C^2", 2 * size * channels**2))
    output = 2 * sizes[-1] * channels * config.d_model
    return (*layers, Layer("subsampling's output", "2 B T' C F' D", output))


def step_flop(layers: tuple[Layer, ...], recomputes: bool) -> float:
    """Return the FLOP of forward and backward; if every block is recomputed, the forward pass counts twice."""
    return sum(layer.flop * (1 + recomputes + layer.backwards) for layer in layers)


def product_rate(multiply: Multiply, device: torch.device, dtype: torch.dtype, size: int, rounds: int = 20) -> float:
    """Return the FLOP/s of a (size, size) matrix product: the median of up to `rounds` rounds after a warm-up round."""
    own = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=own).to(device, dtype) for _ in range(2))
    seconds = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        multiply(a, b)
        # CUDA launches asynchronously: without this the launch is timed, not the product.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > MAX_TIMING:
            break
    return 2 * size**3 / statistics.median(seconds[1:] or seconds)
