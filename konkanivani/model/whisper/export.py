"""Export of a trained Whisper model as a copy of its base folder in which only changed weights differ."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from konkanivani.base.config import AudioContext
from konkanivani.base.errors import CheckpointError, NumericsError, ResourceError
from konkanivani.model.whisper.files import INDEX, check_finite, read_json, read_tensors, refused, write_json
from konkanivani.model.whisper.folder import AUDIO_CONTEXT, CONFIG, HEAD, WhisperFolder
from konkanivani.model.whisper.whole_folder import check_is_new, whole_folder

# Other files of weights: they hold the base model's, so the exported folder must not contain them.
STALE = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|msgpack|h5|onnx|onnx_data|gguf|ggml|bin\.index\.json)")
DTYPE_SETTINGS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class WrittenFolder:
    """Summary of an export: weight files rewritten, and files left out because they hold the base model's weights.

    `in_full`: stored in fp32, because in the base model's half precision a weight would not be finite.
    """

    rewritten: tuple[str, ...]
    left_out: tuple[str, ...]
    in_full: bool

    def sentence(self) -> str:
        """Return the summary as a message."""
        said = f"Tensors changed: {', '.join(self.rewritten) or 'none, the weights equal those of the base model'}."
        if self.in_full:
            said += " Stored in fp32: in the half precision of the base model a weight would not be finite."
        if self.left_out:
            said += f" Not written, since they contain weights of the base model: {', '.join(self.left_out)}."
        return said


def write_whisper_folder(
    base: WhisperFolder, weights: Mapping[str, torch.Tensor], out: Path, audio_context: AudioContext | None = None
) -> WrittenFolder:
    """Write `weights`, by the project's names, to the folder `out`, which is complete or does not exist.

    Args:
        audio_context: audio context that the weights were trained with; recorded in the folder if it differs from the
            base model's. None: the base model's.

    Raises:
        UsageError: `out` exists and is not empty.
        CheckpointError: The weights do not match the base model's network, or are not finite.
        ResourceError: The files cannot be written.
        NumericsError: The files, read back, differ from the weights.
    """
    check_is_new(out)
    named = _named_as_in_files(base, weights)
    kept_as = (pair for file in base.files for pair in read_tensors(base.path / file).items())
    # fp16 ends at 65,504: a trained weight can leave its range.
    in_full = any(not named[name].to(tensor.dtype).isfinite().all() for name, tensor in kept_as)
    with whole_folder(out) as partial:
        kept, left_out = _other_files(base)
        _check_room(base, kept, out)
        for name in kept:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base.path / name, partial / name)
        rewritten = [name for name in base.files if _write_weights(base.path / name, named, partial / name, in_full)]
        verify_weights(partial, base, named, in_full, out)
        if in_full:
            _tell_of_full_precision(partial)
        if audio_context not in (None, base.audio_context):
            said = read_json(partial / base.marked_file)
            write_json(partial / base.marked_file, said | {AUDIO_CONTEXT: audio_context})
    return WrittenFolder(tuple(rewritten), left_out, in_full)


def _named_as_in_files(base: WhisperFolder, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {ours: theirs for theirs, ours in base.our_names().items()}
    shapes = {name: tensor.shape for name, tensor in base.architecture.build_without_values().state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise CheckpointError(f"The weights do not match the shape of {base.path}. Use its own base model.")
    check_finite(weights)
    named = {names[name]: tensor.detach().cpu() for name, tensor in weights.items()}
    has_head = any(HEAD in tensors for tensors in base.files.values())
    # The output layer is the embedding, so a file that stores it separately gets a copy.
    return named | ({HEAD: named["model.decoder.embed_tokens.weight"].clone()} if has_head else {})


def _write_weights(source: Path, weights: Mapping[str, torch.Tensor], target: Path, in_full: bool) -> bool:
    """Write a file of weights in its own dtypes, or in fp32; return False if it is unchanged and was copied."""
    before = read_tensors(source)
    after = {
        name: weights[name].to(torch.float32 if in_full else tensor.dtype).contiguous()
        for name, tensor in before.items()
    }
    if all(_has_same_bits(after[name], tensor) for name, tensor in before.items()):
        shutil.copyfile(source, target)
        return False
    # Keep the metadata: transformers reads {"format": "pt"} from it.
    with safetensors.safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(after, target, metadata)
    return True


def verify_weights(
    written: Path, base: WhisperFolder, weights: Mapping[str, torch.Tensor], in_full: bool, out: Path
) -> None:
    """Compare the files in `written` with `weights` rounded to each tensor's number format, bit for bit.

    Raises:
        NumericsError: A tensor differs. `out` names the folder in the message.
    """
    for file in base.files:
        found = read_tensors(written / file)
        for name, original in read_tensors(base.path / file).items():
            dtype = torch.float32 if in_full else original.dtype
            if name not in found or not _has_same_bits(found[name], weights[name].to(dtype)):
                raise NumericsError(
                    f"{out} was not written: {name} in {file}, read back, differs from the trained weight "
                    f"rounded to {str(dtype).removeprefix('torch.')}. Check the disk and export again."
                )


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Comparing bytes also distinguishes 0.0 from -0.0.
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _other_files(base: WhisperFolder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the base's files without weights, as relative paths, and its other files of weights (left out)."""
    found = []
    for directory, folders, names in os.walk(base.path):
        # In place, so that os.walk skips hidden folders such as .git and .cache.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(directory, name).relative_to(base.path).as_posix() for name in sorted(names)]
    stale = tuple(name for name in found if STALE.fullmatch(name) and name not in base.files)
    return tuple(name for name in found if name not in {*stale, *base.files}), stale


def _check_room(base: WhisperFolder, kept: tuple[str, ...], out: Path) -> None:
    needed = sum((base.path / name).stat().st_size for name in (*kept, *base.files))
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ResourceError(
            f"{out} needs {needed / 2**20:.0f} MiB, but only {free / 2**20:.0f} MiB are free. Free disk space, "
            "or choose another folder."
        )


def _tell_of_full_precision(folder: Path) -> None:
    """Set the dtype and the total size that the folder's JSON files state to their fp32 values."""
    config = read_json(folder / CONFIG)
    config |= {name: "float32" for name in DTYPE_SETTINGS if name in config}
    write_json(folder / CONFIG, config)
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise refused(folder, f"its {INDEX} has no weight_map")
        sizes = [tensor.nbytes for name in {*weight_map.values()} for tensor in read_tensors(folder / name).values()]
        metadata = index.get("metadata")
        index["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": sum(sizes)}
        write_json(folder / INDEX, index)
