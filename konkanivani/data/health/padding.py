"""Share of padding in the planned micro-batches, computed from durations as `batching` plans them."""

from dataclasses import dataclass

import numpy as np

from konkanivani.data.batching import EpochPlanner, padded_seconds, same_size


@dataclass(frozen=True)
class EpochHealth:
    """The first epoch as planned; seconds are of the recorded audio, before speed perturbation.

    The `window_…` fields describe the global batches (utterances of an optimizer step): their size, and the median and
    maximum seconds of audio in one.
    """

    utterances: int
    window_size: int
    micro_batch: int
    steps: int
    padding_share: float
    window_seconds: float
    longest_window_seconds: float


def measure_epoch(planner: EpochPlanner, micro_batch: int) -> EpochHealth:
    """Return the planner's epoch 0, with its global batches cut into micro-batches of `micro_batch` utterances."""
    # Micro-batches of a fixed number of utterances, as a numeric --batch_size gives them.
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
