"""One real training step with less memory than it takes, so that halves of its micro-batch are needed; prints JSON.

Bisects the growth of the data segment with which nothing has to be split, then runs the step with a share of it and
compares that with the undisturbed one. Each attempt runs in a fork, so that all begin with the same memory. The one
argument says which blocks are recomputed: without, memory runs out in the forward pass; with, in the backward pass.
"""

import dataclasses
import json
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.base.errors import ResourceError
from konkanivani.base.units import MIB
from konkanivani.data.batch import Window
from konkanivani.memory import recovery
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.training.step import StepParts, train_step
from tests.laws.parts import MODEL, double_parts, relative_difference, speeches, window

ROOMY, NARROWEST_STEP = 256 * MIB, 4 * MIB
SAMPLES = 4 * 16_000
# How much of what is enough each may have. With nothing recomputed activations pile up to the forward pass's end, where
# the backward pass is about to need as much: well below that, it is the forward pass that fails. With every block
# recomputed the forward pass takes 78 % of the peak: between that and all of it, it is the backward pass that fails.
SHARES = {"never": 0.8, "always": 0.86}
SHAPES = {
    "never": dataclasses.replace(MODEL, d_model=64, encoder_layers=16),
    "always": dataclasses.replace(MODEL, d_model=128),
}


@dataclass(frozen=True)
class Outcome:
    """What a step came to: its retries, whether one was in the backward pass, its loss, the weights after it."""

    splits: int
    failed_in_backward: bool
    loss: float
    weights: dict[str, torch.Tensor]


class PhaseNames(MemoryMonitor):
    """Notes which phases ended."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 0)
        self.ended: list[str] = []

    def end_phase(self, phase: str) -> None:
        self.ended.append(phase)

    def has_failed_in_backward(self) -> bool:
        """Whether a forward pass was not followed by the end of its backward pass."""
        return ("forward", "forward") in zip(self.ended, self.ended[1:], strict=False)


def data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024


def step_within(growth: int, parts: StepParts, cut: Window, path: Path, may_split: bool = True) -> Outcome | None:
    """The step in a fork whose data may grow by `growth` bytes; None where it did not end, or may not split and did."""
    path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        if not may_split:
            recovery.release_memory = lambda: os._exit(1)  # what is done before a step is begun again
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + growth, resource.RLIM_INFINITY))
            report = train_step(parts, cut, step=3)
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            weights = {name: p.detach() for name, p in parts.model.named_parameters()}
            outcome = Outcome(report.splits, parts.forward.monitor.has_failed_in_backward(), report.loss, weights)
            torch.save(vars(outcome), path)
            code = 0
        except ResourceError:
            pass
        finally:
            os._exit(code)
    return Outcome(**torch.load(path, weights_only=True)) if os.waitpid(child, 0)[1] == 0 else None  # noqa: TID251


def main(recompute: str) -> None:
    torch.set_num_threads(1)  # a fork has but one
    parts, cut = double_parts(SHAPES[recompute], recompute), window(long_speeches(), 4)
    parts = dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, monitor=PhaseNames()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.pt"
        undisturbed = step_within(ROOMY, parts, cut, path)
        enough, too_little = ROOMY, 0
        while enough - too_little > NARROWEST_STEP:
            growth = (enough + too_little) // 2
            fits = step_within(growth, parts, cut, path, may_split=False) is not None
            enough, too_little = (growth, too_little) if fits else (enough, growth)
        split = step_within(int(SHARES[recompute] * enough), parts, cut, path)
    found = {
        "undisturbed_splits": undisturbed.splits,
        "enough_mib": enough / MIB,
        "splits": split.splits,
        "failed_in_backward": split.failed_in_backward,
        "loss_difference": abs(split.loss - undisturbed.loss) / abs(undisturbed.loss),
        "weight_difference": max(
            relative_difference(weight, split.weights[name]) for name, weight in undisturbed.weights.items()
        ),
    }
    print(json.dumps(found))


def long_speeches() -> list:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, SAMPLES, generator=generator, dtype=torch.float64)
    return [dataclasses.replace(speech, waveform=waveform) for speech, waveform in zip(speeches(4), noise, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1])
