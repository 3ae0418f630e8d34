"""Random T5 models of transformers, and folders as written by `save_pretrained`. Nothing is downloaded."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from konkanivani.models.t5.folder import name_in_file
from konkanivani.models.t5.model import T5, T5Shape, T5Variant
from konkanivani.ops.passes import optimize

SKIP_REASON = "transformers, with which T5 is compared, is not installed: pip install -e .[test]"
transformers = pytest.importorskip("transformers", reason=SKIP_REASON)
modeling = pytest.importorskip("transformers.models.t5.modeling_t5", reason=SKIP_REASON)


@dataclass(frozen=True)
class Kind:
    """Small model with the properties that distinguish a published model."""

    is_gated: bool = True
    is_tied: bool = False
    is_mt5: bool = False
    layers: tuple[int, int] = (2, 2)
    vocab_size: int = 300
    largest_file: str = "5GB"

    @property
    def variant(self) -> T5Variant:
        """Variant of the project's T5 for this kind."""
        return T5Variant(self.is_gated, not self.is_tied, self.is_tied)


KINDS = {
    "1.0": Kind(is_gated=False, is_tied=True),
    "1.1": Kind(),
    "flan": Kind(vocab_size=321, largest_file="30KB"),
    "mt5": Kind(is_mt5=True, vocab_size=2_112),
    "byt5": Kind(layers=(4, 1), vocab_size=384),
}


def reference(kind: Kind, seed: int = 0, width: int = 24) -> torch.nn.Module:
    """Return a random transformers model in evaluation mode, in which every weight affects the output."""
    config_class = transformers.MT5Config if kind.is_mt5 else transformers.T5Config
    config = config_class(
        vocab_size=kind.vocab_size,
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=kind.layers[0],
        num_decoder_layers=kind.layers[1],
        num_heads=2,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=40,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if kind.is_gated else "relu",
        tie_word_embeddings=kind.is_tied,
        decoder_start_token_id=0,
    )
    config._attn_implementation = "eager"
    name = "MT5ForConditionalGeneration" if kind.is_mt5 else "T5ForConditionalGeneration"
    model = getattr(transformers, name)(config).eval()
    if not kind.is_tied:
        # transformers 5 ties the output layer unless it is read from a file with other values.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            # T5 does not divide the scores by a square root: larger queries would amplify rounding errors.
            deviation = {"shared": 0.3 if kind.is_tied else 1.0, "q": 0.1}.get(key.split(".")[-2], 0.2)
            parameter.copy_(1 + 0.2 * drawn if "layer_norm" in key else deviation * drawn)
    return model


class ExactNorm(torch.nn.Module):
    """RMS norm with the variance in the precision of its input; transformers computes it in fp32 even for float64."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


def to_float64(model: torch.nn.Module) -> torch.nn.Module:
    """Convert a transformers model to float64, including its norms."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("T5LayerNorm", "MT5LayerNorm"):
            model.set_submodule(name, ExactNorm(module))
    return model.double()


def shape_of(model: torch.nn.Module, kind: Kind) -> T5Shape:
    """Return the dimensions of a transformers model as a `T5Shape`."""
    config = model.config
    return T5Shape(
        config.d_model,
        config.d_kv,
        config.num_heads,
        *kind.layers,
        config.d_ff,
        config.vocab_size,
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
        kind.variant,
    )


def to_project_model(model: torch.nn.Module, kind: Kind) -> T5:
    """Return the project's model with the weights of a transformers model, in evaluation mode."""
    ours, theirs = T5(shape_of(model, kind)).to(model.shared.weight.dtype), model.state_dict()
    named = {name: theirs[name_in_file(name, kind.is_gated)].clone() for name in ours.state_dict()}
    ours.load_state_dict(named)
    optimize(ours)
    return ours.eval()


def write_reference_folder(kind: Kind, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model with `save_pretrained`, and the tokenizer file."""
    from tests.t5.parts import sentencepiece_model

    model = reference(kind, seed).to(dtype)
    model.save_pretrained(path, max_shard_size=kind.largest_file)
    (path / "spiece.model").write_bytes(sentencepiece_model())
    return path
