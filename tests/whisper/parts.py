"""Small Whisper models in each training mode, with the vocabulary of tests/invariants and a window of 2 s."""

import json
from pathlib import Path

import safetensors.torch
import torch

from konkanivani.config import AugmentConfig, DataConfig, LossConfig, MemoryConfig, OptimizerConfig, TrainConfig
from konkanivani.distributed import ALONE, Topology
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import DIMENSIONS, TWINS, name_in_file
from konkanivani.models.whisper.model import Whisper, WhisperShape
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import StepParts
from tests.conftest import WORDS
from tests.invariants.parts import CPU, VOCAB_SIZE, speeches
from tests.pretrained_parts import MODES, draw_lora_weights
from tests.whisper.byte_vocabularies import added_token_ids, train_vocabulary, write_vocabulary_files

SHAPE = WhisperShape(16, 2, 2, 2, 32, 80, VOCAB_SIZE, source_positions=100, target_positions=40)
FROZEN = {
    "full": ("encoder.positions",),
    "encoder": ("encoder.",),
    "one block": ("encoder.positions", "encoder.subsampling.", "encoder.blocks.0."),
    "LoRA": ("",),
}
FOUR_UTTERANCES = speeches(4)


class NonZeroLoraWhisper(WhisperArchitecture):
    """Architecture with non-zero LoRA products, as after some steps: otherwise half of their gradients are zero."""

    def build(self) -> Whisper:
        """Build the network."""
        model = super().build()
        draw_lora_weights(model)
        return model


def is_trained(name: str, mode: str) -> bool:
    """Return whether this tensor is trained in this mode."""
    return "low_rank" in name or not name.startswith(FROZEN[mode])


def whisper_config(
    recompute: str = "never", rate: float = 1e-3, concurrent_micro_batches: int = 1, half: bool = False
) -> TrainConfig:
    """Return the configuration of a training step, with SpecAugment."""
    return TrainConfig(
        data=DataConfig(concurrent_micro_batches=concurrent_micro_batches),
        loss=LossConfig(ctc_weight=0.0),
        memory=MemoryConfig(gradient_checkpointing=recompute, mixed_precision=half),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1),
        augment=AugmentConfig(),
    )


def whisper_parts(
    mode: str,
    config: TrainConfig | None = None,
    dtype: torch.dtype = torch.float64,
    topology: Topology = ALONE,
    sharded: bool = False,
    placement: Placement = ON_CARD,
    device: torch.device = CPU,
) -> StepParts:
    """Return the parts of a training step, by default on the CPU."""
    torch.set_default_dtype(dtype)
    try:
        architecture = NonZeroLoraWhisper(SHAPE, MODES[mode])
        layout = StateLayout(topology, sharded, placement)
        return build_step_parts(config or whisper_config(), architecture, device, 100, layout=layout)
    finally:
        torch.set_default_dtype(torch.float32)


def write_small_folder(path: Path, seconds: int = 2, seed: int = 0) -> Path:
    """Write the folder of a random model and a vocabulary of the test words with safetensors alone."""
    vocabulary, merges = train_vocabulary(" ".join(WORDS), 300)
    added = added_token_ids(vocabulary, ("hi", "mr"))
    write_vocabulary_files(path, vocabulary, merges, added)
    shape = WhisperShape(16, 2, 2, 2, 32, 80, len(vocabulary) + len(added), 50 * seconds, target_positions=60)
    config = {theirs: getattr(shape, ours) for theirs, (ours, _) in DIMENSIONS.items()}
    config |= {name: config[twin] for name, twin in TWINS.items()}
    (path / "config.json").write_text(json.dumps({"model_type": "whisper", **config}))
    (path / "preprocessor_config.json").write_text(json.dumps({"chunk_length": seconds}))
    torch.manual_seed(seed)
    weights = WhisperArchitecture(shape).build().state_dict()
    safetensors.torch.save_file({name_in_file(k): v for k, v in weights.items()}, path / "model.safetensors")
    return path
