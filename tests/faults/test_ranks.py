"""Several ranks of the real script: killed, out of memory, with different flags, or too many."""

import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from konkanivani.config import DataConfig, PretrainedConfig, RunConfig, TrainConfig
from konkanivani.distributed import ALONE, Topology, read_topology
from konkanivani.errors import UsageError
from konkanivani.flags import CorpusSize, resolve
from konkanivani.recipe.preflight import check_global_batch, check_ranks, take_card
from tests.conftest import (
    TINY_MODEL,
    TRAINER,
    Corpus,
    checked,
    mark_full,
    read_log,
    run_folders,
    run_trainer,
    write_corpus,
)
from tests.faults.under_torchrun import (
    RankRun,
    kill_ranks,
    limit_memory_of_rank_1,
    rank_run_differences,
    run_ranks,
    train_undisturbed,
)
from tests.fork_server import ROOT, Fork, Job, fork_server
from tests.invariants.ranks import environments_of
from tests.timeouts import PROCESS_TIMEOUT

TWO = Topology(rank=0, world_size=2, local_rank=0, local_world_size=2)


@pytest.mark.parametrize("is_cold", [False, *mark_full(True)], ids=["forks", "by its command line"])
def test_run_with_a_killed_and_restarted_rank_equals_undisturbed_run(is_cold, corpus, tmp_path):
    killed = RankRun(corpus, tmp_path / "killed", steps=8, is_cold=is_cold)
    assert len(kill_ranks(killed, 1, random.Random(2))) == 1  # during training
    output = (tmp_path / "killed" / "output.txt").read_text(encoding="utf-8")
    assert output.count("not responding") == 1
    assert rank_run_differences(killed, train_undisturbed(RankRun(corpus, tmp_path / "undisturbed", steps=8))) == []


def test_sharded_ranks_then_one_process_equal_a_single_process_run(tmp_path):
    broken = corpus_with_broken_recording(tmp_path / "corpus")
    steady = ("--schedule", "inverse_sqrt", "--warmup_steps", "1", "--batch_size", "2", "--dropout", "0")
    flags = (*TINY_MODEL, *broken.flags(), *steady, "--gradient_accumulation_steps", "2", "--max_rejected", "10%")
    flags += ("--test_manifest", broken.manifest("test"), "--test_decode", "greedy", "--num_workers", "1")
    checked(run_trainer(*flags, *run_folders(tmp_path / "one"), "--max_steps", "9"))
    shared = (*flags, *run_folders(tmp_path / "ranks"), "--resume", "auto")
    output = run_ranks(tmp_path / "output.txt", 2, *shared, "--max_steps", "4", "--shard", "always")
    assert output.count("Skipped: ") == 1 and output.count('"test_wer"') == 1
    assert len(read_log(tmp_path / "ranks", "validation")[0]["rank_peaks_mib"]) == 2
    checked(run_trainer(*shared, "--max_steps", "9"))
    for kind, name in (("step", "loss"), ("validation", "loss"), ("validation", "cer"), ("step", "tokens")):
        alone, ranks = ([record[name] for record in read_log(tmp_path / run, kind)] for run in ("one", "ranks"))
        assert ranks == pytest.approx(alone, rel=1e-4), name
    rejected = [(tmp_path / run / "runs" / "default" / "rejected.jsonl").read_text() for run in ("one", "ranks")]
    assert rejected[0] == rejected[1] and rejected[0].count("\n") == 1


def corpus_with_broken_recording(directory: Path) -> Corpus:
    """Write a corpus of three steps with a training recording that is broken after its first half."""
    corpus = write_corpus(directory, {"train": 12, "valid": 3, "test": 3})
    path = directory / "audio" / "train_005.flac"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    return corpus


@pytest.mark.full
def test_sharded_run_restarts_with_smaller_micro_batches_after_oom(corpus, tmp_path):
    run = RankRun(corpus, tmp_path, sharded=True, steps=1)
    flags = (*run.flags(), "--batch_size", "4")
    output = run_ranks(tmp_path / "output.txt", 2, *flags, restarts=2, before=limit_memory_of_rank_1)
    sizes = re.findall(
        r"Out of memory at (.*) \(the test's memory is full\) with weights sharded over the ranks", output
    )
    assert len(sizes) > 1 and len(sizes) == len(set(sizes)), sizes  # each size is reported once
    assert [record["step"] for record in read_log(tmp_path)] == [1]
    assert (tmp_path / "checkpoints" / "did_not_fit_1.json").is_file()
    assert 'Traceback (most recent call last):\n  File "/tmp' not in output


@dataclass(frozen=True)
class RankSetup:
    """Sources, folder and flags of a rank on another machine."""

    sources: Path
    folder: Path
    flags: tuple[str, ...]

    def start(self, environment: dict[str, str], errors: Path) -> Fork | subprocess.Popen:
        """Start the rank; other sources need a new interpreter without imports."""
        if self.sources == ROOT:
            nothing = Path(os.devnull)
            return fork_server().start(
                Job(ROOT / TRAINER, self.flags, nothing, errors, self.folder, environment, threads=1)
            )
        own = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(self.sources)}
        with open(errors, "w") as file:
            command = [sys.executable, "-c", TRAIN, *self.flags]
            return subprocess.Popen(command, cwd=self.folder, env=environment | own, stderr=file)


ONE_RANK_PER_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # one rank per machine
TRAIN = (
    "import sys; from konkanivani.command_line import end_script, run_script; "
    "from konkanivani.flags import parse_args; from konkanivani.recipe.train import train_and_report; "
    "end_script(run_script(lambda: train_and_report(parse_args(sys.argv[1:]))))"
)


def output_of_rejected_ranks(setups: Sequence[RankSetup]) -> str:
    """Return stderr of these ranks, which must all be rejected."""
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder, str(rank)) for rank in range(len(setups))]
        each = zip(setups, environments_of(len(setups)), errors, strict=True)
        ranks = [place.start(environment | ONE_RANK_PER_MACHINE, file) for place, environment, file in each]
        codes = [rank.wait(PROCESS_TIMEOUT) for rank in ranks]
        output = "".join(file.read_text(encoding="utf-8") for file in errors)
    assert codes == [2] * len(ranks), output
    return output


def make_rank_setups(what: str, corpus: Corpus, folder: Path) -> list[RankSetup]:
    """Return two ranks with different flags, code or data."""
    there, sources = folder / "there", ROOT
    shutil.copytree(corpus.directory, there)
    flags = (*TINY_MODEL, "--train_manifest", "train.jsonl", "--valid_manifest", "valid.jsonl", *run_folders(folder))
    here = RankSetup(ROOT, corpus.directory, flags)
    if what == "flags":
        flags += ("--learning_rate", "0.002")
    elif what == "code":
        sources = folder / "sources"
        shutil.copytree(ROOT / "konkanivani", sources / "konkanivani")
        with open(sources / "konkanivani" / "lengths.py", "a", encoding="utf-8") as file:
            file.write("# Mended on this machine only.\n")
    else:
        rows = (there / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (there / "train.jsonl").write_text("".join(rows[1:]), encoding="utf-8")
    return [here, RankSetup(sources, there, flags)]


@pytest.mark.parametrize("what", ["flags", "code", "data"])
def test_differing_ranks_are_all_rejected_with_one_message(what, corpus, tmp_path):
    output = output_of_rejected_ranks(make_rank_setups(what, corpus, tmp_path))
    assert output.count(f"rank 1 has different {what} than rank 0") == 1
    assert output.count("The ranks disagree") == 1 and "Traceback" not in output
    assert not list(tmp_path.glob("checkpoints/*.pt"))


def make_config(batch: int = 2, **run: object) -> TrainConfig:
    data = DataConfig(batch_size=batch, gradient_accumulation_steps=1)
    return TrainConfig(run=RunConfig(**run), data=data)


def test_settings_invalid_for_several_ranks_are_rejected():
    check_ranks(make_config(), TWO)
    with pytest.raises(UsageError, match="the effective batch is 1 utterance, fewer than the 2 ranks"):
        check_ranks(make_config(batch=1), TWO)
    many = Topology(world_size=12, local_world_size=12)
    # With the default flags, the global batch has an utterance for each rank; that of a checkpoint is checked later.
    defaults = TrainConfig()
    tuned = TrainConfig(pretrained=PretrainedConfig(pretrained="folder"))
    for config in (defaults, tuned, dataclasses.replace(make_config(batch=1), run=RunConfig(resume="auto"))):
        check_ranks(config, many)
    for config in (defaults, tuned):
        for hours in (0.1, 1000.0):
            check_global_batch(resolve(config, CorpusSize(hours, 1000, ranks=12)), many)
    with pytest.raises(UsageError, match="the effective batch is 1 utterance, fewer than the 12 ranks"):
        check_global_batch(make_config(batch=1), many)
    restarting = Topology(world_size=2, local_world_size=2, max_restarts=3)
    check_ranks(make_config(resume="auto"), restarting)
    for run in ({"fresh": True}, {"resume": "some.pt"}):
        check_ranks(make_config(**run), TWO)
        with pytest.raises(UsageError, match="would be applied again at each restart"):
            check_ranks(make_config(**run), restarting)


def test_fewer_gpus_than_ranks_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="2 ranks on this machine but only 1 GPU"):
        take_card(TWO)
    take_card(ALONE)


@pytest.mark.parametrize("environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_invalid_rank_environment_is_rejected(environment):
    with pytest.raises(UsageError, match="do not describe a valid rank"):
        read_topology(environment)


def test_topology_defaults_to_one_process_without_rank_environment():
    assert read_topology({"HOME": "/root"}) == ALONE and ALONE.is_single_process
    assert not read_topology({"RANK": "0", "WORLD_SIZE": "1"}).is_single_process
    there = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_topology(there) == Topology(rank=3, world_size=4, local_rank=1, local_world_size=2, is_launched=True)
