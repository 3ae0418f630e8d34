"""Folder of an exported model for the Hugging Face hub: weights, tokenizer, settings and model card.

The folder is complete or does not exist. A folder that this module has written is replaced unless it was changed.
"""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from konkanivani.checkpoints.checkpoint import Checkpoint, ScoreKind, read_provenance
from konkanivani.data.manifest import read_fingerprint
from konkanivani.errors import ResourceError, UsageError, defer_signals
from konkanivani.files import digest_of_file
from konkanivani.flags import config_from_text
from konkanivani.inference.bundle import FOLDER_NAME
from konkanivani.inference.card_scores import CardScore
from konkanivani.inference.model_card import (
    CACHED,
    CARD,
    AuthorFacts,
    BaseFacts,
    CardFacts,
    Contents,
    Corpus,
    TrainingFacts,
    model_card,
    name_of,
)
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.models.model_files import whole_folder
from konkanivani.models.whisper.export import PretrainedWhisper, TunedWhisper, WrittenFolder, export_whisper, read_base

BASE_CARD = "base_model_card.md"  # the card of the base model, which names its authors and licence
MARK = re.compile(r"\n<!-- Written by konkanivani export: ([0-9a-f]{64}) -->\n\Z")
MAX_CARD_BYTES = 2**20
LICENCE_ENTRY = re.compile(r"^license:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$", re.MULTILINE | re.ASCII)
FRONT_MATTER = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---", re.DOTALL)


@dataclass(frozen=True)
class HubFolder:
    """Folder to write, with the facts of its card that are not in the checkpoint."""

    path: Path
    author: AuthorFacts
    scores: tuple[CardScore, ...]


def write_hub_bundle(
    target: HubFolder, checkpoint: Checkpoint, speech_model: SpeechModel, write: Callable[[Path], object]
) -> None:
    """Write the folder of a native model; `write` writes the bundle to a path and verifies it."""
    facts = card_facts(target, checkpoint, _contents(speech_model))
    write_hub_folder(target.path, facts, lambda folder: write(folder / FOLDER_NAME))


def write_hub_whisper(
    target: HubFolder, checkpoint: Checkpoint, speech_model: SpeechModel, tuned: TunedWhisper, pretrained: str | None
) -> WrittenFolder:
    """Write the folder of a fine-tuned Whisper model in the format of its base, and return a summary.

    Args:
        pretrained: current path of the base folder; None: the path used in training.
    """
    base = read_base(tuned, pretrained, [target.path])
    language = tuned.config.pretrained.language
    contents = replace(_contents(speech_model), is_whisper=True, prompt_language=language, note=tuned.note())
    written: list[WrittenFolder] = []
    facts = card_facts(target, checkpoint, contents, base)
    write_hub_folder(target.path, facts, lambda folder: written.append(export_whisper(tuned, base, folder)))
    return written[0]


# --------------------
# Facts of a checkpoint and of its base model.


def _contents(speech_model: SpeechModel) -> Contents:
    parameters = sum(parameter.numel() for parameter in speech_model.model.parameters())
    return Contents(FOLDER_NAME, parameters, speech_model.longest_seconds)


def card_facts(
    target: HubFolder, checkpoint: Checkpoint, contents: Contents, base: PretrainedWhisper | None = None
) -> CardFacts:
    """Return the facts of the card.

    Args:
        base: pretrained folder of the run; None for a model trained from scratch or imported.
    """
    training = _training_facts(checkpoint)
    provenance = read_provenance(checkpoint)
    origin = None
    if base is not None:
        origin = _base_folder_facts(base)
    elif provenance is not None:
        origin = BaseFacts(provenance.file, provenance.sha256, provenance.licence, "", provenance.saved_by)
    imported = provenance.language if provenance is not None and training is None else ""
    language = target.author.speech_language or imported or None
    return CardFacts(name_of(target.path), target.author, contents, training, origin, language, target.scores)


def _training_facts(checkpoint: Checkpoint) -> TrainingFacts | None:
    """Return the record of the training; None for an imported model without further training."""
    if checkpoint.step == 0:
        return None
    corpus = None
    if "corpus" in checkpoint.states:
        fingerprint = read_fingerprint(checkpoint.states["corpus"])
        # Only the name: the path may contain the name of the user.
        corpus = Corpus(os.path.basename(fingerprint.manifest), fingerprint.utterances, fingerprint.hours)
    config = config_from_text(checkpoint.config)
    progress = checkpoint.states.get("progress", {})
    epochs = progress.get("epochs_finished")
    seconds = progress.get("audio_seconds")
    cer = progress.get("best_score")
    # Without a validation manifest, the score counts the epochs instead; without a search, it is a loss.
    is_cer = progress.get("score_kind", ScoreKind.UNKNOWN) in (ScoreKind.UNKNOWN, ScoreKind.CER)
    is_measured = is_cer and config.data.valid_manifest is not None
    return TrainingFacts(
        config=config,
        steps=checkpoint.step,
        corpus=corpus,
        epochs=epochs if isinstance(epochs, int) else None,
        audio_hours=seconds / 3600 if isinstance(seconds, float) else None,
        valid_cer=cer if is_measured and isinstance(cer, float) and 0 <= cer < float("inf") else None,
    )


def _base_folder_facts(base: PretrainedWhisper) -> BaseFacts:
    folder = base.folder
    base_name = folder.config.get("_name_or_path")  # written by transformers
    # A local path would be no use to a reader.
    name = base_name if isinstance(base_name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base_name, re.ASCII) else ""
    files = list(folder.files)
    # Shards have a digest each, which a reader would not compare.
    digest = digest_of_file(folder.path / files[0]) if len(files) == 1 else ""
    folder_path = folder.path.resolve()
    repository = ""
    commit = ""
    if match := CACHED.search(folder_path.as_posix()):
        repository = f"{match[1]}/{match[2]}"
        commit = match[3]
    return BaseFacts(folder_path.name, digest, licence_in_card(folder.path / CARD), name, "", repository, commit)


def licence_in_card(path: Path) -> str:
    """Return the `license` entry of a model card's metadata; "" if there is none."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CARD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    block = FRONT_MATTER.match(text)
    entry = LICENCE_ENTRY.search(block[1]) if block else None
    return entry[1] if entry else ""


# --------------------
# Folder that is written as a whole, and replaced only if it is unchanged since.


def check_hub_folder(out: Path) -> None:
    """Raise UsageError if `out` exists, is not empty, and has other content than an earlier export wrote."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if out.is_dir() and (out / CARD).is_file() and _is_unchanged(out):
        return
    reason = "is a file"
    if out.is_dir():
        reason = "was not written by --hub_folder, or was changed since"
    raise UsageError(f"--hub_folder {out} {reason}, so it is not replaced. Choose a new or empty folder.")


def write_hub_folder(out: Path, facts: CardFacts, write_files: Callable[[Path], object]) -> None:
    """Write the folder `out` with the files of `write_files`, which gets a temporary empty folder, and the model card.

    Raises UsageError if `out` must not be replaced, and ResourceError if it cannot be written.
    """
    check_hub_folder(out)
    is_new = not out.exists() or not any(out.iterdir())
    target = out if is_new else _sibling(out, "new")
    try:
        with whole_folder(target) as partial:
            write_files(partial)
            if (partial / CARD).exists():
                (partial / CARD).replace(partial / BASE_CARD)
            card = model_card(facts)
            (partial / CARD).write_text(card, encoding="utf-8")
            (partial / CARD).write_text(card + _mark(partial, card), encoding="utf-8")
        if not is_new:
            _swap(target, out)
    finally:
        if not is_new:
            with defer_signals():
                shutil.rmtree(target, ignore_errors=True)


def _sibling(out: Path, kind: str) -> Path:
    """Return an unused path in the same folder, and hence on the same file system."""
    target = out.resolve()
    return target.with_name(f"{target.name}.{kind}_{uuid.uuid4().hex[:8]}")


def _swap(new: Path, out: Path) -> None:
    """Replace the folder `out` by `new`; if that fails, `out` keeps its content."""
    target = out.resolve()
    old = _sibling(out, "old")
    try:
        with defer_signals():  # between the two renames, `out` does not exist
            os.rename(target, old)
            try:
                os.rename(new, target)
            except OSError:
                os.rename(old, target)
                raise
    except OSError as error:
        raise ResourceError(
            f"{out} could not be replaced: {error.strerror or error}. Repair the folder, or choose another one."
        ) from None
    with defer_signals():  # else half of the old folder would stay
        shutil.rmtree(old, ignore_errors=True)


def _is_unchanged(out: Path) -> bool:
    """Return whether the card and the list of files are unchanged since the folder was exported."""
    try:
        with open(out / CARD, "rb") as file:
            text = file.read(MAX_CARD_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return False
    mark = MARK.search(text)
    if mark is None:
        return False
    return mark[1] == _digest(out, text[: mark.start()])


def _mark(folder: Path, card: str) -> str:
    """Return the comment at the end of a card by which its export recognizes the folder."""
    return f"\n<!-- Written by konkanivani export: {_digest(folder, card)} -->\n"


def _digest(folder: Path, card: str) -> str:
    """Return a digest of the card and of the names and sizes of the other files."""
    # Sizes instead of contents: the weights may have gigabytes.
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir() and path != folder / CARD]
    listed = [(path.relative_to(folder).as_posix(), path.lstat().st_size) for path in files]
    return hashlib.sha256(repr((card, listed)).encode("utf-8", "surrogateescape")).hexdigest()
