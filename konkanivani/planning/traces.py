"""Traced peaks of a configuration's training step, cached in memory and in a file shared by runs.

A trace is a pure function of the model, the device's costs and the code, so that later runs can reuse it. A damaged
file is ignored.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from konkanivani.config import TrainConfig
from konkanivani.errors import ResourceError
from konkanivani.files import atomic_write, cache_folder, digest_of_code
from konkanivani.lengths import SECONDS, InputUnit
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.architecture import Architecture
from konkanivani.models.front_end import FeatureExtractor
from konkanivani.ops.passes import ALL_PASSES, Passes
from konkanivani.ops.products import is_onednn_preferred
from konkanivani.planning.tensors import TRACED_DEVICE, TRACED_HOST
from konkanivani.planning.tracer import BatchShape, Peak, StepTracer
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import StepParts


class Traces:
    """Cached results of a tracer; the tracer itself takes a second to build and is created on first use."""

    def __init__(
        self,
        build: Callable[[], StepTracer],
        blocks: int,
        costs: DeviceCosts,
        encoder_hop: int,
        longest_seconds: float = math.inf,
        unit: InputUnit = SECONDS,
    ) -> None:
        """`encoder_hop` is in samples per encoder frame; `longest_seconds` is the longest input, in its `unit`."""
        self.unit = unit
        self.blocks = blocks
        self.costs = costs
        self.encoder_hop = encoder_hop
        self._build = build
        self.longest_seconds = longest_seconds
        self._peaks: dict[tuple[BatchShape, int], Peak] = {}
        self._validation_peaks: dict[BatchShape, int] = {}

    @functools.cached_property
    def tracer(self) -> StepTracer:
        """The tracer, built on first use."""
        return self._build()

    def peak(self, shape: BatchShape, recompute: RecomputePolicy) -> Peak:
        """Return the peaks of a training step at this batch shape."""
        # Policies with the same number of recomputed blocks at this length share a trace.
        key = shape, min(recompute(shape.seconds).count, self.blocks)
        if key not in self._peaks:
            self._peaks[key] = self.tracer.trace(shape, recompute)
        return self._peaks[key]

    def validation_peak(self, shape: BatchShape) -> int:
        """Return the peak bytes of validation at this batch shape."""
        if shape not in self._validation_peaks:
            self._validation_peaks[shape] = self.tracer.trace_validation(shape)
        return self._validation_peaks[shape]

    def read(self, path: Path) -> None:
        """Merge the traces in the file at `path`; a missing or damaged file is ignored."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            # The first line is the CRC-32 of the JSON text that follows.
            checksum, text = path.read_text(encoding="utf-8").split("\n", 1)
            if int(checksum, 16) == zlib.crc32(text.encode()):
                peaks, validation_peaks = json.loads(text)
                self._peaks |= {(BatchShape(*row[:3]), row[3]): Peak(*row[4:]) for row in peaks}
                self._validation_peaks |= {BatchShape(*row[:3]): row[3] for row in validation_peaks}

    def write(self, path: Path) -> None:
        """Write all traces to `path`.

        A failure is ignored: it only costs the next run some seconds of tracing.
        """
        peaks = [(*_row(shape), count, *_row(peak)) for (shape, count), peak in self._peaks.items()]
        text = json.dumps([peaks, [(*_row(shape), peak) for shape, peak in self._validation_peaks.items()]])
        with contextlib.suppress(OSError, ResourceError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_text(f"{zlib.crc32(text.encode()):08x}\n{text}", encoding="utf-8")


def _row(value: BatchShape | Peak) -> Iterable[float]:
    return vars(value).values()


def build_tracer(
    config: TrainConfig,
    architecture: Architecture,
    costs: DeviceCosts,
    placement: Placement = ON_CARD,
    passes: Passes = ALL_PASSES,
) -> StepTracer:
    """Return a tracer of this configuration's step; with --freeze_steps, of the later and larger step."""
    tuning = dataclasses.replace(architecture.tuning, freeze_steps=0)
    architecture = dataclasses.replace(architecture, tuning=tuning)
    layout = StateLayout(placement=placement, host=TRACED_HOST)

    def build(front_end: FeatureExtractor) -> StepParts:
        return build_step_parts(config, architecture, TRACED_DEVICE, 1, front_end, layout, passes)

    return StepTracer(build, architecture.build_front_end(config.augment), costs)


@contextlib.contextmanager
def kept_traces(
    config: TrainConfig,
    architecture: Architecture,
    costs: DeviceCosts,
    placement: Placement = ON_CARD,
    passes: Passes = ALL_PASSES,
) -> Iterator[Traces]:
    """Yield the cached traces of this configuration's step, and write them back with the new ones at the end."""
    blocks = len(architecture.build_without_values().blocks)
    framing = architecture.framing
    traces = Traces(
        lambda: build_tracer(config, architecture, costs, placement, passes),
        blocks,
        costs,
        framing.encoder_hop,
        architecture.longest_seconds,
        framing.unit,
    )
    path = traces_path(config, architecture, costs, placement, passes)
    if path is None:
        yield traces
        return
    traces.read(path)
    yield traces
    traces.read(path)  # merge the traces that other processes have written meanwhile
    traces.write(path)


def traces_path(
    config: TrainConfig,
    architecture: Architecture,
    costs: DeviceCosts,
    placement: Placement = ON_CARD,
    passes: Passes = ALL_PASSES,
) -> Path | None:
    """Return the cache file, named by a digest of everything that the traces depend on; None without a cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    precision = config.memory.mixed_precision, config.memory.amp_dtype, config.memory.weight_dtype
    step = architecture, config.augment, config.loss, config.optimizer, precision
    device = costs.is_cuda, costs.rounding, is_onednn_preferred()
    # Any change of the code or of PyTorch may change a trace.
    depends = repr((step, device, placement, passes, digest_of_code(), torch.__version__))
    return folder / f"traces_{hashlib.sha256(depends.encode()).hexdigest()[:32]}.json"
