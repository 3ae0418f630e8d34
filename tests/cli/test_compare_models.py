"""compare_models.py trains each model once, in order, and handles failed and interrupted models."""

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from konkanivani.child_process import ProcessResult
from konkanivani.cli.compare import (
    RECORD,
    Outcome,
    RunRecord,
    check_data,
    choose_candidates,
    distinct_names,
    flags_in,
    read_record,
    table_of,
    write_record,
)
from konkanivani.errors import DataError, UsageError
from tests.conftest import ROOT, TINY_MODEL, Corpus, checked, start_script, write_corpus
from tests.fork_server import fork_scripts, fork_server
from tests.timeouts import PROCESS_TIMEOUT
from tests.whisper.small_model import write_model

SCRIPT = "training_scripts/compare_models.py"
SMALL = ("--device", "cpu", "--num_workers", "0", "--max_steps", "2", "--test_decode", "greedy")


@pytest.fixture(scope="module")
def one_word_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Write a corpus of one-word utterances, each shorter than 1 s."""
    folder = tmp_path_factory.mktemp("one_word") / "tones"
    return write_corpus(folder, {"train": 8, "test": 2}, lengths=range(1, 2))


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two folders of Whisper models, the second with damaged weights."""
    root, shape = tmp_path_factory.mktemp("models"), {"seconds": 1, "layers": (1, 1), "positions": 64}
    paths = tuple(write_model(root / name, ("en", "mr"), **shape) for name in ("sound", "broken"))
    weights = paths[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-400:] = b"\xff" * 400  # NaN weights; the header is unchanged
    weights.write_bytes(data)
    return paths


def comparison_flags(corpus: Corpus, folder: Path) -> tuple[str, ...]:
    manifests = ("--train_manifest", corpus.manifest("train"), "--test_manifest", corpus.manifest("test"))
    return (*manifests, *SMALL, "--folder", str(folder))


def run_comparison(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the comparison with its trainers in forked processes."""
    return fork_server().run(ROOT / SCRIPT, *flags, before=fork_scripts)


def test_report_has_row_per_model_and_reason_of_failure(one_word_corpus, model_folders, tmp_path):
    sound, broken = map(str, model_folders)
    flags = (*comparison_flags(one_word_corpus, tmp_path / "c"), "--language", "mr", "--json", *TINY_MODEL[:-2])
    done = checked(run_comparison("--pretrained", broken, "--pretrained", sound, "--presets", "minimal", *flags))
    rows = json.loads(done.stdout)["models"]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text()) == {"models": rows}
    failed, whisper, ours = rows
    assert [row["name"] for row in rows] == ["broken", "sound", "minimal"]
    assert failed["exit_code"] == 4 and "broken" in failed["reason"] and failed["wer"] is None
    for row in (whisper, ours):
        kept = read_record(tmp_path / "c" / row["name"])
        steps = read_steps(tmp_path / "c" / row["name"])
        assert (row["exit_code"], row["reason"], row["decode"]) == (0, None, "greedy")
        assert row["wer"] == kept.summary["test_wer"] > 0 and kept.summary["steps"] == len(steps) == 2
        assert row["minutes"] == pytest.approx(sum(step["seconds"] for step in steps) / 60)
        assert row["seconds_per_step"] == pytest.approx(30 * row["minutes"]) and row["times_real_time"] > 0
        size = os.path.getsize(kept.summary["checkpoint"])
        assert row["peak_memory_mib"] > 50 and row["checkpoint_mib"] == size / 2**20
    assert whisper["parameters"] > whisper["trained_parameters"] > 0  # its positions are not trained
    assert ours["parameters"] == ours["trained_parameters"]
    table = table_of([Outcome(**row) for row in rows]).splitlines()
    assert [line.split()[0] for line in table] == ["model", "broken", "sound", "minimal"]
    assert "failed: " in table[1] and len({len(line) for line in (table[0], *table[2:])}) == 1

    # Repeat without the preset: trained models are not trained again, failed ones are retried.
    log = tmp_path / "c" / "sound" / "logs" / "default" / "log.jsonl"
    before = log.stat().st_mtime_ns
    again = run_comparison(
        "--pretrained", sound, broken, *comparison_flags(one_word_corpus, tmp_path / "c"), "--language", "mr"
    )
    rows = [line.split() for line in again.stdout.splitlines()]
    assert again.returncode == 0 and rows == [table[place].split() for place in (0, 2, 1)], again.stderr
    assert "sound: already trained" in again.stderr and log.stat().st_mtime_ns == before
    assert again.stderr.count("broken: training in") == 1


def read_steps(place: Path) -> list[dict]:
    lines = (place / "logs" / "default" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def test_interrupted_comparison_saves_and_resumes(corpus, tmp_path):
    """Only the comparison gets the signal, as from `kill`; its trainer is a separate process."""
    folder = tmp_path / "c"
    flags = ("--presets", "minimal", *comparison_flags(corpus, folder), *TINY_MODEL[:-2])
    endless = [flag if flag != "2" or flags[place - 1] != "--max_steps" else "4000" for place, flag in enumerate(flags)]
    process = start_script(SCRIPT, *endless, output=tmp_path / "output.txt")
    log, until = folder / "minimal" / "logs" / "default" / "log.jsonl", time.monotonic() + PROCESS_TIMEOUT
    while not (log.is_file() and log.stat().st_size):
        assert process.poll() is None and time.monotonic() < until, (tmp_path / "output.txt").read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PROCESS_TIMEOUT) == 130
    output = (tmp_path / "output.txt").read_text(encoding="utf-8")
    assert (
        "Stopped by a signal at step" in output and "run the same command again" in output and "Traceback" not in output
    )
    assert (folder / "minimal" / "checkpoints" / "checkpoint_last.pt").is_file()
    steps, kept = read_steps(folder / "minimal"), read_record(folder / "minimal")
    assert kept is not None and kept.outcome is None and not (folder / "comparison.json").exists()

    # Different conditions are rejected before any training; equal ones resume.
    rejected = run_comparison(*flags)
    assert rejected.returncode == 2 and "different --max_steps" in rejected.stderr
    write_record(folder / "minimal", dataclasses.replace(kept, conditions={**kept.conditions, "--max_steps": "2"}))
    resumed = checked(run_comparison(*flags))
    assert f"step {len(steps)}" in resumed.stderr and "starting a new run" not in resumed.stderr
    steps_after = read_steps(folder / "minimal")  # steps before the interruption are not repeated
    assert (
        steps_after[: len(steps)] == steps
        and len(steps_after) == max(2, len(steps))
        and read_record(folder / "minimal").is_finished
    )


def candidate_flags(
    *arguments: str, pretrained: tuple[str, ...] = (), presets: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    return [candidate.flags for candidate in choose_candidates(pretrained, presets, flags_in(arguments))]


def test_names_are_last_path_parts_and_made_unique():
    assert distinct_names(["a/tiny", "b/small/"], ["minimal"]) == ["tiny", "small", "minimal"]
    assert distinct_names(["/m/a/tiny", "/m/b/tiny", "c"], []) == ["a-tiny", "b-tiny", "c"]
    assert distinct_names(["/m/a/tiny", "/a/tiny"], []) == ["m-a-tiny", "a-tiny"]
    assert distinct_names(["/u/a-c", "/a/c", "/b/c"], []) == ["u-a-c", "a-c", "b-c"]
    assert distinct_names(["/m/minimal"], ["minimal"]) == ["m-minimal", "preset-minimal"]
    with pytest.raises(UsageError, match="given twice"):
        distinct_names(["/m/tiny", "/m/../m/tiny/"], [])


def test_flags_are_passed_to_models_that_use_them(tmp_path):
    arguments = ("--language", "mr", "--vocab-size=40", "--audio_roots", "x", "y", "--lora_rank", "2")
    folder = str(tmp_path)
    theirs, ours = candidate_flags(*arguments, pretrained=(folder,), presets=("minimal",))
    assert theirs == ("--pretrained", folder, "--language", "mr", "--audio_roots", "x", "y", "--lora_rank", "2")
    assert ours == ("--preset", "minimal", "--vocab-size=40", "--audio_roots", "x", "y")
    # The trainer reports unused flags.
    assert candidate_flags(*arguments, presets=("minimal",)) == [("--preset", "minimal", *arguments)]
    for candidate in choose_candidates((folder,), (), flags_in(arguments)):
        with pytest.raises(UsageError, match="--vocab_size would change it"):
            _ = candidate.config
    for candidate in choose_candidates((), ("minimal",), flags_in(arguments[:2])):
        with pytest.raises(UsageError, match="--language"):
            _ = candidate.config


@pytest.mark.parametrize("flag", ["--checkpoint_dir=x", "--log-dir", "--resume", "--fresh", "--preset", "--init_from"])
def test_flags_of_single_run_are_rejected(flag):
    with pytest.raises(UsageError, match="only for a single run"):
        candidate_flags(flag, "x", presets=("minimal",))


def test_errors_are_reported_once_before_training(corpus, tmp_path):
    presets, folder = ("--presets", "minimal", "optimized"), tmp_path / "c"
    broken = corpus.directory / "absent.jsonl"
    flags = [
        str(broken) if word.endswith(("test.jsonl", "train.jsonl")) else word
        for word in comparison_flags(corpus, folder)
    ]
    done = run_comparison(*presets, *flags)
    assert done.returncode == 3 and done.stderr.count("cannot be read") == 2 and not folder.exists()
    idle = run_comparison(*presets, *comparison_flags(corpus, folder), "--noise_prob", "0.2")
    assert idle.returncode == 2 and idle.stderr.count("has no effect") == 1 and not folder.exists()
    nothing = run_comparison(*comparison_flags(corpus, folder))
    assert nothing.returncode == 2 and "No models to compare" in nothing.stderr
    absent = run_comparison("--pretrained", str(tmp_path / "no"), *comparison_flags(corpus, folder))
    assert absent.returncode == 2 and "not found" in absent.stderr and not folder.exists()
    folder.mkdir()
    (folder / "comparison.json").write_text("mine")
    done = run_comparison(*presets, *comparison_flags(corpus, folder))
    assert done.returncode == 2 and "is not a comparison" in done.stderr
    assert (folder / "comparison.json").read_text() == "mine"


def test_comparison_requires_readable_test_manifest(corpus):
    (candidate,) = choose_candidates((), ("minimal",), flags_in(corpus.flags()))
    with pytest.raises(UsageError, match="--test_manifest"):
        check_data(candidate.config)
    (tested,) = choose_candidates((), ("minimal",), flags_in((*corpus.flags(), "--test_manifest", __file__)))
    with pytest.raises(DataError, match="broken"):
        check_data(tested.config)


@pytest.mark.parametrize(
    "code, errors, reason",
    [
        (
            6,
            ("warning: x", " 50%|##   | 1/2", "Out of memory: no more. Give less."),
            "Out of memory: no more. Give less.",
        ),
        (
            4,
            ("old", "The flags contradict:", "  --a", "  --b", "Leave out."),
            "The flags contradict: --a --b Leave out.",
        ),
        (1, ("Traceback (most recent call last):", '  File "x"', "ValueError: y"), "ValueError: y"),
        (137, ("  3%|   | 1/30",), "Killed (SIGKILL), perhaps by the system for lack of memory."),
        (5, (" 3%|   | 1/30",), "Exit code 5, without a message."),
    ],
)
def test_failure_reason_is_last_message_of_trainer(code, errors, reason):
    assert ProcessResult(code, (), errors).reason == reason


def test_result_file_round_trips_and_truncated_one_is_ignored(tmp_path):
    kept = RunRecord({"--seed": "1"}, {"steps": 2}, Outcome("tiny", "a/tiny", wer=0.5))
    write_record(tmp_path / "tiny", kept)
    assert read_record(tmp_path / "tiny") == kept and read_record(tmp_path) is None
    assert kept.is_finished
    assert kept.differences({"--seed": "1"}) == [] and kept.differences({"--seed": "2"}) == ["--seed"]
    failed = dataclasses.replace(kept, outcome=Outcome("tiny", "a/tiny", exit_code=6, reason="No room."))
    assert not failed.is_finished and failed.differences({"--seed": "2"}) == []
    assert failed.differences({"--pretrained": "'b/tiny'"}) == ["--pretrained"]
    (tmp_path / "tiny" / RECORD).write_text('{"conditions": {')
    assert read_record(tmp_path / "tiny") is None
