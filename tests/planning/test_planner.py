"""Plans are the largest that fit the budget; and the command that plans memory."""

import dataclasses
import json
import shlex

import pytest
import torch

from konkanivani.cli.plan import read_plan_flags, settle
from konkanivani.config import PRESETS, MemoryConfig, ModelConfig, TextConfig, TrainConfig
from konkanivani.console import MIB, parse_budget
from konkanivani.errors import ResourceError, UsageError
from konkanivani.flags import explicit_flags
from konkanivani.memory.devices import KNOWN_GPUS, DeviceCosts, cpu_costs, cuda_costs, find_gpu
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.plan import ALWAYS, NEVER, Planner, plan_bucket
from konkanivani.planning.report import plan_budget, plan_presets, read_report
from konkanivani.planning.sizes import check_state
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import Traces
from tests.conftest import TINY_MODEL, checked, parameter_grid, run_script
from tests.fork_server import fork_server
from tests.tracers import ONLY_TENSORS, traces_of

SMALL = ModelConfig(d_model=32, encoder_layers=3, decoder_layers=1, attention_heads=2, subsampling_channels=8)
TINY = dataclasses.replace(SMALL, encoder_layers=1)


def traces(model: ModelConfig, costs: DeviceCosts = ONLY_TENSORS, half: bool = False) -> Traces:
    return traces_of(TrainConfig(model=model, memory=MemoryConfig(mixed_precision=half)), costs)


def planner_of(model: ModelConfig, budget: str) -> Planner:
    return planner_from_traces(traces(model), parse_budget(budget))


def planner_from_traces(traced: Traces, budget: int) -> Planner:
    return Planner(traced, budget, tokens_per_second=10.0)


def test_recomputation_lowers_the_peak_and_more_audio_raises_it():
    traced, load = traces(PRESETS["minimal"]), BatchShape(2, 5.0, 50)
    kept = traced.peak(load, NEVER).bytes
    assert traced.peak(load, ALWAYS).bytes < 0.85 * kept < kept < traced.peak(BatchShape(4, 5.0, 50), NEVER).bytes


def test_each_recomputed_block_lowers_the_peak():
    tracer, load = traces(PRESETS["minimal"]).tracer, BatchShape(2, 8.0, 80)
    peaks = [tracer.trace(load, RecomputePolicy.first(count)).bytes for count in range(4)]
    assert peaks == sorted(set(peaks), reverse=True)
    assert tracer.trace(load, RecomputePolicy.first(tracer.blocks)) == tracer.trace(load, ALWAYS)


@pytest.mark.parametrize("policy, seconds", parameter_grid([NEVER, ALWAYS], [2.0, 8.0]))
def test_largest_batch_fits_and_one_more_utterance_does_not(seconds, policy):
    planner = planner_of(SMALL, "48MiB")
    plan = planner.largest_batch(seconds, round(10 * seconds), policy, most=512)
    assert plan.utterances > 1
    fits = planner.traces.tracer.trace(BatchShape(plan.utterances, seconds, plan.tokens), policy).bytes
    more = planner.traces.tracer.trace(BatchShape(plan.utterances + 1, seconds, plan.tokens), policy).bytes
    assert fits == plan.peak <= planner.budget < more


def test_longest_utterance_fits_and_a_6_percent_longer_one_does_not():
    planner = planner_of(SMALL, "24MiB")
    longest = planner.longest_utterance(lambda seconds: round(10 * seconds), NEVER)
    assert longest > 5
    assert planner.peak(BatchShape(1, longest, round(10 * longest)), NEVER) <= planner.budget
    assert planner.peak(BatchShape(1, 1.06 * longest, round(10.6 * longest)), NEVER) > planner.budget


def test_auto_recomputes_the_fewest_blocks_that_fit_the_budget():
    traced, load = traces(PRESETS["minimal"]), BatchShape(1, 20.0, 200)
    peaks = [traced.peak(load, RecomputePolicy.first(count)).bytes for count in range(traced.blocks + 1)]
    for count in (0, 1, 3):
        planner = planner_from_traces(traced, peaks[count])
        plan = plan_bucket(planner, 20.0, 200, "auto", most=1)
        assert (plan.utterances, plan.recomputed_blocks, plan.peak) == (1, count, peaks[count])
    assert plan_bucket(planner_from_traces(traced, peaks[1]), 20.0, 200, "never", most=1).utterances == 0
    assert plan_bucket(planner_from_traces(traced, peaks[-1] - 1), 20.0, 200, "auto", most=1).utterances == 0


def test_largest_batch_is_limited_by_the_requested_maximum():
    assert planner_of(SMALL, "1GiB").largest_batch(2.0, 20, NEVER, most=3).utterances == 3


def test_budget_below_the_model_state_is_rejected_with_a_fitting_preset():
    config = TrainConfig(model=PRESETS["optimized"])
    with pytest.raises(ResourceError, match="1.. MiB, and .* more than the budget of 60 MiB.*--preset minimal"):
        check_state(config, architecture_of(config, 40), ONLY_TENSORS, parse_budget("60MiB"))


def test_plan_on_cuda_includes_rounding_workspace_and_context():
    costs = cuda_costs("T4", (7, 5), context=300 * MIB)
    load = BatchShape(2, 5.0, 50)
    here, there = traces(SMALL).peak(load, NEVER).bytes, traces(SMALL, costs).peak(load, NEVER).bytes
    assert here < there < 1.1 * here
    assert planner_from_traces(traces(SMALL, costs), 2**32).peak(load, NEVER) - there == costs.workspace + costs.context
    assert cuda_costs("H100", (9, 0)).workspace > costs.workspace > 8 * MIB


def test_half_precision_peak_on_cuda_is_below_fp32_and_above_the_cpu():
    """Layer norms are in fp32 there; the backward pass of attention accumulates in fp32."""
    costs, load = cuda_costs("T4", (7, 5)), BatchShape(2, 10.0, 100)
    model = PRESETS["minimal"]
    full, half = traces(model, costs).peak(load, NEVER), traces(model, costs, half=True).peak(load, NEVER)
    on_cpu = traces(model, half=True).peak(load, NEVER)
    assert on_cpu.bytes < half.bytes < full.bytes
    assert costs.attention_workspace(2, 100, 64, is_half=True) == 3 * 4 * 2 * 100 * 64
    assert costs.attention_workspace(2, 100, 64, is_half=False) == cpu_costs().attention_workspace(2, 9, 9, True) == 0


def test_validation_batch_shrinks_to_fit_the_budget():
    planner = planner_of(PRESETS["minimal"], "1GiB")
    seconds, peak = planner.validation_seconds(10.0, 100, asked=60.0)
    assert seconds == 60.0 and peak < planner.peak(BatchShape(6, 10.0, 100), ALWAYS)
    planner.budget = peak - 1
    smaller, less = planner.validation_seconds(10.0, 100, asked=60.0)
    assert smaller == 30.0 and less <= planner.budget


@pytest.mark.parametrize("text", ["4", "4 gigs", "0GiB", "-1GiB", "99999GiB", "", "1e3MiB", "4Gi", 400 * "9" + "G"])
def test_invalid_budget_is_rejected(text):
    with pytest.raises(UsageError, match="--memory_budget"):
        parse_budget(text)


def test_budgets_have_binary_and_decimal_units():
    assert (parse_budget("4GiB"), parse_budget("1.5 MiB"), parse_budget("2GB")) == (2**32, 3 * 2**19, 2 * 10**9)


@pytest.mark.parametrize(
    "text, size",
    [("4G", 2**32), ("4g", 2**32), ("4 gib", 2**32), ("4GIB", 2**32), ("700m", 700 * MIB), ("4gb", 4 * 10**9)],
)
def test_budget_units_ignore_case_and_single_letters_are_binary(text, size):
    assert parse_budget(text) == size


def test_gpu_names_match_without_vendor_case_and_hyphens():
    assert find_gpu("gtx 980") == find_gpu("NVIDIA GeForce GTX 980") == find_gpu("GTX-980")
    assert find_gpu("Tesla T4").memory < 15 * 2**30
    with pytest.raises(UsageError, match="--gpu Voodoo 2 is not a known GPU.*T4.*--memory_budget"):
        find_gpu("Voodoo 2")


@pytest.mark.parametrize(
    "written, name",
    [
        ("A100-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("T4 16GB", "T4"),
        ("GTX980", "GTX 980"),
        ("3060", "RTX 3060"),
        ("A4000", "RTX A4000"),
        ("GeForce RTX 3050 Laptop GPU", "RTX 3050 Laptop"),
        ("RTX 3050 6GB Laptop", "RTX 3050 Laptop 6GB"),
        ("rtx 4050", "RTX 4050 Laptop"),  # the only variant
        ("GeForce GTX 1650 Mobile", "GTX 1650"),  # equal to the desktop version
        ("Quadro RTX 5000 with Max-Q Design", "Quadro RTX 5000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("GTX TITAN X", "TITAN X"),
    ],
)
def test_gpu_is_found_by_names_of_shops_and_drivers(written, name):
    assert find_gpu(written).name == name


def test_each_known_gpu_is_found_by_its_name():
    assert [find_gpu(gpu.name) for gpu in KNOWN_GPUS] == list(KNOWN_GPUS)


@pytest.mark.parametrize(
    "written, message",
    [
        ("RTX 3065", "most similar known names are RTX 3060, .*--memory_budget"),
        ("A100 60GB", "exists with 40 GB or 80 GB"),
        ("Tesla K80", "does not support a GPU this old"),
        ("GTX 680", "does not support a GPU this old"),
        ("GeForce GTX TITAN", "does not support a GPU this old"),
    ],
)
def test_unknown_gpu_is_rejected_with_advice(written, message):
    with pytest.raises(UsageError, match=message):
        find_gpu(written)


def test_plan_command_prints_flags_that_the_trainer_accepts(corpus, tmp_path):
    flags = ("--memory_budget", "314MiB", *TINY_MODEL, "--encoder_layers", "3")
    done = checked(run_script("training_scripts/plan_memory.py", *flags, "--json"))
    report = json.loads(done.stdout)
    never, always = report["answers"]
    assert (never["gradient_checkpointing"], always["gradient_checkpointing"]) == ("never", "always")
    assert 0 < never["longest_seconds"] < always["longest_seconds"]
    for kept, recomputed in zip(never["buckets"], always["buckets"], strict=True):
        assert 0 < kept["utterances"] <= recomputed["utterances"] and kept["peak"] <= report["budget"]
    table = run_script("training_scripts/plan_memory.py", *flags)
    assert report["flags"] in table.stdout and f"{never['longest_seconds']:g} s" in table.stdout
    # Equal answers, as with all blocks on the host, are printed once.
    different = read_report(done.stdout)
    always_twice = (dataclasses.replace(different.answers[1], gradient_checkpointing="never"), different.answers[1])
    assert "keeping activations" in different.as_table()
    assert "keeping activations" not in dataclasses.replace(different, answers=always_twice).as_table()
    shorter = dataclasses.replace(always_twice[0], longest_seconds=1.0), always_twice[1]
    assert "keeping activations" in dataclasses.replace(different, answers=shorter).as_table()
    folders = "--checkpoint_dir", str(tmp_path / "c"), "--log_dir", str(tmp_path / "r")
    trained = run_script(
        "training_scripts/train_konkanivani_asr.py",
        *(*shlex.split(report["flags"]), *corpus.flags(), *folders, "--max_steps", "1", "--num_workers", "0"),
    )
    assert trained.returncode == 0, trained.stderr
    assert "Memory plan for 314MiB" in trained.stdout and "conformer 32, 3+1 layers" in trained.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "Give --memory_budget"),
        (("--memory_budget", "4"), "give a number and a unit"),
        (("--gpu", "Voodoo 2"), "not a known GPU"),
        (("--gpu", "T4", "--device", "cpu"), "contradicts"),
        (("--gpu", "T4", "--batch_size", "4", "--effective_batch_size", "9"), "contradicts"),
    ],
)
def test_plan_command_errors_are_one_sentence(flags, sentence):
    done = run_script("training_scripts/plan_memory.py", *flags)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "utterances"),
    [
        ("", 8),
        ("--effective_batch_size 5", 5),
        ("--batch_size auto --effective_batch_size 12", 12),
        ("--batch_size 3 --effective_batch_size 12", 12),
        ("--batch_size 4 --gradient_accumulation_steps 4", 16),
    ],
)
def test_plan_command_keeps_the_utterances_per_step(flags, utterances):
    words = ["--memory_budget", "2GiB", *flags.split()]
    train, _ = settle(read_plan_flags(words), explicit_flags(words))
    assert train.global_batch_size == utterances


def test_plan_command_reports_progress_before_importing_torch(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_script("training_scripts/plan_memory.py", "--memory_budget", "4g", "--json")
    first, last = done.stderr.splitlines()
    assert first.startswith("Tracing training steps") and " s " in first and last == "torch was imported"
    assert done.stdout == ""


def test_gpu_name_sets_the_budget():
    model = (*TINY_MODEL[:-2], "--d_model", "512", "--encoder_layers", "1", "--subsampling_channels", "256")
    done = run_script("training_scripts/plan_memory.py", *model, "--gpu", "GTX 750", "--mixed_precision", "--json")
    report = json.loads(done.stdout)
    assert report["budget"] == find_gpu("GTX 750").memory and report["context"] > 0
    assert report["device"] == "GTX 750" and report["precision"] == "half precision"


def print_answers():
    """Print the plans of a process with running threads."""
    torch.randn(600, 600) @ torch.randn(600, 600)  # starts OpenMP threads, which a fork does not inherit
    config = TrainConfig(model=TINY, text=TextConfig(vocab_size=40))
    report = plan_budget(config, cpu_costs(), parse_budget("312MiB"))
    print([answer.gradient_checkpointing for answer in report.answers])
    print(plan_presets(config, cpu_costs(), {"small": TINY}, (0.1, 0.33, 0.38)))


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Return the output of a process without a previous backward pass: PyTorch forbids one in a fork after it."""
    program = "from tests.planning import test_planner\ntest_planner.print_answers()"
    return checked(fork_server().run_program(program)).stdout.splitlines()


def test_plan_is_computed_in_a_process_with_running_threads(printed):
    assert printed[0] == "['never', 'always']"


def test_table_has_a_dash_if_the_state_does_not_fit_and_grows_with_budget(printed):
    cells = printed[-1].split()
    assert cells[0] == "small" and cells[1:7] == ["-", "/", "-", "-", "/", "-"]
    numbers = [float(cell) for cell in cells[7:] if cell != "/"]
    assert len(numbers) == 8 and all(less < more for less, more in zip(numbers[:4], numbers[4:], strict=True))
