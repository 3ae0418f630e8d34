"""Export of a checkpoint as a .nemo file, the inverse of import_asr.py, for tests of the import.

The model must be one that NeMo can build: relative positions in attention, padded subsampling, no norm after the
depthwise convolution (its BatchNorm is the identity), no norm before the first block, only a CTC head, NeMo's features.
NeMo 3.0 restores such a file and gives the same output as this project (docs/experiments.md).
"""

import dataclasses
import io
import tarfile
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import Checkpoint
from konkanivani.config import AugmentConfig, TrainConfig
from konkanivani.errors import UsageError
from konkanivani.flags import config_from_text
from konkanivani.inference.speech_model import SpeechModel, build_speech_model
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.nemo.archive import CONFIG, IDS, PIECE, TOKENIZER, TRAINER, WEIGHTS, field
from konkanivani.models.nemo.settings import BATCH_NORM, HEADS, SUBSAMPLINGS, read_settings, sources
from konkanivani.models.nemo.weights import FILTER_BANK, NORM_EPSILON
from konkanivani.rules import settings_of

TARGET = "EncDecCTCModelBPE"
VERSIONS = {"zeros": "2.5.0", "reflected": "2.4.1"}  # NeMo's padding of the waveform depends on its version
GUARDS = {"added": "add", "floor": "clamp"}
ABSENT_ID = 2**64 - 1  # -1 as a varint: the id of an absent token
SHAPE = (
    "--decoder_layers 0 --attention_positions relative --convolution_norm none --subsampling striding --scaled_input "
    "--entry_norm False --preemphasis 0.97 --window symmetric --frame_padding zeros --mel_scale slaney "
    f"--log_floor_mode added --smallest_power {2.0**-24} --std_ddof sample "
    "--dynamic_range 0 --dc_removal none --normalization utterance"
)
"""Training flags of an exportable model, in addition to its dimensions."""

Tensors = dict[str, torch.Tensor]


def write_nemo(path: Path, checkpoint: Checkpoint) -> None:
    """Write the model of a checkpoint to `path`; raise UsageError with all settings that the file cannot represent."""
    import yaml

    config = config_from_text(checkpoint.config)
    text = yaml.safe_dump(configuration(config), sort_keys=False).encode()
    check_representable(config, text, path)
    speech_model = build_speech_model(checkpoint, torch.device("cpu"))
    weights = io.BytesIO()
    torch.save(tensors(speech_model), weights)
    members = {CONFIG: text, TOKENIZER: tokenizer(checkpoint.tokenizer), WEIGHTS: weights.getbuffer()}
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(f"./{name}")
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))


def configuration(config: TrainConfig) -> dict[str, object]:
    """Return NeMo's configuration of the settings that it can represent; `check_representable` checks the others."""
    model, features = config.model, config.features
    kinds = {ours: (kind, factor) for (kind, factor), ours in SUBSAMPLINGS.items()}
    kind, factor = kinds.get(model.subsampling, ("striding", 4))
    return {
        "target": f"nemo.collections.asr.models.{TARGET}",
        "nemo_version": VERSIONS.get(features.frame_padding, VERSIONS["zeros"]),
        "sample_rate": SAMPLE_RATE,
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "window_size": features.window_samples / SAMPLE_RATE,
            "window_stride": features.hop_samples / SAMPLE_RATE,
            "features": features.mel_bins,
            "n_fft": features.fft_samples,
            "preemph": features.preemphasis,
            "log_zero_guard_type": GUARDS[features.log_floor_mode],
            "log_zero_guard_value": features.smallest_power,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder",
            "feat_in": features.mel_bins,
            "n_layers": model.encoder_layers,
            "d_model": model.d_model,
            "n_heads": model.attention_heads,
            "ff_expansion_factor": model.resolved_feedforward_dim // model.d_model,
            "conv_kernel_size": model.convolution_kernel,
            "subsampling": kind,
            "subsampling_factor": factor,
            "subsampling_conv_channels": model.subsampling_channels,
            "dropout": model.dropout,
            "xscaling": model.scaled_input,
            "use_bias": model.biases,
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
            **{"feat_in": model.d_model, "num_classes": -1, "vocabulary": []},
        },
        "tokenizer": {
            **{"type": "bpe", "dir": None, "model_path": f"nemo:{TOKENIZER}"},
            **{"vocab_path": None, "spe_tokenizer_vocab": None},  # required by NeMo, but unused
        },
    }


def check_representable(config: TrainConfig, text: bytes, path: Path) -> None:
    """Raise UsageError with all settings that an import of this configuration would change."""
    read = read_settings(text, path)
    model = dataclasses.replace(config.model, feedforward_dim=config.model.resolved_feedforward_dim)
    ours, theirs = (
        settings_of(dataclasses.replace(TrainConfig(), model=each, features=features))
        for each, features in ((model, config.features), (read.model, read.features))
    )
    lost = [f"--{mine.name} {mine.value}" for mine, other in zip(ours, theirs, strict=True) if mine != other]
    if lost:
        raise UsageError(f"A .nemo file has no place for {', '.join(lost)}: train a model without.")


def tensors(speech_model: SpeechModel) -> Tensors:
    """Return the model's tensors under NeMo's names, and the constants of its feature extraction."""
    ours, model = speech_model.model.state_dict(), speech_model.architecture.model
    values: Tensors = {}
    for name, source in sources(ours, model).items():
        parts = ours[name].chunk(len(source.names)) if source.names else ()
        values |= {theirs: part.reshape(source.shape) for theirs, part in zip(source.names, parts, strict=True)}
        if source.norm and name.endswith(".bias"):
            # A convolution without bias gets it from the BatchNorm; otherwise the BatchNorm is the identity.
            values |= identity(source.norm, torch.zeros_like(ours[name]) if source.names else ours[name])
    head = HEADS[TARGET][1]
    for leaf in ("weight", "bias"):  # the blank is token 0 here and the last token in NeMo
        rows = ours[f"ctc_head.{leaf}"].roll(-1, 0)
        values[f"{head}.{leaf}"] = rows[:, :, None] if leaf == "weight" else rows
    bank = speech_model.architecture.build_front_end(AugmentConfig()).log_mel.power.mel_scale.fb.T
    # NeMo's window is symmetric.
    window = torch.hann_window(speech_model.architecture.features.window_samples, periodic=False)
    values |= {FILTER_BANK: bank[None], "preprocessor.featurizer.window": window}
    # torch.save stores the whole storage of a view, hence the copies.
    return {name: tensor.contiguous().clone() for name, tensor in values.items()}


def identity(norm: str, bias: torch.Tensor) -> Tensors:
    """Return the tensors of a BatchNorm that adds `bias` and is the identity otherwise."""
    ones = torch.ones_like(bias)
    # variance + epsilon = 1
    values = {"weight": ones, "bias": bias, "running_mean": 0 * ones, "running_var": (1 - NORM_EPSILON) * ones}
    result = {f"{norm}.{leaf}": values[leaf] for leaf in BATCH_NORM}
    return result | {f"{norm}.num_batches_tracked": torch.tensor(1)}


def tokenizer(model: bytes) -> bytes:
    """Return the SentencePiece model without the blank, its first piece; all other ids decrease by one."""
    if model[:1] != field(PIECE, b"")[:1] or model[1] >= 128:
        raise UsageError(
            "The tokenizer does not begin with a short piece, and so is none of this trainer's. Give one that is."
        )
    # A later TrainerSpec overrides the ids of the first one. A first piece below 128 bytes has a length of one byte.
    ids = b"".join(field(number, token - 1 if token else ABSENT_ID) for number, token in IDS.items())
    return model[2 + model[1] :] + field(TRAINER, ids)
