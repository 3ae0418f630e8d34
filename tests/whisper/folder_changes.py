"""Changes to the files of a Whisper folder, for tests of invalid folders."""

import json
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.decoder.embed_tokens.weight"
FolderChange = Callable[[Path], object]


def change_json(name: str, **changes: object) -> FolderChange:
    """Return a function that changes settings of a JSON file in a folder; a value of ... removes the setting."""

    def change(folder: Path) -> None:
        parsed = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in parsed.items() if value is not ...}))

    return change


def write_or_remove(name: str, data: str | bytes | None) -> FolderChange:
    """Return a function that writes this content to a file in a folder, or removes the file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if data is not None:
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> FolderChange:
    """Return a function that applies `change` to the tensors of a folder."""

    def rewrite(folder: Path) -> None:
        result = safetensors.torch.load_file(folder / WEIGHTS)
        change(result)
        safetensors.torch.save_file(result, folder / WEIGHTS, {"format": "pt"})

    return rewrite


def change_weight_bytes(change: Callable[[bytes], bytes]) -> FolderChange:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
