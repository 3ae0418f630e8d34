"""Files of pretrained models: JSON and safetensors, validated before anything is allocated, and folders written whole.

No code in them is run; pickle is refused.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors
import torch

from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.files import conversion_hint, sync_file

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
    with _read_or_refused(path):
        # Checked before reading: a file of gigabytes would exhaust the memory.
        if path.stat().st_size > MOST_JSON_BYTES:
            raise refused(folder, f"its {name} has more than {MOST_JSON_BYTES} bytes")
        try:
            found = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError):
            raise refused(folder, f"its {name} is not JSON") from None
    if not isinstance(found, dict):
        raise refused(folder, f"its {name} is not a JSON object")
    return found


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
    with _read_or_refused(path), safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def first_rows(path: Path, name: str, count: int) -> torch.Tensor:
    """Return the first `count` rows of a tensor in a safetensors file."""
    with _read_or_refused(path), safetensors.safe_open(path, framework="pt") as file:
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
    with _read_or_refused(path):
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
def _read_or_refused(path: Path) -> Iterator[None]:
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
# Folder that is either written completely or does not exist.


def check_is_new(out: Path) -> None:
    """Raise UsageError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists. Choose a new or empty folder.")


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Provide a temporary folder next to `out`; rename it to `out` at the end, or delete it if anything fails.

    Raises:
        ResourceError: The folder cannot be written.
    """
    try:
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
