"""Tracers of a configuration's training step, with their results cached on disk."""

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from konkanivani.base.config import TrainConfig
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.shapes import CARD, HOST
from konkanivani.memory.tracer import StepTracer, TracedStep
from konkanivani.memory.traces import Traces
from konkanivani.memory.weights.placement import ON_CARD, Placement
from konkanivani.model.architecture import Architecture
from konkanivani.model.kernels.products import is_onednn_preferred
from konkanivani.recipe.build_step import StateLayout, build_step_parts
from konkanivani.recipe.paths import cache_folder
from konkanivani.recipe.ranks import digest_of_code
from konkanivani.training.step import train_step
from konkanivani.training.validation import recognize


def build_tracer(
    config: TrainConfig, architecture: Architecture, costs: DeviceCosts, placement: Placement = ON_CARD
) -> StepTracer:
    """Return a tracer of this configuration's step; with --freeze_steps, of the later and larger step."""
    tuning = dataclasses.replace(architecture.tuning, freeze_steps=0)
    architecture = dataclasses.replace(architecture, tuning=tuning)
    layout = StateLayout(placement=placement, host=HOST)
    step = TracedStep(
        build=lambda front_end: build_step_parts(config, architecture, CARD, 1, front_end, layout),
        train=train_step,
        recognize=recognize,
    )
    return StepTracer(step, architecture.build_front_end(config.augment), costs)


@contextmanager
def kept_traces(
    config: TrainConfig, architecture: Architecture, costs: DeviceCosts, placement: Placement = ON_CARD
) -> Iterator[Traces]:
    """Yield the cached traces of this configuration's step, and write them back with the new ones at the end."""
    blocks = len(architecture.build_without_values().blocks)
    hop = architecture.framing.encoder_hop
    traces = Traces(
        lambda: build_tracer(config, architecture, costs, placement), blocks, costs, hop, architecture.longest_seconds
    )
    path = traces_path(config, architecture, costs, placement)
    if path is None:
        yield traces
        return
    traces.read(path)
    yield traces
    traces.read(path)  # merge the traces that other processes have written meanwhile
    traces.write(path)


def traces_path(
    config: TrainConfig, architecture: Architecture, costs: DeviceCosts, placement: Placement = ON_CARD
) -> Path | None:
    """Return the cache file, named by a digest of everything that the traces depend on; None without a cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    precision = config.memory.mixed_precision, config.memory.amp_dtype
    step = architecture, config.augment, config.loss, config.optimizer, precision
    device = costs.is_cuda, costs.rounding, is_onednn_preferred()
    # Any change of the code or of PyTorch may change a trace.
    depends = repr((step, device, placement, digest_of_code(), torch.__version__))
    return folder / f"traces_{hashlib.sha256(depends.encode()).hexdigest()[:32]}.json"
