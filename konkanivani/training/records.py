"""Log records: one frozen dataclass per kind.

A number that TensorBoard draws carries its tag in the metadata of its field; a value of None is not logged. The digits
in the tags exist because TensorBoard sorts its groups by name and opens only the first two.
"""

from dataclasses import dataclass

from torch import Tensor

from konkanivani.memory.monitor import PLANNED, RESERVED, VALIDATION, PhaseMemory, logged_as


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
    """

    step: int = 0
    skipped_steps: int = 0
    epochs_finished: int = 0


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
        splits: OOM retries of the step with smaller micro-batches.
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
