"""compare_models.py trains each model once, in order, and handles failed and stopped models."""

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from konkanivani.child_process import Ended
from konkanivani.errors import DataError, UsageError
from konkanivani.recipe.comparison import (
    KEPT,
    Kept,
    Outcome,
    check_data,
    choose_candidates,
    distinct_names,
    flags_in,
    read_kept,
    table_of,
    write_kept,
)
from tests.conftest import ROOT, TINY_MODEL, Corpus, checked, start_script, write_corpus
from tests.patience import PATIENCE
from tests.warm import fork_scripts, warm_parent
from tests.whisper.small_model import write_model

SCRIPT = "training_scripts/compare_models.py"
SMALL = ("--device", "cpu", "--num_workers", "0", "--max_steps", "2", "--test_decode", "greedy")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return utterances of one word each, within a window of a second."""
    folder = tmp_path_factory.mktemp("short") / "tones"
    return write_corpus(folder, {"train": 8, "test": 2}, lengths=range(1, 2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two folders of Whisper models, the second with damaged weights."""
    root, shape = tmp_path_factory.mktemp("models"), {"seconds": 1, "layers": (1, 1), "positions": 64}
    paths = tuple(write_model(root / name, ("en", "mr"), **shape) for name in ("sound", "broken"))
    weights = paths[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-400:] = b"\xff" * 400  # NaN; its list of tensors is unchanged
    weights.write_bytes(data)
    return paths


def flags_of(corpus: Corpus, folder: Path) -> tuple[str, ...]:
    manifests = ("--train_manifest", corpus.manifest("train"), "--test_manifest", corpus.manifest("test"))
    return (*manifests, *SMALL, "--folder", str(folder))


def compare(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the comparison to its end, with the trainers in forks."""
    return warm_parent().run(ROOT / SCRIPT, *flags, before=fork_scripts)


def test_each_model_has_its_row_and_one_that_fails_its_reason(short, folders, tmp_path):
    sound, broken = map(str, folders)
    flags = (*flags_of(short, tmp_path / "c"), "--language", "mr", "--json", *TINY_MODEL[:-2])
    done = checked(compare("--pretrained", broken, "--pretrained", sound, "--presets", "minimal", *flags))
    rows = json.loads(done.stdout)["models"]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text()) == {"models": rows}
    failed, whisper, ours = rows
    assert [row["name"] for row in rows] == ["broken", "sound", "minimal"]
    assert failed["exit_code"] == 4 and "broken" in failed["reason"] and failed["wer"] is None
    for row in (whisper, ours):
        kept = read_kept(tmp_path / "c" / row["name"])
        steps = read_log_of(tmp_path / "c" / row["name"])
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

    # Run again without one of them: trained models are not trained again, failed ones are retried.
    log = tmp_path / "c" / "sound" / "logs" / "default" / "log.jsonl"
    before = log.stat().st_mtime_ns
    again = compare("--pretrained", sound, broken, *flags_of(short, tmp_path / "c"), "--language", "mr")
    said = [line.split() for line in again.stdout.splitlines()]
    assert again.returncode == 0 and said == [table[place].split() for place in (0, 2, 1)], again.stderr
    assert "sound: already trained" in again.stderr and log.stat().st_mtime_ns == before
    assert again.stderr.count("broken: training in") == 1


def read_log_of(place: Path) -> list[dict]:
    lines = (place / "logs" / "default" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def test_a_stopped_comparison_has_saved_and_goes_on(corpus, tmp_path):
    """The signal reaches only the comparison, as from `kill`; its trainer is a separate interpreter."""
    folder = tmp_path / "c"
    flags = ("--presets", "minimal", *flags_of(corpus, folder), *TINY_MODEL[:-2])
    endless = [flag if flag != "2" or flags[place - 1] != "--max_steps" else "4000" for place, flag in enumerate(flags)]
    process = start_script(SCRIPT, *endless, output=tmp_path / "said.txt")
    log, until = folder / "minimal" / "logs" / "default" / "log.jsonl", time.monotonic() + PATIENCE
    while not (log.is_file() and log.stat().st_size):
        assert process.poll() is None and time.monotonic() < until, (tmp_path / "said.txt").read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    said = (tmp_path / "said.txt").read_text(encoding="utf-8")
    assert "Stopped by a signal at step" in said and "run the same command again" in said and "Traceback" not in said
    assert (folder / "minimal" / "checkpoints" / "checkpoint_last.pt").is_file()
    steps, kept = read_log_of(folder / "minimal"), read_kept(folder / "minimal")
    assert kept is not None and kept.outcome is None and not (folder / "comparison.json").exists()

    # Different conditions are refused before any training; equal ones resume.
    refused = compare(*flags)
    assert refused.returncode == 2 and "different --max_steps" in refused.stderr
    write_kept(folder / "minimal", dataclasses.replace(kept, conditions={**kept.conditions, "--max_steps": "2"}))
    gone_on = checked(compare(*flags))
    assert f"step {len(steps)}" in gone_on.stderr and "starting a new run" not in gone_on.stderr
    made = read_log_of(folder / "minimal")  # steps from before the stop are not repeated
    assert made[: len(steps)] == steps and len(made) == max(2, len(steps)) and read_kept(folder / "minimal").is_finished


def choose(*arguments: str, pretrained: tuple[str, ...] = (), presets: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [candidate.flags for candidate in choose_candidates(pretrained, presets, flags_in(arguments))]


def test_names_are_the_last_parts_made_different_where_two_are_alike():
    assert distinct_names(["a/tiny", "b/small/"], ["minimal"]) == ["tiny", "small", "minimal"]
    assert distinct_names(["/m/a/tiny", "/m/b/tiny", "c"], []) == ["a-tiny", "b-tiny", "c"]
    assert distinct_names(["/m/a/tiny", "/a/tiny"], []) == ["m-a-tiny", "a-tiny"]
    assert distinct_names(["/u/a-c", "/a/c", "/b/c"], []) == ["u-a-c", "a-c", "b-c"]
    assert distinct_names(["/m/minimal"], ["minimal"]) == ["m-minimal", "preset-minimal"]
    with pytest.raises(UsageError, match="given twice"):
        distinct_names(["/m/tiny", "/m/../m/tiny/"], [])


def test_flags_go_to_the_models_that_they_concern(tmp_path):
    said = ("--language", "mr", "--vocab-size=40", "--audio_roots", "x", "y", "--lora_rank", "2")
    folder = str(tmp_path)
    theirs, ours = choose(*said, pretrained=(folder,), presets=("minimal",))
    assert theirs == ("--pretrained", folder, "--language", "mr", "--audio_roots", "x", "y", "--lora_rank", "2")
    assert ours == ("--preset", "minimal", "--vocab-size=40", "--audio_roots", "x", "y")
    # The trainer reports unused flags.
    assert choose(*said, presets=("minimal",)) == [("--preset", "minimal", *said)]
    for candidate in choose_candidates((folder,), (), flags_in(said)):
        with pytest.raises(UsageError, match="--vocab_size would change it"):
            _ = candidate.config
    for candidate in choose_candidates((), ("minimal",), flags_in(said[:2])):
        with pytest.raises(UsageError, match="--language"):
            _ = candidate.config


@pytest.mark.parametrize("flag", ["--checkpoint_dir=x", "--log-dir", "--resume", "--fresh", "--preset", "--init_from"])
def test_what_is_of_a_single_run_is_refused(flag):
    with pytest.raises(UsageError, match="only for a single run"):
        choose(flag, "x", presets=("minimal",))


def test_what_is_wrong_is_told_once_before_anything_is_trained(corpus, tmp_path):
    presets, folder = ("--presets", "minimal", "optimized"), tmp_path / "c"
    broken = corpus.directory / "absent.jsonl"
    flags = [str(broken) if word.endswith(("test.jsonl", "train.jsonl")) else word for word in flags_of(corpus, folder)]
    done = compare(*presets, *flags)
    assert done.returncode == 3 and done.stderr.count("cannot be read") == 2 and not folder.exists()
    idle = compare(*presets, *flags_of(corpus, folder), "--noise_prob", "0.2")
    assert idle.returncode == 2 and idle.stderr.count("has no effect") == 1 and not folder.exists()
    nothing = compare(*flags_of(corpus, folder))
    assert nothing.returncode == 2 and "No models to compare" in nothing.stderr
    absent = compare("--pretrained", str(tmp_path / "no"), *flags_of(corpus, folder))
    assert absent.returncode == 2 and "not found" in absent.stderr and not folder.exists()
    folder.mkdir()
    (folder / "comparison.json").write_text("mine")
    done = compare(*presets, *flags_of(corpus, folder))
    assert done.returncode == 2 and "is not a comparison" in done.stderr
    assert (folder / "comparison.json").read_text() == "mine"


def test_without_a_test_manifest_there_is_nothing_to_compare_by(corpus):
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
def test_the_reason_is_the_trainers_last_word(code, errors, reason):
    assert Ended(code, (), errors).reason == reason


def test_what_is_kept_is_read_back_and_a_torn_file_is_nothing(tmp_path):
    kept = Kept({"--seed": "1"}, {"steps": 2}, Outcome("tiny", "a/tiny", wer=0.5))
    write_kept(tmp_path / "tiny", kept)
    assert read_kept(tmp_path / "tiny") == kept and read_kept(tmp_path) is None
    assert kept.is_finished
    assert kept.differences({"--seed": "1"}) == [] and kept.differences({"--seed": "2"}) == ["--seed"]
    failed = dataclasses.replace(kept, outcome=Outcome("tiny", "a/tiny", exit_code=6, reason="No room."))
    assert not failed.is_finished and failed.differences({"--seed": "2"}) == []
    assert failed.differences({"--pretrained": "'b/tiny'"}) == ["--pretrained"]
    (tmp_path / "tiny" / KEPT).write_text('{"conditions": {')
    assert read_kept(tmp_path / "tiny") is None
