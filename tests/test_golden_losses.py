"""Losses of a tiny run, step by step, against stored values: no optimization may change them.

golden_losses.txt has float64 losses on a CPU without dropout, since faster sampling may change the dropout masks. After
an intended change of the mathematics, write the file again:

    .venv/bin/python -m tests.test_golden_losses
"""

import dataclasses
from pathlib import Path

import pytest

from konkanivani.config import FeatureConfig, LossConfig, OptimizerConfig
from konkanivani.flags import LEGACY_DEFAULTS
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import MODEL, double_parts, global_batch, speeches

GOLDEN = Path(__file__).parent / "golden_losses.txt"
STEPS = 12
RUNS = {
    "conformer": MODEL,
    "transformer": dataclasses.replace(MODEL, encoder_type="transformer"),
    "intermediate_ctc": MODEL,
    "speech_features": MODEL,
    "peak_features": MODEL,
}
# The first three runs use the features of older versions.
FEATURES = {
    f"{kind}_features": FeatureConfig(dynamic_range=80.0, dc_removal="frame", normalization=kind, smallest_power=1e-16)
    for kind in ("speech", "peak")
}


def parts_of(run: str) -> StepParts:
    """Return the freshly initialised step parts of the run."""
    parts = double_parts(RUNS[run], features=FEATURES.get(run, LEGACY_DEFAULTS.features))
    loss = LossConfig(ctc_weight=0.3, intermediate_ctc_weight=0.3 if run == "intermediate_ctc" else 0.0)
    forward = dataclasses.replace(parts.forward, objective=parts.architecture.objective(loss))
    return dataclasses.replace(parts, forward=forward, schedule=OptimizerConfig(warmup_steps=500))


def losses(parts: StepParts) -> list[float]:
    """Return the joint loss of each step on different global batches of six utterances, the last split differently."""
    cuts = [2] * (STEPS - 1) + [3]
    global_batches = (global_batch(speeches(6, seed=step), cut) for step, cut in enumerate(cuts))
    return [train_step(parts, one, step).loss for step, one in enumerate(global_batches)]


def read_golden(run: str) -> list[float]:
    """Return the stored losses of the run."""
    rows = (line.split() for line in GOLDEN.read_text().splitlines() if not line.startswith("#"))
    return [float(loss) for name, _, loss in rows if name == run]


@pytest.mark.parametrize("run", RUNS)
def test_losses_equal_stored_values(run):
    assert losses(parts_of(run)) == pytest.approx(read_golden(run), rel=1e-9, abs=0)


def test_negative_control_changed_norm_epsilon_changes_losses():
    parts = parts_of("conformer")
    parts.model.encoder.blocks[0].entry_norm.eps *= 1.001
    assert losses(parts) != pytest.approx(read_golden("conformer"), rel=1e-9, abs=0)


if __name__ == "__main__":
    lines = [f"{run} {step} {loss!r}" for run in RUNS for step, loss in enumerate(losses(parts_of(run)))]
    GOLDEN.write_text("# run, step, loss in nats a token: see test_golden_losses.py\n" + "\n".join(lines) + "\n")
