"""Small T5 models, model folders and pairs of texts. Needs no transformers."""

import functools
import io
import json
import os
from pathlib import Path

import safetensors.torch
import sentencepiece
import torch

from konkanivani.config import DataConfig, LossConfig, MemoryConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import SpecialTokens, TextLimits
from konkanivani.distributed import ALONE, Topology
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.folder import DIMENSIONS, name_in_file
from konkanivani.models.t5.model import T5, T5Shape, T5Variant
from konkanivani.models.t5.vocabulary import Pieces, T5Tokens, T5Vocabulary, Utf8Bytes
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import StepParts
from tests.conftest import ROOT
from tests.pretrained_parts import MODES, draw_lora_weights

CPU = torch.device("cpu")
KONKANI = Path(os.environ.get("KONKANIVANI_DATA", ROOT.parent / "shared" / "data")) / "konkani_text"
# Sentences written for this test, in Konkani, Marathi and English, with punctuation, digits and rare characters.
LINES = (
    "हांव गोंयांत रावतां, आनी तूं खंय रावता?",
    "आमची भास कोंकणी; ती गोड आसा.",
    "पावसाळ्यांत न्हंयो भरतात आनी शेतां पाचवीं जातात।",
    "तो सकाळीं ५ वरांचेर उठता (सदांच).",
    "मराठी भाषा सोपी आहे, पण लिहिणे कठीण.",
    "The quick brown fox jumps over 13 lazy dogs!",
    "e-mail: someone@example.org — price €12.50…",
    "  spaces   around,\ttabs too  ",
    "ﬁne ½ Ⅸ ＡＢＣ",
    "क्‍ष ज्ञ श्री र्‍य",
    "😀 emoji and 漢字 unknown",
    "a",
)
SHAPE = T5Shape(16, 8, 2, 2, 2, 24, 60, position_buckets=8, max_distance=16)
SIZE = 200  # rows of the embedding, more than the tokenizer has pieces
VARIANTS = {"1.1": T5Variant(), "1.0": T5Variant(is_gated=False, has_head=False, scales_output=True)}
FROZEN = {
    "full": ("-",),
    "encoder": ("encoder.", "decoder.embedding."),
    "one block": ("encoder.positions.", "encoder.blocks.0.", "decoder.embedding."),
    "LoRA": ("",),
}
SPECIAL = SpecialTokens(None, None, 0, 1)


class NonZeroLoraT5(T5Architecture):
    """Architecture with non-zero LoRA products, as after some steps: otherwise half of their gradients are zero."""

    def build(self) -> T5:
        """Build the network."""
        model = super().build()
        draw_lora_weights(model)
        return model


def is_trained(name: str, mode: str) -> bool:
    """Return whether this tensor is trained in this mode."""
    return "low_rank" in name or not name.startswith(FROZEN[mode])


def t5_config(recompute: str = "never", rate: float = 1e-3, half: bool = False) -> TrainConfig:
    """Return the configuration of a training step."""
    return TrainConfig(
        data=DataConfig(concurrent_micro_batches=1),
        loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
        memory=MemoryConfig(gradient_checkpointing=recompute, mixed_precision=half),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1, weight_decay=0.0),
    )


def t5_parts(
    mode: str = "full",
    config: TrainConfig | None = None,
    dtype: torch.dtype = torch.float64,
    topology: Topology = ALONE,
    sharded: bool = False,
    placement: Placement = ON_CARD,
    device: torch.device = CPU,
    variant: str = "1.1",
) -> StepParts:
    """Return the parts of a training step, by default on the CPU."""
    torch.set_default_dtype(dtype)
    try:
        shape = T5Shape(*list(vars(SHAPE).values())[:-1], VARIANTS[variant])
        layout = StateLayout(topology, sharded, placement)
        return build_step_parts(config or t5_config(), NonZeroLoraT5(shape, MODES[mode]), device, 100, layout=layout)
    finally:
        torch.set_default_dtype(torch.float32)


def pairs(count: int, seed: int = 0) -> list[Example]:
    """Return pairs of 1 to 40 input tokens and 1 to 30 target tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> torch.Tensor:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(2, SHAPE.vocab_size, (length,), generator=generator)

    return [Example(f"p{number}", draw(40), draw(30).tolist(), None) for number in range(count)]


def global_batch(examples: list[Example], batch_size: int) -> GlobalBatch:
    """Return these pairs as one global batch in micro-batches of `batch_size`."""
    return split_into_micro_batches(examples, same_size(batch_size), SPECIAL)


def all_lines() -> list[str]:
    """Return at least 700 lines: `LINES`, their words in other orders, and the Konkani sentences if available."""
    results = list(LINES)
    for path in sorted(KONKANI.glob("*.txt")) if KONKANI.is_dir() else ():
        results += path.read_text(encoding="utf-8").splitlines()
    words = " ".join(LINES).split()
    results += [
        " ".join(words[(7 * n + k * k) % len(words)] for k in range(3 + n % 9)) for n in range(700 - len(LINES))
    ]
    return results


@functools.cache
def sentencepiece_model(size: int = 300) -> bytes:
    """Return a SentencePiece model with the ids and the text normalisation of T5."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.strip() for line in LINES[:-2]] * 20),
        model_writer=model,
        vocab_size=size,
        character_coverage=1.0,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


LIMITS = TextLimits(64, 64)


def vocabulary(limits: TextLimits = LIMITS, is_bytes: bool = False) -> T5Vocabulary:
    """Return a vocabulary of the pieces of `sentencepiece_model`, or of UTF-8 bytes."""
    if is_bytes:
        return T5Vocabulary(Utf8Bytes(), T5Tokens(384), limits)
    tokens = T5Tokens(SIZE)
    return T5Vocabulary(Pieces(sentencepiece_model(), tokens), tokens, limits)


def write_folder(
    path: Path, is_bytes: bool = False, width: int = 16, seed: int = 0, variant: str = "1.1", size: int | None = None
) -> Path:
    """Write the folder of a random model with safetensors alone; `size` is the number of its tokens."""
    path.mkdir(parents=True)
    kind = VARIANTS[variant]
    if size is None:
        size = 384 if is_bytes else SIZE
    shape = T5Shape(width, 8, 2, 2, 2, 2 * width, size, position_buckets=16, max_distance=32, variant=kind)
    config = {theirs: getattr(shape, ours) for theirs, (ours, _) in DIMENSIONS.items()}
    config |= {"model_type": "t5", "feed_forward_proj": "gated-gelu" if kind.is_gated else "relu"}
    config |= {"tie_word_embeddings": kind.scales_output, "decoder_start_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    if is_bytes:
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    else:
        (path / "spiece.model").write_bytes(sentencepiece_model())
    torch.manual_seed(seed)
    weights = T5Architecture(shape).build().state_dict()
    named = {name_in_file(name, kind.is_gated): value for name, value in weights.items()}
    safetensors.torch.save_file(named, path / "model.safetensors", {"format": "pt"})
    return path


def write_pairs(path: Path, texts: list[tuple[str, str]], names: tuple[str, str] = ("input", "text")) -> Path:
    """Write a text-to-text manifest."""
    rows = [json.dumps(dict(zip(names, pair, strict=True)), ensure_ascii=False) for pair in texts]
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return path
