"""Training and memory plans through the Python API give the results of the commands."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import konkanivani
from konkanivani import (
    DataConfig,
    MemoryConfig,
    ModelConfig,
    PretrainedConfig,
    RunConfig,
    TrainConfig,
    TuningConfig,
    child_process,
)
from konkanivani.child_process import ProcessResult, copy_output, summary_of
from konkanivani.errors import DataError, ResourceError, UsageError
from konkanivani.flags import command_words, parse_args
from tests.conftest import ROOT, Corpus, checked, run_script
from tests.fork_server import ForkedCommand
from tests.process_cleanup import descendants
from tests.timeouts import PROCESS_TIMEOUT

TINY = ModelConfig(d_model=16, attention_heads=2, feedforward_dim=32, encoder_layers=1, decoder_layers=1)


def config_of(corpus: Corpus, folder: Path, **run: object) -> TrainConfig:
    """Return the settings of a small run on the corpus."""
    manifests = dict(zip(corpus.flags()[::2], corpus.flags()[1::2], strict=True))
    return TrainConfig(
        model=TINY,
        data=DataConfig(
            train_manifest=str(manifests["--train_manifest"]),
            valid_manifest=str(manifests["--valid_manifest"]),
            num_workers=0,
        ),
        run=RunConfig(checkpoint_dir=f"{folder}/checkpoints", log_dir=f"{folder}/runs", device="cpu", **run),
    )


def test_settings_survive_conversion_to_command_line_and_back():
    config = TrainConfig(
        model=TINY,
        data=DataConfig(train_manifest="-odd name.jsonl", audio_roots=("a", "b c")),
        memory=MemoryConfig(mixed_precision=True),
        run=RunConfig(preset="minimal", epochs=3),
    )
    words = command_words(config)
    assert parse_args(words).config == config
    assert "--mixed_precision" in words and "--train_manifest=-odd name.jsonl" in words
    assert command_words(TrainConfig()) == []


def test_train_returns_the_summary_that_the_command_prints(corpus, tmp_path, capfd):
    summary = konkanivani.train(config_of(corpus, tmp_path / "api", max_steps=2, epochs=1))
    assert (summary.is_interrupted, summary.steps) == (False, 2)
    assert summary.checkpoint.is_file() and summary.tensorboard.is_dir()
    words = command_words(config_of(corpus, tmp_path / "cli", max_steps=2, epochs=1))
    printed = json.loads(
        checked(run_script("training_scripts/train_konkanivani_asr.py", *words)).stdout.splitlines()[-1]
    )
    assert summary.scores["best_valid_score"] == printed["best_valid_score"]
    assert (summary.parameters, summary.epochs) == (printed["parameters"], printed["epochs"])
    assert "Peak memory" in capfd.readouterr().err  # the run's output is shown


@pytest.fixture
def forked_children(monkeypatch) -> None:
    """Make the API run its child processes as forks, in which everything is imported already."""
    forked = SimpleNamespace(Popen=ForkedCommand, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(child_process, "subprocess", forked)


def test_errors_of_the_run_are_raised_with_its_message(tmp_path, corpus, forked_children):
    broken = config_of(corpus, tmp_path)
    missing_manifest = dataclasses.replace(broken.data, train_manifest=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="nowhere.jsonl"):
        konkanivani.train(dataclasses.replace(broken, data=missing_manifest))
    with pytest.raises(UsageError, match="train_manifest"):
        konkanivani.train(TrainConfig())
    two_missing_manifests = dataclasses.replace(missing_manifest, valid_manifest=str(tmp_path / "lost.jsonl"))
    with pytest.raises(DataError, match=r"nowhere\.jsonl.*\n.*lost\.jsonl"):
        konkanivani.train(dataclasses.replace(broken, data=two_missing_manifests))
    with pytest.raises(UsageError, match=r"^Invalid settings: run.device='gpu' must be \{auto,cuda,cpu\}; run.fresh=1"):
        konkanivani.train(TrainConfig(run=RunConfig(device="gpu", fresh=1)))
    with pytest.raises(UsageError, match="dry run"):
        konkanivani.train(TrainConfig(run=RunConfig(dry_run=True)))
    with pytest.raises(ResourceError, match="without a summary"):
        summary_of(["no JSON"])


def start_in_python(config: TrainConfig) -> "subprocess.Popen[str]":
    """Start a Python program that trains and prints the summary's checkpoint."""
    words = json.dumps(command_words(config))
    program = (
        "import json, sys, konkanivani\n"
        "from konkanivani.flags import parse_args\n"
        "summary = konkanivani.train(parse_args(json.loads(sys.argv[1])).config)\n"
        "print(summary.is_interrupted, summary.checkpoint)\n"
    )
    command = [sys.executable, "-c", program, words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after PROCESS_TIMEOUT seconds."""
    until = time.monotonic() + PROCESS_TIMEOUT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_ctrl_c_saves_checkpoint_and_training_resumes(corpus, tmp_path, forked_children):
    """Interrupt the process as a notebook interrupts its kernel, then resume."""
    config = config_of(corpus, tmp_path, epochs=5000, save_minutes=60.0)
    process = start_in_python(config)
    wait_until(lambda: list((tmp_path / "runs").rglob("log.jsonl")))
    time.sleep(2.0)  # into the training loop
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PROCESS_TIMEOUT)
    assert process.returncode == 0, errors
    assert output.split() == ["True", f"{tmp_path}/checkpoints/checkpoint_last.pt"]
    step = int(re.findall(r"step (\d+)", errors)[-1])
    run = dataclasses.replace(config.run, resume="auto", max_steps=step + 1)
    resumed = konkanivani.train(dataclasses.replace(config, run=run))
    assert (resumed.is_interrupted, resumed.steps) == (False, step + 1)


def test_ctrl_c_during_startup_returns_without_checkpoint(corpus, tmp_path):
    """Send SIGINT twice while the run starts: the process returns without a checkpoint."""
    process = start_in_python(config_of(corpus, tmp_path))
    wait_until(lambda: len(descendants(process.pid)) > 0)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PROCESS_TIMEOUT)
    assert (process.returncode, output.split()) == (0, ["True", "None"]), errors


HANDLER_IS_RESTORED = """
import signal
import pytest
from konkanivani.child_process import CommandRunner
from konkanivani.errors import Interrupted
before = signal.getsignal(signal.SIGINT)
trainer = CommandRunner()
with pytest.raises(ZeroDivisionError), trainer.forwarding_interrupts():
    assert signal.getsignal(signal.SIGINT) != before
    signal.raise_signal(signal.SIGINT)  # no KeyboardInterrupt
    raise ZeroDivisionError
assert signal.getsignal(signal.SIGINT) == before
with pytest.raises(Interrupted):
    trainer.check()
"""


def test_sigint_handler_is_restored_after_training():
    # In a new process: a run of an earlier test may have left a thread here that exits the process after a signal.
    done = run_program(HANDLER_IS_RESTORED)
    assert done.returncode == 0, done.stderr


def test_exit_codes_of_signals_count_as_interruption():
    """129, 130 and 143 are exit codes of signals; a KeyboardInterrupt traceback comes from an interrupted startup."""
    traceback = ("Traceback (most recent call last):", "KeyboardInterrupt")
    assert all(ProcessResult(code, (), ()).is_interrupted for code in (129, 130, 143))
    assert ProcessResult(1, (), traceback).is_interrupted
    assert not any(
        ProcessResult(code, (), ("ValueError: KeyboardInterrupt",)).is_interrupted for code in (0, 1, 2, 137)
    )


@pytest.mark.parametrize(
    "code, errors, message",
    [
        (3, ("a.jsonl: not found.", "b.jsonl: not found."), "a.jsonl: not found.\nb.jsonl: not found."),
        (2, ("Contradiction:", "  --a", "  --b"), "Contradiction:\n  --a\n  --b"),
        (6, ("x/y.py:7: UserWarning: slow", "  warn(", "", " 5%|#  | 1/20", "No space left."), "No space left."),
        (1, ("Traceback (most recent call last):", '  File "x"', "ValueError: y"), "ValueError: y"),
        (2, ("╭─ Value ─╮", "│ not an  │", "│ int.    │", "│ ─────── │", "│ --help  │", "╰─────────╯"), "not an int."),
        (137, ("a",), "Killed (SIGKILL), perhaps by the system for lack of memory."),
        (5, (), "Exit code 5, without a message."),
    ],
)
def test_error_message_is_extracted_from_stderr_of_the_run(code, errors, message):
    assert ProcessResult(code, (), errors).message == message


class ClosedStream(io.StringIO):
    """Stream whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_output_copy_keeps_carriage_returns_and_survives_closed_stream(monkeypatch):
    written = "0%|  |\r50%|# |\rDone: é.\n".encode()
    for stream, expected in ((io.StringIO(), written.decode()), (ClosedStream(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        kept = deque[str]()
        copy_output(io.TextIOWrapper(io.BytesIO(written), encoding="utf-8"), kept)
        assert list(kept) == ["0%|  |", "50%|# |", "Done: é."]
        assert stream.getvalue() == expected


def test_plan_raises_usage_errors_of_the_command():
    with pytest.raises(UsageError, match="memory_budget"):
        konkanivani.plan(TrainConfig())
    with pytest.raises(UsageError, match="run.device='gpu'"):
        konkanivani.plan(TrainConfig(run=RunConfig(device="gpu")), memory_budget="4GiB")
    with pytest.raises(UsageError, match="--lora_alpha has no effect"):
        konkanivani.plan(TrainConfig(tuning=TuningConfig(lora_alpha=2.0)), gpu="T4")


def run_program(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python program in a new process."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PROCESS_TIMEOUT)


AFTER_BACKWARD_PASS = """
import os, sys, torch, konkanivani
from konkanivani.cli.plan import main
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():  # its devices start threads of autograd, as a GPU does
    values = torch.ones(4, 4, requires_grad=True)
    (values @ values).sum().backward()
model = konkanivani.ModelConfig(d_model=32, encoder_layers=1, decoder_layers=1, attention_heads=2)
settings = konkanivani.TrainConfig(model=model)
print(konkanivani.plan(settings, gpu="GTX 980").as_json(), flush=True)
print("NEGATIVE CONTROL", file=sys.stderr)
os.environ["XDG_CACHE_HOME"] = sys.argv[1]  # without cached traces
sys.exit(main(sys.argv[2:]))
"""


# The same settings for the command.
PLAN = ("--d_model", "32", "--encoder_layers", "1", "--decoder_layers", "1", "--attention_heads", "2")
PLAN += ("--gpu", "GTX 980", "--json")


@dataclasses.dataclass(frozen=True)
class Planned:
    """Output of AFTER_BACKWARD_PASS: the plan, stderr of the function, and the result of the command there."""

    report: dict
    function_stderr: str
    exit_code: int
    command_stderr: str


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Planned:
    """Plan twice after a backward pass in the same process: with the function, and with the `main` of the command."""
    done = run_program(AFTER_BACKWARD_PASS, str(tmp_path_factory.mktemp("cache")), *PLAN)
    function_stderr, mark, command_stderr = done.stderr.partition("NEGATIVE CONTROL")
    assert mark, done.stderr
    return Planned(json.loads(done.stdout), function_stderr, done.returncode, command_stderr)


def test_plan_after_a_backward_pass_equals_plan_of_the_command(planned):
    assert planned.report == json.loads(checked(run_script("training_scripts/plan_memory.py", *PLAN)).stdout)
    assert planned.report["device"] == "GTX 980" and len(planned.report["answers"]) == 2
    assert "{" not in planned.function_stderr  # the JSON is returned, not printed


def test_negative_control_forks_fail_after_a_backward_pass(planned):
    assert planned.exit_code != 0 and "fork-based multiprocessing" in planned.command_stderr


def test_ctrl_c_interrupts_a_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "import konkanivani\nkonkanivani.plan(konkanivani.TrainConfig(), gpu='T4')"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(descendants(process.pid)) >= 3)  # the command and its two workers
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PROCESS_TIMEOUT)
    assert process.returncode == -signal.SIGINT and errors.endswith("KeyboardInterrupt\n"), errors


def test_plan_workers_end_when_the_command_is_killed(tmp_path):
    command = [sys.executable, "-m", "konkanivani", "plan", "--gpu", "T4"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, **quiet)
    wait_until(lambda: len(descendants(process.pid)) == 2)
    workers = descendants(process.pid)
    process.kill()
    process.wait(PROCESS_TIMEOUT)
    wait_until(lambda: not any(map(is_running, workers)))


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_plan_uses_model_shape_of_init_from_checkpoint(base):
    report = konkanivani.plan(TrainConfig(run=RunConfig(init_from=str(base))), memory_budget="320MiB")
    command = ("training_scripts/plan_memory.py", "--checkpoint", str(base), "--memory_budget", "320MiB", "--json")
    assert json.loads(report.as_json()) == json.loads(checked(run_script(*command)).stdout)


def test_pretrained_defaults_equal_those_of_the_command_line():
    words = command_words(TrainConfig(pretrained=PretrainedConfig(pretrained="whisper", language="mr")))
    assert words == ["--pretrained", "whisper", "--language", "mr"]
    assert parse_args(words).config.data.max_duration == 30.0 != TrainConfig().data.max_duration


def test_import_does_not_load_torch():
    program = "import sys, konkanivani; konkanivani.TrainConfig; konkanivani.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    with pytest.raises(AttributeError):
        konkanivani.trian  # noqa: B018
