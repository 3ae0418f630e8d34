"""Invalid input gives one clear message, the exit code of its category, and no partial file."""

import json
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, ScoreKind, read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST, Checkpointer
from konkanivani.config import RunConfig, TrainConfig
from konkanivani.data.filtering import Limits, reason_to_reject
from konkanivani.data.index import Utterance
from konkanivani.data.manifest import read_manifest
from konkanivani.distributed import ALONE
from konkanivani.errors import CheckpointError, DataError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import PeriodicSaver, train
from konkanivani.training.run import TrainState
from tests.conftest import TINY_MODEL, checked, run_folders, run_trainer, write_corpus
from tests.run_setup import begin_run, parse_flags


def run_rejected(code: int, directory: Path, *flags: str) -> str:
    """Run the real script, which must exit with `code` and leave no partial file in `directory`; return its stderr."""
    done = run_trainer(*flags, *run_folders(directory), cwd=directory)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    assert partial_files(directory) == []
    return done.stderr


def partial_files(directory: Path) -> list[Path]:
    return [*directory.rglob("*.partial"), *directory.rglob("*.tmp")]


def run_rejected_in_process(kind: type[KonkaniVaniError], directory: Path, *flags: str) -> str:
    """Train in this process, which must raise `kind` and leave no partial file; return the error message."""
    with pytest.raises(kind) as caught:
        train(build_run(begin_run([*TINY_MODEL, *flags, *run_folders(directory)])))
    assert partial_files(directory) == []
    return str(caught.value)


# Usage: 2


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--train_manifst", "x.jsonl"), ("--train_manifst", "--train_manifest")),
        (("--learning-rte", "1"), ("--learning-rte", "--learning_rate")),
        (("--epochs", "many"), ("--epochs", "many")),
        (("--preset", "huge"), ("huge", "minimal")),
        (("--resume", "auto", "--fresh"), ("--resume", "--fresh", "give only one of them")),
        (
            ("--d_model", "33", "--dropout", "2", "--epochs", "0", "--learning_rate", "nan", "--run_name", "a/b"),
            ("--d_model 33", "--dropout must", "--epochs must", "--learning_rate must be a finite", "--run_name must"),
        ),
    ],
    ids=["mistyped", "nearest", "type", "choice", "contradiction", "several"],
)
def test_invalid_flags_exit_with_2_before_torch_is_imported(tmp_path, tmp_path_factory, monkeypatch, flags, expected):
    shadowing = tmp_path_factory.mktemp("shadowing")
    (shadowing / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(shadowing))
    message = run_rejected(2, tmp_path, *flags)
    assert all(part in message for part in expected), message
    assert list(tmp_path.iterdir()) == []


def test_missing_device_and_missing_manifest_exit_with_2(corpus, tmp_path):
    assert "--device cpu" in run_rejected(2, tmp_path, "--device", "cuda", *corpus.flags())
    assert "prepare_builtin_corpus.py" in run_rejected(2, tmp_path, "--device", "cpu")


@pytest.mark.parametrize("name, value", [("dropout", "1"), ("epochs", "0"), ("keep_checkpoints", "1"), ("seed", "-1")])
def test_boundary_values_of_flags_are_checked(name, value):
    with pytest.raises(UsageError, match=f"--{name} must"):
        parse_flags([f"--{name}", value])
    allowed = {"dropout": "0", "epochs": "1", "keep_checkpoints": "2", "seed": "0"}[name]
    parse_flags([f"--{name}", allowed])


# Data: 3

GOOD_ROW = {"audio_filepath": "a.flac", "duration": 1.0, "text": "एक"}
MANIFESTS = {
    "empty": (b"", "empty"),
    "blank": (b"\n \n", "empty"),
    "broken": (b'\n{"audio_filepath": "a', "row 3: not a line of JSON"),
    "list": (b"\n[1]", "row 3: a list, but a JSON object"),
    "number": (b"\n3", "row 3: a int, but a JSON object"),
    "missing audio": (b'\n{"duration": 1, "text": "a"}', "row 3: audio_filepath must be"),
    "missing text": (b'\n{"audio_filepath": "a", "duration": 1}', "row 3: text must be"),
    "missing duration": (b'\n{"audio_filepath": "a", "text": "a"}', "row 3: duration must be"),
    "text is a number": (b'\n{"audio_filepath": "a", "duration": 1, "text": 5}', "row 3: text must be"),
    "duration in quotes": (b'\n{"audio_filepath": "a", "duration": "1", "text": "a"}', "row 3: duration must be"),
    "duration is true": (b'\n{"audio_filepath": "a", "duration": true, "text": "a"}', "row 3: duration must be"),
    "NaN duration": (b'\n{"audio_filepath": "a", "duration": NaN, "text": "a"}', "row 3: duration must be"),
    "infinite": (b'\n{"audio_filepath": "a", "duration": 1e999, "text": "a"}', "row 3: duration must be"),
    "negative": (b'\n{"audio_filepath": "a", "duration": -1, "text": "a"}', "row 3: duration must be"),
    "huge": (b'\n{"audio_filepath": "a", "duration": 1' + b"0" * 400 + b', "text": "a"}', "row 3: duration must be"),
    "audio with NUL": (b'\n{"audio_filepath": "a\\u0000", "duration": 1, "text": "a"}', "row 3: audio_filepath must"),
    "latin-1": (b'\n{"audio_filepath": "caf\xe9", "duration": 1, "text": "a"}', "row 3: not UTF-8"),
    "binary": (b"\n" + bytes(range(11, 256)), "row 3: not UTF-8"),
    "table": (b"\nText", "row 3: not a line of JSON (Expecting value: line 1 column 1 (char 0)); konkanivani prepare"),
    "nested": (b"\n" + b"[" * 100_000, "row 3: not a line of JSON"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_invalid_manifest_row_is_skipped_with_number_and_reason(name, tmp_path):
    path = tmp_path / "train.jsonl"
    content, expected = MANIFESTS[name]
    good = b"" if expected == "empty" else json.dumps(GOOD_ROW).encode() + b"\n"
    path.write_bytes(good + content)
    (tmp_path / "a.flac").touch()
    if not good:
        with pytest.raises(DataError, match="is empty"):
            read_manifest(path)
        return
    manifest = read_manifest(path)
    (broken,) = manifest.broken
    assert f"row {broken.row}: {broken.reason}".startswith(expected) and len(manifest) == 1
    assert "\n" not in broken.reason and len(broken.reason) < 1000


def test_manifest_with_bom_blank_lines_and_crlf_is_read(tmp_path):
    path = tmp_path / "train.jsonl"
    (tmp_path / "a.flac").touch()
    row = json.dumps(GOOD_ROW, ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row + b"\r\n")
    assert [u.text for u in list(read_manifest(path))] == ["एक", "एक"]


def test_unreadable_manifest_and_missing_audio_exit_with_3(corpus, tmp_path):
    missing = str(tmp_path / "nowhere.jsonl")
    assert "nowhere.jsonl cannot be read" in run_rejected(3, tmp_path, *TINY_MODEL, "--train_manifest", missing)
    assert "directory" in run_rejected_in_process(
        DataError, tmp_path / "other", "--train_manifest", str(corpus.directory)
    )
    row = json.dumps(GOOD_ROW)
    (tmp_path / "train.jsonl").write_text(row + "\n")
    message = run_rejected(3, tmp_path, *TINY_MODEL, "--train_manifest", str(tmp_path / "train.jsonl"))
    assert "row 1, a.flac: the audio file does not exist" in message and "Fix or delete them" in message


def test_rejecting_all_utterances_raises_data_error(corpus, tmp_path):
    message = run_rejected_in_process(DataError, tmp_path, *corpus.flags(), "--min_duration", "19")
    assert "None of the 26 utterances" in message and "--min_duration 19" in message


def _write_truncated_flac(path: Path) -> None:
    whole = next(path.parent.glob("*.flac")).read_bytes()
    path.write_bytes(whole[: len(whole) * 6 // 10])


def _write_nan(path: Path) -> None:
    samples = np.zeros(48_000, np.float32)
    samples[100] = np.nan
    soundfile.write(path, samples, 16_000, subtype="FLOAT")


def _write_silence(*shape: int) -> Callable[[Path], None]:
    return lambda path: soundfile.write(path, np.zeros(shape), 16_000)


SHORT_RUN = ("--batch_size", "2", "--gradient_accumulation_steps", "1", "--epochs", "1")


def test_unusable_utterances_are_skipped_counted_and_listed(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 10})
    path = Path(corpus.manifest("train"))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[1]["duration"] = 30.0
    rows[3]["duration"] = 0.1
    rows[5]["text"] = "! ।"
    rows[7]["text"] = "एक " * 60
    rows[9]["text"] = "एक " * 200  # 60 tokens exceed the CTC limit, 200 --max_tokens
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")  # a blank line counts as a row
    flags = ("--train_manifest", str(path), *SHORT_RUN, "--max_tokens", "150", "--max_steps", "1")
    flags += ("--max_rejected", "10%", "--tokenizer_type", "unigram")
    done = checked(run_trainer(*TINY_MODEL, *flags, *run_folders(tmp_path)))
    assert f"5 utterances of {path} are skipped" in done.stdout
    assert "  1 x longer than --max_duration 20 s\n  1 x shorter than --min_duration 0.2 s\n" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "runs/default/rejected.jsonl").read_text().splitlines()]
    assert [r["row"] for r in results] == [3, 7, 11, 15, 19]
    assert [r["audio_filepath"] for r in results] == [rows[i]["audio_filepath"] for i in (1, 3, 5, 7, 9)]
    reasons = (
        "max_duration 20 s",
        "shorter than --min_duration",
        "empty",
        "CTC cannot align",
        "more than --max_tokens",
    )
    assert all(part in r["reason"] for part, r in zip(reasons, results, strict=True)), results


def _write_header_of_four_gigabytes(path: Path) -> None:
    soundfile.write(path, np.zeros(48_000), 16_000)
    whole = bytearray(path.read_bytes())
    place = whole.index(b"data") + 4
    whole[place : place + 4] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(bytes(whole[:60_000]))


HOSTILE: dict[str, tuple[Callable[[Path], object], dict[str, object], str]] = {
    "missing": (lambda path: None, {}, "does not exist"),
    "corrupt": (_write_truncated_flac, {}, "is truncated|cannot be|flac|lasts"),
    "4 GB": (_write_header_of_four_gigabytes, {}, "lasts|cannot be|is truncated|states"),
    "NaN": (_write_nan, {}, "NaN or infinite"),
    "channels": (_write_silence(4800, 1024), {"duration": 0.3}, "1024 channels|channels"),
    "three hours": (_write_nan, {"duration": 10_800.0}, "longer than --max_duration 20 s"),
    "other duration": (_write_silence(16_000), {}, "lasts 1.00 s, not 3.00 s"),
    "empty": (_write_nan, {"text": " ।"}, "empty after normalisation"),
    "control": (_write_nan, {"text": "एक\x07"}, "U+0007"),
    "escape": (_write_nan, {"text": "एक\x1b[2J"}, "U+001B"),
}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_training_skips_all_defective_rows_of_hostile_corpus(workers, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 20})
    path = Path(corpus.manifest("train"))
    lines = path.read_text(encoding="utf-8").splitlines()
    for name, (write, fields, _) in HOSTILE.items():
        audio = corpus.directory / "audio" / f"{name}.wav"
        write(audio)
        row = {"audio_filepath": f"audio/{name}.wav", "duration": 3.0, "text": "एक दोन", **fields}
        lines.append(json.dumps(row))
    content = "\n".join(lines).encode() + b'\n{"audio_filepath": "a", "duration": 1, "text": "caf\xe9"}\n'
    path.write_bytes(content)
    flags = ("--train_manifest", str(path), "--batch_size", "4", "--gradient_accumulation_steps", "2")
    flags += ("--epochs", "2", "--tokenizer_type", "unigram", "--num_workers", workers)
    message = run_rejected_in_process(DataError, tmp_path / "no", *flags)
    assert "of the 31 rows" in message and "--max_rejected" in message
    checked(run_trainer(*TINY_MODEL, *flags, *run_folders(tmp_path), "--max_rejected", "35%"))
    values = {}
    for line in (tmp_path / "runs/default/rejected.jsonl").read_text(encoding="utf-8").splitlines():
        rejection = json.loads(line)
        assert rejection["row"] not in values  # reported once, although both epochs read the row
        values[rejection["row"]] = rejection
    assert sorted(values) == list(range(21, 32))
    for row, (name, (_, _, expected)) in enumerate(HOSTILE.items(), start=21):
        assert values[row]["audio_filepath"] == f"audio/{name}.wav"
        assert any(part in values[row]["reason"] for part in expected.split("|")), values[row]
    assert values[31]["reason"] == "not UTF-8"


def test_utterance_is_rejected_when_ctc_has_one_frame_too_few():
    limits = Limits(0.0, 20.0, 400, 1.1)
    one_second = Utterance("a", "a", 1.0, "text")
    # 16000 / 1.1 -> 14546 samples -> 1 + 14034 // 160 = 88 frames -> (87 // 2 - 1) // 2 = 21 encoder frames
    assert reason_to_reject(one_second, list(range(4, 25)), limits) is None
    assert "22 tokens" in reason_to_reject(one_second, list(range(4, 26)), limits)
    assert "CTC" in reason_to_reject(one_second, [4, 4, *range(5, 24)], limits)  # 21 tokens and a repeat


# Checkpoints: 4


def small_checkpoint(step: int = 1) -> Checkpoint:
    states = {"model": {"weight": torch.arange(2000.0)}, "progress": {"step": step}}
    return Checkpoint("--epochs 3\n", b"tokenizer", 30, step, 7, states)


class HostilePickle:
    """Object that creates a file when unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def save_with_torch(content: object, **options: bool) -> Callable[[Path, bytes], None]:
    return lambda path, _: torch.save(content, path, **options)


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda path, _: path.write_bytes(b""),
    "cut in half": lambda path, whole: path.write_bytes(whole[: len(whole) // 2]),
    "cut at the end": lambda path, whole: path.write_bytes(whole[: int(len(whole) * 0.999)]),
    "foreign pickle": save_with_torch({"weights": torch.zeros(3)}),
    "tensor": save_with_torch(torch.zeros(3)),
    "old pickle": save_with_torch({"format": 1}, _use_new_zipfile_serialization=False),
    "newer format": save_with_torch({"format": 99}),
    "fields missing": save_with_torch({"format": 1, "config": ""}),
    "hostile": lambda path, _: torch.save({"format": 1, "config": HostilePickle(path.parent / "exploded")}, path),
    "text": lambda path, _: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
}


def damage(path: Path, how: str) -> None:
    DAMAGES[how](path, path.read_bytes())


@pytest.mark.parametrize("how", DAMAGES)
def test_invalid_checkpoint_file_is_rejected_by_path(how, tmp_path):
    path = tmp_path / LAST
    write_checkpoint(path, small_checkpoint())
    read_checkpoint(path)  # valid before the damage
    damage(path, how)
    before = path.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [LAST]  # no code was executed, no other file is left


def test_negative_control_hostile_pickle_runs_code_if_unpickled(tmp_path):
    path = tmp_path / LAST
    created_by_pickle = path.with_name("exploded")
    torch.save({"format": 1, "config": HostilePickle(created_by_pickle)}, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(path, weights_only=False)  # noqa: TID251
    assert created_by_pickle.exists()


def test_newest_valid_checkpoint_is_read_and_damaged_one_is_renamed(tmp_path, capsys):
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in (1, 2):
        checkpointer.save(small_checkpoint(step))
    damage(tmp_path / LAST, "cut in half")
    path, checkpoint = checkpointer.read_newest_sound()
    assert (path.name, checkpoint.step) == ("checkpoint_previous.pt", 1)
    assert LAST in capsys.readouterr().out
    assert (tmp_path / (LAST + ".damaged")).exists() and not (tmp_path / LAST).exists()


def test_run_with_only_damaged_checkpoints_requires_fresh(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=3)
    checkpointer.save(small_checkpoint())
    damage(tmp_path / LAST, "empty")
    for _ in range(2):  # a restart loop must not find an empty folder the second time
        with pytest.raises(CheckpointError, match="--fresh"):
            checkpointer.read_newest_sound()
    assert checkpointer.has_checkpoints()
    assert checkpointer.move_aside() is not None
    assert checkpointer.read_newest_sound() is None


def test_resuming_damaged_checkpoint_exits_with_4(corpus, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    write_checkpoint(folder / LAST, small_checkpoint())
    damage(folder / LAST, "hostile")
    message = run_rejected(4, tmp_path, *corpus.flags(), "--resume", str(folder / LAST))
    assert str(folder / LAST) in message and "--resume auto" in message
    assert (folder / LAST).exists() and not (folder / "exploded").exists()
    message = run_rejected(4, tmp_path, *TINY_MODEL, *corpus.flags(), "--resume", "auto")
    assert "--fresh" in message
    assert (folder / (LAST + ".damaged")).exists() and not (folder / "exploded").exists()


@pytest.mark.parametrize("name", ["nowhere.pt", "folder"])
def test_missing_checkpoint_or_folder_is_rejected(name, tmp_path):
    (tmp_path / "folder").mkdir()
    hint = "--checkpoint_dir .*folder --resume auto" if name == "folder" else "Give the path"
    with pytest.raises(CheckpointError, match=f"no checkpoint at .*{name}.*{hint}"):
        read_checkpoint(tmp_path / name)


# Resources: 6


def test_unwritable_output_folders_exit_with_6(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    inside = str(tmp_path / "file" / "folder")
    done = run_trainer(*TINY_MODEL, *corpus.flags(), "--checkpoint_dir", inside, "--log_dir", str(tmp_path / "runs"))
    assert done.returncode == 6 and "Choose another --checkpoint_dir" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ResourceError, match="Choose another --log_dir"):
        flags = ("--checkpoint_dir", str(tmp_path / "checkpoints"), "--log_dir", inside)
        build_run(begin_run([*TINY_MODEL, *corpus.flags(), *flags]))


class FlakyRun:
    """Parts of a run that `PeriodicSaver` uses; the disk is full at the saves numbered in `failing`."""

    def __init__(self, failing: set[int]):
        self.failing, self.saves = failing, 0
        self.topology, self.is_sharded = ALONE, False
        self.logs = self.storage = self.logbook = self.checkpointer = self.monitor = self
        self.state = TrainState()
        self.phases: list[str] = []
        self.config = TrainConfig()

    def flush(self) -> None: ...

    def end_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def checkpoint(self) -> None: ...

    def save(self, *_: object) -> None:
        self.saves += 1
        if self.saves in self.failing:
            raise ResourceError("The disk is full.")


def test_failed_save_warns_and_third_in_a_row_raises(capsys):
    saver = PeriodicSaver(FlakyRun({1, 2, 4, 5, 6}))
    for _ in range(5):
        saver.save()
    assert capsys.readouterr().out.count("The disk is full. Training continues") == 4
    with pytest.raises(ResourceError, match="disk is full"):
        saver.save()
    assert saver.run.phases == ["save"] * 6, "a failed save uses memory too"


def test_skipped_step_does_not_save_again():
    run = FlakyRun(set())
    run.config = TrainConfig(run=RunConfig(save_steps=2, save_minutes=0))
    saver = PeriodicSaver(run)
    saves = []
    for step in (0, 0, 1, 2, 2, 2, 3, 4):
        run.state.step = step
        saver.save_if_due()
        saves.append(run.saves)
    assert saves == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("third, best, without_improvement", [(0.7, 0.7, 0), (0.95, 0.9, 2)])
def test_failed_save_of_the_best_epoch_leaves_the_score_of_the_stored_one(
    corpus, tmp_path, third, best, without_improvement
):
    """Scores 0.9, 0.5 (its save fails), and a third: it is compared with the best of the stored ones."""
    run = build_run(begin_run([*TINY_MODEL, *corpus.flags(), *run_folders(tmp_path), "--epochs", "3"]))
    scores = iter((0.9, 0.5, third))
    saved = []
    save = Checkpointer.save

    def failing_save(
        self: Checkpointer, checkpoint: Checkpoint, epoch: int | None = None, is_best: bool = False
    ) -> Path:
        saved.append((epoch, is_best))
        if epoch == 2:
            raise ResourceError("The disk is full.")
        return save(self, checkpoint, epoch, is_best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "konkanivani.training.loop.finish_epoch",
            lambda run, _interruptible: run.state.finish_epoch(next(scores), ScoreKind.CER),
        )
        patch.setattr(Checkpointer, "save", failing_save)
        train(run)
    assert [each for each in saved if each[0] is not None] == [(1, True), (2, True), (3, third < 0.9)]
    assert run.state.best_score == best
    assert run.state.epochs_without_improvement == without_improvement


def test_failed_final_save_raises():
    with pytest.raises(ResourceError, match="disk is full"):
        PeriodicSaver(FlakyRun({1})).save(is_final=True)


# Numerics: 5


def test_non_finite_gradients_exit_with_5(corpus, tmp_path):
    flags = ("--train_manifest", corpus.manifest("train"), "--learning_rate", "1e30", "--warmup_steps", "0")
    more = ("--epochs", "2", "--batch_size", "1", "--gradient_accumulation_steps", "1", "--num_workers", "0")
    message = run_rejected(5, tmp_path, *TINY_MODEL, *flags, *more)
    assert "--learning_rate" in message and "not finite" in message
    for path in (tmp_path / "checkpoints").glob("*.pt"):
        weights = read_checkpoint(path).states["model"].values()
        assert all(math.isfinite(w.abs().max()) for w in weights if w.is_floating_point()), path


def test_negative_control_valid_input_exits_with_0(corpus, tmp_path):
    done = run_trainer(*TINY_MODEL, *corpus.flags(), *run_folders(tmp_path), "--max_steps", "1", "--num_workers", "0")
    assert done.returncode == 0, done.stderr
    summary = done.stdout.splitlines()[-1]
    assert json.loads(summary)["steps"] == 1
    assert json.loads(summary)["best_valid_score"] is None and "NaN" not in summary and "Infinity" not in summary
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["konkanivani.training.loop.log_step", "konkanivani.training.validation.rates_over"])
def test_unexpected_error_terminates_audio_workers(where, corpus, tmp_path, monkeypatch):
    """Workers ignore SIGTERM: a worker that is still alive would block the process after its traceback."""
    seen = []

    def fail(*_: object) -> None:
        seen.append(len(multiprocessing.active_children()))
        raise ZeroDivisionError

    monkeypatch.setattr(where, fail)
    flags = ("--batch_size", "13", "--gradient_accumulation_steps", "1", "--epochs", "2", "--num_workers", "1")
    run = build_run(begin_run([*TINY_MODEL, *corpus.flags(), *flags, *run_folders(tmp_path)]))
    with pytest.raises(ZeroDivisionError):
        train(run)
    assert seen[0] > 0 and multiprocessing.active_children() == []
