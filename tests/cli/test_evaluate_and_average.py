"""Evaluate and average the checkpoints of a tiny run of two epochs from the command line."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.averaging import NamedCheckpoint, average_checkpoints, newest_epochs
from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.config import DecodingConfig
from konkanivani.data.audio.effects import condition_named
from konkanivani.data.audio.waveform import load_audio, restore_peaks
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import CheckpointError
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.recipe.evaluation_model import load_evaluation_model, recognize_manifest, recognize_under_conditions
from konkanivani.training.validation import EvaluationSet
from tests.conftest import ROOT, TINY_MODEL, Corpus, checked, run_folders, run_in_process, run_script, run_trainer

EVALUATE = "training_scripts/evaluate_konkanivani_asr.py"
AVERAGE = "training_scripts/average_checkpoints.py"
COUNTS = ("word_errors", "words", "character_errors", "characters")


@dataclass(frozen=True)
class TrainedRun:
    """Checkpoints of a finished run, its test manifest, and its printed summary."""

    checkpoints: Path
    manifest: str
    summary: dict

    def path(self, name: str) -> Path:
        return self.checkpoints / f"checkpoint_{name}.pt"

    def named(self, name: str) -> NamedCheckpoint:
        return NamedCheckpoint(name, read_checkpoint(self.path(name)))


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    directory = tmp_path_factory.mktemp("आमचीं मॉडेलां 1")
    shutil.copytree(corpus.directory / "audio", directory / "audio")
    manifest = directory / "marked.jsonl"
    rows = [json.loads(line) for line in Path(corpus.manifest("test")).read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row |= {"pattern": "seen" if number % 2 else "unseen"}
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = run_trainer(
        *(*TINY_MODEL, *corpus.flags(), *run_folders(directory), "--test_manifest", str(manifest)),
        *("--epochs", "2", "--num_workers", "0", "--learning_rate", "0.003", "--warmup_steps", "2"),
    )
    assert done.returncode == 0 and str(directory) in done.stdout.splitlines()[-1], done.stderr  # unescaped
    return TrainedRun(directory / "checkpoints", str(manifest), json.loads(done.stdout.splitlines()[-1]))


def evaluate(checkpoint: Path, manifest: str, *more: str) -> dict:
    done = checked(run_script(EVALUATE, "--checkpoint", str(checkpoint), "--manifest", manifest, "--json", *more))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def evaluation(trained: TrainedRun) -> dict:
    return evaluate(trained.path("best"), trained.manifest)


def test_rates_equal_training_summary(trained, evaluation):
    for name in ("wer", "cer", "cer_seen_patterns", "cer_unseen_patterns"):
        assert evaluation[name] == pytest.approx(trained.summary[f"test_{name}"], abs=1e-4)


def test_summary_counts_utterances_words_and_characters(trained, evaluation):
    assert evaluation["utterances"] == 5
    assert evaluation["left_out"] == 0
    assert evaluation["words"] == evaluation["words_seen_patterns"] + evaluation["words_unseen_patterns"] > 0
    assert evaluation["wer"] == pytest.approx(evaluation["word_errors"] / evaluation["words"], abs=1e-6)
    assert evaluation["cer"] == pytest.approx(evaluation["character_errors"] / evaluation["characters"], abs=1e-6)
    assert evaluation["seconds"] > 0


def test_hypotheses_keep_manifest_order_and_sum_to_totals(trained, evaluation):
    path = Path(evaluation["hypotheses"])
    assert path == trained.checkpoints / "checkpoint_best.marked.hypotheses.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    references = [json.loads(line) for line in Path(trained.manifest).read_text(encoding="utf-8").splitlines()]
    assert [(r["audio_filepath"], r["reference"]) for r in rows] == [
        (r["audio_filepath"], r["text"]) for r in references
    ]
    assert {name: sum(row[name] for row in rows) for name in COUNTS} == {name: evaluation[name] for name in COUNTS}
    assert list(trained.checkpoints.glob("*.partial")) == []


def test_summary_has_error_types_intervals_speakers_and_durations(evaluation):
    kinds = ("substitutions", "deletions", "insertions")
    assert sum(evaluation[f"word_{kind}"] for kind in kinds) == evaluation["word_errors"]
    assert sum(evaluation[f"character_{kind}"] for kind in kinds) == evaluation["character_errors"]
    rows = [json.loads(line) for line in Path(evaluation["hypotheses"]).read_text(encoding="utf-8").splitlines()]
    low, high = evaluation["cer_interval"]
    if len({row["character_errors"] / row["characters"] for row in rows}) > 1:
        assert low <= evaluation["cer"] <= high
    else:
        assert low is high is None
    assert sum(part["words"] for part in evaluation["durations"]) == evaluation["words"]
    assert (evaluation["interval_unit"], evaluation["normalize"], evaluation["speakers"]) == (
        "utterances",
        "konkanivani",
        [],
    )
    assert evaluation["decoding"]["decode"] == "greedy"


def test_stored_hypotheses_score_equally_and_can_be_compared(trained, evaluation, tmp_path):
    page = tmp_path / "score.html"
    again = checked(run_script(EVALUATE, "--hypotheses", evaluation["hypotheses"], "--json"))
    summary = json.loads(again.stdout)
    assert all(summary[name] == evaluation[name] for name in (*COUNTS, "wer_interval"))
    other = tmp_path / "perfect.jsonl"
    rows = [json.loads(line) for line in Path(evaluation["hypotheses"]).read_text(encoding="utf-8").splitlines()]
    perfect = [json.dumps({"audio_filepath": r["audio_filepath"], "hypothesis": r["reference"]}) for r in rows[1:]]
    other.write_text("\n".join(perfect))
    more = ("--normalize", "spell", "--compare", str(other), "--html", str(page), "--decode", "prefix")
    compared = evaluate(trained.path("best"), trained.manifest, *more)
    assert compared["comparison"]["utterances"] == 4 and compared["comparison"]["other_wer"] == 0
    assert compared["comparison"]["difference"] > 0 and compared["normalize"] == "spell"
    html = page.read_text(encoding="utf-8")
    assert "checkpoint_best.pt, step" in html and "prefix" in html and "Compared" in html
    assert compared["hypotheses"] == evaluation["hypotheses"].replace(
        "marked", "marked.prefix"
    )  # in addition to the greedy hypotheses


BUNDLE = str(ROOT / "tests" / "nemo" / "parakeet.safetensors")
BEST_FLAGS = ("--checkpoint", "{best}", "--manifest")


@pytest.mark.parametrize(
    ("script", "flags", "exit_code", "message"),
    [
        (EVALUATE, ("--checkpoint", "nowhere.pt", "--manifest", "{manifest}"), 4, "no checkpoint at nowhere.pt"),
        (EVALUATE, (*BEST_FLAGS, "{best}"), 3, "rows of"),
        (
            EVALUATE,
            ("--checkpoint", BUNDLE, "--manifest", "{manifest}"),
            4,
            "use a bundle with python3 training_scripts/transcribe.py",
        ),
        (EVALUATE, (*BEST_FLAGS, "nowhere.jsonl"), 3, "nowhere.jsonl cannot be read"),
        (EVALUATE, (*BEST_FLAGS, "{manifest}", "--output", "/nowhere/out"), 6, "--output /nowhere/out cannot be"),
        (EVALUATE, (*BEST_FLAGS, "{manifest}", "--output", __file__), 2, "a file that is not a list of hypotheses"),
        (EVALUATE, (*BEST_FLAGS, "{manifest}", "--outptu", "x"), 2, "--output"),
        (AVERAGE, (), 2, "either the checkpoints"),
        (AVERAGE, ("{last}", "--checkpoint_dir", "x"), 2, "either the checkpoints"),
        (AVERAGE, ("{last}", "--output", "checkpoint_epoch_9.pt"), 2, "reserved for checkpoints of a run"),
        (AVERAGE, ("{last}", "--outptu", "x.pt"), 2, "--output"),
        (AVERAGE, ("nowhere.pt",), 4, "There is no checkpoint at nowhere.pt"),
        (AVERAGE, ("{last}", "--output", f"{__file__}/x.pt"), 6, "x.pt cannot be written"),
        (
            AVERAGE,
            ("{last}", "--output", __file__),
            2,
            "already exists. Choose another name, or overwrite it with --force",
        ),
        (AVERAGE, ("konkani.nemo",), 4, "training_scripts/import_asr.py konkani.nemo konkani.pt"),
    ],
)
def test_invalid_arguments_exit_with_code_and_message(trained, script, flags, exit_code, message):
    known = {"{best}": str(trained.path("best")), "{last}": str(trained.path("last")), "{manifest}": trained.manifest}
    done = run_in_process(script, *(known.get(flag, flag) for flag in flags))
    assert done.returncode == exit_code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return checkpoint.states["model"]


def test_mean_of_identical_checkpoints_is_unchanged(trained):
    one = trained.named("last")
    for times in (1, 2, 3):
        mean = average_checkpoints([one] * times)
        assert list(mean.states) == ["model"]
        assert weights(mean).keys() == weights(one.checkpoint).keys()
        for name, tensor in weights(one.checkpoint).items():
            assert weights(mean)[name].dtype == tensor.dtype
            assert torch.equal(weights(mean)[name], tensor), name


def test_mean_of_two_checkpoints_keeps_newer_settings(trained):
    first, second = trained.named("epoch_1"), trained.named("epoch_2")
    for order in ([first, second], [second, first]):
        mean = average_checkpoints(order)
        newer = second.checkpoint
        assert (mean.step, mean.config, mean.tokenizer) == (newer.step, newer.config, newer.tokenizer)
        for name, tensor in weights(mean).items():
            expected = (weights(first.checkpoint)[name].double() + weights(second.checkpoint)[name].double()) / 2
            assert torch.equal(tensor, expected.float()), name
    some = next(iter(weights(mean)))
    assert not torch.equal(weights(mean)[some], weights(first.checkpoint)[some])


def modified_checkpoint(named: NamedCheckpoint, part: str) -> NamedCheckpoint:
    checkpoint = named.checkpoint
    model = dict(weights(checkpoint))
    some = next(iter(model))
    changes = {
        "tokenizer": {"tokenizer": checkpoint.tokenizer + b"x"},
        "heads": {"config": checkpoint.config.replace("--attention_heads 2", "--attention_heads 4")},
        "shape": {"states": {"model": model | {some: torch.cat([model[some], model[some]])}}},
        "names": {"states": {"model": {name: tensor for name, tensor in model.items() if name != some}}},
        "no model": {"states": {}},
        "Whisper": {"states": {"model": {some: model[some]}, "pretrained": {}}},
        "not finite": {"states": {"model": model | {some: model[some] * float("nan")}}},
    }
    return NamedCheckpoint(part, dataclasses.replace(checkpoint, **changes[part]))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("tokenizer", "last and tokenizer cannot be averaged: their tokenizers differ"),
        ("heads", "--attention_heads is 2 in one and 4 in the other"),
        ("shape", "last and shape cannot be averaged: their weights"),
        ("names", "last and names cannot be averaged: their weights"),
        ("Whisper", "last and Whisper cannot be averaged: they started from different models. Average"),
        ("no model", "The checkpoint no model contains no model weights"),
        ("not finite", "The checkpoint not finite contains weights that are not finite"),
    ],
)
def test_incompatible_checkpoints_are_rejected_by_name(trained, part, message):
    one = trained.named("last")
    with pytest.raises(CheckpointError, match=message):
        average_checkpoints([one, modified_checkpoint(one, part)])


def test_averaging_none_or_too_few_checkpoints_is_rejected(trained):
    with pytest.raises(CheckpointError, match="No checkpoint to average"):
        average_checkpoints([])
    assert [path.name for path in newest_epochs(trained.checkpoints, 1)] == ["checkpoint_epoch_2.pt"]
    with pytest.raises(CheckpointError, match="contains 2 epoch checkpoints, not 3"):
        newest_epochs(trained.checkpoints, 3)


@pytest.fixture(scope="module")
def averaged(trained: TrainedRun) -> Path:
    done = checked(run_script(AVERAGE, "--checkpoint_dir", str(trained.checkpoints), "--last", "2"))
    assert "checkpoint_epoch_1.pt, checkpoint_epoch_2.pt" in done.stdout
    return trained.path("averaged")


def test_averaged_checkpoint_can_be_evaluated(trained, averaged, tmp_path):
    expected = average_checkpoints([trained.named("epoch_1"), trained.named("epoch_2")])
    for name, tensor in weights(read_checkpoint(averaged)).items():
        assert torch.equal(tensor, weights(expected)[name])
    evaluation = evaluate(averaged, trained.manifest, "--output", str(tmp_path / "hypotheses.jsonl"))
    assert evaluation["utterances"] == 5
    assert (tmp_path / "hypotheses.jsonl").is_file()


def test_averaged_checkpoint_is_not_resumed(trained, averaged, corpus, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    write_checkpoint(alone / averaged.name, read_checkpoint(averaged))
    assert Checkpointer(alone, keep=3).read_newest_sound() is None
    folders = run_folders(tmp_path / "resumed")
    done = run_trainer(*TINY_MODEL, *corpus.flags(), *folders, "--num_workers", "0", "--resume", str(averaged))
    assert done.returncode == 4, done.stdout
    assert "optimizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_conditions_score_same_utterances_and_appear_in_html(trained, evaluation, tmp_path):
    page = tmp_path / "conditions.html"
    summary = evaluate(trained.path("best"), trained.manifest, "--conditions", "--html", str(page))
    rows = summary["conditions"]
    assert len(rows) == 14 and rows[0]["condition"] == "unchanged"
    assert {row["words"] for row in rows} == {evaluation["words"]}
    assert [rows[0][name] for name in COUNTS] == [evaluation[name] for name in COUNTS]
    assert all(summary[name] == evaluation[name] for name in COUNTS)
    html = page.read_text(encoding="utf-8")
    assert "By recording condition" in html and "8 kHz, mu-law" in html
    assert "conditions" not in evaluation


def test_each_condition_is_applied_to_model_input(trained, monkeypatch):
    model_inputs: dict[str, list[torch.Tensor]] = {}
    original = EvaluationSet.evaluate

    def evaluate_and_record(self, *arguments):
        examples = [self.speech[number] for number in range(len(self.speech.utterances))]
        model_inputs[self.speech.condition] = [example.waveform for example in examples]
        return original(self, *arguments)

    monkeypatch.setattr(EvaluationSet, "evaluate", evaluate_and_record)
    model = load_evaluation_model(trained.path("best"), torch.device("cpu"))
    manifest = read_manifest(trained.manifest)
    unchanged = recognize_manifest(model, str(trained.path("best")), manifest, DecodingConfig())
    texts = recognize_under_conditions(model, unchanged, manifest, DecodingConfig())
    assert [condition.name for condition in texts] == list(model_inputs)
    for name, waveforms in model_inputs.items():
        for row, waveform in zip(manifest, waveforms, strict=True):
            as_recorded = load_audio(row.source)
            # Peaks that a condition clips are restored, as when a clipped file is read.
            simulated = condition_named(name).apply(as_recorded, row.id)
            assert torch.equal(waveform, restore_peaks(simulated, SAMPLE_RATE))
            assert torch.equal(waveform, simulated) == (name != "clipped")
            assert torch.equal(waveform, as_recorded) == (name == "unchanged")


def test_conditions_with_stored_hypotheses_are_rejected(evaluation):
    done = run_script(EVALUATE, "--hypotheses", evaluation["hypotheses"], "--conditions")
    assert done.returncode == 2 and "--conditions" in done.stderr and "Traceback" not in done.stderr
