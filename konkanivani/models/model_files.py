"""Files of pretrained models and LoRA adapters: JSON and safetensors, validated before anything is allocated."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import safetensors
import safetensors.torch
import torch

from konkanivani.config import TuningConfig
from konkanivani.errors import (
    CheckpointError,
    KonkaniVaniError,
    ResourceError,
    UsageError,
    defer_signals,
    exit_cleanly_at_signals,
)
from konkanivani.files import conversion_hint, sync_file
from konkanivani.models.architecture import Architecture
from konkanivani.models.fine_tuning import LOW_RANK_TENSORS

# --------------------
# Files of a model's folder: JSON and safetensors, read without running code; pickle is refused.


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
NUMBER_FORMATS = frozenset({"F16", "BF16", "F32"})
PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|bin\.index\.json)")
MOST_JSON_BYTES = MAX_HEADER_BYTES = 2**22  # the longest of both, large-v3's list of tensors, has about 200,000


def refused(path: Path, reason: str, advice: str = "Download it again, or use another") -> CheckpointError:
    """Return the error for a folder that cannot be used."""
    return CheckpointError(f"The model folder {path} cannot be used: {reason}. {advice}.")


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file of the folder."""
    folder = path.parent
    name = path.name
    if not path.is_file():
        raise refused(folder, f"it has no {name}", "Use a folder with all files of the model")
    with _convert_read_errors(path):
        # Checked before reading: a file of gigabytes would exhaust the memory.
        if path.stat().st_size > MOST_JSON_BYTES:
            raise refused(folder, f"its {name} has more than {MOST_JSON_BYTES} bytes")
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError):
            raise refused(folder, f"its {name} is not JSON") from None
    if not isinstance(values, dict):
        raise refused(folder, f"its {name} is not a JSON object")
    return values


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write the object as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError if a weight of a trained model is not finite."""
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"The weights {name} of the model are not finite. Use another checkpoint.")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, memory-mapped: their values are read on access."""
    with _convert_read_errors(path), safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def first_rows(path: Path, name: str, count: int) -> torch.Tensor:
    """Return the first `count` rows of a tensor in a safetensors file."""
    with _convert_read_errors(path), safetensors.safe_open(path, framework="pt") as file:
        return file.get_slice(name)[:count]


def files_of(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors in each weight file: from the index, or from a single file's header."""
    if (path / WEIGHTS).exists():
        return {WEIGHTS: tuple(header_of(path / WEIGHTS))}
    if not (path / INDEX).exists():
        pickled = sorted(entry.name for entry in path.iterdir() if PICKLED.fullmatch(entry.name))
        if pickled:
            raise refused(
                path,
                f"its {pickled[0]} is pickle, which can run code when it is read",
                "If you trust it, convert it with the model's class in transformers, "
                'from_pretrained("OLD").save_pretrained("NEW"), and copy the other files to the new folder',
            )
        raise refused(path, f"it has no {WEIGHTS}", "Use a folder with all files of the model")
    listed = read_json(path / INDEX).get("weight_map")
    files: dict[str, tuple[str, ...]] = {}
    for tensor, file in (listed if isinstance(listed, dict) else {}).items():
        # No slash in the name: a path could point outside of the folder.
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", file):
            raise refused(path, f"its {INDEX} lists {file!r:.60}, which is not a weight file in the folder")
        files[file] = (*files.get(file, ()), tensor)
    if not files:
        raise refused(path, f"its {INDEX} has no weight_map")
    return files


def header_of(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor of a file, without reading values."""
    if not path.is_file():
        raise refused(path.parent, f"it has no {path.name}", "Use a folder with all files of the model")
    with _convert_read_errors(path):
        with open(path, "rb") as file:
            claimed = int.from_bytes(file.read(8), "little")
        # The first 8 bytes are the header's length; checked before safetensors allocates it.
        if claimed > MAX_HEADER_BYTES:
            reason = f"its {path.name} is damaged (its header states {claimed} bytes){conversion_hint(path)}"
            raise refused(path.parent, reason)
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


@contextlib.contextmanager
def _convert_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except KonkaniVaniError:
        raise
    except (PermissionError, MemoryError) as error:
        reason = "permission denied" if isinstance(error, PermissionError) else "not enough memory"
        raise ResourceError(f"{path} cannot be read: {reason}. Fix that and start again.") from None
    except Exception as error:  # a damaged or hostile file can raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(".")
        raise refused(path.parent, f"its {path.name} is damaged ({reason}){conversion_hint(path)}") from None


# --------------------
# Dimensions of a model, in its folder's config.json and in a checkpoint.


def read_dimension(path: Path, config: Mapping[str, object], name: str, most: int, default: object = None) -> int:
    """Return the dimension `name` of the folder's config.json; refuse the folder if it is not from 1 to `most`."""
    value = config.get(name, default)
    # `type`, not isinstance: True is an int.
    if type(value) is not int or not 1 <= value <= most:
        raise refused(path, f"{name} in its {CONFIG} is {value!r:.40} but must be a number from 1 to {most}")
    return value


def checked_dimensions(state: Mapping[str, object], most: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions that a checkpoint stores; raise a CheckpointError if one is not from 1 to its bound.

    Args:
        most: upper bound of each dimension, by its name.
    """
    dimensions: dict[str, int] = {}
    for name, bound in most.items():
        value = state.get(name)
        # The checkpoint is untrusted: bound every dimension before a network of that size is built.
        if type(value) is not int or not 1 <= value <= bound:
            raise CheckpointError("The checkpoint's model has invalid dimensions. Use another checkpoint.")
        dimensions[name] = value
    return dimensions


# --------------------
# Folder of a model in Hugging Face format, the base of every family's.


@dataclass(frozen=True)
class ModelFolder:
    """Folder whose settings and list of tensors have been checked; weights are read on demand.

    `config` is the content of config.json; `files` maps each file to the names of its tensors.
    """

    path: Path
    config: Mapping[str, object]
    files: Mapping[str, tuple[str, ...]]

    @property
    def architecture(self) -> Architecture:
        """Architecture that the folder describes."""
        raise NotImplementedError

    @property
    def peft_model(self) -> Mapping[str, str]:
        """Class of the model in transformers, as PEFT's adapter_config.json names it."""
        raise NotImplementedError

    def name_in_file(self, name: str) -> str:
        """Return the name in the files of the network's tensor or layer `name`."""
        raise NotImplementedError

    def copies(self) -> dict[str, str]:
        """Return the names in the files that repeat another tensor, with that tensor's name in the files."""
        raise NotImplementedError

    def our_names(self) -> dict[str, str]:
        """Return the network's tensor names, keyed by their names in the files."""
        return {self.name_in_file(name): name for name in self.architecture.build_without_values().state_dict()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the network's tensors in fp32, by the project's names; raises as `check_weights` does."""
        return dict(self.each_weight())

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors one by one, so that only one is in memory at a time."""
        names = self.our_names()
        for name, tensor in self._tensors():
            if name in names:
                yield names[name], tensor

    def check_weights(self) -> None:
        """Read all weights and keep none.

        Raises:
            CheckpointError: A weight is not finite, or a copy of a tensor differs from it.
        """
        for _ in self._tensors():
            pass

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in fp32, by their names in the files."""
        copies = self.copies()
        originals = set(copies.values())
        # Of a tensor and its copies, the first is kept to compare the others with.
        first: dict[str, tuple[str, torch.Tensor]] = {}
        for file in self.files:
            for name, tensor in read_tensors(self.path / file).items():
                copied = tensor.to(torch.float32, copy=True)  # memory-mapped: another program may change the file
                if not copied.isfinite().all():
                    raise refused(self.path, f"its {name} contains values that are not finite")
                original = copies.get(name, name)
                if original in originals:
                    first_name, expected = first.setdefault(original, (name, copied))
                    if not torch.equal(copied, expected):
                        copy = first_name if name == original else name
                        raise refused(
                            self.path, f"its {copy} differs from its {original}, to which its {CONFIG} ties it"
                        )
                yield name, copied

    def build(self) -> torch.nn.Module:
        """Build the network with the folder's weights, on the CPU."""
        model = self.architecture.build_without_values()
        model.load_state_dict(self.weights(), assign=True)
        return model

    def check_tensors(self, family: str, unused: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a folder whose files do not have exactly the network's tensors and shapes.

        Args:
            family: name of the model's family, for messages.
            unused: shapes of tensors that the files may contain although the network has none.
        """
        model = self.architecture.build_without_values()
        expected = {self.name_in_file(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored: dict[str, tuple[tuple[int, ...], str]] = {}
        # All headers first: a missing file explains more than a difference does.
        headers = {file: header_of(self.path / file) for file in self.files}
        for file, header in headers.items():
            if header.keys() != set(self.files[file]):
                raise refused(self.path, f"the tensors in its {file} differ from its {INDEX}")
            stored |= header
        expected |= {copy: expected[name] for copy, name in self.copies().items()}
        expected |= {name: shape for name, shape in unused.items() if name in stored}
        for name in sorted(stored.keys() ^ expected.keys()):
            is_missing = name in expected
            reason = f"it has no tensor {name}" if is_missing else f"its tensor {name:.80} is not part of {family}"
            raise refused(self.path, reason)
        for name, (shape, kind) in stored.items():
            if kind not in NUMBER_FORMATS:
                supported = ", ".join(sorted(NUMBER_FORMATS))
                raise refused(self.path, f"its {name} is of type {kind} but must be {supported}")
            if shape != expected[name]:
                reason = f"its {name} has the shape {shape}, but {expected[name]} according to its {CONFIG}"
                raise refused(self.path, reason)


Folder = TypeVar("Folder", bound=ModelFolder)


@dataclass(frozen=True)
class PretrainedFolder(Generic[Folder]):
    """Model in a checked folder; its families add architecture, tokenizer and learning rate."""

    folder: Folder

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return self.folder.path

    def check_weights(self) -> None:
        """Read all weights without keeping them; raise a CheckpointError if some are not finite numbers."""
        self.folder.check_weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights in fp32 under this project's names."""
        return self.folder.weights()

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of `weights` one by one."""
        return self.folder.each_weight()


# --------------------
# Folder that is either written completely or does not exist.


def check_is_new(out: Path) -> None:
    """Raise UsageError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists. Choose a new or empty folder.")


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Provide a temporary folder next to `out`; rename it to `out` at the end, or delete it if anything fails.

    SIGTERM and SIGHUP delete it too.

    Raises:
        ResourceError: The folder cannot be written.
    """
    try:
        with exit_cleanly_at_signals():
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial", dir=out.parent))
            try:
                yield partial
                for path in partial.rglob("*"):
                    if path.is_file():
                        path.chmod(0o644)  # safetensors creates files that only their owner can read
                        sync_file(path)
                partial.chmod(0o755)  # mkdtemp creates folders that only their owner can enter
                os.replace(partial, out)  # atomic, and after the files are synced: a crash leaves all or nothing
            finally:
                with defer_signals():  # a second Ctrl-C would leave gigabytes
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"{out} could not be written: {error.strerror or error}. Free disk space, repair the folder, or "
            "choose another one."
        ) from None
    except safetensors.SafetensorError as error:
        raise ResourceError(
            f"{out} could not be written: {error}. Free disk space, or choose another folder."
        ) from None


# --------------------
# LoRA adapters in PEFT's format. PEFT (github.com/huggingface/peft) adds lora_alpha / r times the product of `lora_B`
# and `lora_A` to a layer of the base model that transformers has loaded. r rank, D input and N output width of a layer.


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's prefix of the names in transformers' model


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
    _check_products(base, products, {name: layers.get(name, (0, 0)) for name in adapted}, tuning.lora_rank)
    check_finite(products)
    with whole_folder(out) as partial:
        safetensors.torch.save_file(_peft_names(base, products), partial / ADAPTER_WEIGHTS, {"format": "pt"})
        write_json(partial / ADAPTER_CONFIG, _peft_config(base, tuning, _peft_targets(base, layers, adapted)))


def _check_products(
    base: ModelFolder, products: Mapping[str, torch.Tensor], adapted: Mapping[str, tuple[int, int]], rank: int
) -> None:
    down, up = LOW_RANK_TENSORS
    expected = {f"{name}.{down}": (rank, width) for name, (_, width) in adapted.items()}
    expected |= {f"{name}.{up}": (width, rank) for name, (width, _) in adapted.items()}
    if {name: tuple(tensor.shape) for name, tensor in products.items()} != expected:
        raise CheckpointError(
            f"The LoRA adapter does not match the layers of {base.path} at rank {rank}. Use its own base model."
        )


def _peft_names(base: ModelFolder, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the products by PEFT's names; A is (r, D) and B (N, r) in PEFT too."""
    parts = dict(zip(LOW_RANK_TENSORS, ("lora_A.weight", "lora_B.weight"), strict=True))
    peft_weights = {}
    for name, tensor in products.items():
        part = next(part for part in LOW_RANK_TENSORS if name.endswith(part))
        layer = base.name_in_file(name.removesuffix(f".{part}"))
        peft_weights[f"{PEFT_PREFIX}{layer}.{parts[part]}"] = tensor.detach().cpu().contiguous()
    return peft_weights


def _peft_targets(base: ModelFolder, layers: Mapping[str, tuple[int, int]], adapted: Set[str]) -> list[str]:
    """Return PEFT's `target_modules`: last parts of names if all layers with them are adapted, else full names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    has_all = adapted == {name for name in layers if name.rpartition(".")[2] in ends}
    names = [base.name_in_file(name) for name in adapted]
    return sorted({name.rpartition(".")[2] for name in names} if has_all else names)


def _peft_config(base: ModelFolder, tuning: TuningConfig, targets: list[str]) -> dict[str, object]:
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
