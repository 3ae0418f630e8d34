"""Models on the Hugging Face Hub: which files are needed, and whether the cache has them.

Weights are read from safetensors and .nemo files; a file with pickle is never downloaded.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from konkanivani.console import say
from konkanivani.errors import UsageError
from konkanivani.hub import MAIN, Listing, RemoteFile, Repository, check_revision, is_commit, is_hub_name, is_plain

# Required content: the settings alone, a Whisper or T5 folder ("whisper"), or a NeMo model (a .nemo file or a
# Parakeet folder).
Needs = Literal["settings", "whisper", "nemo"]
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
PICKLED = re.compile(r"pytorch_model.*\.bin|model.*\.(ckpt|pt|pth)")
GENERATION = "generation_config.json"  # with the audio context of a fine-tuned Whisper model, which a plan needs
FEATURES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = "tokenizer.json"
BYTE_PAIRS = ("vocab.json", "merges.txt")  # instead of tokenizer.json
PIECES = "spiece.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
BYTE_TOKENIZER = "ByT5Tokenizer"  # class of a tokenizer without files
SETTINGS = (
    "README.md",  # names the licence
    *FEATURES,
    TOKENIZER,
    *BYTE_PAIRS,
    TOKENIZER_CONFIG,
    PIECES,
    "added_tokens.json",
    "special_tokens_map.json",
    "normalizer.json",
)
TEXT_TYPES = ("t5", "mt5")
MODEL_TYPES = {"settings": ("whisper", *TEXT_TYPES), "whisper": ("whisper", *TEXT_TYPES), "nemo": ("parakeet_ctc",)}
SEVERAL_FILES = f"its weights are in several files, and a Parakeet model is read from a single {WEIGHTS}"
JOIN_FILES = "Load it with transformers, write it with save_pretrained and a larger max_shard_size, and use that folder"
MAX_SETTINGS_BYTES = 2**26  # the longest, a tokenizer.json, has about 4 million


@dataclass(frozen=True)
class ModelLocation:
    """Folder or file of a model; `commit` is the commit that a hub name was resolved to, None for a local path."""

    path: Path
    commit: str | None = None


def locate_model(name: str, revision: str | None, needs: Needs) -> ModelLocation:
    """Return the local path `name`, or the downloaded snapshot of the repository `name`.

    An existing path takes precedence over a repository. A name that is neither is returned as a path, whose reader
    raises the usual error. The commit of a branch or tag is printed.

    Args:
        revision: branch, tag or commit; None for the branch main.

    Raises:
        UsageError: There is no such repository or revision, or `revision` is given with a local path.
        CheckpointError: The repository has no usable model, or a file differs from the listing.
        ResourceError: The Hub cannot be reached or denies access, or the disk is full.
    """
    if os.path.exists(name) or not is_hub_name(name):
        if revision is not None:
            raise UsageError(
                f"--revision {revision} selects a revision on the hub, and {name} is a local path: omit it."
            )
        return ModelLocation(Path(name))
    check_revision(revision)
    located = _locate_remote_model(Repository(name, revision or MAIN), needs)
    if not is_commit(revision):
        # On stderr: --json and transcripts go to stdout.
        say(f"{name} ({revision or MAIN}) is commit {located.commit}, in {located.path}.", sys.stderr)
    return located


def _locate_remote_model(repository: Repository, needs: Needs) -> ModelLocation:
    """Return the snapshot with the needed files, downloaded unless it is complete in the cache."""
    return repository.from_cache_or_hub(
        lambda: _cached_model(repository, needs), lambda: _download_model(repository, needs)
    )


def _cached_model(repository: Repository, needs: Needs) -> ModelLocation | None:
    """Return the model in the cache, or None if it is not complete.

    Weights are downloaded last, but other programs, which share the cache, may have left out some of the settings.
    """
    commit = repository.cached_commit()
    if commit is None:
        return None
    folder = repository.snapshot(commit)
    if needs == "nemo":
        archives = sorted(folder.glob("*.nemo"))
        if archives:
            return ModelLocation(archives[0], commit)
    if not (folder / CONFIG).is_file():
        return None
    kind = _model_type(folder / CONFIG)
    if kind == "whisper" and not (folder / GENERATION).is_file() and not repository.is_absent(commit, GENERATION):
        return None
    if needs != "settings" and not (_has_settings(folder, kind) and _has_weights(folder, needs)):
        return None
    return ModelLocation(folder, commit)


def _has_settings(folder: Path, kind: object) -> bool:
    """Return whether a folder has the front end's settings and all files of a tokenizer of this type of model."""
    files = {path.name for path in folder.iterdir() if path.is_file()}
    if kind in TEXT_TYPES:
        settings = [_read_settings(folder / name) for name in (CONFIG, TOKENIZER_CONFIG)]
        is_of_bytes = BYTE_TOKENIZER in [values.get("tokenizer_class") for values in settings]
        return PIECES in files or is_of_bytes
    has_features = not files.isdisjoint(FEATURES)
    has_pairs = kind == "whisper" and files.issuperset(BYTE_PAIRS)
    return has_features and (TOKENIZER in files or has_pairs)


def _download_model(repository: Repository, needs: Needs) -> ModelLocation:
    """Download the needed files of the revision, and store its commit for later use without a network."""
    listing = repository.listing()
    located = _download_files(repository, listing, needs)
    repository.store_ref(listing.commit, is_complete=needs != "settings")
    return located


def _download_files(repository: Repository, listing: Listing, needs: Needs) -> ModelLocation:
    """Download the needed files that the cache lacks: settings first, weights last."""
    files = listing.files
    folder = repository.snapshot(listing.commit)
    archives = sorted(name for name in files if name.endswith(".nemo") and "/" not in name)
    if needs == "nemo" and archives:
        if len(archives) > 1:
            raise repository.refused(f"it has {len(archives)} .nemo files", "Download one of them and give its path")
        repository.fetch(listing.commit, [files[archives[0]]])
        return ModelLocation(folder / archives[0], listing.commit)
    if CONFIG not in files:
        raise repository.refused(f"it has no {CONFIG}{' and no .nemo file' if needs == 'nemo' else ''}")
    _check_size(repository, files[CONFIG])
    repository.fetch(listing.commit, [files[CONFIG]])
    _check_model_type(repository, folder / CONFIG, needs)
    weights = _weight_files(repository, files, needs) if needs != "settings" else []
    settings = [files[name] for name in (GENERATION, *(SETTINGS if weights else ())) if name in files]
    for file in settings:
        _check_size(repository, file)
    repository.fetch(listing.commit, [*settings, *weights])
    if GENERATION not in files:
        repository.store_absence(listing.commit, GENERATION)
    return ModelLocation(folder, listing.commit)


def _weight_files(repository: Repository, files: Mapping[str, RemoteFile], needs: Needs) -> list[RemoteFile]:
    """Return the single file of weights, or the index and its files; never pickle."""
    if WEIGHTS in files:
        return [files[WEIGHTS]]
    shards = sorted(name for name in files if SHARD.fullmatch(name))
    if INDEX in files and needs == "nemo":
        raise repository.refused(SEVERAL_FILES, JOIN_FILES)
    if INDEX in files and shards:
        _check_size(repository, files[INDEX])
        return [files[INDEX], *(files[name] for name in shards)]
    pickled = sorted(name for name in files if PICKLED.fullmatch(name))
    if pickled:
        raise repository.refused(
            f"its weights are only in {pickled[0]}, which is pickle and can run code when it is read",
            "If you trust it, convert it with transformers' save_pretrained and give the new folder",
        )
    raise repository.refused(f"it has no {WEIGHTS}")


def _check_size(repository: Repository, file: RemoteFile) -> None:
    if file.size is not None and file.size > MAX_SETTINGS_BYTES:
        raise repository.refused(f"its {file.name} has more than {MAX_SETTINGS_BYTES} bytes")


def _check_model_type(repository: Repository, path: Path, needs: Needs) -> None:
    kind = _model_type(path)
    if kind not in MODEL_TYPES[needs]:
        supported = " or ".join(MODEL_TYPES[needs])
        raise repository.refused(f"its {CONFIG} is of a model of type {kind!r:.40}, and only {supported} is supported")


def _model_type(path: Path) -> object:
    """Return the model_type of a config.json, or None if the file has none."""
    return _read_settings(path).get("model_type")


def _read_settings(path: Path) -> dict[str, object]:
    """Return the JSON object in a file, or an empty one if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _has_weights(folder: Path, needs: Needs) -> bool:
    """Return whether a folder has the file of weights, or the index and all files that it lists."""
    if (folder / WEIGHTS).is_file():
        return True
    if needs == "nemo":  # which is read from a single file
        return False
    try:
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return bool(listed) and all(is_plain(name) and (folder / name).is_file() for name in listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
