"""Operation counter, and cached tracers and traces, one per model and device."""

import functools
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

from konkanivani.config import TrainConfig
from konkanivani.memory.devices import DeviceCosts
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.tracer import StepTracer
from konkanivani.planning.traces import Traces, build_tracer

VOCAB_SIZE = 40
ONLY_TENSORS = DeviceCosts("a device", is_cuda=False, rounding=1, workspace=0, context=0)


class OperationCounter(TorchDispatchMode):
    """Counter of the executed operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation] += 1
        return operation(*args, **(kwargs or {}))


@functools.cache
def tracer_of(config: TrainConfig, costs: DeviceCosts = ONLY_TENSORS) -> StepTracer:
    """Return the tracer of a model and device, built on first use."""
    return build_tracer(config, architecture_of(config, VOCAB_SIZE), costs)


@functools.cache
def traces_of(config: TrainConfig, costs: DeviceCosts = ONLY_TENSORS) -> Traces:
    """Return the traces of a model and device; each batch shape is traced once."""
    tracer = tracer_of(config, costs)
    return Traces(lambda: tracer, tracer.blocks, costs, architecture_of(config, VOCAB_SIZE).framing.encoder_hop)
