"""The peaks of one model's steps, each traced once: by this process, or by an earlier one that wrote them down.

A trace is a pure function of the model, of its device's costs and of the code: what one run has found, the next one
need not trace. A damaged file is as good as none.
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
    """What a tracer says, asked once for each load; the tracer itself, a second's work, is built when first asked."""

    def __init__(
        self,
        build: Callable[[], StepTracer],
        blocks: int,
        costs: DeviceCosts,
        encoder_hop: int,
        longest_seconds: float = math.inf,
    ) -> None:
        """`encoder_hop` are the samples from one encoder frame to the next, `longest_seconds` what the model hears."""
        self.blocks, self.costs, self.encoder_hop, self._build = blocks, costs, encoder_hop, build
        self.longest_seconds = longest_seconds
        self._peaks: dict[tuple[BatchShape, int], Peak] = {}
        self._validation_peaks: dict[BatchShape, int] = {}

    @functools.cached_property
    def tracer(self) -> StepTracer:
        """The tracer."""
        return self._build()

    def peak(self, shape: BatchShape, recompute: RecomputePolicy) -> Peak:
        """The traced peaks of a step at this load."""
        key = shape, min(recompute(shape.seconds).count, self.blocks)
        if key not in self._peaks:
            self._peaks[key] = self.tracer.trace(shape, recompute)
        return self._peaks[key]

    def validation_peak(self, shape: BatchShape) -> int:
        """The traced bytes of validating this load."""
        if shape not in self._validation_peaks:
            self._validation_peaks[shape] = self.tracer.trace_validation(shape)
        return self._validation_peaks[shape]

    def read(self, path: Path) -> None:
        """Takes in what a process before this one wrote; nothing where there is no such file, or a damaged one."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            checksum, text = path.read_text(encoding="utf-8").split("\n", 1)
            if int(checksum, 16) == zlib.crc32(text.encode()):
                peaks, validation_peaks = json.loads(text)
                self._peaks |= {(BatchShape(*row[:3]), row[3]): Peak(*row[4:]) for row in peaks}
                self._validation_peaks |= {BatchShape(*row[:3]): row[3] for row in validation_peaks}

    def write(self, path: Path) -> None:
        """Writes all that is known; a cache that cannot be written costs the next run some seconds, and is no error."""
        peaks = [(*_row(shape), count, *_row(peak)) for (shape, count), peak in self._peaks.items()]
        text = json.dumps([peaks, [(*_row(shape), peak) for shape, peak in self._validation_peaks.items()]])
        with contextlib.suppress(OSError, ResourceError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_text(f"{zlib.crc32(text.encode()):08x}\n{text}", encoding="utf-8")


def _row(value: BatchShape | Peak) -> Iterable[float]:
    return vars(value).values()
