"""Conversion of .nemo files and Parakeet folders to checkpoints of this project."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from konkanivani.base.auto_defaults import resolve
from konkanivani.base.config import AugmentConfig, LossConfig, TextConfig, TrainConfig
from konkanivani.base.errors import DataError, ResourceError, UsageError, explained
from konkanivani.base.files import digest_of_file
from konkanivani.base.flags import config_to_text
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.rules import check_config
from konkanivani.inference.nemo.archive import NemoArchive, open_nemo, refused
from konkanivani.inference.nemo.folder import WEIGHTS, read_folder_pieces, read_folder_settings, read_folder_tensors
from konkanivani.inference.nemo.names import RNNT
from konkanivani.inference.nemo.pieces import Pieces, read_pieces
from konkanivani.inference.nemo.settings import NemoSettings, read_settings
from konkanivani.inference.nemo.weights import Tensors, read_tensors, take_weights
from konkanivani.inference.provenance import PROVENANCE_STATE, Provenance
from konkanivani.model.architecture import HybridArchitecture, architecture_of, is_within_bounds
from konkanivani.training.checkpoint.checkpoint import Checkpoint

FILTER_BANK = "preprocessor.featurizer.fb"


@dataclass(frozen=True)
class Imported:
    """Result of an import; `left` describes the parts of the file that are not in the checkpoint."""

    checkpoint: Checkpoint
    architecture: HybridArchitecture
    numbers: int
    provenance: Provenance
    left: str

    def sentences(self) -> str:
        """Return a summary for the user."""
        model = self.architecture.model
        features = self.architecture.features
        framing = self.architecture.framing
        said = self.provenance
        known = [f"SHA-256 {self.provenance.sha256}", f"saved by {self.provenance.saved_by}"]
        known += [f"licence: {said.licence}" if said.licence else "no licence in the file: check its source"]
        numbers = f"{self.numbers / 1e6:.1f} M parameters"
        tokens = f"{self.checkpoint.vocab_size} tokens"
        tokens += f" of {said.language}" if said.language else ""
        return (
            f"Imported: {model.encoder_layers} blocks of dimension {model.d_model} and a CTC head, "
            f"{numbers}; {tokens}; {features.mel_bins} mel bins, "
            f"{1000 * framing.encoder_hop // SAMPLE_RATE} ms per frame.\nNot imported: {self.left}.\nSource: "
            f"{said.file}, {', '.join(known)}."
        )


def import_nemo(path: Path, language: str | None, folder: Path) -> Imported:
    """Convert a .nemo file, or a Parakeet folder, to a checkpoint.

    Args:
        language: language to import, if the model has several.
        folder: place of a temporary file for gzipped weights, which has no name.

    Raises a CheckpointError if the file is damaged or unsupported, and a UsageError if it lacks this language.
    """
    if path.is_dir():
        settings = read_folder_settings(path)
        tokenizers = {"": read_folder_pieces(path)}
        config = _config(settings, tokenizers[_choose(language, ("",), path)], path)
        return _imported(config, settings, tokenizers, read_folder_tensors(path), path / WEIGHTS)
    with open_nemo(path, folder) as archive:
        settings = read_settings(archive.config, path)
        tokenizers = {name: _pieces(archive, file) for name, file in settings.tokenizers.items()}
        chosen = _choose(language, tuple(tokenizers), path)
        _check_vocabulary(settings, tokenizers, path)
        config = _config(settings, tokenizers[chosen], path)
        # A licence file in the archive takes precedence over the configuration's entry.
        settings = replace(settings, licence=archive.licence or settings.licence)
        return _imported(config, settings, tokenizers, read_tensors(archive.weights, path), path, chosen)


def _imported(
    config: TrainConfig,
    settings: NemoSettings,
    tokenizers: Mapping[str, Pieces],
    found: Tensors,
    path: Path,
    chosen: str = "",
) -> Imported:
    """Return the checkpoint for settings that have been read from the file at `path`, and its tensors."""
    pieces = tokenizers[chosen]
    architecture = architecture_of(config, pieces.tokenizer.size)
    _check_filter_bank(found, architecture, path)
    rnnt = sum(tensor.numel() for name, tensor in found.items() if RNNT.match(name))
    # Names, shapes and dtypes only: no memory is used.
    ours = architecture.build_without_values().state_dict()
    weights = take_weights(found, ours, settings, _rows(tokenizers, chosen), path)
    left = [f"an RNNT decoder and joint network, {rnnt / 1e6:.1f} M parameters"] if rnnt else []
    left += [f"the tokens of {len(tokenizers) - 1} other languages"] if len(tokenizers) > 1 else []
    with explained(ResourceError, f"{path} cannot be read", "Fix that and start again."):
        digest = digest_of_file(path)
    provenance = Provenance(path.name, digest, settings.licence, settings.saved_by, chosen)
    checkpoint = Checkpoint(
        config=config_to_text(config),
        tokenizer=pieces.tokenizer.model,
        vocab_size=pieces.tokenizer.size,
        step=0,
        plan_digest=0,
        states={"model": {**weights}, PROVENANCE_STATE: provenance.state_dict()},
    )
    numbers = sum(tensor.numel() for tensor in weights.values())
    return Imported(checkpoint, architecture, numbers, provenance, " and ".join(left) or "nothing")


def _pieces(archive: NemoArchive, file: str) -> Pieces:
    if file not in archive.tokenizers:
        raise refused(archive.path, f"it contains no {file:.80}, which its configuration requires")
    try:
        return read_pieces(archive.tokenizers[file])
    except (ValueError, DataError) as error:
        raise refused(archive.path, str(error).rstrip("."), "Use another model") from None


def _choose(language: str | None, languages: tuple[str, ...], path: Path) -> str:
    if languages == ("",):
        if language is not None:
            raise UsageError(f"--language {language}: {path} has one tokenizer for all languages. Omit it.")
        return ""
    if language is None and len(languages) > 1:
        raise UsageError(f"{path} has several languages. Use --language with one of {', '.join(languages)}.")
    if language is not None and language not in languages:
        raise UsageError(f"--language {language} is not a language of {path}. Use one of {', '.join(languages)}.")
    return language or languages[0]


def _check_vocabulary(settings: NemoSettings, tokenizers: Mapping[str, Pieces], path: Path) -> None:
    """Raise a CheckpointError if the rows of the CTC head are in another order than the tokenizers' pieces."""
    names = tuple(name for pieces in tokenizers.values() for name in pieces.names)
    # Not every file lists the vocabulary. If it does, a wrong tokenizer would give fluent but wrong text.
    if settings.vocabulary and settings.vocabulary != names:
        raise refused(path, "the vocabulary of its output head differs from its tokenizers", "Use another model")


def _config(settings: NemoSettings, pieces: Pieces, path: Path) -> TrainConfig:
    """Return the checkpoint's settings: model and features from the file, all others default."""
    config = TrainConfig(
        model=settings.model,
        features=settings.features,
        text=TextConfig(tokenizer_type="bpe", vocab_size=pieces.tokenizer.size),
        loss=LossConfig(ctc_weight=1.0),
    )
    config = resolve(config)
    try:
        check_config(config)
    except UsageError as error:
        raise refused(path, f"its configuration is invalid. {str(error).rstrip('.')}", "Use another model") from None
    if not is_within_bounds(config.model):
        raise refused(path, "its dimensions are out of range", "Use another model")
    return config


def _rows(tokenizers: Mapping[str, Pieces], chosen: str) -> list[int | None]:
    """Return, for each token of this project's tokenizer, its row in the file's CTC head, or None."""
    # The head concatenates the rows of all languages in the order of their tokenizers.
    before = 0
    for language, pieces in tokenizers.items():
        if language == chosen:
            rows = [None if old is None else before + old for old in pieces.old_ids]
        before += pieces.size
    return [before, *rows[1:]]  # the blank is NeMo's last row, here the first token


def _check_filter_bank(found: Tensors, architecture: HybridArchitecture, path: Path) -> None:
    """Raise a CheckpointError if the file's mel filter bank differs from the one built from its settings."""
    theirs = found.get(FILTER_BANK)
    ours = architecture.build_front_end(AugmentConfig()).log_mel.power.mel_scale.fb.T
    if theirs is None:
        return
    # Filters stored in half precision are compared with a larger tolerance.
    nearness = 1e-5 if theirs.dtype == torch.float32 else 1e-3
    if theirs.shape[1:] != ours.shape or not (theirs[0].float() - ours).abs().max() < nearness * ours.max():
        raise refused(path, f"its {FILTER_BANK} does not match its settings", "Use another model")
