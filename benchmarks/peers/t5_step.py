#!/usr/bin/env python3
"""Compare an optimizer step of a random FLAN-T5-small in this trainer and in transformers: time, memory and loss.

    python3 benchmarks/peers/t5_step.py --rounds 5

Both train the same shape from the same weights on the same 8 pairs of 196 and 384 tokens, in fp32 on the CPU, with
clipping and the same optimizer, as one step. transformers computes it with gradient checkpointing. Their losses must
agree. Peak is the number of live tensor bytes counted at dispatch; growth is VmHWM minus the resident memory of the
process before its model, which includes the holes of the C library's heap.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import importlib.util
import json
import os
import statistics
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.measuring.common import warm_up
from benchmarks.peers.processes import OURS, Contestant, Entry, Result, race
from benchmarks.peers.toolkits import OwnStep, peak_bytes
from benchmarks.peers.whisper_toolkits import fill
from konkanivani.command_line import read_flags, run_script
from konkanivani.config import DataConfig, LossConfig, MemoryConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batching import Example, same_size, split_into_micro_batches
from konkanivani.data.text import SpecialTokens
from konkanivani.errors import NumericsError, UsageError
from konkanivani.memory.monitor import peak_resident_mib, reset_peak_resident, resident_mib
from konkanivani.models.asr import trained_parameters
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.folder import name_in_file
from konkanivani.models.t5.model import T5Shape
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.optimizer_state import learning_rate

THEIRS = "transformers"
SMALL = T5Shape(512, 64, 6, 8, 8, 1024, 32_128)
SPECIAL = SpecialTokens(blank=None, unknown=None, start=0, end=1)
FIRST_TOKEN = 2
SCHEDULE = OptimizerConfig(learning_rate=1e-4, weight_decay=0.0)
TOTAL_STEPS = 100  # for the learning-rate schedule
LOSS_SHARE = 0.001  # largest relative difference of the last losses


@dataclass(frozen=True)
class T5Terms:
    """Parameters of the workload: a step on `utterances` pairs of `inputs` and `targets` tokens, ends included."""

    utterances: int
    inputs: int
    targets: int
    optimizer: Literal["adamw", "adafactor"]
    device: str = "cpu"

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (B, T) and targets (B, U), which end with the end token; equal on every machine."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randint(FIRST_TOKEN, SMALL.vocab_size, (self.utterances, self.inputs), generator=generator)
        targets = torch.randint(FIRST_TOKEN, SMALL.vocab_size, (self.utterances, self.targets), generator=generator)
        targets[:, -1] = SPECIAL.end
        return inputs, targets


class KonkaniVani(OwnStep):
    """`train_step`; the setting `recomputed` is --gradient_checkpointing always."""

    def __init__(self, entry: Entry, terms: T5Terms) -> None:
        together = terms.utterances // entry.micro_batches
        config = dataclasses.replace(
            TrainConfig(),
            data=DataConfig(
                batch_size=together,
                gradient_accumulation_steps=entry.micro_batches,
                concurrent_micro_batches=entry.at_once,
            ),
            loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
            optimizer=dataclasses.replace(SCHEDULE, optimizer=terms.optimizer),
            memory=MemoryConfig(gradient_checkpointing="always" if entry.setting == "recomputed" else "never"),
        )
        rows = zip(*terms.tokens(), strict=True)
        pairs = [Example(str(number), one, other[:-1].tolist(), None) for number, (one, other) in enumerate(rows)]
        self.global_batch = split_into_micro_batches(pairs, same_size(together), SPECIAL)
        self.resident_before = resident_mib()
        self.parts = build_step_parts(config, T5Architecture(SMALL), torch.device("cpu"), TOTAL_STEPS)
        fill((name_in_file(name, is_gated=True), value) for name, value in self.parts.model.named_parameters())
        self.parameters = sum(parameter.numel() for parameter in trained_parameters(self.parts.model))
        warm_up(self.parts, self.global_batch)


class Transformers:
    """T5ForConditionalGeneration with gradient checkpointing, and AdamW (fused) or Adafactor of transformers."""

    def __init__(self, terms: T5Terms) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.version = transformers.__version__
        self.inputs, self.targets = terms.tokens()
        self.device = terms.device
        config = transformers.T5Config(
            vocab_size=SMALL.vocab_size,
            d_model=SMALL.d_model,
            d_kv=SMALL.head_width,
            d_ff=SMALL.feedforward_dim,
            num_layers=SMALL.encoder_layers,
            num_decoder_layers=SMALL.decoder_layers,
            num_heads=SMALL.attention_heads,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            tie_word_embeddings=False,
            use_cache=False,
            decoder_start_token_id=SPECIAL.start,
        )
        self.resident_before = resident_mib()
        reset_peak_resident()
        self.model = transformers.T5ForConditionalGeneration(config).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers 5 ties the output layer unless it is read from a file with other values.
        self.model.lm_head.weight = torch.nn.Parameter(torch.empty_like(self.model.shared.weight))
        fill(self.model.named_parameters())
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = self._optimizer(terms)
        self.steps = 0
        self.step()  # creates the optimizer's state

    def _optimizer(self, terms: T5Terms) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        if terms.optimizer == "adamw":
            return torch.optim.AdamW(parameters, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=True)
        from transformers.optimization import Adafactor

        # As in this trainer: the learning rate is the schedule's, without first moment.
        return Adafactor(parameters, lr=SCHEDULE.learning_rate, relative_step=False, scale_parameter=False)

    def step(self) -> float:
        """Run one optimizer step; return the loss in nats per token."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(SCHEDULE, self.steps, TOTAL_STEPS)
        self.steps += 1
        loss = self.model(input_ids=self.inputs, labels=self.targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), SCHEDULE.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def resident_peak_mib(self) -> float:
        """Return VmHWM in MiB; only the constructor resets it."""
        return peak_resident_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return peak_bytes(self.model, self.optimizer, self.step, self.device)


def build(entry: dict, terms: dict) -> Contestant:
    """Import the toolkit of an entry and return the contestant."""
    contestant = Entry(**entry)
    workload = T5Terms(**terms)
    if contestant.toolkit == OURS:
        bootstrap.set_malloc_options(os.environ)  # as in every training script
        return KonkaniVani(contestant, workload)
    return Transformers(workload)


ENTRIES = (
    Entry(OURS, "recomputed", 2, at_once=2),
    Entry(OURS, "kept", 2, at_once=2),
    Entry(OURS, "recomputed", 1),
    Entry(OURS, "kept", 1),
    Entry(THEIRS, "checkpointing", 1),
)


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    rounds: int = 5
    """Steps of each side after a warm-up; the median counts."""
    pairs: int = 8
    """Pairs of a step, an even number."""
    inputs: int = 196
    """Tokens of an input."""
    targets: int = 384
    """Tokens of a target."""
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    """Optimizer of both sides."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def compare(flags: Flags) -> str:
    """Return the report; raise NumericsError if the losses show that the two do not compute the same step."""
    if min(flags.rounds, flags.pairs, flags.inputs, flags.targets) < 1 or flags.pairs % 2:
        raise UsageError("--rounds, --inputs and --targets must be at least 1, and --pairs an even number.")
    if importlib.util.find_spec(THEIRS) is None:
        raise UsageError(
            "The package transformers, with which this compares, is not installed. Run: pip install -e .[test]."
        )
    pythons = dict.fromkeys((OURS, THEIRS), Path(sys.executable))
    terms = T5Terms(flags.pairs, flags.inputs, flags.targets, flags.optimizer)
    results = race(ENTRIES, pythons, terms, flags.rounds, "benchmarks.peers.t5_step")
    losses = [result.loss for result in results]
    if max(losses) - min(losses) > LOSS_SHARE * max(losses):
        raise NumericsError(
            f"The losses {losses} are not from the same step, so nothing is comparable. Fix the compared programs."
        )
    if flags.json:
        return json.dumps([dataclasses.asdict(result) for result in results])
    return "\n".join(
        [
            "| | step, s: median | least | CPU s | peak, MiB | growth, MiB | step over theirs | peak | growth |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(result, results[-1]) for result in results),
        ]
    )


def _row(result: Result, theirs: Result) -> str:
    name = f"{result.entry.name}, {result.entry.micro_batches} micro-batches {result.version}"
    cells = (
        f"{result.median:.2f}",
        f"{min(result.seconds):.2f}",
        f"{statistics.median(result.cpu_seconds):.2f}",
        f"{result.peak_mib:.0f}",
        f"{result.growth_mib:.0f}",
        f"{result.median / theirs.median:.2f}",
        f"{result.peak_mib / theirs.peak_mib:.2f}",
        f"{result.growth_mib / theirs.growth_mib:.2f}",
    )
    return f"| {' | '.join((name, *cells))} |"


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
