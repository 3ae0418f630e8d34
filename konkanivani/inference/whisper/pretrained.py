"""Whisper folder as a pretrained model: architecture, tokenizer and weights."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.base.config import AudioContext, PretrainedConfig, TuningConfig
from konkanivani.base.errors import CheckpointError
from konkanivani.inference.whisper.byte_pairs import read_byte_pairs
from konkanivani.inference.whisper.vocabulary import ModelTokens, Prompt, PromptedVocabulary, is_english_only
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.model.whisper.folder import MOST, WhisperFolder, read_whisper_folder
from konkanivani.model.whisper.shape import WhisperShape

KIND = "whisper"
# d_model: 1/40 of the peak learning rate in Whisper's training (Radford et al., 2022, table 17). Other widths use the
# rate of the next larger one.
RATES = {384: 3.75e-5, 512: 2.5e-5, 768: 1.25e-5, 1024: 6.25e-6, 1280: 5e-6}
LORA_RATE = 1e-3  # high, since LoRA's products start at zero


@dataclass(frozen=True)
class PretrainedWhisper:
    """Whisper model in a folder; implements `Pretrained`."""

    folder: WhisperFolder

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return self.folder.path

    def settled(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the settings with the folder's audio context if they name none."""
        return dataclasses.replace(config, audio_context=self._audio_context(config))

    def architecture(self, tuning: TuningConfig, config: PretrainedConfig) -> WhisperArchitecture:
        """Return the architecture with the layers to train and the audio context of the settings."""
        return WhisperArchitecture(self.folder.shape, tuning, self._audio_context(config))

    def _audio_context(self, config: PretrainedConfig) -> AudioContext:
        return config.audio_context or self.folder.audio_context

    def vocabulary(self, config: PretrainedConfig) -> PromptedVocabulary:
        """Return the tokenizer with the language and task of `config` as the prompt of its labels."""
        shape = self.folder.shape
        said = self.folder.generation
        pairs = read_byte_pairs(self.path)
        english = is_english_only(pairs, shape.vocab_size, said)
        tokens = ModelTokens(shape.vocab_size, shape.target_positions, english, said)
        return PromptedVocabulary(pairs, Prompt(config.language, config.task), tokens)

    def check_weights(self) -> None:
        """Read all weights without keeping them; raise a CheckpointError if some are not finite numbers."""
        self.folder.check_weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights in fp32 under this project's names."""
        return self.folder.weights()

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of `weights` one by one."""
        return self.folder.each_weight()

    def learning_rate(self, tuning: TuningConfig) -> float:
        """Return a peak learning rate: lower for larger models, and a rate of its own for LoRA weights."""
        wider = [width for width in RATES if width >= self.folder.shape.d_model]
        return LORA_RATE if tuning.lora_rank else RATES[min(wider, default=max(RATES))]

    def description(self) -> Mapping[str, object]:
        """Return the model's kind and dimensions."""
        return {"kind": KIND, **dataclasses.asdict(self.folder.shape)}


def read_pretrained_whisper(path: Path) -> PretrainedWhisper:
    """Return the Whisper model in a folder, with its settings and list of tensors checked.

    Errors are those listed in `read_whisper_folder`.
    """
    return PretrainedWhisper(read_whisper_folder(path))


def restored_shape(state: Mapping[str, object]) -> WhisperShape:
    """Return the dimensions stored in `description`; raise a CheckpointError if they are invalid."""
    found: dict[str, int] = {}
    for name, most in MOST.items():
        value = state.get(name)
        # The checkpoint is untrusted: bound every dimension before a network of that size is built.
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError("The checkpoint's model has invalid dimensions. Use another checkpoint.")
        found[name] = value
    shape = WhisperShape(**found)
    if shape.d_model % 2 or shape.d_model % shape.attention_heads:
        raise CheckpointError(
            "The checkpoint's number of attention heads does not divide the model dimension. Use another checkpoint."
        )
    return shape
