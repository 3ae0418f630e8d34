"""Weights of .nemo files and Parakeet folders, and their import as checkpoints.

V tokens of this project's tokenizer, D model dimension, K kernel size.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import safetensors
import torch

from konkanivani.checkpoints.checkpoint import PROVENANCE_STATE, Checkpoint, Provenance, check_finite, load_tensors
from konkanivani.config import AugmentConfig, FeatureConfig, LossConfig, ModelConfig, TextConfig, TrainConfig
from konkanivani.errors import DataError, ResourceError, UsageError, explained
from konkanivani.files import conversion_hint, digest_of_file
from konkanivani.flags import config_to_text, resolve
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.architecture import HybridArchitecture, architecture_of, is_within_bounds
from konkanivani.models.hub import INDEX, JOIN_FILES, SEVERAL_FILES
from konkanivani.models.nemo.archive import (
    NemoArchive,
    Pieces,
    Section,
    open_nemo,
    read_pieces,
    refused,
    sentencepiece_of,
)
from konkanivani.models.nemo.settings import BATCH_NORM, HEADS, LEFT, RNNT, NemoSettings, Source, read_settings, sources
from konkanivani.rules import check_config

# --------------------
# Conversion of NeMo tensors to this project's model; all names and shapes are checked before any conversion.


NEVER = -1e4  # logit of a token that the file lacks: its probability is 0
NORM_EPSILON = 1e-5  # default of torch.nn.BatchNorm1d, which NeMo uses

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def read_tensors(file: BinaryIO, path: Path) -> Tensors:
    """Return the file's tensors by their own names.

    Raises a CheckpointError if they are damaged or were not written by torch.save.
    """
    try:
        return load_tensors(file)
    except MemoryError:
        raise ResourceError(f"The model {path} cannot be read: not enough memory. Free some.") from None
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise refused(path, f"its weights are damaged or not plain tensors ({reason:.200})") from None


def take_weights(
    tensors: Tensors, ours: Mapping[str, torch.Tensor], settings: NemoSettings, rows: Sequence[int | None], path: Path
) -> Tensors:
    """Return the weights of this project's model in fp32.

    Args:
        tensors: tensors of the file. They are removed as they are converted, so that no tensor exists twice.
        ours: state dict of the model, without values.
        rows: row of the file's CTC head for each token of this project, None for a token that the file lacks. The
            file's last row, for the blank, is the first of `rows`.

    Raises a CheckpointError if a tensor is missing, unknown, not finite, or has another shape.
    """
    needed = sources(ours, settings.model)
    head = [f"{settings.head}.{leaf}" for leaf in ("weight", "bias")]
    shapes = _shapes(needed.values())
    blank = rows[0]
    if blank is None:
        raise ValueError("the first of the rows is the blank's, which every file has")
    shapes |= {head[0]: (blank + 1, settings.model.d_model, 1), head[1]: (blank + 1,)}
    _check_tensors(tensors, shapes, path)
    # Free unused tensors, such as an RNNT decoder, before new ones are made.
    for name in tensors.keys() - shapes.keys():
        del tensors[name]
    weights = {}
    addresses = set()
    for name, source in needed.items():
        converted = _convert(tensors, source, ours[name].shape)
        storage = converted.untyped_storage()
        # Biases may share memory in the file. Copy them, and views of larger tensors, so that each weight has its own
        # memory and no more than it needs.
        weights[name] = (
            converted.clone() if storage.data_ptr() in addresses or storage.nbytes() > converted.nbytes else converted
        )
        addresses.add(storage.data_ptr())
    # NeMo's CTC head is a convolution with kernel size 1: (V, D, 1).
    weights["ctc_head.weight"] = _select_rows(tensors[head[0]].float().flatten(1), rows, 0.0)
    weights["ctc_head.bias"] = _select_rows(tensors[head[1]].float(), rows, NEVER)
    check_finite(str(path), weights)  # folding divides by the root of a variance, which may be negative
    return weights


def _shapes(needed: Collection[Source]) -> Shapes:
    """Return the shape of every tensor that the encoder is made of, by its name in the file."""
    shapes = {name: source.shape for source in needed for name in source.names}
    norms = {source.norm: source.shape[:1] for source in needed if source.norm}
    return shapes | {f"{norm}.{leaf}": shape for norm, shape in norms.items() for leaf in BATCH_NORM}


def _check_tensors(tensors: Tensors, shapes: Shapes, path: Path) -> None:
    """Raise a CheckpointError that names a missing, misshapen, non-floating-point, non-finite or unknown tensor."""
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise refused(path, f"it has no tensor {name}, which its configuration requires")
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            kind = f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            raise refused(path, f"its tensor {name} is {kind}, but its configuration requires {shape} of floats")
    unknown = sorted(name for name in tensors if name not in shapes and not LEFT.fullmatch(name))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        reason = f"it has a tensor {unknown[0]!r:.120}{more} that its configuration does not use"
        raise refused(path, reason, "Use another model, or a newer version")
    check_finite(str(path), {name: tensors[name] for name in shapes})


def _convert(tensors: Tensors, source: Source, shape: torch.Size) -> torch.Tensor:
    """Return one converted tensor; a BatchNorm is folded into the convolution before it, with fixed statistics.

    y = (conv(x) - mean) / sqrt(variance + 1e-5) * weight + bias is a convolution with scaled kernel and bias.
    """
    parts = [tensors.pop(name).float() for name in source.names]
    if source.norm is None:
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(shape)
    # Fold in float64 and round once.
    weight, bias, mean, variance = (tensors[f"{source.norm}.{leaf}"].double() for leaf in BATCH_NORM)
    scale = weight / (variance + NORM_EPSILON).sqrt()
    # Kernel (D, 1, K); otherwise the bias, which is 0 if the convolution has none.
    if len(shape) == 3:
        return (parts[0].double() * scale[:, None, None]).float()
    return (((parts[0].double() if parts else 0.0) - mean) * scale + bias).float()


def _select_rows(head: torch.Tensor, rows: Sequence[int | None], missing_value: float) -> torch.Tensor:
    """Return the given rows of a tensor, filled with `missing_value` for None."""
    selected = head[torch.tensor([row or 0 for row in rows])]
    selected[torch.tensor([row is None for row in rows])] = missing_value
    return selected


# --------------------
# Reader of CTC Parakeet models saved by transformers: NeMo's FastConformer under other tensor names.


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
FEATURES = ("preprocessor_config.json", "processor_config.json")
MOST_JSON_BYTES = MOST_HEADER_BYTES = 2**24
# Patterns of names in transformers and their replacements in NeMo, applied in this order.
NAMES = (
    (r"encoder\.subsampling\.layers\.", "encoder.pre_encode.conv."),
    (r"encoder\.subsampling\.linear\.", "encoder.pre_encode.out."),
    (r"\.self_attn\.([qkv])_proj\.", r".self_attn.linear_\1."),
    (r"\.self_attn\.o_proj\.", ".self_attn.linear_out."),
    (r"\.self_attn\.relative_k_proj\.", ".self_attn.linear_pos."),
    (r"\.self_attn\.bias_([uv])$", r".self_attn.pos_bias_\1"),
    (r"\.conv\.norm\.", ".conv.batch_norm."),
    (r"^ctc_head\.", HEADS["EncDecCTCModelBPE"][1] + "."),
)
# Supported values of each setting.
ENCODER = {
    **{"model_type": ("parakeet_encoder",), "hidden_act": ("silu",), "subsampling_factor": (8,)},
    **{"subsampling_conv_kernel_size": (3,), "subsampling_conv_stride": (2,)},
}
# Settings that do not affect inference.
ENCODER_UNUSED = (
    *("activation_dropout", "attention_dropout", "dropout_positions", "layerdrop", "initializer_range", "dtype"),
    *("max_position_embeddings", "_attn_implementation_autoset", "attention_out_bias"),
)


def read_folder_settings(path: Path) -> NemoSettings:
    """Return the settings of the model in a folder; raise a CheckpointError that names the first unsupported one."""
    values = _json(path, CONFIG)
    config = Section(path, CONFIG, values)
    config.only("model_type", "parakeet_ctc")
    size = config.count("vocab_size", 1025)
    blank = config.get("pad_token_id", 1024)
    # The CTC head is imported with the blank in its last row, as NeMo has it.
    if blank != size - 1:
        raise config.unbuilt("pad_token_id", blank, f"the last token, {size - 1},")
    version = str(config.get("transformers_version", "of unknown version"))[:40]
    features = _features(path)
    model = _encoder(Section(path, "encoder_config", config.get("encoder_config")), features.mel_bins)
    return NemoSettings(
        model, features, HEADS["EncDecCTCModelBPE"][1], {"": TOKENIZER}, (), f"transformers {version}", ""
    )


def read_folder_pieces(path: Path) -> Pieces:
    """Return the folder's tokenizer, converted to this project's SentencePiece layout."""
    try:
        return read_pieces(sentencepiece_of(_json(path, TOKENIZER)))
    except ValueError as error:
        raise refused(path, str(error), "Use another model") from None


def read_folder_tensors(path: Path) -> Tensors:
    """Return the folder's tensors under NeMo's names; they are memory-mapped from the file until they are copied."""
    if (path / INDEX).exists() and not (path / WEIGHTS).exists():
        raise refused(path, SEVERAL_FILES, JOIN_FILES)
    try:
        with open(path / WEIGHTS, "rb") as file:
            # safetensors would allocate memory for a header of any stated length up to 100 MB.
            if int.from_bytes(file.read(8), "little") > MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
        with safetensors.safe_open(path / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # a damaged file can raise nearly anything
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        hint = conversion_hint(path / WEIGHTS)
        raise refused(path, f"its {WEIGHTS} cannot be read ({reason:.200}){hint}") from None
    for pattern, replacement in NAMES:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def _json(path: Path, name: str) -> object:
    if not (path / name).is_file():
        raise refused(path, f"it has no {name}", "Use a folder with all files of the model")
    try:
        if (path / name).stat().st_size > MOST_JSON_BYTES:
            raise ValueError
        return json.loads((path / name).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        raise refused(path, f"its {name} cannot be read as JSON") from None


def _features(path: Path) -> FeatureConfig:
    name = next((name for name in FEATURES if (path / name).is_file()), FEATURES[0])
    values = _json(path, name)
    if isinstance(values, dict) and "feature_extractor" in values:
        # processor_config.json of newer versions nests the feature settings.
        values = values["feature_extractor"]
    section = Section(path, name, values)
    section.ignore("feature_extractor_type", "processor_class", "padding_side", "return_attention_mask")
    section.only("sampling_rate", SAMPLE_RATE)
    section.only("padding_value", 0.0, 0)
    features = FeatureConfig(
        mel_bins=section.count("feature_size", 80),
        fft_samples=section.count("n_fft", 512),
        window_samples=section.count("win_length", 400),
        hop_samples=section.count("hop_length", 160),
        # Constants of transformers' feature extractor, equal to NeMo's since 2.5.0.
        smallest_power=2.0**-24,
        log_floor_mode="added",
        preemphasis=float(section.number("preemphasis", 0.97, 0, 0.999)),
        window="symmetric",
        frame_padding="zeros",
        mel_scale="slaney",
        std_ddof="sample",
        dynamic_range=0.0,
        dc_removal="none",
        normalization="utterance",
    )
    section.finish()
    return features


def _encoder(section: Section, mel_bins: int) -> ModelConfig:
    section.ignore(*ENCODER_UNUSED)
    section.only_all(ENCODER)
    section.only("num_mel_bins", mel_bins)
    heads = section.count("num_attention_heads", 8)
    biases = section.only("attention_bias", True, False)
    # Grouped-query attention is not supported.
    section.only("num_key_value_heads", heads)
    section.only("convolution_bias", biases)
    model_config = ModelConfig(
        d_model=section.count("hidden_size", 1024),
        encoder_layers=section.count("num_hidden_layers", 24),
        decoder_layers=0,
        attention_heads=heads,
        feedforward_dim=section.count("intermediate_size", 4096),
        convolution_kernel=section.count("conv_kernel_size", 9),
        subsampling_channels=section.count("subsampling_conv_channels", 256),
        dropout=float(section.number("dropout", 0.1, 0, 0.999)),
        attention_positions="relative",
        convolution_norm="none",
        subsampling="separable",
        scaled_input=section.only("scale_input", True, False),
        entry_norm=False,
        biases=biases,
    )
    section.finish()
    return model_config


# --------------------
# Conversion of .nemo files and Parakeet folders to checkpoints of this project.


FILTER_BANK = "preprocessor.featurizer.fb"


@dataclass(frozen=True)
class NemoImport:
    """Result of an import; `omitted` describes the parts of the file that are not in the checkpoint."""

    checkpoint: Checkpoint
    architecture: HybridArchitecture
    numbers: int
    provenance: Provenance
    omitted: str

    def sentences(self) -> str:
        """Return a summary for the user."""
        model = self.architecture.model
        features = self.architecture.features
        framing = self.architecture.framing
        origin = self.provenance
        origin_facts = [f"SHA-256 {self.provenance.sha256}", f"saved by {self.provenance.saved_by}"]
        origin_facts += [f"licence: {origin.licence}" if origin.licence else "no licence in the file: check its source"]
        numbers = f"{self.numbers / 1e6:.1f} M parameters"
        tokens = f"{self.checkpoint.vocab_size} tokens"
        tokens += f" of {origin.language}" if origin.language else ""
        return (
            f"Imported: {model.encoder_layers} blocks of dimension {model.d_model} and a CTC head, "
            f"{numbers}; {tokens}; {features.mel_bins} mel bins, "
            f"{1000 * framing.encoder_hop // SAMPLE_RATE} ms per frame.\nNot imported: {self.omitted}.\nSource: "
            f"{origin.file}, {', '.join(origin_facts)}."
        )


def import_nemo(path: Path, language: str | None, folder: Path, source: str | None = None) -> NemoImport:
    """Convert a .nemo file, or a Parakeet folder, to a checkpoint.

    Args:
        language: language to import, if the model has several.
        folder: place of a temporary file for gzipped weights, which has no name.
        source: name of the model in the provenance record; None for the file name.

    Raises a CheckpointError if the file is damaged or unsupported, and a UsageError if it lacks this language.
    """
    if path.is_dir():
        settings = read_folder_settings(path)
        tokenizers = {"": read_folder_pieces(path)}
        config = _config(settings, tokenizers[_choose(language, ("",), path)], path)
        imported = _import_tensors(config, settings, tokenizers, read_folder_tensors(path), path / WEIGHTS)
        return _with_source(imported, source)
    with open_nemo(path, folder) as archive:
        settings = read_settings(archive.config, path)
        tokenizers = {name: _pieces(archive, file) for name, file in settings.tokenizers.items()}
        chosen = _choose(language, tuple(tokenizers), path)
        _check_vocabulary(settings, tokenizers, path)
        config = _config(settings, tokenizers[chosen], path)
        # A licence file in the archive takes precedence over the configuration's entry.
        settings = replace(settings, licence=archive.licence or settings.licence)
        imported = _import_tensors(config, settings, tokenizers, read_tensors(archive.weights, path), path, chosen)
        return _with_source(imported, source)


def _with_source(imported: NemoImport, source: str | None) -> NemoImport:
    """Return the import with `source` in place of the file name in its provenance record."""
    if source is None:
        return imported
    provenance = replace(imported.provenance, file=source)
    states = {**imported.checkpoint.states, PROVENANCE_STATE: provenance.state_dict()}
    return replace(imported, checkpoint=replace(imported.checkpoint, states=states), provenance=provenance)


def _import_tensors(
    config: TrainConfig,
    settings: NemoSettings,
    tokenizers: Mapping[str, Pieces],
    tensors: Tensors,
    path: Path,
    chosen: str = "",
) -> NemoImport:
    """Return the checkpoint for settings that have been read from the file at `path`, and its tensors."""
    pieces = tokenizers[chosen]
    architecture = architecture_of(config, pieces.tokenizer.size)
    _check_filter_bank(tensors, architecture, path)
    rnnt = sum(tensor.numel() for name, tensor in tensors.items() if RNNT.match(name))
    # Names, shapes and dtypes only: no memory is used.
    ours = architecture.build_without_values().state_dict()
    weights = take_weights(tensors, ours, settings, _head_rows(tokenizers, chosen), path)
    omitted = [f"an RNNT decoder and joint network, {rnnt / 1e6:.1f} M parameters"] if rnnt else []
    omitted += [f"the tokens of {len(tokenizers) - 1} other languages"] if len(tokenizers) > 1 else []
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
    return NemoImport(checkpoint, architecture, numbers, provenance, " and ".join(omitted) or "nothing")


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


def _head_rows(tokenizers: Mapping[str, Pieces], chosen: str) -> list[int | None]:
    """Return, for each token of this project's tokenizer, its row in the file's CTC head, or None."""
    # The head concatenates the rows of all languages in the order of their tokenizers.
    before = 0
    for language, pieces in tokenizers.items():
        if language == chosen:
            rows = [None if old is None else before + old for old in pieces.old_ids]
        before += pieces.size
    return [before, *rows[1:]]  # the blank is NeMo's last row, here the first token


def _check_filter_bank(tensors: Tensors, architecture: HybridArchitecture, path: Path) -> None:
    """Raise a CheckpointError if the file's mel filter bank differs from the one built from its settings."""
    file_bank = tensors.get(FILTER_BANK)
    built_bank = architecture.build_front_end(AugmentConfig()).log_mel.power.mel_scale.fb.T
    if file_bank is None:
        return
    # Filters stored in half precision are compared with a larger tolerance.
    tolerance = 1e-5 if file_bank.dtype == torch.float32 else 1e-3
    if (
        file_bank.shape != (1, *built_bank.shape)
        or not (file_bank[0].float() - built_bank).abs().max() < tolerance * built_bank.max()
    ):
        raise refused(path, f"its {FILTER_BANK} does not match its settings", "Use another model")
