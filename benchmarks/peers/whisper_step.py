#!/usr/bin/env python3
"""Compare an optimizer step of a Whisper model in this trainer and in transformers: time and memory, loss and gradient.

    python3 benchmarks/peers/whisper_step.py compare --size base --rounds 5
    python3 benchmarks/peers/whisper_step.py compare --device cuda --amp --size small
    python3 benchmarks/peers/whisper_step.py accumulation

compare: noise utterances with features of Whisper's 30 s window (6 s with "digits"), cross entropy over all labels of
the step, all blocks recomputed, clipping, AdamW. Each side runs in its own process; a round is one step of each,
sequentially. Both start from the same random weights. Their losses must agree, except with --audio_context speech,
where this trainer leaves out the silence after an utterance, which transformers cannot. Peak is the number of live
tensor bytes counted at dispatch (CUDA: the allocator's); growth is VmHWM minus the resident memory of the process
before its model; the figure above the state is the peak minus weights, gradients and moments of the trained parameters,
16 bytes each.

accumulation: each step has the same four utterances with 4, 20, 4 and 20 labels, in micro-batches of four, of two or of
one, from the same small random weights, in fp32 on a CPU, at learning rate 0. Reported are the loss and the gradient
norm that the installed `Seq2SeqTrainer` logs, and the values of `train_step`. A mean over the labels of the step does
not depend on the division into micro-batches. B utterances, T feature frames, F mel bins, U labels.

The exit code does not depend on the accumulation's result, since this is a measurement.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import copy
import dataclasses
import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Literal

import torch

from benchmarks.measuring.common import run_subcommand
from benchmarks.peers.processes import OURS, Entry, Result, race
from benchmarks.peers.whisper_toolkits import DEFAULT_WINDOWS, WhisperTerms
from konkanivani.command_line import read_flags
from konkanivani.config import DataConfig, LossConfig, OptimizerConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.data.batching import Example, same_size, split_into_micro_batches
from konkanivani.data.text import SpecialTokens
from konkanivani.errors import NumericsError, UsageError
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import name_in_file
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

THEIRS = "transformers"
CONTESTANTS = "benchmarks.peers.whisper_toolkits"
LOSS_SHARE = 0.001  # largest relative difference of the last losses (half precision: ten times that)
ON_CARD = "card"
HEARD = {"window": "all of the window", "speech": "the speech alone"}
TRAINED = {"all": "all weights", "decoder": "the decoder alone", "lora": "LoRA of rank 32 on q and v"}


@dataclass(frozen=True)
class WhisperComparison:
    """Results of all settings; the last one is that for transformers."""

    terms: WhisperTerms
    rounds: int
    machine: str
    results: tuple[Result, ...]

    def markdown(self) -> str:
        """Return a description of the measurement and the tables as Markdown."""
        terms, theirs = self.terms, self.results[-1]
        return "\n".join(
            [
                f"Whisper {terms.size}, {TRAINED[terms.train]} ({theirs.parameters / 1e6:.1f} M parameters trained); "
                f"{terms.utterances} windows of {terms.window_seconds} s, {terms.together} a micro-batch, with "
                f"{min(terms.seconds):.1f} to {max(terms.seconds):.1f} s of speech and {min(terms.labels)} to "
                f"{max(terms.labels)} labels; ours takes {HEARD[terms.audio_context]}; every block recomputed; "
                f"{_precision(terms)}; {self.machine}; {self.rounds} rounds of a step each.",
                "",
                "| | step, s: median | least | most | CPU s | its features, s | peak, MiB | above state | growth |",
                "|---|---|---|---|---|---|---|---|---|",
                *(_row(result) for result in self.results),
                "",
                f"| ours over {THEIRS}' | median | least | CPU s | features | peak | above state | growth |",
                "|---|---|---|---|---|---|---|---|",
                *(_ratios(result, theirs) for result in self.results[:-1]),
            ]
        )

    def as_json(self) -> dict[str, object]:
        """Return all fields as JSON-serialisable values."""
        return asdict(self)


def compare(
    terms: WhisperTerms, rounds: int, at_once: tuple[int, ...], weights: tuple[str, ...] = (ON_CARD,)
) -> WhisperComparison:
    """Compare this trainer with transformers.

    Raises NumericsError if the losses show that the two do not compute the same step.

    Args:
        at_once: Numbers of concurrent micro-batches of this trainer.
        weights: Locations of this trainer's weights, keys of PLACEMENTS or "card".
    """
    pieces = terms.utterances // terms.together
    entries = (
        *(Entry(OURS, "", pieces, at_once=count) for count in at_once if ON_CARD in weights),
        *(Entry(OURS, place, pieces) for place in weights if place != ON_CARD),
        Entry(THEIRS, "", pieces),
    )
    pythons = dict.fromkeys((OURS, THEIRS), Path(sys.executable))
    results = race(entries, pythons, terms, rounds, CONTESTANTS, aside=("features",))
    losses = [result.loss for result in results]
    # With the speech alone, the encoder input differs from that in transformers, and so does the loss.
    is_same_work = terms.audio_context == "window"
    if is_same_work and max(losses) - min(losses) > (10 if terms.mixed_precision else 1) * LOSS_SHARE * max(losses):
        raise NumericsError(
            f"The losses {losses} are not from the same step, so nothing is comparable. Fix the compared programs."
        )
    return WhisperComparison(terms, rounds, _machine(terms.device), results)


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _precision(terms: WhisperTerms) -> str:
    half = "fp16" if terms.device == "cuda" else "bf16"
    return f"autocast to {half}" if terms.mixed_precision else "fp32"


def _above_state(result: Result) -> float:
    """Return the peak minus weights, gradients and moments of the trained parameters, in MiB."""
    return result.peak_mib - STATE_BYTES * result.parameters / MIB


def _row(result: Result) -> str:
    times, features = result.seconds, statistics.median(result.aside["features"])
    cpu = statistics.median(result.cpu_seconds)
    cells = (f"{result.median:.3f}", f"{min(times):.3f}", f"{max(times):.3f}", f"{cpu:.3f}", f"{features:.3f}")
    sizes = (f"{result.peak_mib:.0f}", f"{_above_state(result):.0f}", f"{result.growth_mib:.0f}")
    return f"| {result.entry.name} {result.version} | {' | '.join((*cells, *sizes))} |"


def _ratios(ours: Result, theirs: Result) -> str:
    features = [statistics.median(result.aside["features"]) for result in (ours, theirs)]
    cpu = [statistics.median(result.cpu_seconds) for result in (ours, theirs)]
    pairs = (
        (ours.median, theirs.median),
        (min(ours.seconds), min(theirs.seconds)),
        cpu,
        features,
        (ours.peak_mib, theirs.peak_mib),
        (_above_state(ours), _above_state(theirs)),
        (ours.growth_mib, theirs.growth_mib),
    )
    return f"| {ours.entry.name} | {' | '.join(f'{one / other:.2f}' for one, other in pairs)} |"


@dataclass(frozen=True)
class CompareFlags:
    """Flags of this script."""

    size: Literal["tiny", "base", "small", "digits", "medium_blocks"] = "tiny"
    """Shape of the model with random weights. "digits" is the one of whisper_learning.py; "medium_blocks" has four
    encoder blocks and one decoder block of medium."""
    train: Literal["all", "decoder", "lora"] = "all"
    """Trained part: everything, the decoder, or LoRA of rank 32 on queries and values."""
    rounds: int = 5
    """Steps of each side after a warm-up; the median counts."""
    accum: int = 4
    """Micro-batches in the step."""
    batch: int = 1
    """Utterances in a micro-batch."""
    shortest: float = 5.0
    """Seconds of speech in the shortest utterance."""
    longest: float = 28.0
    """Seconds of speech in the longest utterance."""
    tokens_per_second: float = 16.0
    """Labels per second of speech (Konkani in Whisper's tokens: 7.5 per word); at most 448 per utterance."""
    audio_context: Literal["window", "speech"] = "window"
    """Input of this trainer's encoder: the whole window, as in transformers, or the speech alone."""
    window_seconds: int | None = None
    """Length of the encoder's window in seconds (default: 30, or 6 with "digits")."""
    at_once: tuple[int, ...] = (1, 2)
    """Numbers of concurrent micro-batches of this trainer to measure (CPU only)."""
    weights: tuple[Literal["card", "half", "host", "ahead"], ...] = ("card",)
    """Locations of this trainer's weights to measure; "ahead" is the host with the next block prefetched. Micro-batches
    run concurrently only with "card"."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    amp: bool = False
    """Autocast on both sides: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def compare_steps(flags: CompareFlags) -> str:
    """Return the report."""
    if min(flags.rounds, flags.accum, flags.batch, flags.window_seconds or 1, *flags.at_once) < 1 or not (
        flags.at_once and flags.weights
    ):
        raise UsageError(
            "--rounds, --accum, --batch, --window_seconds and --at_once must be at least 1, --weights not empty."
        )
    if not 0 < flags.tokens_per_second < 1000:
        raise UsageError("--tokens_per_second must be more than 0 and less than 1000.")
    for package in {"transformers", *(["peft"] if flags.train == "lora" else [])}:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package}, beside which this measures, is not installed. Run: pip install -e .[test].")

    terms = WhisperTerms(
        size=flags.size,
        train=flags.train,
        utterances=flags.accum * flags.batch,
        together=flags.batch,
        shortest=flags.shortest,
        longest=flags.longest,
        tokens_per_second=flags.tokens_per_second,
        device=flags.device,
        mixed_precision=flags.amp,
        audio_context=flags.audio_context,
        window_seconds=flags.window_seconds or DEFAULT_WINDOWS.get(flags.size, 30),
    )
    if not 0.2 <= flags.shortest <= flags.longest <= terms.window_seconds:
        raise UsageError(f"--shortest must be at least 0.2, --longest no less and at most {terms.window_seconds}.")
    comparison = compare(terms, flags.rounds, flags.at_once if flags.device == "cpu" else (1,), flags.weights)
    return json.dumps(comparison.as_json()) if flags.json else comparison.markdown()


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
class AccumulationComparison:
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


def measure_accumulation(seed: int, divided: bool = False) -> AccumulationComparison:
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
        loss, norm = train_with_trainer(model, rows, size)
        cuts.append(MicroBatchPlan(size, len(LABELS) // size, loss, norm, report.loss, report.gradient_norm))
    return AccumulationComparison(version("transformers"), version("accelerate"), version("torch"), tuple(cuts))


def build_model(seed: int) -> torch.nn.Module:
    """Return a Whisper model with the random weights of transformers."""
    import transformers

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


def train_with_trainer(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]], size: int) -> tuple[float, float]:
    """Return the loss and gradient norm that Trainer logs for one step in micro-batches of `size`."""
    import transformers

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


NEEDED = ("transformers", "accelerate")


@dataclass(frozen=True)
class AccumulationFlags:
    """Flags of this script."""

    seed: int = 0
    """Seed of weights and utterances."""
    divided: bool = False
    """Set `accepts_loss_kwargs` so that the Trainer assumes a model that does not divide by the labels of the step."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def compare_accumulation(flags: AccumulationFlags) -> str:
    """Return the report."""
    # find_spec() does not import the packages, which takes seconds.
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The Trainer of this comparison needs {' and '.join(missing)}, which cannot be imported here. Install "
            f"what is missing: pip install {' '.join(missing)}."
        )

    found = measure_accumulation(flags.seed, flags.divided)
    return json.dumps(dataclasses.asdict(found)) if flags.json else found.table()


SUBCOMMANDS = {
    "compare": lambda arguments: compare_steps(read_flags(CompareFlags, arguments)),
    "accumulation": lambda arguments: compare_accumulation(read_flags(AccumulationFlags, arguments)),
}

if __name__ == "__main__":
    sys.exit(run_subcommand(SUBCOMMANDS, sys.argv[1:]))
