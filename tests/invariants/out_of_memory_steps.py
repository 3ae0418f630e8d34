"""Real training steps with too little memory, so that a micro-batch is halved; prints JSON.

Runs an unlimited step, then one with a share of its memory, and compares the two. Each runs in a fork, so that both
start with the same memory. Without recomputation, memory runs out in the forward pass; with every block recomputed, it
runs out in the backward pass.
"""

import dataclasses
import json
import math
import os
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # recomputation imports it, which must not happen within a measured step

from konkanivani.console import MIB
from konkanivani.data.batching import GlobalBatch
from konkanivani.errors import ResourceError
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import MODEL, double_parts, global_batch, relative_difference, speeches

SAMPLES = 5 * 16_000
# Memory of the limited step as a share of the sufficient amount. Without recomputation, activations grow until the end
# of the forward pass, after which the backward pass needs about the same again: well below that, the forward pass
# fails. With every block recomputed the backward pass has the peak: from 0.7 of it to just below all of it, the forward
# pass fits.
SHARES = {"never": 0.75, "always": 0.86}
SHAPES = {
    "never": dataclasses.replace(MODEL, d_model=64, encoder_layers=16),
    "always": dataclasses.replace(MODEL, d_model=128),
}


@dataclass(frozen=True)
class Outcome:
    """Result of a step: memory growth, retries, whether one failed in the backward pass, loss and weights."""

    growth: int
    splits: int
    failed_in_backward: bool
    loss: float
    weights: dict[str, torch.Tensor]


class PhaseNames(MemoryMonitor):
    """Memory monitor that records the order in which phases end."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 0)
        self.ended: list[str] = []

    def end_phase(self, phase: str) -> None:
        self.ended.append(phase)

    def has_failed_in_backward(self) -> bool:
        """Return whether a forward pass was not followed by the end of its backward pass."""
        return ("forward", "forward") in zip(self.ended, self.ended[1:], strict=False)


def memory_bytes(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def step_with_limit(growth: float, parts: StepParts, batch: GlobalBatch, path: Path) -> Outcome | None:
    """Run the step in a fork whose data may grow by `growth` bytes; return None if the fork fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before, most = memory_bytes("VmSize"), resource.RLIM_INFINITY
            if growth < math.inf:
                resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes("VmData") + int(growth), most))
            report = train_step(parts, batch, step=3)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            weights = {name: p.detach() for name, p in parts.model.named_parameters()}
            taken, in_backward = memory_bytes("VmPeak") - before, parts.monitor.has_failed_in_backward()
            torch.save(vars(Outcome(taken, report.splits, in_backward, report.loss, weights)), path)
            code = 0
        except ResourceError:
            pass
        finally:
            os._exit(code)
    return Outcome(**torch.load(path, weights_only=True)) if os.waitpid(child, 0)[1] == 0 else None  # noqa: TID251


def compare(recompute: str, batch: GlobalBatch, folder: str) -> dict[str, float | bool]:
    """Compare both steps with this recomputation mode."""
    parts = double_parts(SHAPES[recompute], recompute)
    parts = dataclasses.replace(parts, monitor=PhaseNames())
    undisturbed = step_with_limit(math.inf, parts, batch, Path(folder) / "undisturbed.pt")
    split = step_with_limit(SHARES[recompute] * undisturbed.growth, parts, batch, Path(folder) / "split.pt")
    return {
        "undisturbed_splits": undisturbed.splits,
        "growth_mib": undisturbed.growth / MIB,
        "splits": split.splits,
        "failed_in_backward": split.failed_in_backward,
        "loss_difference": abs(split.loss - undisturbed.loss) / abs(undisturbed.loss),
        "weight_difference": max(
            relative_difference(weight, split.weights[name]) for name, weight in undisturbed.weights.items()
        ),
    }


def main() -> None:
    """Run all comparisons and print them as JSON."""
    torch.set_num_threads(1)
    batch = global_batch(long_speeches(), 4)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({recompute: compare(recompute, batch, folder) for recompute in SHARES}))


def long_speeches() -> list:
    """Return four utterances of 5 s."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, SAMPLES, generator=generator, dtype=torch.float64)
    return [dataclasses.replace(speech, waveform=waveform) for speech, waveform in zip(speeches(4), noise, strict=True)]


if __name__ == "__main__":
    main()
