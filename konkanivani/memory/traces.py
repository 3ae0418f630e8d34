"""Cache of the traced peaks of a model's training steps, in memory and in a file shared by runs.

A trace is a pure function of the model, the device's costs and the code, so that later runs can reuse it. A damaged
file is ignored.
"""

import contextlib
import functools
import json
import math
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from konkanivani.base.errors import ResourceError
from konkanivani.base.files import atomic_write
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.tracer import BatchShape, Peak, StepTracer


class Traces:
    """Cached results of a tracer; the tracer itself takes a second to build and is created on first use."""

    def __init__(
        self,
        build: Callable[[], StepTracer],
        blocks: int,
        costs: DeviceCosts,
        encoder_hop: int,
        longest_seconds: float = math.inf,
    ) -> None:
        """`encoder_hop` is in samples per encoder frame; `longest_seconds` is the longest input of the model."""
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
