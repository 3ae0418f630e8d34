"""Shared fixtures and helpers: a small corpus of tones, and runs of the scripts in child processes."""

import contextlib
import gc
import importlib
import io
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import soundfile

from konkanivani.install.environment import mend_streams
from tests.fork_server import DEV_NULL, ROOT, THREADS, Fork, ForkServer, Job, can_fork, fork_server
from tests.process_cleanup import descendants, kill_leftovers, reset_ignored_signals
from tests.shared_folders import made_once, shared_root
from tests.timeouts import PROCESS_TIMEOUT

if TYPE_CHECKING:
    from tests.trained_model import Trained

reset_ignored_signals()

TRAINER = "training_scripts/train_konkanivani_asr.py"
WORDS = ("एक", "दोन", "तीन", "चार", "पांच", "उदक", "घर", "शाळा", "बाजार", "आवय")
TINY_MODEL = (
    *("--d_model", "32", "--encoder_layers", "2", "--decoder_layers", "1", "--attention_heads", "2"),
    *("--convolution_kernel", "7", "--subsampling_channels", "8", "--vocab_size", "30", "--device", "cpu"),
)

# Files that take longer than 10 s, roughly slowest first. They run first: otherwise one process may still run such
# a file at the end while the others are idle. By default, pytest-xdist starts with the files that have most tests.
SLOW_FILES = (
    "inference/test_listener.py",
    "faults/test_signals.py",
    "test_api.py",
    "invariants/test_oom_retry_is_exact.py",
    "invariants/test_planned_peak_bounds_measured_peak.py",
    "planning/test_planner.py",
    "faults/test_ranks.py",
    "test_package.py",
    "models/test_fine_tuning.py",
    "recipe/test_continue_schedule.py",
    "faults/test_late_writes.py",
    "invariants/test_two_processes_equal_one.py",
    "training/test_graphs.py",
    "inference/test_transcribe.py",
    "invariants/test_resume_is_exact.py",
    "faults/test_dry_run.py",
    "invariants/test_documentation.py",
    "faults/test_non_finite.py",
    "faults/test_repeated_commands.py",
    "corpora/test_health.py",
    "faults/test_lost_workers.py",
    "inference/test_export.py",
    "inference/test_model_card.py",
    "t5/test_invariants.py",
    "faults/test_exact_resume.py",
    "whisper/test_invariants.py",
    "training/test_graph_runner.py",
    "whisper/test_fallback.py",
    "cli/test_listen_script.py",
    "t5/test_commands.py",
    "planning/test_run_plan.py",
    "faults/test_kills.py",
    "whisper/test_planned_peaks.py",
    "recipe/test_changed_corpus.py",
    "faults/test_untrusted_input.py",
    "training/test_bfloat16.py",
    "whisper/test_generation.py",
    "planning/test_shapes.py",
    "faults/test_disk_full.py",
    "faults/test_streams.py",
    "recipe/test_cuda_graphs.py",
    "whisper/test_bad_input.py",
    "data/test_workers.py",
    "nemo/test_imported_model.py",
)


@dataclass(frozen=True)
class Corpus:
    """Corpus folder with a manifest per split."""

    directory: Path

    def manifest(self, split: str) -> str:
        return str(self.directory / f"{split}.jsonl")

    def flags(self) -> tuple[str, ...]:
        """Return the manifest flags that a training run on this corpus needs."""
        return "--train_manifest", self.manifest("train"), "--valid_manifest", self.manifest("valid")


def speak(words: list[str]) -> np.ndarray:
    """Return one chord of 90 ms per character and 60 ms of silence between words, float32 at 16 kHz."""
    time = np.arange(1440) / 16_000
    pieces = []
    for word in words:
        for character in word:
            pitch = 200 + 37 * (ord(character) % 64)
            pieces.append(0.2 * np.sin(2 * np.pi * pitch * time) + 0.1 * np.sin(5 * np.pi * pitch * time))
        pieces.append(np.zeros(960))
    return np.concatenate(pieces).astype(np.float32)


def write_corpus(directory: Path, counts: dict[str, int], seed: int = 0, lengths: range = range(1, 7)) -> Corpus:
    """Write a corpus of `counts` utterances per split, whose word counts cycle through `lengths`."""
    generator = np.random.default_rng(seed)
    (directory / "audio").mkdir(parents=True)
    for split, count in counts.items():
        rows = []
        for number in range(count):
            words = [WORDS[i] for i in generator.integers(len(WORDS), size=lengths[number % len(lengths)])]
            audio = speak(words)
            audio += 0.005 * generator.standard_normal(len(audio)).astype(np.float32)
            name = f"audio/{split}_{number:03d}.flac"
            soundfile.write(directory / name, audio, 16_000)
            row = {"audio_filepath": name, "duration": len(audio) / 16_000, "text": " ".join(words)}
            rows.append(json.dumps(row, ensure_ascii=False))
        (directory / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return Corpus(directory)


def write_shards(corpus: Corpus, directory: Path) -> Corpus:
    """Write each split as one tar shard, with manifests that give the position of each utterance in it."""
    directory.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        rows = [json.loads(line) for line in Path(corpus.manifest(split)).read_text(encoding="utf-8").splitlines()]
        with tarfile.open(directory / f"{split}.tar", "w") as shard:
            for row in rows:
                shard.add(corpus.directory / row["audio_filepath"], row["audio_filepath"])
        with tarfile.open(directory / f"{split}.tar") as shard:
            places = {member.name: (member.offset_data, member.size) for member in shard}
        for row in rows:
            row["byte_offset"], row["byte_count"] = places[row["audio_filepath"]]
            row["audio_filepath"] = f"{split}.tar"
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Corpus(directory)


def write_augmentation(directory: Path) -> tuple[str, ...]:
    """Write two noises and two room impulse responses; return trainer flags that enable them and all augmentation."""
    generator = np.random.default_rng(5)
    directory.mkdir(parents=True)
    for kind, seconds, rate in (("noise", 1.7, 22_050), ("rir", 0.2, 16_000)):
        rows = []
        for number in range(2):
            sound = generator.standard_normal(int(seconds * rate)) * np.exp(-np.arange(int(seconds * rate)) / rate * 9)
            soundfile.write(directory / f"{kind}{number}.wav", 0.1 * sound, rate)
            rows.append(json.dumps({"audio_filepath": f"{kind}{number}.wav", "duration": seconds}))
        (directory / f"{kind}.jsonl").write_text("\n".join(rows) + "\n")
    augmented = ("--augmentation", "strong")
    noise = ("--noise_manifest", str(directory / "noise.jsonl"), "--noise_prob", "0.7")
    return (*noise, "--rir_manifest", str(directory / "rir.jsonl"), "--rir_prob", "0.5", "--gain", "3", *augmented)


def mark_full(*cases: object) -> list:
    """Return pytest parameters for similar cases that run only with `--full`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]


def mark_full_except(cases: Iterable[str], shown: Container[str]) -> list:
    """Return the cases as parameters; cases that are not in `shown` run only with `--full`."""
    return [*(case for case in cases if case in shown), *mark_full(*(case for case in cases if case not in shown))]


def parameter_grid(*axes: Iterable) -> list:
    """Return all combinations as parameters; without `--full` only enough to cover each case of each axis."""
    axes = [[*axis] for axis in axes]
    shown = [[each % len(axis) for axis in axes] for each in range(max(map(len, axes)))]
    results = []
    for at in map(list, itertools.product(*(range(len(axis)) for axis in axes))):
        marks = () if at in shown else pytest.mark.full
        results.append(pytest.param(*(axis[n] for axis, n in zip(axes, at, strict=True)), marks=marks))
    return results


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`, `--full` and `--card`."""
    parser.addoption(
        "--quick",
        action="store_true",
        help="skip slow files, tests that start a process, and all but the first parameters of each test",
    )
    parser.addoption("--full", action="store_true", help="run the additional cases too")
    parser.addoption("--card", action="store_true", help="run only the tests that need a CUDA GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Skip tests that start a process under `--quick`, and hide the GPU without `--card`."""
    config.addinivalue_line("markers", "card: needs a CUDA GPU")
    config.addinivalue_line("markers", "full: an additional case of a test, or a benchmark; runs only with --full")
    if not config.getoption("--card"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("--quick"):
        sys.addaudithook(_skip_if_process_starts)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import all test files, starting in each process of pytest-xdist with a different file.

    pytest rewrites and compiles the assertions of a file at its first import, 8 s of CPU time for all files. In the
    same order, each process would compile every file; in different orders, it reads what the others have compiled.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or not runs_whole_suite(session.config):
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    number = int(worker["workerid"].removeprefix("gw"))
    first = len(files) * number // worker["workercount"]
    for path in files[first:] + files[:first]:
        # A file that fails or skips is reported when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def runs_whole_suite(config: pytest.Config) -> bool:
    """Return whether the run collects all test files."""
    return all(Path(argument).resolve() in (ROOT, ROOT / "tests") for argument in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect additional cases without `--full` and slow files with `--quick`; sort; skip GPU tests without a GPU."""
    import torch  # tests.fork_server must set the environment first

    from konkanivani.distributed import choose_device

    on_gpu = config.getoption("--card")
    gpu_tests = [item for item in items if item.get_closest_marker("card")]
    selected = gpu_tests if on_gpu else items
    selected = [item for item in selected if config.getoption("--full") or not item.get_closest_marker("full")]
    order = {ROOT / "tests" / name: number for number, name in enumerate(SLOW_FILES)}
    if config.getoption("--quick"):
        selected = first_parameters(item for item in selected if item.path not in order)
    config.hook.pytest_deselected(items=list(set(items).difference(selected)))
    items[:] = sorted(selected, key=lambda item: order.get(item.path, len(order)))
    if on_gpu and torch.cuda.is_available():
        choose_device("cuda")  # apply the same PyTorch settings as the scripts
    reason = "this machine has no CUDA GPU" if on_gpu else "needs a CUDA GPU: run pytest --card"
    for item in gpu_tests if not (on_gpu and torch.cuda.is_available()) else ():
        item.add_marker(pytest.mark.skip(reason=reason))


def first_parameters(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the first item of each test function: a third of the suite's time, but almost all of its code."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def pytest_collection_finish() -> None:
    """Freeze the garbage collector after the imports, and compute with one thread.

    Collecting the imported objects took a sixth of the test time. Two threads are 50 % slower on tensors of this size.
    """
    import torch

    gc.freeze()
    torch.set_num_threads(1)


def _skip_if_process_starts(event: str, _arguments: tuple) -> None:
    if event in ("subprocess.Popen", "os.fork") and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip("starts a process, and --quick was given")


@pytest.fixture(scope="session", autouse=True)
def temporary_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a separate cache folder, so that the cache of the user is neither read nor written."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def stop_fork_server() -> Iterator[None]:
    """Stop the parent process of the forked scripts at the end of the session."""
    yield
    if fork_server.cache_info().currsize:
        fork_server().close()


@pytest.fixture(scope="session")
def torch_only_parent() -> Iterator[ForkServer]:
    """Yield a parent process that has imported PyTorch only, without its lazily imported modules."""
    parent = ForkServer(("torch",))
    yield parent
    parent.close()


@pytest.fixture(autouse=True)
def kill_leftover_processes() -> Iterator[None]:
    """Kill the processes that a failed test left running."""
    before = descendants(os.getpid())
    yield
    kill_leftovers(descendants(os.getpid()) - before)


@pytest.fixture(scope="session")
def synthesizer() -> Iterator[object]:
    """Yield a speech synthesizer, or skip the test if espeakng-loader is not installed."""
    pytest.importorskip("espeakng_loader", reason="espeakng-loader is not installed")
    from konkanivani.corpora.synthesis import SpeechSynthesizer

    with SpeechSynthesizer() as synthesizer:
        yield synthesizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return a corpus of 26 training (the last global batch has only 4), 5 validation and 5 test utterances."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 26, "valid": 5, "test": 5})


@pytest.fixture(scope="session")
def three_steps(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of three steps of the tiny model, all weights trained. Do not change it."""
    from konkanivani.recipe.build import build_run
    from konkanivani.training.loop import train
    from tests.run_setup import begin_run

    folder = tmp_path_factory.mktemp("three_steps")
    flags = (*TINY_MODEL, *corpus.flags(), *run_folders(folder), "--num_workers", "0", "--max_steps", "3")
    train(build_run(begin_run(list(flags))))
    return folder


@pytest.fixture(scope="session")
def base(three_steps: Path) -> Path:
    return three_steps / "checkpoints" / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Trained"]:
    """Yield a tiny model that recognizes tones as words, trained once per test run."""
    from tests.trained_model import load_trained, train_tones

    with made_once(shared_root(tmp_path_factory), "trained", train_tones) as folder:
        yield load_trained(folder)


@pytest.fixture
def copy(three_steps: Path, tmp_path: Path) -> Path:
    shutil.copytree(three_steps, tmp_path / "copy")
    return tmp_path / "copy"


def script_command(script: str, *arguments: str) -> list[str]:
    """Return the command line of a script of this repository."""
    return [sys.executable, str(ROOT / script), *arguments]


def start_script(script: str, *arguments: str, output: Path, threads: int = THREADS) -> Fork:
    """Start a script whose output goes to the file `output`."""
    return fork_server().start(Job(ROOT / script, arguments, output, threads=threads))


def start_cold(command: Sequence[str], output: Path, threads: int = THREADS, **variables: str) -> subprocess.Popen:
    """Start a command in a new interpreter and session, as a user does."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | variables
    with open(output, "ab") as stream:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def run_script(
    script: str,
    *arguments: str,
    cwd: Path = ROOT,
    threads: int = THREADS,
    stdin: Path = DEV_NULL,
    is_cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end and capture its output.

    It runs in a fork of a process that has imported everything, unless it `is_cold` or a fork cannot use the
    environment.
    """
    if not is_cold and threads == THREADS and can_fork(os.environ):
        return fork_server().run(ROOT / script, *arguments, cwd=cwd, stdin=stdin)
    command, own = script_command(script, *arguments), os.environ | {"OMP_NUM_THREADS": str(threads)}
    with open(stdin, "rb") as read:
        return subprocess.run(
            command, cwd=cwd, env=own, capture_output=True, text=True, timeout=PROCESS_TIMEOUT, stdin=read
        )


def run_in_process(
    script: str, *arguments: str, cwd: Path = ROOT, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    """Run a script without side effects in this process, in a third of the time of a fork.

    Of the process setup at the start of the script, only the stream configuration is done.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors) for errors in ("strict", "backslashreplace")]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.chdir(cwd)
        patch.setitem(sys.modules, "bootstrap", SimpleNamespace(rerun_under_venv=mend_streams))
        for name, value in zip(("argv", "stdout", "stderr"), ([script, *arguments], *streams), strict=True):
            patch.setattr(sys, name, value)
        runpy.run_path(str(ROOT / script), run_name="__main__")
    for stream in streams:
        stream.flush()
    outputs = [stream.buffer.getvalue().decode(encoding) for stream in streams]
    return subprocess.CompletedProcess((script, *arguments), end.value.code, *outputs)


def checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Assert that the process exited with 0, and return it."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_trainer(*arguments: str, cwd: Path = ROOT, is_cold: bool = False) -> subprocess.CompletedProcess[str]:
    return run_script(TRAINER, *arguments, cwd=cwd, is_cold=is_cold)


def run_folders(directory: Path) -> tuple[str, ...]:
    """Return the flags that put the checkpoints and logs of a run in `directory`."""
    return "--checkpoint_dir", str(directory / "checkpoints"), "--log_dir", str(directory / "runs")


def read_log(directory: Path, kind: str = "step") -> list[dict]:
    """Return the JSONL records of one kind."""
    lines = (directory / "runs" / "default" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]
