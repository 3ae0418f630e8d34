"""What can be logged: one frozen dataclass a kind of record.

A number that TensorBoard draws carries its tag in its field's metadata; a value of None is not logged. TensorBoard
sorts its groups by name and opens the first two: hence the digits.
"""

from dataclasses import dataclass

from torch import Tensor

from konkanivani.memory.monitor import PLANNED, RESERVED, VALIDATION, PhaseMemory, logged_as


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from: the step, the windows skipped and the epochs validated on the way.

    Windows are skipped between two steps, and an epoch is validated behind its last one: whether before or after the
    checkpoint, their own counts say.
    """

    step: int = 0
    skipped_steps: int = 0
    epochs_finished: int = 0


FROM_NOTHING = Resumed()


INITIAL = "initial"
CURVES = ("", VALIDATION, PLANNED, RESERVED, INITIAL)
DRAWN_PHASES = ("forward", "backward", "update", "validation")  # for which memory is planned


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses are per token; `scale` is 1.0 without a scaler.

    `seconds` is the step's wall time, `waiting_seconds` what of it passed until its data was there. `splits` counts how
    often it ran out of memory and was begun again in smaller pieces. `model_flops_utilisation` is its share of the
    arithmetic that the device can do, `gpu_utilisation` of the time in which the card worked; both of one rank. The
    periodic clearing of the cache on CUDA: how often in this step, and the seconds spent in it; None on a CPU.
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
    """A window that changed no weight, since its loss or its gradient was not finite; `step` steps lie before it.

    `skipped_steps` counts the run's, `consecutive_skips` those in a row, this one included. `scale` is what the loss
    scale is now. `utterances` are the window's ids: at least one of them, or the weights, have something to do with it.
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
    """A reference and its hypothesis."""

    reference: str
    hypothesis: str
    utterance_id: str


@dataclass(frozen=True)
class ValidationRecord:
    """One pass over the validation set after `step` steps. WER and CER are fractions (0.345 = 34.5 %).

    `initial_wer` and `initial_cer` are those of the weights that the run began with, None where it began with none.
    `blank_share` is that of its frames on CTC's best paths, `clipped_share` that of the epoch's clipped
    gradients.
    `rank_peaks_mib` are the peaks of memory of all ranks so far, by rank; empty where one process trains alone.
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
    """What the costliest batches took by phase, before the first epoch."""

    step: int
    memory: tuple[PhaseMemory, ...]


@dataclass(frozen=True)
class SpectrogramRecord:
    """One utterance to look at and to listen to: waveform (samples,) at 16 kHz, features (T, F).

    `posteriors` (T', V) are CTC's; None where there is no CTC.
    """

    step: int
    utterance_id: str
    waveform: Tensor
    features: Tensor
    posteriors: Tensor | None


@dataclass(frozen=True)
class SettingsRecord:
    """The flags of this run, as text, from `step` on."""

    step: int
    text: str


Record = StepRecord | SkipRecord | ValidationRecord | RehearsalRecord | SpectrogramRecord | SettingsRecord
