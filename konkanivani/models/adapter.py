"""LoRA adapters of tuned models in PEFT's format.

PEFT (github.com/huggingface/peft) adds lora_alpha / r times the product of `lora_B` and `lora_A` to a layer of the base
model that transformers has loaded.

r rank, D input and N output width of a layer.
"""

from collections.abc import Mapping, Set
from pathlib import Path

import safetensors.torch
import torch

from konkanivani.config import TuningConfig
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.models.fine_tuning import LOW_RANK_TENSORS
from konkanivani.models.model_files import ModelFolder, check_finite, check_is_new, whole_folder, write_json

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's prefix of the names in transformers' model


def write_adapter(base: ModelFolder, weights: Mapping[str, torch.Tensor], tuning: TuningConfig, out: Path) -> None:
    """Write the low-rank products of `weights` to the folder `out`, which is complete or does not exist.

    Args:
        weights: tensors by the project's names: all of the model, or its low-rank products only.

    Raises:
        UsageError: `out` exists and is not empty, or there are no products.
        CheckpointError: The products do not match this base and rank, or are not finite.
        ResourceError: The files cannot be written.
    """
    check_is_new(out)
    products = {name: tensor for name, tensor in weights.items() if name.endswith(LOW_RANK_TENSORS)}
    if not products:
        raise UsageError("The model has no LoRA adapter. Export its weights as a whole folder.")
    modules = base.architecture.build_without_values().named_modules()
    layers = {
        name: (layer.out_features, layer.in_features) for name, layer in modules if isinstance(layer, torch.nn.Linear)
    }
    adapted = {name.removesuffix(f".{part}") for part in LOW_RANK_TENSORS for name in products if name.endswith(part)}
    # A layer that the base model does not have gets the shape (0, 0), which matches no tensor.
    _check_shapes(base, products, {name: layers.get(name, (0, 0)) for name in adapted}, tuning.lora_rank)
    check_finite(products)
    with whole_folder(out) as partial:
        safetensors.torch.save_file(_named_as_in_peft(base, products), partial / WEIGHTS, {"format": "pt"})
        write_json(partial / ADAPTER_CONFIG, _config(base, tuning, _targets(base, layers, adapted)))


def _check_shapes(
    base: ModelFolder, products: Mapping[str, torch.Tensor], adapted: Mapping[str, tuple[int, int]], rank: int
) -> None:
    down, up = LOW_RANK_TENSORS
    wanted = {f"{name}.{down}": (rank, width) for name, (_, width) in adapted.items()}
    wanted |= {f"{name}.{up}": (width, rank) for name, (width, _) in adapted.items()}
    if {name: tuple(tensor.shape) for name, tensor in products.items()} != wanted:
        raise CheckpointError(
            f"The LoRA adapter does not match the layers of {base.path} at rank {rank}. Use its own base model."
        )


def _named_as_in_peft(base: ModelFolder, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the products by PEFT's names; A is (r, D) and B (N, r) in PEFT too."""
    parts = dict(zip(LOW_RANK_TENSORS, ("lora_A.weight", "lora_B.weight"), strict=True))
    named = {}
    for name, tensor in products.items():
        part = next(part for part in LOW_RANK_TENSORS if name.endswith(part))
        layer = base.name_in_file(name.removesuffix(f".{part}"))
        named[f"{PREFIX}{layer}.{parts[part]}"] = tensor.detach().cpu().contiguous()
    return named


def _targets(base: ModelFolder, layers: Mapping[str, tuple[int, int]], adapted: Set[str]) -> list[str]:
    """Return PEFT's `target_modules`: last parts of names if all layers with them are adapted, else full names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    has_all = adapted == {name for name in layers if name.rpartition(".")[2] in ends}
    names = [base.name_in_file(name) for name in adapted]
    return sorted({name.rpartition(".")[2] for name in names} if has_all else names)


def _config(base: ModelFolder, tuning: TuningConfig, targets: list[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": None,  # none of PEFT's own tasks takes audio features as input
        "auto_mapping": dict(base.peft_model),
        "base_model_name_or_path": str(base.path.resolve()),
        "r": tuning.lora_rank,
        "lora_alpha": tuning.lora_alpha or 2 * tuning.lora_rank,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
