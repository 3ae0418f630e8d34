"""Reader of CTC Parakeet models saved by transformers: NeMo's FastConformer under other tensor names."""

import json
import re
from pathlib import Path

import safetensors

from konkanivani.base.config import FeatureConfig, ModelConfig
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.line_endings import conversion_hint
from konkanivani.inference.nemo.archive import refused
from konkanivani.inference.nemo.configuration import Section
from konkanivani.inference.nemo.pieces import Pieces, read_pieces
from konkanivani.inference.nemo.settings import HEADS, NemoSettings
from konkanivani.inference.nemo.token_pieces import sentencepiece_of
from konkanivani.inference.nemo.weights import Tensors

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
    whole = Section(path, CONFIG, values)
    whole.only("model_type", "parakeet_ctc")
    size = whole.count("vocab_size", 1025)
    blank = whole.get("pad_token_id", 1024)
    # The CTC head is imported with the blank in its last row, as NeMo has it.
    if blank != size - 1:
        raise whole.unbuilt("pad_token_id", blank, f"the last token, {size - 1},")
    version = str(whole.get("transformers_version", "of unknown version"))[:40]
    features = _features(path)
    model = _encoder(Section(path, "encoder_config", whole.get("encoder_config")), features.mel_bins)
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
    try:
        with open(path / WEIGHTS, "rb") as file:
            # safetensors would allocate memory for a header of any stated length up to 100 MB.
            if int.from_bytes(file.read(8), "little") > MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
        with safetensors.safe_open(path / WEIGHTS, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # a damaged file can raise nearly anything
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        hint = conversion_hint(path / WEIGHTS)
        raise refused(path, f"its {WEIGHTS} cannot be read ({reason:.200}){hint}") from None
    for theirs, nemos in NAMES:
        found = {re.sub(theirs, nemos, name): tensor for name, tensor in found.items()}
    return found


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
    found = FeatureConfig(
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
    )
    section.finish()
    return found


def _encoder(section: Section, mel_bins: int) -> ModelConfig:
    section.ignore(*ENCODER_UNUSED)
    section.only_all(ENCODER)
    section.only("num_mel_bins", mel_bins)
    heads = section.count("num_attention_heads", 8)
    biases = section.only("attention_bias", True, False)
    # Grouped-query attention is not supported.
    section.only("num_key_value_heads", heads)
    section.only("convolution_bias", biases)
    found = ModelConfig(
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
    return found
