"""A folder of a Whisper model as what a run begins with: its architecture, its tokens, its weights."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.base.config import PretrainedConfig, TuningConfig
from konkanivani.base.errors import CheckpointError
from konkanivani.inference.whisper.byte_pairs import read_byte_pairs
from konkanivani.inference.whisper.vocabulary import ModelTokens, Prompt, PromptedVocabulary, is_english_only
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.model.whisper.folder import MOST, WhisperFolder, read_whisper_folder
from konkanivani.model.whisper.shape import WhisperShape

KIND = "whisper"
# A fortieth of the peak with which each width was trained (Radford et al., 2022, table 17), of the next wider one.
RATES = {384: 3.75e-5, 512: 2.5e-5, 768: 1.25e-5, 1024: 6.25e-6, 1280: 5e-6}
LORA_RATE = 1e-3


@dataclass(frozen=True)
class PretrainedWhisper:
    """A `Pretrained` of the folder."""

    folder: WhisperFolder

    @property
    def path(self) -> Path:
        """The folder's."""
        return self.folder.path

    def settled(self, config: PretrainedConfig) -> PretrainedConfig:
        """The settings with the folder's audio context where they name none."""
        return dataclasses.replace(config, audio_context=config.audio_context or self.folder.audio_context)

    def architecture(self, tuning: TuningConfig, config: PretrainedConfig) -> WhisperArchitecture:
        """The folder's, of which so much is to be trained, hearing what is asked for."""
        return WhisperArchitecture(self.folder.shape, tuning, self.settled(config).audio_context)

    def vocabulary(self, config: PretrainedConfig) -> PromptedVocabulary:
        """The folder's tokens, their labels of the language and task that are asked for."""
        shape, said = self.folder.shape, self.folder.generation
        pairs = read_byte_pairs(self.path)
        english = is_english_only(pairs, shape.vocab_size, said)
        tokens = ModelTokens(shape.vocab_size, shape.target_positions, english, said)
        return PromptedVocabulary(pairs, Prompt(config.language, config.task), tokens)

    def check_weights(self) -> None:
        """Reads the folder's."""
        self.folder.check_weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """The folder's, in fp32 by our names."""
        return self.folder.weights()

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same one by one."""
        return self.folder.each_weight()

    def learning_rate(self, tuning: TuningConfig) -> float:
        """The larger the model the lower; one of its own for low-rank products, which begin at zero."""
        wider = [width for width in RATES if width >= self.folder.shape.d_model]
        return LORA_RATE if tuning.lora_rank else RATES[min(wider, default=max(RATES))]

    def description(self) -> Mapping[str, object]:
        """Its kind and dimensions."""
        return {"kind": KIND, **dataclasses.asdict(self.folder.shape)}


def read_pretrained_whisper(path: Path) -> PretrainedWhisper:
    """The folder, its settings and list of tensors checked; errors are those of `read_whisper_folder`."""
    return PretrainedWhisper(read_whisper_folder(path))


def restored_shape(state: Mapping[str, object]) -> WhisperShape:
    """The dimensions that `description` has kept; a CheckpointError where no model has such."""
    found = {name: state.get(name) for name in MOST}
    if not all(type(value) is int and 1 <= value <= MOST[name] for name, value in found.items()):
        raise CheckpointError("The checkpoint's model has invalid dimensions. Use another checkpoint.")
    shape = WhisperShape(**found)
    if shape.d_model % 2 or shape.d_model % shape.attention_heads:
        raise CheckpointError(
            "The checkpoint's number of attention heads does not divide the model dimension. Use another checkpoint."
        )
    return shape
