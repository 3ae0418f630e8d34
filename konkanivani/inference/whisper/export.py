"""Export of a fine-tuned Whisper model, as a complete folder or as a PEFT adapter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.base.config import TrainConfig
from konkanivani.base.errors import CheckpointError, UsageError
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.inference.whisper.pretrained import PretrainedWhisper, read_pretrained_whisper
from konkanivani.model.whisper.adapter import write_adapter
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.model.whisper.export import WrittenFolder, write_whisper_folder


@dataclass(frozen=True)
class TunedWhisper:
    """Settings, architecture, complete weights and serialized tokenizer of a fine-tuned Whisper model."""

    config: TrainConfig
    architecture: WhisperArchitecture
    weights: Mapping[str, torch.Tensor]
    tokenizer: bytes

    def note(self) -> str | None:
        """Return advice for use of the model in other programs, or None if it needs none."""
        if self.architecture.audio_context == "window":
            return None
        seconds = self.architecture.longest_seconds
        rate = SAMPLE_RATE / self.architecture.framing.encoder_hop
        return (
            f"It was trained on the speech only, not on windows of {seconds:g} s. Set the context length in "
            f"other programs, for example --audio-ctx of whisper.cpp: {rate:g} frames per second."
        )


def read_base(tuned: TunedWhisper, folder: str | None, outputs: Iterable[Path]) -> PretrainedWhisper:
    """Return the pretrained folder of the run, or `folder` as a copy of it.

    Raises a CheckpointError if the folder does not exist or contains a model of other dimensions or tokens, and a
    UsageError if one of the `outputs` is inside it.
    """
    path = Path(folder or tuned.config.pretrained.pretrained or "")
    if folder is None and not path.is_dir():
        raise CheckpointError(
            f"The folder {path} that the run was started from does not exist, but the export needs it. Give "
            "its current path with --pretrained."
        )
    base = read_pretrained_whisper(path)
    # Compare resolved paths: a symbolic link could point into the base folder.
    inside = [out for out in outputs if path.resolve() in out.resolve().parents]
    if inside:
        raise UsageError(
            f"{inside[0]} is inside the folder that the run was started from. Choose a folder outside of it."
        )
    if base.folder.shape != tuned.architecture.model or not _has_tokens_of(base, tuned):
        raise CheckpointError(
            f"The run was not started from a model like {base.path}: its dimensions or tokens differ. Give the "
            "original folder with --pretrained."
        )
    return base


def _has_tokens_of(base: PretrainedWhisper, tuned: TunedWhisper) -> bool:
    try:
        return base.vocabulary(tuned.config.pretrained).model == tuned.tokenizer
    except UsageError:  # the vocabulary lacks the language of the run
        return False


def export_whisper(tuned: TunedWhisper, base: PretrainedWhisper, out: Path) -> WrittenFolder:
    """Write the folder `out`: the base's files, with the trained weights in the base's number formats.

    Errors are those listed in `write_whisper_folder`, which compares the files with the weights bit for bit.
    """
    # `plain` merges LoRA weights into the layers.
    _, weights = tuned.architecture.plain(tuned.weights)
    return write_whisper_folder(base.folder, weights, out, tuned.architecture.audio_context)


def export_adapter(tuned: TunedWhisper, base: PretrainedWhisper, out: Path) -> None:
    """Write the folder `out` with the LoRA weights only, in PEFT's format."""
    if not tuned.architecture.tuning.lora_rank:
        raise UsageError(
            "--adapter needs a run with --lora_rank, but this run trained the layers themselves: use --whisper."
        )
    write_adapter(base.folder, tuned.weights, tuned.architecture.tuning, out)
