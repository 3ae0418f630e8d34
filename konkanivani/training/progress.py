"""Records of steps, skips and validations, and the progress of a run computed from them, for logs and the progress bar.

The counters that a checkpoint stores as "progress" are `TrainState` (run.py).

A number that TensorBoard draws carries its tag in the metadata of its field; a value of None is not logged. The digits
in the tags exist because TensorBoard sorts its groups by name and opens only the first two.
"""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from konkanivani.data.batching import GlobalBatch
from konkanivani.lengths import SECONDS, InputUnit
from konkanivani.memory.monitor import PLANNED, RESERVED, VALIDATION, PhaseMemory, logged_as
from konkanivani.models.architecture import Architecture, product_rate, step_flop
from konkanivani.ops.products import fast_linear
from konkanivani.training.step import StepReport

# --------------------
# Log records: one frozen dataclass per kind.


@dataclass(frozen=True)
class Resumed:
    """Position from which a run is resumed.

    Skipped global batches and validated epochs are counted separately, because `step` alone is ambiguous: batches are
    skipped between two steps, and an epoch is validated after its last step, so either can be logged before or after
    the checkpoint of the same step.

    Args:
        step: optimizer steps so far.
        skipped_steps: global batches skipped so far.
        epochs_finished: epochs validated so far.
        has_initial_scores: whether initial weights were validated, which is logged before the first step.
    """

    step: int = 0
    skipped_steps: int = 0
    epochs_finished: int = 0
    has_initial_scores: bool = False


FROM_NOTHING = Resumed()


INITIAL = "initial"
CURVES = ("", VALIDATION, PLANNED, RESERVED, INITIAL)  # "" is the curve of training
DRAWN_PHASES = ("forward", "backward", "update", "validation")  # the phases of the memory plan


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Args:
        loss, ctc_loss, attention_loss: nats per token.
        scale: loss scale; 1.0 without a GradScaler.
        seconds: wall time of the step.
        splits: OOM retries of the step, of any kind.
        waiting_seconds: part of `seconds` spent waiting for data.
        model_flops_utilisation: model FLOP/s of the step as a fraction of the device's rate, on this rank (MFU).
        gpu_utilisation: fraction of time in which the GPU of this rank ran a kernel.
        cache_clearings: how often the CUDA cache was emptied in this step; None on a CPU.
        cache_clearing_seconds: seconds spent emptying it; None on a CPU.
    """

    step: int
    epoch: int
    loss: float | None = logged_as("2 loss/all")
    ctc_loss: float | None = logged_as("2 loss/ctc")
    attention_loss: float | None = logged_as("2 loss/attention")
    learning_rate: float | None = logged_as("5 optimizer/learning_rate")
    gradient_norm: float | None = logged_as("5 optimizer/gradient_norm")
    scale: float | None = logged_as("5 optimizer/scale")
    skipped_steps: int | None = logged_as("5 optimizer/skipped_steps")
    skipped: bool
    audio_seconds_per_second: float | None = logged_as("3 speed/audio_seconds_per_second")
    padding_share: float | None = logged_as("6 data/padding_share")
    tokens: int | None = logged_as("6 data/tokens")
    utterances: int | None = logged_as("6 data/utterances")
    seconds: float | None = logged_as("3 speed/step_seconds")
    splits: int | None = logged_as("4 memory/splits")
    waiting_seconds: float | None = logged_as("3 speed/waiting_for_data_seconds", default=None)
    model_flops_utilisation: float | None = logged_as("3 speed/model_flops_utilisation", default=None)
    gpu_utilisation: float | None = logged_as("3 speed/gpu_utilisation", default=None)
    cache_clearings: int | None = logged_as("8 allocator/cache_clearings", default=None)
    cache_clearing_seconds: float | None = logged_as("8 allocator/cache_clearing_seconds", default=None)
    memory: tuple[PhaseMemory, ...] = ()


@dataclass(frozen=True)
class SkipRecord:
    """A global batch that changed no weight because its loss or gradient was not finite.

    Args:
        step: optimizer steps before it.
        skipped_steps: skipped global batches of the run, including this one.
        consecutive_skips: skipped global batches in a row, including this one.
        scale: loss scale of its backward pass.
        utterances: ids of all utterances of the global batch; the cause is at least one of them, or the weights.
    """

    step: int
    epoch: int
    skipped_steps: int
    consecutive_skips: int
    loss: float
    ctc_loss: float | None
    attention_loss: float | None
    gradient_norm: float
    scale: float
    reason: str
    utterances: tuple[str, ...]


@dataclass(frozen=True)
class HypothesisPair:
    """A reference transcript and its hypothesis."""

    reference: str
    hypothesis: str
    utterance_id: str


@dataclass(frozen=True)
class ValidationRecord:
    """One pass over the validation set after `step` steps.

    Args:
        wer, cer: error rates as fractions (0.345 = 34.5 %).
        rank_peaks_mib: peak memory of each rank so far, in rank order; empty in a single-process run.
        blank_share: fraction of blank frames on the CTC best paths.
        clipped_share: fraction of the epoch's steps with a clipped gradient.
        initial_wer, initial_cer: error rates of the initial weights; None if training started from random weights.
    """

    step: int
    epoch: int
    loss: float | None = logged_as("2 loss/all", VALIDATION)
    ctc_loss: float | None = logged_as("2 loss/ctc", VALIDATION)
    attention_loss: float | None = logged_as("2 loss/attention", VALIDATION)
    wer: float | None = logged_as("1 error rates/WER", VALIDATION)
    cer: float | None = logged_as("1 error rates/CER", VALIDATION)
    utterances: int | None = None
    seconds: float | None = None
    hypotheses: tuple[HypothesisPair, ...] = ()
    memory: PhaseMemory | None = None
    rank_peaks_mib: tuple[float, ...] = ()
    blank_share: float | None = logged_as("1 error rates/blank_frames", VALIDATION, default=None)
    clipped_share: float | None = logged_as("5 optimizer/clipped_share", default=None)
    initial_wer: float | None = logged_as("1 error rates/WER", INITIAL, default=None)
    initial_cer: float | None = logged_as("1 error rates/CER", INITIAL, default=None)


@dataclass(frozen=True)
class RehearsalRecord:
    """Memory per phase of the most expensive batches, measured before the first epoch."""

    step: int
    memory: tuple[PhaseMemory, ...]


@dataclass(frozen=True)
class SpectrogramRecord:
    """One utterance for visual and audible inspection.

    Args:
        waveform: (samples,) at 16 kHz.
        features: (T, F).
        posteriors: CTC posteriors (T', V); None without CTC.
    """

    step: int
    utterance_id: str
    waveform: Tensor
    features: Tensor
    posteriors: Tensor | None


@dataclass(frozen=True)
class SettingsRecord:
    """The flags of this run as text, valid from `step`."""

    step: int
    text: str


Record = StepRecord | SkipRecord | ValidationRecord | RehearsalRecord | SpectrogramRecord | SettingsRecord


# --------------------
# Text of records for the console.


PAIRS_ON_CONSOLE = 5
UTTERANCES_ON_CONSOLE = 8


def describe_validation(record: ValidationRecord) -> str:
    """Return one line of numbers, then at most five references with their hypotheses."""
    parts = [f"epoch {record.epoch}", f"step {record.step}"]
    parts += [f"valid loss {record.loss:.3f}"] if record.loss is not None else []
    for name, rate, initial in (("WER", record.wer, record.initial_wer), ("CER", record.cer, record.initial_cer)):
        before = f" (initially {100 * initial:.1f} %)" if initial is not None and record.step else ""
        parts += [f"{name} {100 * rate:.1f} %{before}"] if rate is not None else []
    lines = [" · ".join(parts)]
    for pair in record.hypotheses[:PAIRS_ON_CONSOLE]:
        lines.append(f"  reference   {' '.join(pair.reference.split())}")
        lines.append(f"  hypothesis  {' '.join(pair.hypothesis.split())}")
    return "\n".join(lines)


def describe_skip(record: SkipRecord) -> str:
    """Return a message on a skipped step: cause, utterances, and the log that lists all of them."""
    named = record.utterances[:UTTERANCES_ON_CONSOLE]
    omitted = len(record.utterances) - UTTERANCES_ON_CONSOLE
    utterances = ", ".join(named) + (f" and {omitted} others" if omitted > 0 else "")
    return (
        f"Step {record.step + 1} is skipped: {record.reason}. The weights are unchanged. Its utterances: "
        f"{utterances} (log.jsonl lists those of every skipped step)."
    )


# --------------------
# Warnings about a run that does not learn, early enough to restart it with other settings.


FAILING_CER = 0.9
ONLY_BLANKS = 0.995  # fraction of the validation frames
FLAT_LOSS = 0.97  # fraction of the first epoch's loss
MOSTLY_CLIPPED = 0.9  # fraction of an epoch's steps
SHORT_RUN = 1000  # steps
CLIPPED_AT_FIRST = 1000  # steps: earlier, most gradients of a good run are clipped too (docs/experiments.md)
LOOKS = 1 / 3, 2 / 3  # fractions of a run's steps; checked at the end of the epoch that reaches each


@dataclass(frozen=True)
class EpochLearning:
    """Training and validation statistics of one epoch.

    Args:
        first_step: optimizer steps before the epoch.
        last_step: optimizer steps up to its end.
        total_steps: optimizer steps of the whole run.
        loss: mean loss over the steps of this epoch.
        first_loss: mean loss over the steps of the first epoch.
        clipped_share: fraction of the epoch's steps whose gradient norm exceeded --max_grad_norm.
        cer: character error rate of the validation; NaN without one.
        blank_share: fraction of blank frames on the CTC best paths of the validation; None without CTC.
    """

    first_step: int
    last_step: int
    total_steps: int
    loss: float
    first_loss: float
    clipped_share: float
    cer: float = math.nan
    blank_share: float | None = None

    @property
    def is_time_to_look(self) -> bool:
        """Return whether one third or two thirds of the run's steps were reached in this epoch."""
        return any(self.first_step < share * self.total_steps <= self.last_step for share in LOOKS)

    def help(self, unit: InputUnit) -> str:
        """Return the usual remedies if almost nothing is recognized correctly; `unit` measures the model's inputs."""
        helps = []
        has_ctc = self.blank_share is not None
        if self.total_steps < SHORT_RUN:
            why = ", since CTC needs some hundred steps to align" if has_ctc else ""
            helps.append(f"more --epochs or a smaller effective batch{why}")
        if has_ctc:
            helps.append("--tokenizer_type char with little speech, a --ctc_weight of 0.5 or more, a smaller --preset")
        elif unit == SECONDS:
            helps.append("another --learning_rate; for a --pretrained model, the --language closest to the transcripts")
        else:
            helps.append("another --learning_rate")
        helps.append(_advice_on_data(unit))
        return "; ".join(helps)


def _advice_on_data(unit: InputUnit) -> str:
    if unit == SECONDS:
        return "konkanivani inspect checks whether transcripts and audio match"
    return "check that each target belongs to its input"


def failures(epoch: EpochLearning, unit: InputUnit = SECONDS) -> list[str]:
    """Return one line with a remedy per sign that the run does not learn; empty while it is too early to judge."""
    if not epoch.is_time_to_look:
        return []
    done = f"after {epoch.last_step:,} of {epoch.total_steps:,} steps"
    messages = []
    if epoch.blank_share is not None and epoch.blank_share >= ONLY_BLANKS:
        messages.append(
            f"The model still outputs only blanks {done} ({100 * epoch.blank_share:.1f} % of the validation "
            f"frames). Try {epoch.help(unit)}."
        )
    # NaN without validation: the comparison is False. All blanks imply a CER near 1, so only one of both is reported.
    elif epoch.cer >= FAILING_CER:
        messages.append(f"The validation CER is still {100 * epoch.cer:.0f} % {done}. Try {epoch.help(unit)}.")
    # `first_loss` is 0 until the first epoch has finished.
    if epoch.loss >= FLAT_LOSS * epoch.first_loss > 0:
        messages.append(
            f"The training loss does not decrease {done}: {epoch.loss:.3f} per token, {epoch.first_loss:.3f} "
            f"in the first epoch. Try a third of the --learning_rate and more --warmup_steps; {_advice_on_data(unit)}."
        )
    if epoch.clipped_share > MOSTLY_CLIPPED and epoch.last_step >= CLIPPED_AT_FIRST:
        messages.append(
            f"{100 * epoch.clipped_share:.0f} % of the epoch's gradients were clipped {done}. Use a higher "
            "--max_grad_norm, or a lower --learning_rate if the loss is unstable."
        )
    return messages


# --------------------
# Progress bar: steps, loss, speed in audio seconds per second, memory and time left.


Item = TypeVar("Item")


class Progress:
    """tqdm bar over the optimizer steps of a run, with the mean speed of this process."""

    def __init__(self, step: int, total_steps: int, unit: InputUnit = SECONDS) -> None:
        self._speed_unit = "audio s/s" if unit == SECONDS else f"{unit.name}/s"
        # If stderr is a file, write one line per minute instead of redrawing the bar.
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 60.0,
        )
        self._audio_seconds = self._seconds = self._waited = 0.0
        self.last_wait = 0.0
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the wall time since the last lap, in seconds."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds

    def wait_for_next(self, global_batches: Iterator[Item]) -> Item:
        """Return the next global batch and count the time until it is available as waiting."""
        started = time.perf_counter()
        item = next(global_batches)
        self.last_wait = time.perf_counter() - started
        return item

    def show(self, report: StepReport, audio_seconds: float, seconds: float, peak_mib: float) -> None:
        """Advance the bar by one global batch of `audio_seconds` that took `seconds`."""
        self._audio_seconds += audio_seconds
        self._seconds += seconds
        self._waited += self.last_wait
        postfix = f"loss {report.loss:.3f}, {audio_seconds / seconds:.0f} {self._speed_unit}, {peak_mib:.0f} MiB"
        self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.update(0 if report.is_skipped else 1)

    def print_line(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line)

    def audio_seconds_per_second(self) -> float:
        """Return the mean speed over all global batches shown so far; 0 before the first."""
        return self._audio_seconds / self._seconds if self._seconds else 0.0

    def waiting_share(self) -> float:
        """Return the fraction of that time spent waiting for data; 0 before the first global batch."""
        return self._waited / self._seconds if self._seconds else 0.0

    def close(self) -> None:
        """Close the bar, leaving its last state visible."""
        self._bar.close()


# --------------------
# Utilization of the device by a training step, as a fraction of the arithmetic that the device can do.


# Repetitions of the timed matrix product. The square matrices are just large enough to fill the device: the three
# (two factors and the product) take 24 MiB in fp16 on a GPU, and 3 MiB in fp32 on a CPU with few cores, where matrices
# of four times the size give the same rate.
ROUNDS = {"cuda": 20, "cpu": 5}
MAX_FEW_CORES = 8


class Utilisation:
    """Utilization of a device that trains in `dtype`.

    The constructor measures the device's rate in FLOP/s, which takes some milliseconds.
    """

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.device = device
        # Time the product that the model's layers call, so that both sides of the ratio use the same library.
        multiply = fast_linear if dtype == torch.float32 else torch.mm
        self.rate = product_rate(multiply, device, dtype, best_side(device), ROUNDS[device.type])
        self._is_card_silent = device.type != "cuda"

    def model_flops_utilisation(self, global_batch: GlobalBatch, seconds: float) -> float:
        """Return the model FLOP/s of the step as a fraction of the device's rate (MFU).

        Definition: Chowdhery et al., 2022, appendix B. Padding and recomputation do not count as model FLOP. Gradients
        of frozen weights, which are not computed, do count: the value is too high for LoRA and frozen layers.
        """
        return self.global_batch_flop(global_batch) / (seconds * self.rate)

    def global_batch_flop(self, global_batch: GlobalBatch) -> float:
        """Return the FLOP of forward and backward pass that the utterances of this rank's micro-batches need."""
        return sum(
            step_flop(self.architecture.forward_layers((samples,), tokens), recomputes=False)
            for batch in global_batch.micro_batches
            for samples, tokens in zip(batch.sample_lengths, batch.token_lengths, strict=True)
        )

    def gpu_utilisation(self) -> float | None:
        """Return the fraction of the last sampling period in which the GPU ran a kernel (NVML), or None if unknown."""
        if self._is_card_silent:
            return None
        try:
            return torch.cuda.utilization(self.device) / 100
        except Exception:  # no NVML, no permission, or a MIG slice: not needed for training
            self._is_card_silent = True
            return None


def best_side(device: torch.device) -> int:
    """Return the side of square matrices that reach the highest rate on the device."""
    if device.type == "cuda":
        return 2048
    return 512 if torch.get_num_threads() <= MAX_FEW_CORES else 1024
