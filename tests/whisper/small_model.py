"""Small random Whisper model in a folder with all files that training needs, written without transformers."""

import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import name_in_file
from konkanivani.models.whisper.model import WhisperShape
from tests.conftest import WORDS
from tests.whisper.byte_vocabularies import (
    NO_TIMES,
    added_token_ids,
    real_vocabulary,
    train_vocabulary,
    write_vocabulary_files,
)

SECONDS, POSITIONS = 3, 448


def write_model(
    folder: Path,
    languages: tuple[str, ...] = ("en", "hi", "mr"),
    width: int = 16,
    seed: int = 0,
    positions: int = POSITIONS,
    seconds: int = SECONDS,
    words: Sequence[str] = WORDS,
    heads: int = 2,
    layers: tuple[int, int] = (2, 1),
    inner: int | None = None,
    real: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a model with a window of `seconds`; without `languages` it is English-only.

    `real`: use Whisper's own vocabulary instead of one from `words`. `dtype`: the number format of the file.
    """
    result = real_vocabulary() if real else train_vocabulary(" ".join(words), 300)
    inner = inner or 2 * width
    named = added_token_ids(result[0], languages)
    write_vocabulary_files(folder, *result, named)
    end, size = len(result[0]) - 1, len(result[0]) + len(named)
    shape = WhisperShape(width, heads, *layers, inner, 80, size, 50 * seconds, positions)
    config = {
        "model_type": "whisper",
        "d_model": width,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_layers": layers[0],
        "decoder_layers": layers[1],
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "num_mel_bins": 80,
        "vocab_size": size,
        "max_source_positions": 50 * seconds,
        "max_target_positions": positions,
        "bos_token_id": end,
        "pad_token_id": end,
        "eos_token_id": end,
        "decoder_start_token_id": end + 1,
    }
    generation = {"is_multilingual": bool(languages), "suppress_tokens": [], "begin_suppress_tokens": []}
    if languages:
        generation["lang_to_id"] = {f"<|{language}|>": named[f"<|{language}|>"] for language in languages}
        generation["task_to_id"] = {task: named[f"<|{task}|>"] for task in ("transcribe", "translate")}
        generation["no_timestamps_token_id"] = named[NO_TIMES]
    settings = {
        "config.json": config,
        "generation_config.json": generation | {"decoder_start_token_id": end + 1, "eos_token_id": end},
        "preprocessor_config.json": {"feature_size": 80, "chunk_length": seconds, "sampling_rate": 16_000},
    }
    for name, values in settings.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    torch.manual_seed(seed)
    weights = WhisperArchitecture(shape).build().state_dict()
    tensors = {name_in_file(name): tensor.to(dtype) for name, tensor in weights.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder
