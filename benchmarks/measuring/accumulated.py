"""Loss and gradient norm of one optimizer step at several micro-batch sizes, in transformers' Trainer and in this one.

The model is a small random Whisper model. B utterances, T feature frames, F mel bins, U labels.
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
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

LABELS = (4, 20, 4, 20)  # per utterance, end token included; unequal, so that a mean of micro-batch means differs
BATCH_SIZES = (4, 2, 1)
TEXT_TOKENS = 50
SPECIAL = SpecialTokens(start=TEXT_TOKENS + 1, end=TEXT_TOKENS)
# 50 encoder positions are one second of audio.
SHAPE = WhisperShape(64, 2, 2, 2, 128, 80, TEXT_TOKENS + 2, source_positions=50, target_positions=32)
NO_LABEL = -100  # ignored by the loss in transformers
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MicroBatchPlan:
    """Results of a step in `accumulation` micro-batches of `batch` utterances; losses are in nats per label."""

    batch: int
    accumulation: int
    trainer_loss: float
    trainer_norm: float
    our_loss: float
    our_norm: float


@dataclass(frozen=True)
class Comparison:
    """Results of one step at all micro-batch sizes, and the versions of the packages."""

    transformers: str
    accelerate: str
    torch: str
    cuts: tuple[MicroBatchPlan, ...]

    def table(self) -> str:
        """Return the results as a Markdown table."""
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
    """Endless repetition of the utterances in their order.

    An iterable dataset, because Trainer would shuffle a map-style one.
    """

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self._rows


def measure(seed: int, divided: bool = False) -> Comparison:
    """Run the step at every micro-batch size in both trainers.

    Args:
        divided: Let Trainer divide each micro-batch's loss by the number of micro-batches.
    """
    model, speeches = build_model(seed), build_speeches(seed)
    if divided:
        # Without this attribute, Trainer inspects `forward`. Whisper's accepts **kwargs, hence Trainer passes it
        # `num_items_in_batch` and does not divide the loss.
        model.accepts_loss_kwargs = False
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
    """Return a Whisper model with the random weights of transformers."""
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
        # The defaults are tokens of the published vocabulary, with larger ids than this one has.
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def build_speeches(seed: int) -> list[Example]:
    """Return utterances of one second of noise; with the end token, they have `LABELS` labels."""
    generator = torch.Generator().manual_seed(seed)
    waveforms = torch.randn(len(LABELS), SAMPLE_RATE, generator=generator)
    tokens = [torch.randint(TEXT_TOKENS, (count - 1,), generator=generator).tolist() for count in LABELS]
    rows = enumerate(zip(waveforms, tokens, strict=True))
    return [Example(str(number), waveform, said, augment_seed=None) for number, (waveform, said) in rows]


def build_parts(model: torch.nn.Module) -> StepParts:
    """Return the step parts of this trainer with the weights of `model`."""
    config = TrainConfig(
        data=DataConfig(concurrent_micro_batches=1),
        # The loss of transformers' model: cross entropy without smoothing, no CTC.
        loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
        # At learning rate 0, every step starts from the same weights.
        optimizer=OptimizerConfig(learning_rate=0.0, weight_decay=0.0),
    )
    parts = build_step_parts(config, WhisperArchitecture(SHAPE), CPU, total_steps=len(BATCH_SIZES))
    weights = model.state_dict()
    # The state dict of transformers contains tied weights twice, hence the selection by name.
    parts.model.load_state_dict({name: weights[name_in_file(name)] for name in parts.model.state_dict()})
    return parts


def row_of(speech: Example, parts: StepParts) -> dict[str, torch.Tensor]:
    """Return an utterance as Trainer's input: features (F, T) of this trainer's front end, labels (U,)."""
    features, _ = parts.forward.front_end(speech.waveform[None], (len(speech.waveform),), None)
    return {"input_features": features[0].T, "labels": torch.tensor([*speech.tokens, SPECIAL.end])}


def collate_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a micro-batch as in the examples of transformers: features (B, F, T), labels (B, U)."""
    labels = [row["labels"] for row in rows]
    return {
        "input_features": torch.stack([row["input_features"] for row in rows]),
        "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=NO_LABEL),
    }


def trained(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]], size: int) -> tuple[float, float]:
    """Return the loss and gradient norm that Trainer logs for one step in micro-batches of `size`."""
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
        trainer.remove_callback(transformers.PrinterCallback)  # it prints the log, which is read below
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    return float(logged["loss"]), float(logged["grad_norm"])
