"""Hugging Face folders of all number formats and layouts are read exactly and written in the same formats and files."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.errors import CheckpointError
from konkanivani.models.whisper.export import write_whisper_folder
from konkanivani.models.whisper.folder import read_whisper_folder
from tests.conftest import parameter_grid
from tests.whisper.small_model import write_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_INDEX = "pytorch_model.bin.index.json"
FORMATS = {
    "fp32": (torch.float32,),
    "fp16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "fp16 and fp32": (torch.float16, torch.float32),
    "bf16, fp16 and fp32": (torch.bfloat16, torch.float16, torch.float32),
}
SHARDS = {"one file": 1, "two shards": 2, "five shards": 5}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Base:
    """Folder and its tensors by file."""

    path: Path
    files: dict[str, Tensors]

    @property
    def tensors(self) -> Tensors:
        return {name: tensor for tensors in self.files.values() for name, tensor in tensors.items()}


def write_base(path: Path, formats: tuple[torch.dtype, ...], shards: int) -> Base:
    """Write a small model with its tensors in these formats in turn, in one file or in shards with an index."""
    write_model(path, positions=64)
    result = safetensors.torch.load_file(path / WEIGHTS)
    cast = {name: result[name].to(formats[place % len(formats)]) for place, name in enumerate(sorted(result))}
    files: dict[str, Tensors] = {}
    for place, (name, tensor) in enumerate(cast.items()):
        file = WEIGHTS if shards == 1 else f"model-{place % shards + 1:05}-of-{shards:05}.safetensors"
        files.setdefault(file, {})[name] = tensor
    (path / WEIGHTS).unlink()
    for file, tensors in files.items():
        safetensors.torch.save_file(tensors, path / file, {"format": "pt"})
    if shards > 1:
        total = sum(tensor.nbytes for tensor in cast.values())
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return Base(path, files)


def written_files(out: Path, base: Base) -> dict[str, Tensors]:
    return {file: safetensors.torch.load_file(out / file) for file in base.files}


@pytest.mark.parametrize(("formats", "shards"), parameter_grid(FORMATS, SHARDS))
def test_folder_is_read_exactly_and_written_in_its_formats_and_files(formats, shards, tmp_path):
    base = write_base(tmp_path / "base", FORMATS[formats], SHARDS[shards])
    folder = read_whisper_folder(base.path)
    weights, names = folder.weights(), folder.our_names()
    for name, tensor in base.tensors.items():
        assert weights[names[name]].dtype == torch.float32
        assert torch.equal(weights[names[name]], tensor.float()), name

    unchanged = write_whisper_folder(folder, weights, tmp_path / "unchanged")
    assert not unchanged.rewritten
    for file in base.files:
        assert (tmp_path / "unchanged" / file).read_bytes() == (base.path / file).read_bytes()

    trained = {name: weight * 1.37 + 1e-3 for name, weight in weights.items()}
    changed = write_whisper_folder(folder, trained, tmp_path / "changed")
    assert set(changed.rewritten) == base.files.keys()
    for file, tensors in written_files(tmp_path / "changed", base).items():
        assert tensors.keys() == base.files[file].keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == base.files[file][name].dtype
            assert torch.equal(tensor, trained[names[name]].to(tensor.dtype)), name
    assert read_whisper_folder(tmp_path / "changed").weights().keys() == weights.keys()


@pytest.mark.parametrize("formats", ["fp16", "bf16, fp16 and fp32"])
def test_transformers_reads_exported_half_precision_folder(formats, tmp_path):
    transformers = pytest.importorskip("transformers")
    base = write_base(tmp_path / "base", FORMATS[formats], 2)
    folder = read_whisper_folder(base.path)
    trained = {name: weight * 1.37 for name, weight in folder.weights().items()}
    write_whisper_folder(folder, trained, tmp_path / "out")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float32)
    loaded = model.state_dict()
    for file, tensors in written_files(tmp_path / "out", base).items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor.float()), (file, name)


def write_pickles(base: Base, shards: int) -> None:
    """Write the same tensors as pickle files, as in older folders."""
    if shards == 1:
        torch.save(base.tensors, base.path / "pytorch_model.bin")
        return
    names = sorted(base.tensors)
    files = {f"pytorch_model-{n + 1:05}-of-{shards:05}.bin": names[n::shards] for n in range(shards)}
    for file, held in files.items():
        torch.save({name: base.tensors[name] for name in held}, base.path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (base.path / PICKLE_INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 2])
def test_pickle_is_rejected_with_conversion_command(shards, tmp_path):
    base = write_base(tmp_path / "base", FORMATS["fp16"], 1)
    write_pickles(base, shards)
    (base.path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"its pytorch_model.*is pickle.*convert it.*save_pretrained"):
        read_whisper_folder(base.path)


@pytest.mark.parametrize("shards", [1, 2])
def test_pickle_next_to_safetensors_is_neither_read_nor_copied(shards, tmp_path):
    base = write_base(tmp_path / "base", FORMATS["bf16"], 2)
    write_pickles(base, shards)
    pickles = {path.name for path in base.path.iterdir() if path.name.startswith("pytorch_model")}
    assert len(pickles) == (1 if shards == 1 else 3)
    folder = read_whisper_folder(base.path)
    written = write_whisper_folder(folder, folder.weights(), tmp_path / "out")
    assert set(written.left_out) == pickles
    assert not [path for path in (tmp_path / "out").iterdir() if path.name in pickles]


def test_index_that_names_pickle_is_rejected(tmp_path):
    base = write_base(tmp_path / "base", FORMATS["fp16"], 2)
    (base.path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base.tensors, "pytorch_model.bin")}))
    with pytest.raises(CheckpointError, match=r"lists 'pytorch_model\.bin', which is not a weight file"):
        read_whisper_folder(base.path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8], ids=str)
def test_unsupported_number_format_is_rejected_with_tensor_name(dtype, tmp_path):
    base = write_base(tmp_path / "base", FORMATS["fp32"], 1)
    tensors = base.tensors
    name = "model.decoder.layers.0.fc1.weight"
    tensors[name] = tensors[name].to(dtype)
    safetensors.torch.save_file(tensors, base.path / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"its {name} is of type \w+ but must be BF16, F16, F32"):
        read_whisper_folder(base.path)
