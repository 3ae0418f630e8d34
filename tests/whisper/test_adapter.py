"""LoRA in PEFT's format: PEFT's, the project's and the merged model give the same output."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.config import TuningConfig
from konkanivani.errors import CheckpointError, ResourceError, UsageError
from konkanivani.models import model_files
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.export import write_adapter, write_whisper_folder
from konkanivani.models.whisper.folder import WhisperFolder, name_in_file, read_whisper_folder
from konkanivani.models.whisper.model import Whisper
from tests.whisper.folders import KINDS, random_batch, random_features, read_reference

SKIP_REASON = "peft, which reads the adapters, is not installed: pip install -e .[test]"
peft = pytest.importorskip("peft", reason=SKIP_REASON)

Weights = dict[str, torch.Tensor]
ALL = ("query", "key", "value", "output", "expand", "contract")
TRANSFORMERS_NAMES = ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]
TUNING = TuningConfig(lora_rank=3, lora_alpha=5.0, lora_targets=ALL)
KIND = KINDS["tiny"]
LENGTHS = (9, 3)


@pytest.fixture(scope="module")
def base(whisper_folders: dict[str, Path]) -> WhisperFolder:
    return read_whisper_folder(whisper_folders["tiny"])


def build_lora_model(base: WhisperFolder, tuning: TuningConfig, seed: int | None = None) -> Whisper:
    """Return the base with LoRA products: non-zero random ones with a seed, otherwise the initial ones."""
    model = WhisperArchitecture(base.shape, tuning).build()
    result = model.load_state_dict(base.weights(), strict=False)
    assert not result.unexpected_keys and all("low_rank" in name for name in result.missing_keys)
    generator = torch.Generator().manual_seed(seed or 0)
    for name, parameter in model.named_parameters():
        if seed is not None and "low_rank" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def our_logits(model: Whisper, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    model = model.to(dtype)
    output = model(random_features(KIND).to(dtype), (100,) * 2, random_batch(KIND, *LENGTHS).decoder_tokens)
    return model.decoder.output(output.decoded).detach()


@torch.no_grad()
def transformers_logits(model: torch.nn.Module, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    features = random_features(KIND).to(dtype).transpose(1, 2)
    return model.to(dtype)(
        input_features=features, decoder_input_ids=random_batch(KIND, *LENGTHS).decoder_tokens
    ).logits


def load_with_peft(base: WhisperFolder, out: Path) -> torch.nn.Module:
    """Load the base with transformers in float64, and the written adapter with PEFT."""
    return peft.PeftModel.from_pretrained(read_reference(base.path).double(), out).eval()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize(
    ("targets", "theirs"),
    [
        (ALL, TRANSFORMERS_NAMES),
        (("query", "value"), ["q_proj", "v_proj"]),
        (("contract",), ["fc2"]),
        (("key", "output", "expand"), ["fc1", "k_proj", "out_proj"]),
    ],
)
@pytest.mark.parametrize("alpha", [0.0, 5.0])
@pytest.mark.filterwarnings("error::UserWarning")  # PEFT warns about missing and unexpected tensors
def test_lora_merged_and_peft_models_have_equal_logits(targets, theirs, alpha, base, tmp_path):
    tuning = replace(TUNING, lora_targets=targets, lora_alpha=alpha)
    model = build_lora_model(base, tuning, seed=1)
    weights = model.state_dict()
    write_adapter(base, weights, tuning, tmp_path / "adapter")
    _, plain = WhisperArchitecture(base.shape, tuning).plain(weights)
    write_whisper_folder(base, plain, tmp_path / "merged")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["target_modules"] == theirs and written["lora_alpha"] == (alpha or 6)
    ours, peft_model = our_logits(model), transformers_logits(load_with_peft(base, tmp_path / "adapter"))
    assert distance(ours, peft_model) < 1e-12
    # The merged weights are rounded to fp32.
    assert distance(ours, transformers_logits(read_reference(tmp_path / "merged"))) < 1e-5
    assert distance(ours, transformers_logits(read_reference(base.path))) > 0.01  # negative control: without products


def test_peft_merge_equals_project_merge(base, tmp_path):
    model = build_lora_model(base, TUNING, seed=1).double()
    weights = model.state_dict()
    write_adapter(base, weights, TUNING, tmp_path / "adapter")
    theirs = load_with_peft(base, tmp_path / "adapter").merge_and_unload().state_dict()
    _, plain = WhisperArchitecture(base.shape, TUNING).plain(weights)
    assert len(plain) == 89 and max(distance(t, theirs[name_in_file(name)]) for name, t in plain.items()) < 1e-14
    merged, before = plain["encoder.blocks.0.self_attention.key.weight"], base.weights()
    assert distance(merged, before["encoder.blocks.0.self_attention.key.weight"]) > 0.01


def test_negative_control_other_products_or_scale_change_logits(base, tmp_path):
    model = build_lora_model(base, TUNING, seed=1)
    for name, weights, tuning in (
        ("other", build_lora_model(base, TUNING, seed=2).state_dict(), TUNING),
        ("scale", model.state_dict(), replace(TUNING, lora_alpha=5.1)),
    ):
        write_adapter(base, weights, tuning, tmp_path / name)
        assert distance(our_logits(model), transformers_logits(load_with_peft(base, tmp_path / name))) > 1e-3


def test_lora_tensors_suffice_and_peft_finds_the_base_model(base, tmp_path):
    model = build_lora_model(base, TUNING, seed=1)
    weights = model.state_dict()
    products = {name: tensor for name, tensor in weights.items() if "low_rank" in name}
    write_adapter(base, weights, TUNING, tmp_path / "whole")
    write_adapter(base, products, TUNING, tmp_path / "alone")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "whole"]
    result = peft.AutoPeftModel.from_pretrained(tmp_path / "alone", dtype=torch.float32)
    assert distance(our_logits(model), transformers_logits(result.eval())) < 1e-12


def test_adapter_omits_layers_without_lora_products(base, tmp_path):
    model = build_lora_model(base, TUNING, seed=1)
    kept = {name: tensor for name, tensor in model.state_dict().items() if "encoder.blocks.1.self" in name}
    write_adapter(base, kept, TUNING, tmp_path / "adapter")
    for name, parameter in model.named_parameters():
        if "low_rank.up" in name and name not in kept:
            parameter.data.zero_()
    peft_model = load_with_peft(base, tmp_path / "adapter")
    assert sum(name.endswith("lora_A.default.weight") for name, _ in peft_model.named_parameters()) == 4
    assert distance(our_logits(model), transformers_logits(peft_model)) < 1e-12


def test_untrained_lora_model_equals_base_bit_for_bit(base):
    model, plain = build_lora_model(base, TUNING), base.build().eval()
    assert sum(name.endswith("low_rank.up") for name in model.state_dict()) == 2 * 6 + 2 * 10
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(our_logits(model, dtype), our_logits(plain, dtype))
        with torch.no_grad():
            assert torch.equal(our_logits(model, dtype), our_logits(plain, dtype))
    model.decoder.blocks[1].feedforward.contract.low_rank.up.data[0, 0] = 1e-3  # negative control
    assert not torch.equal(our_logits(model), our_logits(plain))


def test_rejected_or_failed_write_leaves_no_files(base, tmp_path, monkeypatch):
    weights, out = build_lora_model(base, TUNING, seed=1).state_dict(), tmp_path / "out"
    name = "decoder.blocks.1.feedforward.expand.low_rank.up"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="mine already exists"):
        write_adapter(base, weights, TUNING, tmp_path / "mine")
    with pytest.raises(UsageError, match="no LoRA adapter"):
        write_adapter(base, base.weights(), TUNING, out)
    with pytest.raises(CheckpointError, match=r"expand\.low_rank\.up of the model are not finite"):
        write_adapter(base, weights | {name: torch.full((96, 3), torch.inf)}, TUNING, out)
    cut = {key: tensor for key, tensor in weights.items() if key != name}
    other = {f"decoder.blocks.7.{key}": weights[key] for key in weights if "low_rank" in key}
    for wrong in (weights | {name: torch.zeros(95, 3)}, cut, other):
        with pytest.raises(CheckpointError, match="does not match the layers of .* at rank 3"):
            write_adapter(base, wrong, TUNING, out)
    with pytest.raises(CheckpointError, match="at rank 4"):
        write_adapter(base, weights, replace(TUNING, lora_rank=4), out)
    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="could not be written: No space"):
        patch.setattr(model_files, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        write_adapter(base, weights, TUNING, out)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    write_adapter(base, weights, TUNING, out)
    kept = safetensors.torch.load_file(out / "adapter_model.safetensors")
    first = "base_model.model.model.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    assert len(kept) == 2 * 32 and torch.equal(
        kept[first], weights["encoder.blocks.0.self_attention.query.low_rank.down"]
    )
