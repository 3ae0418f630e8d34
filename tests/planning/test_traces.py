"""Stored traces give the same plan without a new trace; damaged ones are never used."""

import dataclasses
import os
from pathlib import Path

import pytest

from konkanivani.config import ModelConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.flags import resolve
from konkanivani.memory.devices import cpu_costs, cuda_costs
from konkanivani.memory.plan import MemoryPlan
from konkanivani.planning import plan as run_plan
from konkanivani.planning import traces as traces_module
from konkanivani.planning.plan import ALWAYS, NEVER
from konkanivani.planning.report import PlanRequest, answer, peak_of_validation
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import Traces
from konkanivani.recipe.build import build_run
from tests.conftest import TINY_MODEL, Corpus, run_folders, write_corpus
from tests.run_setup import begin_run

BLOCKS = 4
BATCH = BatchShape(2, 5.25, 50)
SMALL = ModelConfig(d_model=32, encoder_layers=1, decoder_layers=1, attention_heads=2, subsampling_channels=8)


class CountingTracer:
    """Replacement for a tracer that counts its calls and returns a different peak per batch shape."""

    calls = 0

    def trace(self, load: BatchShape, recompute) -> Peak:
        self.calls += 1
        return Peak(1, load.utterances, recompute(load.seconds).count, 10**12 + 1)

    def trace_validation(self, load: BatchShape) -> int:
        self.calls += 1
        return load.tokens


def traces_of(tracer: CountingTracer) -> Traces:
    return Traces(lambda: tracer, BLOCKS, cpu_costs(), encoder_hop=640)


def make_traces(tracer: CountingTracer) -> Traces:
    """Return three traces; one is requested twice, as "always" and as all blocks."""
    traces = traces_of(tracer)
    for policy in (NEVER, ALWAYS, run_plan.RecomputePolicy.first(BLOCKS)):
        traces.peak(BATCH, policy)
    traces.validation_peak(BATCH)
    return traces


def test_each_batch_shape_is_traced_once_by_all_processes_together(tmp_path):
    first, second = CountingTracer(), CountingTracer()
    known = make_traces(first)
    assert first.calls == 3
    known.write(tmp_path / "folder" / "traces.json")
    again = traces_of(second)
    again.read(tmp_path / "folder" / "traces.json")
    assert again.peak(BATCH, NEVER) == known.peak(BATCH, NEVER)
    assert again.peak(BATCH, ALWAYS) == known.peak(BATCH, ALWAYS) != known.peak(BATCH, NEVER)
    assert again.validation_peak(BATCH) == 50 and second.calls == 0
    again.peak(dataclasses.replace(BATCH, seconds=5.26), NEVER)
    assert second.calls == 1


def test_trace_cache_with_any_damaged_byte_is_ignored(tmp_path):
    path = tmp_path / "traces.json"
    make_traces(CountingTracer()).write(path)
    sound = path.read_bytes()
    damaged = [sound[:length] for length in range(0, len(sound), 7)]
    damaged += [sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :] for at in range(9, len(sound))]
    damaged += [b"", b"\xff" * 20, b"00000000\n", b"zz\n[]", "०\n[]".encode()]
    for content in damaged:
        path.write_bytes(content)
        tracer = CountingTracer()
        traces = traces_of(tracer)
        traces.read(path)
        assert traces.peak(BATCH, NEVER) == Peak(1, 2, 0, 10**12 + 1) and tracer.calls == 1, content


@pytest.mark.parametrize("place", ["a file/traces.json", "a folder"])
def test_unwritable_trace_cache_is_not_an_error(tmp_path, place):
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    traces = make_traces(CountingTracer())
    traces.write(tmp_path / place)
    traces.read(tmp_path / place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a file", "a folder"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return utterances of two words each, so that few batch shapes are traced."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 8, "valid": 2}, lengths=range(2, 3))


def planned(corpus: Corpus, directory: Path, *more: str, budget: str = "480MiB") -> MemoryPlan:
    flags = (*TINY_MODEL, *corpus.flags(), *run_folders(directory), "--num_workers", "0", *more)
    return build_run(begin_run([*flags, "--batch_size", "auto", "--memory_budget", budget])).plan


def test_second_run_plans_from_cached_traces(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = planned(corpus, tmp_path / "first")
    assert len(os.listdir(tmp_path / "cache" / "konkanivani")) == 1

    def no_tracing(*_):
        raise AssertionError("it traces")

    monkeypatch.setattr(traces_module, "build_tracer", no_tracing)
    assert planned(corpus, tmp_path / "second", "--seed", "5", "--replan") == first
    assert planned(corpus, tmp_path / "roomy", budget="580MiB").buckets == first.buckets
    # Negative controls: another model, another precision, other sources.
    with pytest.raises(AssertionError, match="it traces"):
        planned(corpus, tmp_path / "third", "--d_model", "64")
    with pytest.raises(AssertionError, match="it traces"):
        planned(corpus, tmp_path / "fourth", "--mixed_precision", "--amp_dtype", "bf16")
    monkeypatch.setattr(traces_module, "digest_of_code", lambda: "other")
    with pytest.raises(AssertionError, match="it traces"):
        planned(corpus, tmp_path / "fifth")


def test_repeated_plan_request_is_answered_from_cached_traces(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = resolve(TrainConfig(model=SMALL))
    request = PlanRequest(config, cpu_costs(), 312 * MIB, "always")
    first = answer(request), peak_of_validation(request)

    def no_tracing(*_):
        raise AssertionError("it traces")

    monkeypatch.setattr(traces_module, "build_tracer", no_tracing)
    assert (answer(request), peak_of_validation(request)) == first
    with pytest.raises(AssertionError, match="it traces"):  # negative control
        answer(dataclasses.replace(request, budget=311 * MIB))


def test_without_a_home_folder_no_trace_is_cached(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "not absolute")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    planned(corpus, tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_traces_do_not_depend_on_the_cuda_context():
    devices = cpu_costs(), cuda_costs("T4", (7, 5), 2**28), cuda_costs("T4", (7, 5), 2**29)
    assert len({traces_module.traces_path(TrainConfig(), 100, costs) for costs in devices}) == 2
