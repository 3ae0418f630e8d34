"""Scripts with model names on the hub: training, resuming, evaluation, plan, import; no token is printed."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from konkanivani.checkpoints.checkpoint import read_checkpoint, read_provenance
from konkanivani.flags import config_from_text
from konkanivani.models.hub import locate_model
from tests.conftest import Corpus, mark_full, run_folders, run_script, start_script
from tests.fork_server import ROOT
from tests.hub.conftest import TOKEN
from tests.hub.server import Hub, Repository
from tests.nemo.files import FOLDER
from tests.timeouts import PROCESS_TIMEOUT

NAME = "someone/whisper-small"
TRAIN = "training_scripts/train_konkanivani_asr.py"


def run(code: int, script: str, *arguments: str, cwd: Path = ROOT) -> str:
    """Run a script, check its exit code and that its output has no token, and return the output."""
    done = run_script(script, *arguments, cwd=cwd)
    output = done.stderr + done.stdout
    assert done.returncode == code, output
    assert TOKEN not in output and "Traceback" not in output
    return output


def test_run_stores_model_commit_and_resumes_from_it(hub: Hub, cache: Path, corpus: Corpus, tmp_path: Path) -> None:
    commit = hub.repositories[NAME].commit
    # Frozen weights are not in the checkpoint: they are loaded from the hub.
    flags = (*corpus.flags(), *run_folders(tmp_path), "--device", "cpu", "--num_workers", "0", "--max_duration", "3")
    begin = ("--pretrained", NAME, "--language", "mr", "--freeze", "encoder", "--revision", "main")
    output = run(0, TRAIN, *begin, *flags, "--max_steps", "1")
    assert f"{NAME} (main) is commit {commit}" in output
    checkpoint = tmp_path / "checkpoints" / "checkpoint_last.pt"
    stored = config_from_text(read_checkpoint(checkpoint).config).pretrained
    assert (stored.pretrained, stored.revision) == (NAME, commit)
    # The branch moves to another model; the run uses its stored commit from the cache, without a request.
    hub.repositories[NAME] = Repository({"config.json": b"{}"})
    hub.requests.clear()
    run(0, TRAIN, *begin, *flags, "--resume", str(checkpoint), "--max_steps", "2")
    assert hub.requests == []
    assert config_from_text(read_checkpoint(checkpoint).config).pretrained.revision == commit
    words = run(4, TRAIN, *begin[:-1], "0" * 40, *flags, "--resume", str(checkpoint), "--max_steps", "3")
    assert f"--revision is {'0' * 40} here and {commit} in the checkpoint" in words
    # The export reads frozen weights and tokenizer from the stored commit.
    exported = tmp_path / "exported"
    run(0, "training_scripts/export_asr.py", "--checkpoint", str(checkpoint), "--whisper", str(exported))
    assert (exported / "model.safetensors").is_file() and hub.requests == []
    # So does an export with --pretrained, although main is another model now.
    named = ("--checkpoint", str(checkpoint), "--pretrained", NAME, "--whisper", str(tmp_path / "again"))
    run(0, "training_scripts/export_asr.py", *named)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    # Without the cache, the stored commit is requested, which does not exist any more.
    shutil.rmtree(cache)
    words = run(2, TRAIN, *flags, "--resume", str(checkpoint), "--max_steps", "3")
    assert f"has no branch, tag or commit {commit}" in words


def test_memory_plan_downloads_only_settings(hub: Hub, cache: Path) -> None:
    # The weights alone exceed this budget, so the plan ends before it traces steps, which takes seconds.
    words = run(6, "training_scripts/plan_memory.py", "--pretrained", NAME, "--memory_budget", "1MiB")
    assert "more than the budget of 1 MiB" in words
    assert hub.downloads() == ["config.json", "generation_config.json"]


def test_evaluation_uses_cached_model_offline(
    hub: Hub, cache: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--pretrained", NAME, "--language", "mr", "--manifest", corpus.manifest("test"), "--device", "cpu")
    script = "training_scripts/evaluate_konkanivani_asr.py"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = run(6, script, *flags)
    assert "HF_HUB_OFFLINE is set" in words and hub.requests == []
    locate_model(NAME, None, "whisper")
    hub.requests.clear()
    assert "WER" in run(0, script, *flags)
    assert hub.requests == []


def test_import_stores_name_and_commit(hub: Hub, cache: Path, tmp_path: Path) -> None:
    repository = Repository({"parakeet.nemo": (FOLDER / "parakeet.nemo").read_bytes()})
    hub.repositories["someone/parakeet"] = repository
    output = tmp_path / "imported.pt"
    words = run(0, "training_scripts/import_asr.py", "someone/parakeet", str(output), "--revision", "main")
    source = f"someone/parakeet@{repository.commit}/parakeet.nemo"
    assert source in words and read_provenance(read_checkpoint(output)).file == source


@pytest.mark.parametrize(
    "script, flags, code",
    [
        (TRAIN, ("--language", "mr", "--train_manifest", "train.jsonl"), 2),
        ("training_scripts/plan_memory.py", ("--memory_budget", "2GiB"), 2),
        ("training_scripts/transcribe.py", ("a.wav",), 2),
    ],
)
def test_unknown_model_name_exits_with_2(
    hub: Hub, cache: Path, tmp_path: Path, script: str, flags: tuple[str, ...], code: int
) -> None:
    (tmp_path / "a.wav").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    words = run(code, script, "--pretrained", "someone/typo", *flags, cwd=tmp_path)
    assert "There is no folder someone/typo, and no public repository someone/typo" in words
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "home"] == before


@pytest.mark.parametrize("stop", [*mark_full(signal.SIGINT), signal.SIGTERM])
def test_signal_during_download_leaves_no_partial_file(
    hub: Hub, cache: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    hub.repositories[NAME].faults["model.safetensors"] = "stalled"
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    flags = ("--pretrained", NAME, "--language", "mr", "--device", "cpu", str(tmp_path / "a.wav"))
    process = start_script("training_scripts/transcribe.py", *flags, output=tmp_path / "output")
    assert hub.has_stalled.wait(PROCESS_TIMEOUT)
    os.kill(process.pid, stop)
    assert process.wait(PROCESS_TIMEOUT) in (128 + stop, -stop)
    words = (tmp_path / "output").read_text()
    assert TOKEN not in words and "Traceback" not in words
    assert not list(cache.rglob("model.safetensors")) and not list(cache.rglob("*.incomplete"))
