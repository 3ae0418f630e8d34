"""A run with --cuda_graphs, captured by the operator recorder: message, resume, plan, and a CPU without graphs."""

from pathlib import Path

import pytest
import torch

from konkanivani.memory.devices import cuda_costs
from konkanivani.ops.graph_backends import RecorderBackend
from konkanivani.planning.plan import held_by_graphs
from konkanivani.planning.sizes import GRAPH_BYTES, with_graphs
from konkanivani.planning.tracer import Peak
from konkanivani.recipe.build import build_run
from konkanivani.training.graphs import GraphedGradient
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from tests.conftest import TINY_MODEL, Corpus, run_folders, write_corpus
from tests.run_setup import begin_run, parse_flags

ON = ("--cuda_graphs", "on")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return a corpus whose lengths need few shapes: each is captured in every run."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 12, "valid": 2}, lengths=range(1, 3))


def build_tiny_run(corpus: Corpus, folder: Path, *more: str) -> Run:
    flags = (*TINY_MODEL, *corpus.flags(), *run_folders(folder), "--num_workers", "0", "--batch_size", "2")
    constant = ("--dropout", "0.1", "--speed_perturbation", "1.0")
    return build_run(begin_run([*flags, *constant, *more]))


def weights_after(corpus: Corpus, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    run = build_tiny_run(corpus, folder, *more)
    train(run)
    return {name: weight.detach() for name, weight in run.step.model.named_parameters()}


@pytest.fixture
def recorder_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture with the operator recorder, as if this CPU were a GPU."""
    monkeypatch.setattr("konkanivani.training.build_step.new_graph_backend", lambda device: RecorderBackend())


@pytest.mark.usefixtures("recorder_backend")
def test_run_captures_its_shapes_reports_them_and_resumes_exactly(corpus, tmp_path, capsys):
    run = build_tiny_run(corpus, tmp_path / "whole", *ON, "--max_steps", "4")
    gradient = run.step.compute_gradient
    assert isinstance(gradient, GraphedGradient) and 1 < len(gradient.grid.shapes) <= 32
    assert f"CUDA graphs (not yet run on a GPU by the project): {len(gradient.grid.shapes)} shapes" in (
        capsys.readouterr().out
    )
    train(run)
    assert len(gradient.captured_shapes) == len(gradient.grid.shapes)
    whole = {name: weight.detach() for name, weight in run.step.model.named_parameters()}
    train(build_tiny_run(corpus, tmp_path / "stopped", *ON, "--max_steps", "4"), last_step=2)
    resumed = weights_after(corpus, tmp_path / "stopped", *ON, "--max_steps", "4", "--resume", "auto")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in resumed)
    # Negative control: another seed draws other masks.
    other = weights_after(corpus, tmp_path / "other", *ON, "--max_steps", "4", "--seed", "5")
    assert not any(torch.equal(other[name], whole[name]) for name in other if "norm" not in name)


@pytest.mark.usefixtures("recorder_backend")
def test_rehearsal_changes_no_weight(corpus, tmp_path):
    results = [
        weights_after(corpus, tmp_path / rehearsal, *ON, "--max_steps", "2", "--rehearsal", rehearsal)
        for rehearsal in ("never", "always")
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_run_on_a_cpu_captures_nothing_and_is_unchanged(corpus, tmp_path, capsys):
    plain = weights_after(corpus, tmp_path / "plain", "--max_steps", "2")
    assert "CUDA graphs" not in capsys.readouterr().out
    asked = weights_after(corpus, tmp_path / "asked", *ON, "--max_steps", "2")
    assert "CUDA graphs: not used" in capsys.readouterr().out
    assert all(torch.equal(plain[name], asked[name]) for name in plain)


def test_plan_counts_the_memory_of_graphs():
    peak = Peak(state=1000, forward=1200, backward=1500, update=1000)
    assert peak.grown(2.0) == Peak(state=1000, forward=1400, backward=2000, update=1000)
    assert held_by_graphs(peak) == 500 + 500
    costs = cuda_costs("a T4", (7, 5))
    assert with_graphs(costs, parse_flags([])) == costs
    assert with_graphs(costs, parse_flags(list(ON))).beside == costs.beside + 32 * GRAPH_BYTES
