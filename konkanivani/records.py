"""What can be logged: one frozen dataclass a kind of record.

A number that TensorBoard draws carries its tag in its field's metadata; a value of None is not logged.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any

from torch import Tensor


def tagged(tag: str, default: Any = MISSING) -> Any:
    """A dataclass field drawn by TensorBoard as `tag`."""
    return field(default=default, metadata={"tag": tag})


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


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in MiB at the end of a phase ("start", "data", "forward", "backward", "update", "log", "validation",
    "save").

    None = does not apply here. allocated, reserved and peak are the accelerator's; resident is the process's. On a CPU,
    peak is the peak resident. Of a phase's moments the one of highest peak counts; of fragmentation = reserved -
    allocated, what the allocator holds and no tensor is in, the largest.
    `allocator_retries` counts how often CUDA refused memory until the allocator had emptied its cache.
    """

    phase: str
    allocated_mib: float | None = tagged("memory/{phase}/allocated_mib")
    reserved_mib: float | None = tagged("memory/{phase}/reserved_mib")
    peak_mib: float | None = tagged("memory/{phase}/peak_mib")
    resident_mib: float | None = tagged("memory/{phase}/resident_mib")
    planned_mib: float | None = tagged("memory/{phase}/planned_mib", default=None)
    fragmentation_mib: float | None = tagged("memory/{phase}/fragmentation_mib", default=None)
    allocator_retries: int | None = tagged("memory/{phase}/allocator_retries", default=None)


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
    loss: float | None = tagged("loss/total")
    ctc_loss: float | None = tagged("loss/ctc")
    attention_loss: float | None = tagged("loss/attention")
    learning_rate: float | None = tagged("optimizer/learning_rate")
    gradient_norm: float | None = tagged("optimizer/gradient_norm")
    scale: float | None = tagged("optimizer/scale")
    skipped_steps: int | None = tagged("optimizer/skipped_steps")
    skipped: bool
    audio_seconds_per_second: float | None = tagged("speed/audio_seconds_per_second")
    padding_share: float | None = tagged("data/padding_share")
    tokens: int | None = tagged("data/tokens")
    utterances: int | None = tagged("data/utterances")
    seconds: float | None = tagged("speed/step_seconds")
    splits: int | None = tagged("memory/splits")
    waiting_seconds: float | None = tagged("speed/waiting_for_data_seconds", default=None)
    model_flops_utilisation: float | None = tagged("speed/model_flops_utilisation", default=None)
    gpu_utilisation: float | None = tagged("speed/gpu_utilisation", default=None)
    cache_clearings: int | None = tagged("memory/cache_clearings", default=None)
    cache_clearing_seconds: float | None = tagged("memory/cache_clearing_seconds", default=None)
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
    ctc_loss: float
    attention_loss: float
    gradient_norm: float
    scale: float
    reason: str
    utterances: tuple[str, ...]


@dataclass(frozen=True)
class HypothesisPair:
    """What was said and what was heard."""

    reference: str
    hypothesis: str
    utterance_id: str


@dataclass(frozen=True)
class ValidationRecord:
    """One pass over the validation set after `step` steps. WER and CER are fractions (0.345 = 34.5 %).

    `rank_peaks_mib` are the peaks of memory of all ranks so far, by rank; empty where one process trains alone.
    """

    step: int
    epoch: int
    loss: float | None = tagged("validation/loss")
    ctc_loss: float | None = tagged("validation/ctc_loss")
    attention_loss: float | None = tagged("validation/attention_loss")
    wer: float | None = tagged("validation/wer")
    cer: float | None = tagged("validation/cer")
    utterances: int | None = None
    seconds: float | None = None
    hypotheses: tuple[HypothesisPair, ...] = ()
    memory: PhaseMemory | None = None
    rank_peaks_mib: tuple[float, ...] = ()


@dataclass(frozen=True)
class RehearsalRecord:
    """What the costliest batches took by phase, before the first epoch."""

    step: int
    memory: tuple[PhaseMemory, ...]


@dataclass(frozen=True)
class SpectrogramRecord:
    """One utterance to look at and to listen to: waveform (samples,) at 16 kHz, features (T, F), posteriors (T', V)."""

    step: int
    utterance_id: str
    waveform: Tensor
    features: Tensor
    posteriors: Tensor


@dataclass(frozen=True)
class SettingsRecord:
    """The flags of this run, as text, from `step` on."""

    step: int
    text: str


Record = StepRecord | SkipRecord | ValidationRecord | RehearsalRecord | SpectrogramRecord | SettingsRecord
