"""One optimizer step of a small random Whisper model, cut in several ways: by transformers' Trainer and by ours.

B utterances, T feature frames, F mel bins, U labels.
"""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import torch
import transformers

from konkanivani.base.config import DataConfig, LossConfig, OptimizerConfig, TrainConfig
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.batch import Example
from konkanivani.data.batching import same_size, split_into_micro_batches
from konkanivani.data.text import SpecialTokens
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.model.whisper.folder import name_in_file
from konkanivani.model.whisper.shape import WhisperShape
from konkanivani.recipe.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

LABELS = (4, 20, 4, 20)  # the end among them
BATCH_SIZES = (4, 2, 1)
TEXT_TOKENS = 50
SPECIAL = SpecialTokens(start=TEXT_TOKENS + 1, end=TEXT_TOKENS)
SHAPE = WhisperShape(64, 2, 2, 2, 128, 80, TEXT_TOKENS + 2, source_positions=50, target_positions=32)
NO_LABEL = -100  # to transformers
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MicroBatchPlan:
    """A step in `accumulation` micro-batches of `batch` utterances: what each trainer says of it, in nats a label."""

    batch: int
    accumulation: int
    trainer_loss: float
    trainer_norm: float
    our_loss: float
    our_norm: float


@dataclass(frozen=True)
class Comparison:
    """All cuts of the same step, and what they were measured with."""

    transformers: str
    accelerate: str
    torch: str
    cuts: tuple[MicroBatchPlan, ...]

    def table(self) -> str:
        """For a person."""
        lines = [
            f"transformers {self.transformers}, accelerate {self.accelerate}, torch {self.torch}",
            "",
            "| batch x accumulation | Trainer: loss | gradient norm | ours: loss | gradient norm |",
            "|---|---|---|---|---|",
        ]
        for cut in self.cuts:
            numbers = cut.trainer_loss, cut.trainer_norm, cut.our_loss, cut.our_norm
            cells = f"{cut.batch} x {cut.accumulation}", *(f"{number:.3f}" for number in numbers)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


class Targets(torch.utils.data.IterableDataset):
    """The utterances in their order, again and again, which no sampler changes."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self._rows


def measure(seed: int, divided: bool = False) -> Comparison:
    """Takes the step in every cut, both ways; `divided`: the Trainer is told that the model does not do it."""
    model, speeches = build_model(seed), build_speeches(seed)
    if divided:
        model.accepts_loss_kwargs = False  # else it asks whether `forward` takes any keyword, and Whisper's does
    parts = build_parts(model)
    rows = [row_of(speech, parts) for speech in speeches]
    cuts = []
    for size in BATCH_SIZES:
        global_batch = split_into_micro_batches(speeches, same_size(size), SPECIAL)
        report = train_step(parts, global_batch, 0)
        loss, norm = trained(model, rows, size)
        cuts.append(MicroBatchPlan(size, len(LABELS) // size, loss, norm, report.loss, report.gradient_norm))
    return Comparison(*(version(name) for name in ("transformers", "accelerate", "torch")), tuple(cuts))


def build_model(seed: int) -> torch.nn.Module:
    """A model of transformers as it initialises one."""
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=SHAPE.vocab_size,
        num_mel_bins=SHAPE.mel_bins,
        d_model=SHAPE.d_model,
        encoder_layers=SHAPE.encoder_layers,
        decoder_layers=SHAPE.decoder_layers,
        encoder_attention_heads=SHAPE.attention_heads,
        decoder_attention_heads=SHAPE.attention_heads,
        encoder_ffn_dim=SHAPE.feedforward_dim,
        decoder_ffn_dim=SHAPE.feedforward_dim,
        max_source_positions=SHAPE.source_positions,
        max_target_positions=SHAPE.target_positions,
        pad_token_id=SPECIAL.end,
        bos_token_id=SPECIAL.end,
        eos_token_id=SPECIAL.end,
        decoder_start_token_id=SPECIAL.start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def build_speeches(seed: int) -> list[Example]:
    """Noise of a second, and of each utterance so many labels that its tokens and the end are `LABELS`."""
    generator = torch.Generator().manual_seed(seed)
    waveforms = torch.randn(len(LABELS), SAMPLE_RATE, generator=generator)
    tokens = [torch.randint(TEXT_TOKENS, (count - 1,), generator=generator).tolist() for count in LABELS]
    rows = enumerate(zip(waveforms, tokens, strict=True))
    return [Example(str(number), waveform, said, augment_seed=None) for number, (waveform, said) in rows]


def build_parts(model: torch.nn.Module) -> StepParts:
    """Our step, with the same weights."""
    config = TrainConfig(
        data=DataConfig(concurrent_micro_batches=1),
        loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
        optimizer=OptimizerConfig(learning_rate=0.0, weight_decay=0.0),
    )
    parts = build_step_parts(config, WhisperArchitecture(SHAPE), CPU, total_steps=len(BATCH_SIZES))
    weights = model.state_dict()
    parts.model.load_state_dict({name: weights[name_in_file(name)] for name in parts.model.state_dict()})
    return parts


def row_of(speech: Example, parts: StepParts) -> dict[str, torch.Tensor]:
    """An utterance as the Trainer is given it: the features (F, T) that ours hears, labels (U,)."""
    features, _ = parts.forward.front_end(speech.waveform[None], (len(speech.waveform),), None)
    return {"input_features": features[0].T, "labels": torch.tensor([*speech.tokens, SPECIAL.end])}


def collate_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A micro-batch as transformers' own examples make it: features (B, F, T), labels (B, U)."""
    labels = [row["labels"] for row in rows]
    return {
        "input_features": torch.stack([row["input_features"] for row in rows]),
        "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=NO_LABEL),
    }


def trained(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]], size: int) -> tuple[float, float]:
    """The loss and the gradient norm that transformers' Trainer logs of one step in micro-batches of `size`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=len(rows) // size,
            learning_rate=0.0,
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Seq2SeqTrainer(
            copy.deepcopy(model), settings, data_collator=collate_rows, train_dataset=Targets(rows)
        )
        trainer.remove_callback(transformers.PrinterCallback)  # it would print what is read below
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    return float(logged["loss"]), float(logged["grad_norm"])
