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
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.flags import config_from_text
from konkanivani.run_speech import build_evaluation_set
from konkanivani.text import Tokenizer
from konkanivani.training.evaluation import Evaluation
from konkanivani.training.forward import ForwardPass


@dataclass(frozen=True)
class Recognizer:
    """A checkpoint's model, ready to be evaluated."""

    checkpoint: Checkpoint
    config: TrainConfig
    tokenizer: Tokenizer
    forward: ForwardPass


def load_recognizer(path: str | Path, device: torch.device) -> Recognizer:
    """The model of the checkpoint at `path` on `device`, in full precision there."""
    checkpoint = read_checkpoint(path)
    config = config_from_text(checkpoint.config)
    # The card that it was trained on may have had formats that this device lacks.
    config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, mixed_precision=False))
    forward = build_forward(config, checkpoint.vocab_size, device, build_front_end(config, device))
    load_states(checkpoint, {"model": forward.model})
    return Recognizer(checkpoint, config, Tokenizer(checkpoint.tokenizer), forward)


def evaluate_manifest(recognizer: Recognizer, manifest: str) -> Evaluation:
    """The recognizer's losses and error rates over a manifest, by greedy CTC; what is left out is told row by row."""
    config, forward = recognizer.config, recognizer.forward
    rejections = Rejections(None, parse_share(config.data.max_rejected, "--max_rejected"))
    utterances = build_evaluation_set(manifest, config, recognizer.tokenizer, forward.device, rejections)
    return utterances.evaluate(forward, greedy_ctc)


def best_checkpoint(directory: str | Path) -> Path:
    """The best checkpoint of a folder by validation, or its last where nothing was validated."""
    best = Path(directory) / BEST
    return best if best.is_file() else Path(directory) / LAST
