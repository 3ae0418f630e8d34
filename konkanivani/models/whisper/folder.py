"""Files of a Whisper folder in Hugging Face format, written whole, and validated before anything is allocated.

No code in it is run: JSON and safetensors are read, pickle is refused.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from konkanivani.config import AudioContext
from konkanivani.errors import UsageError
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.model_files import CONFIG, ModelFolder, files_of, read_dimension, read_json, refused
from konkanivani.models.whisper.architecture import FFT_SAMPLES, WhisperArchitecture
from konkanivani.models.whisper.model import HOP_SAMPLES, WhisperShape

# --------------------
# A Whisper model's folder in Hugging Face format, validated before anything of the claimed size is allocated.


GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # newer versions of transformers store the preprocessor's settings here
DEFAULT_LIST = -1  # alone in a list of suppressed tokens: OpenAI's default list
AUDIO_CONTEXT = "audio_context"  # the project's own setting: the audio context that the weights were trained with
EMBEDDING = "model.decoder.embed_tokens.weight"
HEAD = "proj_out.weight"  # the tied embedding a second time, in some files
# Each dimension by its name in config.json: the project's name, and an upper bound beyond any existing model.
DIMENSIONS = {
    "d_model": ("d_model", 2**14),
    "encoder_attention_heads": ("attention_heads", 2**10),
    "encoder_layers": ("encoder_layers", 2**8),
    "decoder_layers": ("decoder_layers", 2**8),
    "encoder_ffn_dim": ("feedforward_dim", 2**16),
    "num_mel_bins": ("mel_bins", 2**10),
    "vocab_size": ("vocab_size", 2**20),
    "max_source_positions": ("source_positions", 2**14),
    "max_target_positions": ("target_positions", 2**14),
}
MOST = {ours: most for ours, most in DIMENSIONS.values()}
TWINS = {"decoder_attention_heads": "encoder_attention_heads", "decoder_ffn_dim": "encoder_ffn_dim"}
# Parts of tensor names: the project's, and the files'.
NAMES = {
    "subsampling.first": "conv1",
    "subsampling.second": "conv2",
    "positions": "embed_positions.weight",
    "embedding": "embed_tokens",
    "blocks": "layers",
    "self_attention_norm": "self_attn_layer_norm",
    "self_attention": "self_attn",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "out_proj",
    "feedforward.norm": "final_layer_norm",
    "feedforward.expand": "fc1",
    "feedforward.contract": "fc2",
    "norm": "layer_norm",
}
PEFT_MODEL = {
    "base_model_class": "WhisperForConditionalGeneration",
    "parent_library": "transformers.models.whisper.modeling_whisper",
}
PART = re.compile(r"(?<=\.)(" + "|".join(map(re.escape, NAMES)) + r")(?=\.|$)")


def name_in_file(name: str) -> str:
    """Return the name in the files of the network's tensor `name`."""
    return "model." + PART.sub(lambda part: NAMES[part.group()], name)


@dataclass(frozen=True)
class WhisperFolder(ModelFolder):
    """Folder of a Whisper model; `generation` is empty without a generation_config.json."""

    shape: WhisperShape
    generation: Mapping[str, object]

    @property
    def marked_file(self) -> str:
        """Name of the existing file that stores the audio context."""
        return GENERATION if self.generation else CONFIG

    @property
    def audio_context(self) -> AudioContext:
        """Audio context that the weights were trained with; 30 s windows by default."""
        return "speech" if self.stored_audio_context == "speech" else "window"

    @property
    def stored_audio_context(self) -> object:
        """Audio context in the folder's files, before it is checked."""
        return {**self.config, **self.generation}.get(AUDIO_CONTEXT, "window")

    @property
    def architecture(self) -> WhisperArchitecture:
        """Architecture that the folder describes."""
        return WhisperArchitecture(self.shape, audio_context=self.audio_context)

    @property
    def peft_model(self) -> Mapping[str, str]:
        """Class of the model in transformers, as PEFT's adapter_config.json names it."""
        return PEFT_MODEL

    def name_in_file(self, name: str) -> str:
        """Return the name in the files of the network's tensor or layer `name`."""
        return name_in_file(name)

    def copies(self) -> dict[str, str]:
        """Return the names in the files that repeat another tensor, with that tensor's name in the files."""
        has_head = any(HEAD in names for names in self.files.values())
        return {HEAD: EMBEDDING} if has_head else {}


def read_whisper_folder(path: Path) -> WhisperFolder:
    """Read the folder's settings and list of tensors, but no weights.

    Raises:
        UsageError: There is no such folder.
        CheckpointError: The folder is invalid; the message says why.
        ResourceError: A file may not be read.
    """
    described = _read_folder(path)
    _check_preprocessor(path, described.shape)
    _check_ids(path, described.generation, described.shape)
    folder = dataclasses.replace(described, files=files_of(path))
    folder.check_tensors("Whisper", {})
    return folder


def read_whisper_architecture(path: Path) -> WhisperArchitecture:
    """Return the architecture of a folder's config.json, the only file needed: enough for a memory plan."""
    return _read_folder(path).architecture


def _read_folder(path: Path) -> WhisperFolder:
    """Return the folder with its settings, without its list of tensors."""
    if not path.is_dir():
        raise UsageError(_no_folder_message(path))
    config = read_json(path / CONFIG)
    shape = _shape_of(path, config)
    generation = read_json(path / GENERATION) if (path / GENERATION).exists() else {}
    folder = WhisperFolder(path, config, {}, shape, generation)
    stored = folder.stored_audio_context
    if stored not in get_args(AudioContext):
        message = f"{AUDIO_CONTEXT} in its {folder.marked_file} is {stored!r:.40}"
        raise refused(path, f"{message} but must be {' or '.join(get_args(AudioContext))}")
    return folder


def _no_folder_message(path: Path) -> str:
    if path.exists():
        return (
            f"{path} is a file. Use the folder of a Whisper model in Hugging Face format; use --checkpoint for "
            "a checkpoint, or --init_from to start from one."
        )
    return (
        f"There is no folder {path}. Use the folder of a Whisper model in Hugging Face format, or a name on the hub "
        "such as openai/whisper-small."
    )


def _shape_of(path: Path, config: Mapping[str, object]) -> WhisperShape:
    kind = config.get("model_type")
    if kind != "whisper":
        raise refused(path, f"its {CONFIG} is of a model of type {kind!r:.40}", "Use the folder of a Whisper model")
    dimensions = {}
    for name, (ours, max_value) in DIMENSIONS.items():
        dimensions[ours] = read_dimension(path, config, name, max_value)
    shape = WhisperShape(**dimensions)
    for name, twin in TWINS.items():
        if config.get(name) != config[twin]:
            raise refused(path, f"{name} in its {CONFIG} is {config.get(name)!r:.40}, but {twin} is {config[twin]}")
    if shape.d_model % 2 or shape.d_model % shape.attention_heads:
        raise refused(path, f"its {CONFIG} divides a dimension of {shape.d_model} into {shape.attention_heads} heads")
    for name, required in {
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }.items():
        if config.get(name, required) != required:
            raise refused(path, f"{name} in its {CONFIG} is {config[name]!r:.40}, but {required!r} in Whisper")
    return shape


def _check_preprocessor(path: Path, shape: WhisperShape) -> None:
    """Refuse settings that the front end does not implement or the weights were not trained with."""
    name = PREPROCESSOR if (path / PREPROCESSOR).exists() or not (path / PROCESSOR).exists() else PROCESSOR
    values = read_json(path / name)
    if name == PROCESSOR:
        settings = values.get("feature_extractor")
        values = settings if isinstance(settings, dict) else {}
    required = {
        "feature_size": (shape.mel_bins, 80),
        "chunk_length": (shape.window_seconds, 30),
        "sampling_rate": (SAMPLE_RATE, SAMPLE_RATE),
        "hop_length": (HOP_SAMPLES, HOP_SAMPLES),
        "n_fft": (FFT_SAMPLES, FFT_SAMPLES),
        "padding_value": (0, 0),
        "dither": (0, 0),
        "do_normalize": (False, False),
    }
    for setting, (value, default) in required.items():
        # A missing setting has the default of transformers' WhisperFeatureExtractor.
        stored = default if values.get(setting) is None else values[setting]
        if stored != value:
            raise refused(path, f"{setting} in its {name} is {stored!r:.40}, but its network needs {value:g}")


def _check_ids(path: Path, generation: Mapping[str, object], shape: WhisperShape) -> None:
    """Refuse token ids outside of the vocabulary, an invalid first timestamp and alignment heads that do not exist."""
    for name, value in generation.items():
        if name.endswith(("token_id", "_to_id", "suppress_tokens")):
            if name.endswith("suppress_tokens") and value == [DEFAULT_LIST]:
                continue
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            wrong = [v for v in values if v is not None and not (type(v) is int and 0 <= v < shape.vocab_size)]
            if wrong:
                raise refused(
                    path, f"{name} in its {GENERATION} contains the token {wrong[0]!r:.40}, which does not exist"
                )
    latest = generation.get("max_initial_timestamp_index")
    if latest is not None and type(latest) is not int:
        raise refused(path, f"max_initial_timestamp_index in its {GENERATION} is {latest!r:.40} but must be a number")
    heads = generation.get("alignment_heads") or []
    limits = (shape.decoder_layers, shape.attention_heads)
    if not isinstance(heads, list) or not all(_is_head(head, limits) for head in heads):
        raise refused(path, f"alignment_heads in its {GENERATION} are not attention heads of its decoder")


def _is_head(head: object, most: tuple[int, int]) -> bool:
    if not isinstance(head, list) or len(head) != 2:
        return False
    return all(type(number) is int and 0 <= number < bound for number, bound in zip(head, most, strict=True))
