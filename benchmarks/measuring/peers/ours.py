"""This trainer's step as a contestant."""

import bisect
import dataclasses

from benchmarks.measuring.fixed_step import (
    TOTAL_STEPS,
    VOCABULARY,
    build_global_batch,
    build_speech,
    peak_mib,
    take_features_as_given,
    warm_up,
)
from benchmarks.measuring.peers.contest import Entry, Terms
from konkanivani.base.config import PRESETS, DataConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.base.device import choose_device
from konkanivani.base.errors import ResourceError
from konkanivani.base.units import MIB
from konkanivani.data.batch import GlobalBatch
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.monitor import resident_mib
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import parameter_count
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step


def model_of(terms: Terms) -> ModelConfig:
    """Return the preset `original` with the width and dropout of the workload."""
    return dataclasses.replace(PRESETS["original"], d_model=terms.width, dropout=terms.dropout)


class KonkaniVani:
    """`train_step` on the preset `original`; the setting `recompute` is --gradient_checkpointing always.

    Within a limit, the fewest possible blocks are recomputed, as with --gradient_checkpointing auto.
    """

    version = "this tree"

    def __init__(self, entry: Entry, terms: Terms) -> None:
        recompute = "always" if entry.setting == "recompute" else "never"
        config = dataclasses.replace(
            TrainConfig(),
            data=DataConfig(
                batch_size=terms.utterances // entry.micro_batches,
                gradient_accumulation_steps=entry.micro_batches,
                concurrent_micro_batches=entry.at_once,
            ),
            model=model_of(terms),
            memory=MemoryConfig(mixed_precision=terms.mixed_precision, gradient_checkpointing=recompute),
        )
        device = choose_device(terms.device)
        self.global_batch = build_global_batch(
            build_speech(terms.utterances, terms.shortest, terms.longest), entry.micro_batches
        )
        # Measured after the data are in memory and before the model is built.
        self.resident_before = resident_mib()
        architecture = architecture_of(config, VOCABULARY)
        self.parts = build_step_parts(config, architecture, device, TOTAL_STEPS, take_features_as_given)
        self.parameters = parameter_count(self.parts.model)
        self.steps = 0
        warm_up(self.parts, self.global_batch)
        # After the warm-up: the optimizer state is part of the measured peak.
        if entry.limit_mib:
            self.parts = min_recomputed(self.parts, self.global_batch, entry.limit_mib)

    def step(self) -> float:
        """Run one optimizer step; return the loss in nats per token."""
        self.steps += 1
        return train_step(self.parts, self.global_batch, self.steps).loss

    def resident_peak_mib(self) -> float:
        """Return the peak resident memory over all phases, in MiB."""
        # On a CPU, the monitor resets VmHWM in each phase, so that it must be read from the monitor.
        return self.parts.monitor.overall_peak_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return round(peak_mib(self.parts, self.global_batch) * MIB)


def min_recomputed(parts: StepParts, global_batch: GlobalBatch, limit_mib: int) -> StepParts:
    """Return the step with the fewest recomputed blocks whose measured peak is within the limit.

    Raises ResourceError if the peak exceeds the limit with all blocks recomputed.
    """
    ways = [parts.recomputing(RecomputePolicy.first(count)) for count in range(len(parts.model.blocks) + 1)]
    # The peak decreases with the number of recomputed blocks; each comparison runs a step.
    fewest = bisect.bisect_left(ways, True, key=lambda way: peak_mib(way, global_batch) <= limit_mib)
    if fewest == len(ways):
        raise ResourceError(f"No step fits into {limit_mib} MiB. Give a higher limit, or cut the batch finer.")
    return ways[fewest]
