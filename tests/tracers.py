"""Tracers and what they have traced, one for each model and device, shared by all tests of a process."""

import functools

from konkanivani.base.config import TrainConfig
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.tracer import StepTracer
from konkanivani.memory.traces import Traces
from konkanivani.model.architecture import architecture_of
from konkanivani.recipe.planning.tracing import build_tracer

VOCAB_SIZE = 40
ONLY_TENSORS = DeviceCosts("a device", is_cuda=False, rounding=1, workspace=0, context=0)


@functools.cache
def tracer_of(config: TrainConfig, costs: DeviceCosts = ONLY_TENSORS) -> StepTracer:
    """The tracer, built when it is first asked for."""
    return build_tracer(config, architecture_of(config, VOCAB_SIZE), costs)


@functools.cache
def traces_of(config: TrainConfig, costs: DeviceCosts = ONLY_TENSORS) -> Traces:
    """What it says: each load is traced once."""
    tracer = tracer_of(config, costs)
    return Traces(lambda: tracer, tracer.blocks, costs, architecture_of(config, VOCAB_SIZE).framing.encoder_hop)
