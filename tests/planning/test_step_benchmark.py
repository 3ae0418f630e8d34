"""The benchmarks of a step and of memory growth measure the stated values, on the batch of earlier measurements."""

import ast
import json
import random
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.measuring.common import build_global_batch, build_speech
from konkanivani.planning.tensors import LiveBytes
from tests.conftest import ROOT, checked, run_script

PEERS = ROOT.parent / "shared" / "peers" / "step_bench.py"
SMALL = ("--preset", "minimal", "--batch", "2", "--accum", "2", "--steps", "1")


def run_benchmark(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark on one thread: two threads on a shared core wait for each other."""
    return run_script("benchmarks/step.py", *arguments, cwd=cwd, threads=1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict:
    done = checked(run_benchmark(tmp_path_factory.mktemp("elsewhere"), *SMALL, "--json"))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_json_line_has_the_measured_values(measured):
    assert measured["peer"] == "konkanivani"
    assert (measured["batch"], measured["accum"], measured["dropout"], measured["gradient_checkpointing"]) == (
        2,
        2,
        0.1,
        "never",
    )
    assert measured["torch"] == torch.__version__
    assert measured["audio_s"] == 20.4
    assert measured["audio_s_per_s"] == pytest.approx(measured["audio_s"] / measured["step_s"], rel=0.01)
    assert measured["loss"] > 0
    assert measured["skipped_steps"] == 0
    weights_and_moments = 3 * 4 * measured["params"] / 2**20  # fp32: the weights, and Adam's two moments
    assert measured["peak_mib"] > weights_and_moments
    assert measured["rss_mib"] > measured["rss_growth_mib"] > weights_and_moments


@pytest.mark.full
def test_recomputation_lowers_the_peak_and_keeps_the_loss(measured, tmp_path):
    done = run_benchmark(tmp_path, *SMALL, "--gradient_checkpointing", "always", "--json")
    recomputed = json.loads(done.stdout.splitlines()[-1])
    assert recomputed["peak_mib"] < measured["peak_mib"]
    assert recomputed["loss"] == measured["loss"]


@pytest.mark.full
def test_each_utterance_length_is_measured_separately():
    flags = "duration --preset minimal --tokens_per_second 2 --seconds 4 62 --json"
    done = checked(run_script("benchmarks/memory_growth.py", *flags.split()))
    parsed = json.loads(done.stdout.splitlines()[-1])
    short, long = parsed["steps"]
    assert [(step["seconds"], step["tokens"], step["splits"]) for step in (short, long)] == [(4, 8, 0), (62, 124, 0)]
    assert not short["is_skipped"] and not long["is_skipped"] and long["loss"] > 0
    state = 16 * long["params"] / 2**20
    assert 0 < long["peak_above_state_mib"] < long["rss_growth_mib"]
    # Live bytes above the process memory would be a counting error.
    assert long["peak_above_state_mib"] + state < long["rss_growth_mib"] < 1024


@pytest.mark.full
def test_starts_are_measured_for_each_number_of_rows():
    done = checked(run_script("benchmarks/memory_growth.py", "rows", "--rows", "20", "60000", "--later_starts", "1"))
    few, many = map(json.loads, done.stdout.splitlines())
    assert (few["rows"], many["rows"]) == (20, 60_000) and many["size"] > 4  # MiB: with a stored index
    for item in (few, many):
        assert 0 < item["seconds_after_imports"] < item["seconds"] and item["peak"] > 100
    assert many["first_start"]["seconds_after_imports"] > many["seconds_after_imports"]  # it has made the index


INVALID_FLAGS = {
    "step.py": ("--batch 3 --accum 2", "--dropout 1", "--acum 2"),
    "memory_growth.py duration": ("--seconds 0", "--seconds 1e9", "--tokens_per_second 0"),
    "plan_accuracy.py": ("--seconds 0.5", "--seconds 1e9", "--presets", "--precisions fp8"),
    "memory_growth.py rows": ("--rows 0", "--rows", "--later_starts 0"),
    "memory_growth.py steps": ("--steps 1", "--shortest 0", "--longest 0.7", "--batch_size 0", "--distinct 0"),
}
EXPECTED_TEXT = {"--batch": "divide --batch", "--acum": "--accum"}  # expected text, if it is not the flag


@pytest.mark.parametrize(
    "script, given", [(script, given) for script in INVALID_FLAGS for given in INVALID_FLAGS[script]]
)
def test_invalid_benchmark_flags_exit_with_2(script, given):
    flag = given.split()[0]
    path, *words = f"benchmarks/{script} {given}".split()
    done = run_script(path, *words)
    assert done.returncode == 2 and EXPECTED_TEXT.get(flag, flag) in done.stderr and "Traceback" not in done.stderr


def test_global_batch_contains_the_whole_batch():
    speech = build_speech(8)
    global_batch = build_global_batch(speech, 4)
    assert [len(batch.tokens) for batch in global_batch.micro_batches] == [2, 2, 2, 2]
    assert global_batch.utterances == 8
    assert global_batch.tokens == int(speech.token_lengths.sum())
    assert round(global_batch.audio_seconds, 1) == 62.6
    assert 0 < global_batch.padding_share < 0.2
    row = 0
    for batch in global_batch.micro_batches:
        for place in range(2):
            frames, tokens = int(speech.frames[row]), int(speech.token_lengths[row])
            assert (batch.sample_lengths[place], batch.token_lengths[place]) == (frames, tokens)
            assert torch.equal(batch.waveforms[place, :frames], speech.features[row, :frames])
            assert torch.equal(batch.tokens[place, :tokens], speech.tokens[row, :tokens])
            row += 1


def extract_function(source: str, name: str) -> ModuleType:
    """Return a module with one function of a source text, without running the rest."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    module = ModuleType(name)
    module.torch, module.random, module.VOCAB = torch, random, 1000
    exec(compile(tree, name, "exec"), module.__dict__)  # noqa: S102
    return module


@pytest.mark.skipif(not PEERS.is_file(), reason=f"the peer benchmark is not available: {PEERS}")
@pytest.mark.parametrize("utterances", [1, 2, 8, 32])
def test_batch_equals_that_of_the_peer_benchmark(utterances):
    theirs = extract_function(PEERS.read_text(encoding="utf-8"), "make_batch").make_batch(utterances)
    ours = build_speech(utterances)
    for mine, other in zip((ours.features, ours.frames, ours.tokens, ours.token_lengths), theirs[:4], strict=True):
        assert torch.equal(mine, other)
    assert ours.seconds == theirs[4]


def test_live_bytes_equal_a_manual_count():
    live = LiveBytes()
    given = torch.zeros(100)  # 400 bytes
    live.count([given, given[:10]])
    assert (live.live, live.peak) == (400, 400)
    with live:
        first = torch.ones(1000)  # + 4000
        second = first * 2  # + 4000: the peak, 8400
        assert live.live == 8400
        second.add_(1)
        view = second.view(10, 100)[3:]
        assert live.live == 8400
        del first  # - 4000
        assert live.live == 4400
        del second  # a view still references it
        assert live.live == 4400
        third = torch.zeros(250, dtype=torch.float64)  # + 2000
        assert live.live == 6400
    del view, third
    assert (live.live, live.peak) == (400, 8400)


def test_live_bytes_include_tensors_saved_by_autograd():
    live = LiveBytes()
    weight = torch.ones(1000, requires_grad=True)
    live.count([weight])
    with live:
        loss = (weight * 2).exp().sum()  # the product is freed, the exponential is kept for the backward pass
        assert live.live == 4000 + 4000 + 4
        loss.backward()
        del loss
    assert live.live == 4000 + 4000  # the weight and its gradient
    assert live.peak >= 4000 + 2 * 4000
