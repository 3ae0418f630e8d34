"""Bundle of a speech model in one .safetensors file: weights, dimensions, tokenizer and front end, without pickle.

Weights have their names in the model; the SentencePiece model is the uint8 tensor `tokenizer`. The only metadata entry
is JSON: format number, model dimensions, feature settings, and a SHA-256 of all contents, since safetensors itself
would not detect a flipped bit.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from konkanivani.checkpoints.checkpoint import check_finite, provenance_of
from konkanivani.command_line import is_out_of_memory
from konkanivani.config import AugmentConfig, FeatureConfig, ModelConfig, TrainConfig
from konkanivani.data.text import Tokenizer
from konkanivani.errors import CheckpointError, DataError, ResourceError, UsageError
from konkanivani.files import conversion_hint
from konkanivani.flags import LEGACY_DEFAULTS, config_from_text
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.models.architecture import HybridArchitecture, is_within_bounds
from konkanivani.models.front_end import described, stored_features
from konkanivani.ops.passes import optimize
from konkanivani.rules import check_config

FORMAT = 3
# Settings that format 1 lacks. A bundle in which all of them have their defaults is written as format 1, which older
# versions can read.
SINCE_FORMAT_2 = {
    *("attention_positions", "convolution_norm", "subsampling", "scaled_input", "entry_norm", "biases"),
    *("power_guard", "preemphasis", "window", "edges", "mel_scale", "deviation"),
}
# Settings that formats 1 and 2 lack, with the only values that those can describe.
SINCE_FORMAT_3 = ("dynamic_range", "dc_removal", "normalization")
SUFFIX = ".safetensors"
FOLDER_NAME = "model.safetensors"  # of the bundle in a folder for the hub
ENTRY = "konkanivani"  # key in the file's metadata
TOKENIZER = "tokenizer"  # tensor name
MAX_HEADER_BYTES = 2**21  # about 130 per tensor, 500 tensors in the largest preset; safetensors would accept 100 MB

# defaults
MODEL = dataclasses.asdict(ModelConfig())
FEATURES = stored_features(FeatureConfig())
OLDER_FEATURES = stored_features(LEGACY_DEFAULTS.features)
OF_FORMAT_2 = {name: OLDER_FEATURES[name] for name in SINCE_FORMAT_3}


@dataclass(frozen=True)
class Contents:
    """Contents of a bundle; `description` is the metadata's JSON without its checksum."""

    description: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]

    @property
    def checksum(self) -> str:
        """SHA-256 over the description and the name, dtype, shape and bytes of every tensor."""
        digest = hashlib.sha256(json.dumps(self.description, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            # The shape is hashed too: a transposed tensor may have the same bytes.
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def is_bundle(path: Path) -> bool:
    """Return whether a file is a bundle, by its name or, even if damaged, by its first bytes."""
    if path.suffix == SUFFIX or not os.path.isfile(path):
        return path.suffix == SUFFIX
    try:
        with open(path, "rb") as file:
            return file.read(9)[8:] == b"{"  # the JSON header follows 8 bytes with its length
    except OSError:
        return False


def bundle_bytes(speech_model: SpeechModel) -> bytes:
    """Return the model as a bundle, byte-identical for equal models.

    Raises a CheckpointError if a weight is not finite, and a UsageError if the model is not KonkaniVani's own.
    """
    shape = speech_model.architecture
    if not isinstance(shape, HybridArchitecture):
        raise UsageError("A bundle cannot contain a --pretrained model: export it with --whisper or --adapter.")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in speech_model.model.state_dict().items()}
    check_finite("the model to export", tensors)
    tensors[TOKENIZER] = torch.frombuffer(bytearray(speech_model.tokenizer.model), dtype=torch.uint8)
    model = dataclasses.asdict(shape.model)
    features = stored_features(shape.features)
    # An older format with the values that its readers take for all newer settings describes the same model.
    is_first = MODEL | OLDER_FEATURES | _read_format_1(model | features) == model | features
    is_second = features | OF_FORMAT_2 == features
    if is_second:
        features = _read_format_2(features)
    description = {
        "format": 1 if is_first else 2 if is_second else FORMAT,
        "model": _read_format_1(model) if is_first else model,
        "features": described(shape.features) if is_first else features,
        "digits": speech_model.digits,
        "longest_seconds": speech_model.longest_seconds,
    }
    if speech_model.provenance:
        description["provenance"] = speech_model.provenance.state_dict()
    entry = description | {"sha256": Contents(description, tensors).checksum}
    return safetensors.torch.save(tensors, {ENTRY: json.dumps(entry, sort_keys=True)})


def read_bundle(path: Path, device: torch.device) -> SpeechModel:
    """Return the bundle's model on `device`.

    Raises a CheckpointError if the file is missing or damaged, and a ResourceError if it may not be read or memory is
    insufficient.
    """
    if not os.path.isfile(path):
        raise CheckpointError(
            f"There is no bundle at {path}. Give the path of a {SUFFIX} file written by konkanivani export."
        )
    try:
        return _build(_read_contents(path), path, device)
    except (CheckpointError, ResourceError):
        raise
    except PermissionError:
        raise ResourceError(f"The bundle {path} cannot be read: permission denied. Fix that and start again.") from None
    except Exception as error:  # a damaged or hostile file can raise nearly anything
        if is_out_of_memory(error):
            raise ResourceError(
                f"The bundle {path} cannot be read: not enough memory. Close other programs, or use --device cpu."
            ) from None
        reason = (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(".")
        raise CheckpointError(
            f"The bundle {path} is damaged or not a KonkaniVani bundle ({reason}){conversion_hint(path)}. "
            "Export it again."
        ) from None


def _read_contents(path: Path) -> Contents:
    """Return the file's contents on the CPU after verifying their checksum."""
    with open(path, "rb") as file:
        claimed = int.from_bytes(file.read(8), "little")
    if claimed > MAX_HEADER_BYTES:  # parsing such a header could take gigabytes
        raise ValueError(f"its header states {claimed} bytes")
    with safetensors.safe_open(path, framework="pt") as file:
        entry = json.loads((file.metadata() or {}).get(ENTRY, "null"))
        if not isinstance(entry, dict):
            raise CheckpointError(f"The file {path} is not a KonkaniVani bundle. Give one of konkanivani export.")
        if entry.get("format") not in (1, 2, FORMAT):
            raise CheckpointError(
                f"The bundle {path} has format {entry.get('format')!r:.40}; this version reads formats 1 to "
                f"{FORMAT}. Use the version that wrote it, or export it again."
            )
        # Copy: the tensors are memory-mapped from a file that another program may change after the check.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    checksum = entry.pop("sha256", None)
    contents = Contents(entry, tensors)
    if contents.checksum != checksum:
        hint = conversion_hint(path)
        raise CheckpointError(
            f"The bundle {path} is damaged: its checksum does not match{hint}. Copy or export it again."
        )
    return contents


def _build(contents: Contents, path: Path, device: torch.device) -> SpeechModel:
    """Return the model; nothing of the stated size is allocated before the weights are known to have it."""
    description = contents.description
    weights = dict(contents.tensors)
    is_first = description["format"] == 1
    dimensions = description["model"]
    features = _features(description["features"], path) if is_first else description["features"]
    names = [set(_read_format_1(usual) if is_first else usual) for usual in (MODEL, FEATURES)]
    if description["format"] == 2:
        names[1] -= set(SINCE_FORMAT_3)
    if not isinstance(dimensions, dict) or not isinstance(features, dict) or [set(dimensions), set(features)] != names:
        raise ValueError("its dimensions have unknown names")
    longest_seconds = description["longest_seconds"]
    # Python's JSON parser accepts NaN and Infinity.
    if type(longest_seconds) is not float or not 0 < longest_seconds < math.inf:
        raise ValueError(f"longest_seconds is {longest_seconds}")
    older = {} if description["format"] == FORMAT else OF_FORMAT_2
    config = _config({**dimensions, **older, **features, "digits": description["digits"]})
    tokenizer = _tokenizer(weights.pop(TOKENIZER))
    has_ctc = "ctc_head.weight" in weights
    architecture = HybridArchitecture(config.model, config.features, tokenizer.size, has_ctc)
    model = architecture.build_without_values()
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}:
        raise ValueError("its weights do not match its dimensions")
    check_finite(str(path), weights)
    model.load_state_dict(weights, assign=True)
    optimize(model)
    front_end = architecture.build_front_end(AugmentConfig()).to(device)
    source = description.get("provenance")
    digits = config.text.digits
    speech_model = SpeechModel(
        architecture, model.to(device).eval(), front_end, tokenizer, device, longest_seconds, digits
    )
    return dataclasses.replace(speech_model, provenance=provenance_of(source))


def _read_format_1(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that format 1 contains."""
    return {name: value for name, value in _read_format_2(settings).items() if name not in SINCE_FORMAT_2}


def _read_format_2(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that format 2 contains."""
    return {name: value for name, value in settings.items() if name not in SINCE_FORMAT_3}


def _config(settings: Mapping[str, object]) -> TrainConfig:
    """Return a configuration with these settings, checked for type and bounds."""
    try:
        # The flag parser checks types and allowed values.
        config = config_from_text("".join(f"--{name} {value!r}\n" for name, value in settings.items()))
        check_config(config)
    except CheckpointError:
        raise ValueError("its settings have the wrong type") from None
    except UsageError as error:
        raise ValueError(error) from None
    if not is_within_bounds(config.model):
        raise ValueError("its dimensions are out of range")
    return config


def _tokenizer(model: torch.Tensor) -> Tokenizer:
    if model.dtype != torch.uint8:
        raise ValueError("its tokenizer is not binary data")
    try:
        return Tokenizer(model.numpy().tobytes())
    except DataError as error:
        raise ValueError(error) from None


def _features(stored: object, path: Path) -> dict[str, object]:
    """Return the feature settings of a format 1 bundle; raise a CheckpointError if this version cannot compute them."""
    stored = stored if isinstance(stored, dict) else {}
    ours = described(LEGACY_DEFAULTS.features)
    fixed = ours.keys() - _read_format_1(FEATURES).keys()
    names = sorted({*stored} ^ {*ours} | {name for name in fixed if stored.get(name) != ours[name]})
    if names:
        differences = [f"{name} {stored.get(name)!r:.40} for {ours.get(name)!r}" for name in names[:3]]
        if len(names) > 3:
            differences.append("…")
        raise CheckpointError(
            f"The bundle {path} was made for different features than this version's: "
            f"{', '.join(differences)}. Use the version that wrote it."
        )
    return {name: value for name, value in stored.items() if name not in fixed}
