"""A checkpoint's model, ready to be evaluated."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.assembly import build_forward, build_front_end
from konkanivani.checkpoint import BEST, LAST, Checkpoint, load_states, read_checkpoint
from konkanivani.command_line import parse_share
from konkanivani.config import TrainConfig
from konkanivani.data.rejections import Rejections
from konkanivani.decoding.decode import Decode
from konkanivani.flags import config_from_text
from konkanivani.run_speech import build_evaluation_set
from konkanivani.text import Tokenizer
from konkanivani.training.evaluation import Evaluation
from konkanivani.training.forward import ForwardPass


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint's model, ready to be evaluated."""

    checkpoint: Checkpoint
    config: TrainConfig
    tokenizer: Tokenizer
    forward: ForwardPass


def load_trained_model(path: str | Path, device: torch.device) -> TrainedModel:
    """The model of the checkpoint at `path` on `device`, in full precision there."""
    checkpoint = read_checkpoint(path)
    config = config_from_text(checkpoint.config)
    # The card that it was trained on may have had formats that this device lacks.
    config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, mixed_precision=False))
    forward = build_forward(config, checkpoint.vocab_size, device, build_front_end(config, device))
    load_states(checkpoint, {"model": forward.model})
    return TrainedModel(checkpoint, config, Tokenizer(checkpoint.tokenizer), forward)


def evaluate_manifest(trained: TrainedModel, manifest: str, decode: Decode) -> Evaluation:
    """The model's losses and error rates over a manifest; what is left out is told row by row."""
    config, forward = trained.config, trained.forward
    rejections = Rejections(None, parse_share(config.data.max_rejected, "--max_rejected"))
    utterances = build_evaluation_set(manifest, config, trained.tokenizer, forward.device, rejections)
    return utterances.evaluate(forward, decode)


def best_checkpoint(directory: str | Path) -> Path:
    """The best checkpoint of a folder by validation, or its last where nothing was validated."""
    best = Path(directory) / BEST
    return best if best.is_file() else Path(directory) / LAST
