"""The share of padding in the planned micro-batches, computed from durations as `batching` plans them."""

from dataclasses import dataclass

import numpy as np

from konkanivani.data.batching import EpochPlanner, padded_seconds, same_size


@dataclass(frozen=True)
class EpochHealth:
    """The first epoch as it is planned; seconds are of audio as recorded, before its speed is changed."""

    utterances: int
    window_size: int
    micro_batch: int
    steps: int
    padding_share: float
    window_seconds: float
    longest_window_seconds: float


def measure_epoch(planner: EpochPlanner, micro_batch: int) -> EpochHealth:
    """The planner's epoch 0 with its windows cut into micro-batches of so many utterances."""
    limits = same_size(micro_batch)
    windows = [planner.durations[window] for window in planner.plan_epoch(0)]
    speech = np.array([window.sum() for window in windows])
    padded = sum(padded_seconds(window, limits) for window in windows)
    return EpochHealth(
        utterances=len(planner.durations),
        window_size=planner.global_batch_size,
        micro_batch=micro_batch,
        steps=len(windows),
        padding_share=float(1 - speech.sum() / padded) if padded else 0.0,
        window_seconds=float(np.median(speech)),
        longest_window_seconds=float(speech.max()),
    )
