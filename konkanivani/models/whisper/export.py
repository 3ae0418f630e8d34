"""Whisper folders: reading a pretrained one, and writing a trained model as a copy of its base or as an adapter."""

import dataclasses
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from konkanivani.config import AudioContext, PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.errors import CheckpointError, NumericsError, ResourceError, UsageError, explained
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.hub import locate_model
from konkanivani.models.model_files import (
    CONFIG,
    INDEX,
    ModelFolder,
    PretrainedFolder,
    check_finite,
    check_is_new,
    checked_dimensions,
    header_of,
    read_json,
    read_tensors,
    refused,
    whole_folder,
    write_adapter,
    write_json,
)
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.byte_pairs import read_byte_pairs
from konkanivani.models.whisper.folder import AUDIO_CONTEXT, MOST, WhisperFolder, read_whisper_folder
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.models.whisper.vocabulary import ModelTokens, Prompt, PromptedVocabulary, is_english_only

# --------------------
# Export of a trained Whisper model as a copy of its base folder in which only changed weights differ.


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
        message = f"Tensors changed: {', '.join(self.rewritten) or 'none, the weights equal those of the base model'}."
        if self.in_full:
            message += " Stored in fp32: in the half precision of the base model a weight would not be finite."
        if self.left_out:
            message += f" Not written, since they contain weights of the base model: {', '.join(self.left_out)}."
        return message


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
    named_weights = named_as_in_files(base, weights)
    for copy, name in base.copies().items():
        named_weights[copy] = named_weights[name].clone()

    def mark(partial: Path) -> None:
        if audio_context not in (None, base.audio_context):
            settings = read_json(partial / base.marked_file)
            write_json(partial / base.marked_file, settings | {AUDIO_CONTEXT: audio_context})

    return write_copy(base, named_weights, out, mark)


def write_copy(
    base: ModelFolder, named: Mapping[str, torch.Tensor], out: Path, mark: Callable[[Path], None] = lambda _: None
) -> WrittenFolder:
    """Write the base's files with the weights `named` as in its files; raise errors as `write_whisper_folder` does.

    Args:
        mark: changes other files in the complete folder, which still has a temporary name.
    """
    check_is_new(out)
    kept_as = (pair for file in base.files for pair in read_tensors(base.path / file).items())
    # fp16 ends at 65,504: a trained weight can leave its range.
    in_full = any(not named[name].to(tensor.dtype).isfinite().all() for name, tensor in kept_as)
    copied, left_out = _other_files(base)
    for name in copied:
        # An error while it is copied would not say which of both files it is about.
        with explained(ResourceError, f"{base.path / name} cannot be read", "Fix that and start again."):
            (base.path / name).open("rb").close()
    with whole_folder(out) as partial:
        _check_disk_space(base, copied, out, in_full)
        for name in copied:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base.path / name, partial / name)
        rewritten = [name for name in base.files if _write_weights(base.path / name, named, partial / name, in_full)]
        verify_weights(partial, base, named, in_full, out)
        if in_full:
            _state_fp32(partial)
        mark(partial)
    return WrittenFolder(tuple(rewritten), left_out, in_full)


def named_as_in_files(base: ModelFolder, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights by their names in the files; raise a CheckpointError if they do not match the base model."""
    names = {ours: file_name for file_name, ours in base.our_names().items()}
    shapes = {name: tensor.shape for name, tensor in base.architecture.build_without_values().state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise CheckpointError(f"The weights do not match the shape of {base.path}. Use its own base model.")
    check_finite(weights)
    return {names[name]: tensor.detach().cpu() for name, tensor in weights.items()}


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
    written: Path, base: ModelFolder, weights: Mapping[str, torch.Tensor], in_full: bool, out: Path
) -> None:
    """Compare the files in `written` with `weights` rounded to each tensor's number format, bit for bit.

    Raises:
        NumericsError: A tensor differs. `out` names the folder in the message.
    """
    for file in base.files:
        written_tensors = read_tensors(written / file)
        for name, original in read_tensors(base.path / file).items():
            dtype = torch.float32 if in_full else original.dtype
            if name not in written_tensors or not _has_same_bits(written_tensors[name], weights[name].to(dtype)):
                raise NumericsError(
                    f"{out} was not written: {name} in {file}, read back, differs from the trained weight "
                    f"rounded to {str(dtype).removeprefix('torch.')}. Check the disk and export again."
                )


def _has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Comparing bytes also distinguishes 0.0 from -0.0.
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _other_files(base: ModelFolder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the base's files without weights, as relative paths, and its other files of weights (left out)."""
    files = []
    for directory, folders, names in os.walk(base.path):
        # In place, so that os.walk skips hidden folders such as .git and .cache.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(directory, name).relative_to(base.path).as_posix() for name in sorted(names)]
    stale = tuple(name for name in files if STALE.fullmatch(name) and name not in base.files)
    return tuple(name for name in files if name not in {*stale, *base.files}), stale


def _check_disk_space(base: ModelFolder, copied: tuple[str, ...], out: Path, in_full: bool) -> None:
    needed = sum((base.path / name).stat().st_size for name in copied)
    for name in base.files:
        if in_full:
            needed += sum(4 * math.prod(shape) for shape, _ in header_of(base.path / name).values())
        else:
            needed += (base.path / name).stat().st_size
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ResourceError(
            f"{out} needs {needed / 2**20:.0f} MiB, but only {free / 2**20:.0f} MiB are free. Free disk space, "
            "or choose another folder."
        )


def _state_fp32(folder: Path) -> None:
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


# --------------------
# Whisper folder as a pretrained model: architecture, tokenizer and weights.


KIND = "whisper"
# d_model: 1/40 of the peak learning rate in Whisper's training (Radford et al., 2022, table 17). Other widths use the
# rate of the next larger one.
RATES = {384: 3.75e-5, 512: 2.5e-5, 768: 1.25e-5, 1024: 6.25e-6, 1280: 5e-6}
LORA_RATE = 1e-3  # high, since LoRA's products start at zero


@dataclass(frozen=True)
class PretrainedWhisper(PretrainedFolder[WhisperFolder]):
    """Whisper model in a folder; implements `Pretrained`."""

    def complete_settings(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the settings with the folder's audio context if they name none."""
        return dataclasses.replace(config, audio_context=self._audio_context(config))

    def architecture(self, tuning: TuningConfig, config: PretrainedConfig) -> WhisperArchitecture:
        """Return the architecture with the layers to train and the audio context of the settings."""
        return WhisperArchitecture(self.folder.shape, tuning, self._audio_context(config))

    def _audio_context(self, config: PretrainedConfig) -> AudioContext:
        return config.audio_context or self.folder.audio_context

    def vocabulary(self, config: PretrainedConfig) -> PromptedVocabulary:
        """Return the tokenizer with the language and task of `config` as the prompt of its labels."""
        shape = self.folder.shape
        generation = self.folder.generation
        pairs = read_byte_pairs(self.path)
        english = is_english_only(pairs, shape.vocab_size, generation)
        tokens = ModelTokens(shape.vocab_size, shape.target_positions, english, generation)
        return PromptedVocabulary(pairs, Prompt(config.language, config.task), tokens)

    def learning_rate(self, tuning: TuningConfig) -> float:
        """Return a peak learning rate: lower for larger models, and a rate of its own for LoRA weights."""
        wider = [width for width in RATES if width >= self.folder.shape.d_model]
        return LORA_RATE if tuning.lora_rank else RATES[min(wider, default=max(RATES))]

    def description(self) -> Mapping[str, object]:
        """Return the model's kind and dimensions."""
        return {"kind": KIND, **dataclasses.asdict(self.folder.shape)}


def read_pretrained_whisper(path: Path) -> PretrainedWhisper:
    """Return the Whisper model in a folder, with its settings and list of tensors checked.

    Errors are those listed in `read_whisper_folder`.
    """
    return PretrainedWhisper(read_whisper_folder(path))


def restored_shape(state: Mapping[str, object]) -> WhisperShape:
    """Return the dimensions stored in `description`; raise a CheckpointError if they are invalid."""
    shape = WhisperShape(**checked_dimensions(state, MOST))
    if shape.d_model % 2 or shape.d_model % shape.attention_heads:
        raise CheckpointError(
            "The checkpoint's number of attention heads does not divide the model dimension. Use another checkpoint."
        )
    return shape


# --------------------
# Export of a fine-tuned Whisper model, as a complete folder or as a PEFT adapter.


@dataclass(frozen=True)
class TunedWhisper:
    """Settings, architecture, complete weights and serialized tokenizer of a fine-tuned Whisper model."""

    config: TrainConfig
    architecture: WhisperArchitecture
    weights: Mapping[str, torch.Tensor]
    tokenizer: bytes

    def note(self) -> str | None:
        """Return advice for use of the model in other programs, or None if it needs none."""
        if self.architecture.audio_context == "window":
            return None
        seconds = self.architecture.longest_seconds
        rate = SAMPLE_RATE / self.architecture.framing.encoder_hop
        return (
            f"It was trained on the speech only, not on windows of {seconds:g} s. Set the context length in "
            f"other programs, for example --audio-ctx of whisper.cpp: {rate:g} frames per second."
        )


def read_base(tuned: TunedWhisper, folder: str | None, outputs: Iterable[Path]) -> PretrainedWhisper:
    """Return the pretrained folder of the run, or `folder` as a copy of it.

    Raises a CheckpointError if the folder does not exist or contains a model of other dimensions or tokens, and a
    UsageError if one of the `outputs` is inside it.
    """
    path = locate_base(tuned.config.pretrained, folder, outputs)
    base = read_pretrained_whisper(path)
    if base.folder.shape != tuned.architecture.model or not _has_tokens_of(base, tuned):
        raise other_base(path)
    return base


def locate_base(config: PretrainedConfig, folder: str | None, outputs: Iterable[Path]) -> Path:
    """Return the path of the pretrained folder of a run, or of `folder`, its copy; raise errors as `read_base` does."""
    base_path = folder or config.pretrained or ""
    path = locate_model(base_path, config.revision, "whisper").path
    if folder is None and not path.is_dir():
        raise CheckpointError(
            f"The folder {path} that the run was started from does not exist, but the export needs it. Give "
            "its current path with --pretrained."
        )
    # Compare resolved paths: a symbolic link could point into the base folder.
    inside = [out for out in outputs if path.resolve() in out.resolve().parents]
    if inside:
        raise UsageError(
            f"{inside[0]} is inside the folder that the run was started from. Choose a folder outside of it."
        )
    return path


def other_base(path: Path) -> CheckpointError:
    """Return the error for a base folder of another model."""
    return CheckpointError(
        f"The run was not started from a model like {path}: its dimensions or tokens differ. Give the original folder "
        "with --pretrained."
    )


def _has_tokens_of(base: PretrainedWhisper, tuned: TunedWhisper) -> bool:
    try:
        return base.vocabulary(tuned.config.pretrained).model == tuned.tokenizer
    except UsageError:  # the vocabulary lacks the language of the run
        return False


def export_whisper(tuned: TunedWhisper, base: PretrainedWhisper, out: Path) -> WrittenFolder:
    """Write the folder `out`: the base's files, with the trained weights in the base's number formats.

    Errors are those listed in `write_whisper_folder`, which compares the files with the weights bit for bit.
    """
    # `plain` merges LoRA weights into the layers.
    _, weights = tuned.architecture.plain(tuned.weights)
    return write_whisper_folder(base.folder, weights, out, tuned.architecture.audio_context)


def export_adapter(tuned: TunedWhisper, base: PretrainedWhisper, out: Path) -> None:
    """Write the folder `out` with the LoRA weights only, in PEFT's format."""
    if not tuned.architecture.tuning.lora_rank:
        raise UsageError(
            "--adapter needs a run with --lora_rank, but this run trained the layers themselves: use --whisper."
        )
    write_adapter(base.folder, tuned.weights, tuned.architecture.tuning, out)
