"""Random Whisper models with a window of one second, in folders written by transformers. Nothing is downloaded."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from konkanivani.data.batching import Batch, Example, collate
from konkanivani.data.text import SpecialTokens
from konkanivani.models.whisper.folder import name_in_file
from konkanivani.models.whisper.model import Whisper, WhisperShape
from konkanivani.ops.passes import optimize

SKIP_REASON = "transformers, with which Whisper is compared, is not installed: pip install -e .[test]"
transformers = pytest.importorskip("transformers", reason=SKIP_REASON)

SECONDS = 1
FRAMES = 50 * SECONDS


@dataclass(frozen=True)
class Kind:
    """Small model with the properties that distinguish a published model."""

    mel_bins: int = 80
    layers: tuple[int, int] = (2, 2)
    vocab_size: int = 1_865
    end: int = 257
    largest_file: str = "5GB"

    @property
    def special(self) -> SpecialTokens:
        """Special tokens. The start token, which is never decoded, replaces the blank, which Whisper does not have."""
        start = self.end + 1
        return SpecialTokens(blank=start, unknown=start, start=start, end=self.end)


KINDS = {
    "tiny": Kind(),
    "v3": Kind(128, vocab_size=1_866),
    "turbo": Kind(128, (4, 1), 1_866, largest_file="200KB"),
    "en": Kind(layers=(1, 3), vocab_size=1_864, end=256),
}


def reference(kind: Kind, seed: int = 0, width: int = 32, positions: int = 64) -> torch.nn.Module:
    """Return a random transformers model in evaluation mode, in which every weight affects the output."""
    config = transformers.WhisperConfig(
        vocab_size=kind.vocab_size,
        num_mel_bins=kind.mel_bins,
        d_model=width,
        encoder_layers=kind.layers[0],
        decoder_layers=kind.layers[1],
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=3 * width,
        decoder_ffn_dim=3 * width,
        max_source_positions=FRAMES,
        max_target_positions=positions,
        pad_token_id=kind.end,
        bos_token_id=kind.end,
        eos_token_id=kind.end,
        decoder_start_token_id=kind.end + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * drawn if "norm.weight" in name else 0.3 * drawn)
    return model


def to_project_model(model: torch.nn.Module, kind: Kind) -> Whisper:
    """Return the project's model with the weights of a transformers model, in evaluation mode."""
    config = model.config
    shape = WhisperShape(
        config.d_model,
        config.encoder_attention_heads,
        *kind.layers,
        config.encoder_ffn_dim,
        kind.mel_bins,
        kind.vocab_size,
        config.max_source_positions,
        config.max_target_positions,
    )
    ours, theirs = Whisper(shape).to(next(model.parameters()).dtype), model.state_dict()
    ours.load_state_dict({name: theirs[name_in_file(name)].clone() for name in ours.state_dict()})
    optimize(ours)
    return ours.eval()


def write_folder(kind: Kind, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write the folder of a random model with all files of a published one; some hold placeholder text."""
    reference(kind, seed).to(dtype).save_pretrained(path, max_shard_size=kind.largest_file)
    transformers.WhisperFeatureExtractor(feature_size=kind.mel_bins, chunk_length=SECONDS).save_pretrained(path)
    generation = json.loads((path / "generation_config.json").read_text())
    generation |= {"suppress_tokens": [1, 2, 7], "lang_to_id": {"<|mr|>": 320}, "alignment_heads": [[0, 1]]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json", "README.md"):
        (path / name).write_text(f"what a folder of Whisper has in {name}\n")
    return path


def read_reference(path: Path) -> torch.nn.Module:
    """Load the model with transformers in fp32 and evaluation mode, and check that no key is missing or unexpected."""
    model, loading_info = transformers.WhisperForConditionalGeneration.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32
    )
    assert {name: list(item) for name, item in loading_info.items() if item} == {}
    return model.eval()


def random_features(kind: Kind, count: int = 2, seed: int = 0) -> torch.Tensor:
    """Return features (B, T, F) of whole windows."""
    return torch.randn(count, 2 * FRAMES, kind.mel_bins, generator=torch.Generator().manual_seed(seed))


def random_batch(kind: Kind, *lengths: int, seed: int = 0) -> Batch:
    """Return a batch of random utterances of at most one second with these numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return collate(
        [
            Example(
                utterance_id=str(number),
                waveform=torch.randn(16_000 - 900 * number, generator=generator),
                tokens=torch.randint(kind.end, (length,), generator=generator).tolist(),
                augment_seed=None,
            )
            for number, length in enumerate(lengths)
        ],
        kind.special,
    )


def labels_of(targets: torch.Tensor) -> torch.Tensor:
    """Return the targets with -100 at padding, as transformers expects."""
    return targets.masked_fill(targets < 0, -100)
