"""Many optimizer steps in one process: do its live tensors, or its resident memory, grow with time?"""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.measuring.fixed_step import VOCABULARY
from benchmarks.measuring.random_speech import build_speech
from konkanivani.base.config import TrainConfig
from konkanivani.base.device import choose_device
from konkanivani.base.randomness import derive_seed
from konkanivani.data.batch import GlobalBatch
from konkanivani.data.batching import same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.memory.live_bytes import LiveBytes
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import parameter_count
from konkanivani.recipe.build_step import build_step_parts
from konkanivani.training.step import StepParts, StepReport, train_step

GROWTH_PERCENT = 5.0  # that the resident memory may grow by once it has settled
SETTLED_STEP = 200
SAMPLES = 50  # steps, of whose resident memory the median is taken: whole cycles of the clearing of the heap
TOLD_STEPS = 100  # between two lines of progress


@dataclass(frozen=True)
class Moment:
    """How things stand after a step, its window gone: bytes of live tensors, resident MiB, and what the step did."""

    live: int
    resident_mib: float
    seconds: float
    audio_seconds: float
    report: StepReport


@dataclass(frozen=True)
class Drift:
    """What was measured. Live bytes are those of all tensors between two steps, resident memory is in MiB.

    `settled_mib` is the median over the steps from `settled_step` on, `end_mib` and `step_s` (on a CPU with the count
    of live bytes in it) over the last ones. `growth_mib_per_step` is the growth from the former to the latter, and
    `late_growth_mib_per_step` that since the middle: a cache of bounded size fills up, and leaves the second near zero.
    """

    preset: str
    params: int
    steps: int
    skipped_steps: int
    splits: int
    audio_seconds: float
    live_first: int
    live_last: int
    live_most: int
    settled_step: int
    settled_mib: float
    end_mib: float
    largest_mib: float
    growth_percent: float
    growth_mib_per_step: float
    late_growth_mib_per_step: float
    step_s: float
    loss: float
    is_within: bool

    def sentence(self) -> str:
        """The result for a person."""
        return (
            f"{self.preset}, {self.steps} steps on {self.audio_seconds:.0f} s of audio: live bytes between steps "
            f"{self.live_first} at first, {self.live_last} at last, {self.live_most} at most; resident "
            f" {self.settled_mib:.0f} MiB after step {self.settled_step}, "
            f"{self.end_mib:.0f} MiB at the end ({self.growth_percent:+.1f} %, {self.growth_mib_per_step:+.3f} MiB "
            f"a step, {self.late_growth_mib_per_step:+.3f} in the second half), {self.step_s:.2f} s a step then: "
            f"{'within' if self.is_within else 'OUTSIDE'} the bars."
        )


class Windows(Protocol):
    """Windows by number."""

    def __getitem__(self, number: int) -> GlobalBatch: ...


@dataclass(frozen=True)
class RandomGlobalBatches:
    """Windows without end, each a function of (seed, number): `size` utterances of `shortest` to `longest` seconds.

    After `distinct` of them, if it is given, the first one comes again.
    """

    seed: int
    size: int
    batch_size: int
    shortest: float
    longest: float
    distinct: int | None = None

    def __getitem__(self, number: int) -> GlobalBatch:
        seed = derive_seed(self.seed, "drift", number % self.distinct if self.distinct else number)
        lengths, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        speeches = [
            build_speech(lengths.uniform(self.shortest, self.longest), VOCABULARY, generator) for _ in range(self.size)
        ]
        return split_into_micro_batches(speeches, same_size(self.batch_size), OUR_TOKENS)


def measure(config: TrainConfig, steps: int, shortest: float, longest: float, distinct: int | None) -> Drift:
    """Builds the model that `config` describes and trains it for so many steps on noise."""
    device = choose_device(config.run.device)
    set_mmap_threshold()  # as a run under a memory budget does
    parts = build_step_parts(config, architecture_of(config, VOCABULARY), device, steps)
    global_batches = RandomGlobalBatches(
        config.run.seed, config.global_batch_size, config.data.batch_size, shortest, longest, distinct
    )
    return summarize(config.run.preset, parameter_count(parts.model), follow_steps(parts, global_batches, steps))


def follow_steps(parts: StepParts, global_batches: Windows, steps: int) -> list[Moment]:
    """Trains on the first windows, every tensor counted from the first step to the last.

    The count is on without a break, since what a step leaves behind is seen only where it was made under the count. It
    follows storages from their making to their freeing, so what waits for the garbage collector counts as live.
    """
    live, device = LiveBytes(), parts.forward.device
    live.count(parts.state_tensors())
    moments = []
    with nullcontext() if device.type == "cuda" else live:
        for step in range(steps):
            global_batch, began = global_batches[step], time.perf_counter()
            report, audio_seconds = train_step(parts, global_batch, step), global_batch.audio_seconds
            seconds = time.perf_counter() - began
            del global_batch
            moments.append(Moment(live_now(device, live), resident_mib(), seconds, audio_seconds, report))
            if not (step + 1) % TOLD_STEPS:
                print(f"{step + 1} steps, {resident_mib():.0f} MiB resident", file=sys.stderr, flush=True)
    return moments


def live_now(device: torch.device, live: LiveBytes) -> int:
    """Bytes of live tensors; on CUDA as its allocator knows them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live.live


def summarize(preset: str, params: int, moments: Sequence[Moment]) -> Drift:
    """The drift over these moments, which are those of a run from its first step on."""
    settled = min(SETTLED_STEP, len(moments) // 2)
    last = max(len(moments) - SAMPLES, settled)
    middle = (settled + last) // 2
    settled_mib, middle_mib, end_mib = (median_mib(moments, first) for first in (settled, middle, last))
    growth, most = 100 * (end_mib / settled_mib - 1), max(moment.live for moment in moments)
    return Drift(
        preset=preset,
        params=params,
        steps=len(moments),
        skipped_steps=sum(moment.report.is_skipped for moment in moments),
        splits=sum(moment.report.splits for moment in moments),
        audio_seconds=round(sum(moment.audio_seconds for moment in moments), 1),
        live_first=moments[0].live,
        live_last=moments[-1].live,
        live_most=most,
        settled_step=settled,
        settled_mib=round(settled_mib, 1),
        end_mib=round(end_mib, 1),
        largest_mib=round(max(moment.resident_mib for moment in moments), 1),
        growth_percent=round(growth, 2),
        growth_mib_per_step=round((end_mib - settled_mib) / max(1, last - settled), 4),
        late_growth_mib_per_step=round((end_mib - middle_mib) / max(1, last - middle), 4),
        step_s=round(statistics.median(moment.seconds for moment in moments[-SAMPLES:]), 3),
        loss=round(moments[-1].report.loss, 3),
        is_within=most <= moments[0].live and growth <= GROWTH_PERCENT,
    )


def median_mib(moments: Sequence[Moment], first: int) -> float:
    """Return the median resident memory over `SAMPLES` steps from `first` on."""
    return statistics.median(moment.resident_mib for moment in moments[first : first + SAMPLES])
