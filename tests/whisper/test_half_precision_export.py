"""Exported Whisper weights are the trained weights rounded to each tensor's number format, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.config import TrainConfig
from konkanivani.errors import NumericsError, ResourceError
from konkanivani.models.whisper import export
from konkanivani.models.whisper.export import TunedWhisper, export_whisper, read_pretrained_whisper
from tests.whisper.small_model import write_model

FORMATS = {
    "fp32": (torch.float32,),
    "fp16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "mixed": (torch.bfloat16, torch.float16, torch.float32),
}
WEIGHTS = "model.safetensors"


def write_base(folder: Path, formats: tuple[torch.dtype, ...]) -> Path:
    """Write a small model whose tensors have these number formats in turn."""
    write_model(folder)
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    cast = {name: tensor.to(formats[i % len(formats)]) for i, (name, tensor) in enumerate(sorted(tensors.items()))}
    safetensors.torch.save_file(cast, folder / WEIGHTS)
    return folder


def change_weights(base: Path) -> tuple[TunedWhisper, dict[str, torch.Tensor]]:
    """Return the model with all weights slightly changed, and these weights by their names in the file."""
    folder = read_pretrained_whisper(base).folder
    generator = torch.Generator().manual_seed(1)
    weights = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in folder.weights().items()}
    names = {ours: theirs for theirs, ours in folder.our_names().items()}
    return TunedWhisper(TrainConfig(), folder.architecture, weights, b""), {names[n]: t for n, t in weights.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_exported_weights_are_rounded_to_the_format(kind, tmp_path):
    base = write_base(tmp_path / "base", FORMATS[kind])
    tuned, expected = change_weights(base)
    export_whisper(tuned, read_pretrained_whisper(base), tmp_path / "out")
    before = safetensors.torch.load_file(base / WEIGHTS)
    after = safetensors.torch.load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in expected.items():
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], tensor.to(before[name].dtype)), name


@pytest.mark.parametrize("kind", FORMATS)
def test_negative_control_flipped_bit_is_detected_and_nothing_written(kind, tmp_path, monkeypatch):
    base = write_base(tmp_path / "base", FORMATS[kind])
    tuned, _ = change_weights(base)
    save_file = safetensors.torch.save_file

    def save_with_flipped_bit(tensors, path, metadata=None):
        save_file(tensors, path, metadata)
        content = bytearray(Path(path).read_bytes())
        # Tensors are stored little-endian: this is the lowest mantissa bit of the first value.
        content[8 + int.from_bytes(content[:8], "little")] ^= 1
        Path(path).write_bytes(content)

    monkeypatch.setattr(export.safetensors.torch, "save_file", save_with_flipped_bit)
    with pytest.raises(NumericsError, match="read back, differs from the trained weight rounded to"):
        export_whisper(tuned, read_pretrained_whisper(base), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_sharded_weights_are_rounded_to_the_format_of_each_tensor(tmp_path):
    base = write_base(tmp_path / "base", FORMATS["mixed"])
    tensors = safetensors.torch.load_file(base / WEIGHTS)
    (base / WEIGHTS).unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[:7], "two.safetensors": names[7:]}
    for shard, held in shards.items():
        safetensors.torch.save_file({name: tensors[name] for name in held}, base / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (base / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    tuned, expected = change_weights(base)
    export_whisper(tuned, read_pretrained_whisper(base), tmp_path / "out")
    for shard, held in shards.items():
        after = safetensors.torch.load_file(tmp_path / "out" / shard)
        assert after.keys() == set(held)
        for name in held:
            assert after[name].dtype == tensors[name].dtype
            assert torch.equal(after[name], expected[name].to(tensors[name].dtype)), name


def test_weight_above_fp16_range_is_exported_in_fp32(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base", FORMATS["fp16"])
    tuned, expected = change_weights(base)
    large = {name: tensor.clone() for name, tensor in tuned.weights.items()}
    large["decoder.norm.bias"][0] = 70_000.0
    tuned = TunedWhisper(tuned.config, tuned.architecture, large, b"")
    # Each weight takes 4 bytes in the export, but 2 in the base model.
    others = sum(path.stat().st_size for path in base.iterdir() if path.name != WEIGHTS)
    needed = others + sum(4 * tensor.numel() for tensor in safetensors.torch.load_file(base / WEIGHTS).values())
    with monkeypatch.context() as patch:
        patch.setattr(export.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(needed, 0, needed - 1))
        with pytest.raises(ResourceError, match="MiB are free. Free disk space"):
            export_whisper(tuned, read_pretrained_whisper(base), tmp_path / "out")
        patch.setattr(export.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(needed, 0, needed))
        written = export_whisper(tuned, read_pretrained_whisper(base), tmp_path / "out")
    after = safetensors.torch.load_file(tmp_path / "out" / WEIGHTS)
    assert written.in_full and {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert float(after["model.decoder.layer_norm.bias"][0]) == 70_000.0
    assert torch.equal(after["model.encoder.conv1.bias"], expected["model.encoder.conv1.bias"])
