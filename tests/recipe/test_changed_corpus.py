"""A run resumed with added or removed utterances reports their number, and plans its epoch and length again."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from konkanivani.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.data.index import SKETCHED
from konkanivani.data.manifest import OLD_SKETCHED, CorpusChange, Fingerprint
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from tests.conftest import TINY_MODEL, Corpus, read_log, run_folders, write_corpus
from tests.run_setup import begin_run

PEAK, WARMUP, EPOCHS = 1e-3, 3, 4
MODEL = (*TINY_MODEL, "--encoder_layers", "1", "--decoder_layers", "0", "--ctc_weight", "1", "--num_workers", "0")
SCHEDULE = ("--epochs", str(EPOCHS), "--learning_rate", str(PEAK), "--warmup_steps", str(WARMUP))
BATCHING = ("--batch_size", "5", "--gradient_accumulation_steps", "1", "--first_epoch", "shuffled")
CHANGED = "The training corpus has changed since the checkpoint: "
ORDER = "The training data or its order has changed since the checkpoint: "


@pytest.fixture(scope="module")
def spoken_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return a corpus of 30 utterances of four words, so that the tokenizer of any subset has all letters."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.conftest.WORDS", ("एक", "दोन", "तीन", "चार"))
        return write_corpus(tmp_path_factory.mktemp("spoken_corpus") / "tones", {"train": 30}, lengths=range(1, 4))


def write_rows(spoken_corpus: Corpus, numbers: Sequence[int], **changed: str) -> str:
    """Replace the manifest of a run by these rows of the corpus; return its path."""
    lines = Path(spoken_corpus.manifest("train")).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(lines[number]) | changed for number in numbers]
    path = spoken_corpus.directory / "some.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def build(folder: Path, manifest: str, *more: str) -> Run:
    flags = (*MODEL, *SCHEDULE, *BATCHING, "--train_manifest", manifest, *run_folders(folder), "--resume", "auto")
    return build_run(begin_run([*flags, *more]))


def train_until(run: Run, step: int) -> None:
    """Train up to this step and save, with unchanged settings, like a run stopped by a signal."""
    train(run, last_step=min(step, run.step.total_steps))


def cosine(step: int, steps: int) -> float:
    """Return the rate of a step of a cosine schedule with this number of steps."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    share = min(1.0, (step - WARMUP) / (steps - 1 - WARMUP))
    return PEAK * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)


CHANGES = {
    "added": (range(30), "10 utterances added, 0 removed"),
    "removed": (range(12), "0 utterances added, 8 removed"),
    "both": (range(2, 25), "5 utterances added, 2 removed"),
    "one twice": ([*range(20), 7], "1 utterance added, 0 removed"),
}


@pytest.mark.parametrize("numbers, words", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("step, epoch", [(6, "epoch 2 is restarted with a new plan"), (8, "epoch 3 has a new plan")])
def test_numbers_of_added_and_removed_utterances_are_reported(
    step, epoch, numbers, words, spoken_corpus, tmp_path, capsys
):
    """The first corpus has 20 utterances: stop in the middle of an epoch of 4 steps, and between two epochs."""
    train_until(build(tmp_path, write_rows(spoken_corpus, range(20))), step)
    run = build(tmp_path, write_rows(spoken_corpus, numbers))
    output = [line for line in capsys.readouterr().out.splitlines() if line.startswith("The training ")]
    assert output == [f"{CHANGED}{words}; {epoch}."]
    assert (run.state.epoch, run.state.consumed) == (step // 4, 0)


@pytest.mark.parametrize(
    "numbers, changed, words, steps",
    [
        (range(20), {}, [], 16),
        (range(20), {"text": "एक"}, [], 16),
        (range(19, -1, -1), {}, [f"{ORDER}epoch 2 is restarted."], 18),
    ],
    ids=["unchanged", "corrected texts", "another order"],
)
def test_negative_control_the_same_utterances_are_not_a_changed_corpus(
    numbers, changed, words, steps, spoken_corpus, tmp_path, capsys
):
    """An epoch that is restarted after 2 of its steps makes the run 2 steps longer."""
    train_until(build(tmp_path, write_rows(spoken_corpus, range(20))), 6)
    run = build(tmp_path, write_rows(spoken_corpus, numbers, **changed))
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line.startswith("The training ")] == words
    assert (run.step.total_steps, any(line.startswith("Learning rate:") for line in output)) == (steps, steps != 16)


@pytest.mark.parametrize("way", ["keep", "stretch"])
def test_run_length_is_the_finished_plus_the_remaining_steps(way, spoken_corpus, tmp_path, capsys):
    """Two epochs of 4 steps are finished and two of 6 remain; an epoch has each utterance once."""
    train_until(build(tmp_path, write_rows(spoken_corpus, range(20))), 8)
    manifest = write_rows(spoken_corpus, range(30))
    for stop in (9, 13, 100):  # interrupted twice
        train_until(build(tmp_path, manifest, "--continue_schedule", way), stop)
    log = read_log(tmp_path)
    assert [record["step"] for record in log] == list(range(1, 21))
    assert [sum(record["utterances"] for record in log if record["step"] in range(*ends)) for ends in EPOCH_ENDS] == [
        *(20, 20, 30, 30)
    ]
    longer = {"keep": 16, "stretch": 20}[way]
    expected = [cosine(step, 16) for step in range(8)] + [cosine(step, longer) for step in range(8, 20)]
    assert [record["learning_rate"] for record in log] == pytest.approx(expected, rel=1e-9)
    assert expected[-1] == pytest.approx(PEAK / 100)
    output = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Learning rate:")]
    assert output == [
        f"Learning rate: {expected[7]:.2e} at step 8, {expected[8]:.2e} next: schedule planned for 16 steps, now 20 "
        f"(--continue_schedule {way})."
    ]


EPOCH_ENDS = ((1, 5), (5, 9), (9, 15), (15, 21))


def rewrite(folder: Path, change: Callable[[dict], dict]) -> None:
    """Replace the states of the last checkpoint."""
    path = folder / "checkpoints" / LAST
    result = read_checkpoint(path)
    write_checkpoint(path, dataclasses.replace(result, states=change(result.states)))


@pytest.mark.parametrize("step, steps", [(3, 16), (8, 16)])
def test_old_length_is_derived_for_a_checkpoint_without_a_schedule(step, steps, spoken_corpus, tmp_path, capsys):
    train_until(build(tmp_path, write_rows(spoken_corpus, range(20))), step)
    rewrite(tmp_path, lambda states: {name: state for name, state in states.items() if name != "schedule"})
    run = build(tmp_path, write_rows(spoken_corpus, range(30)))
    assert f"schedule planned for {steps} steps, now {run.step.total_steps} (" in capsys.readouterr().out
    assert run.step.total_steps == {3: 3 + 24, 8: 8 + 12}[step]


def test_checkpoint_without_its_corpus_reports_only_a_changed_order(spoken_corpus, tmp_path, capsys):
    train_until(build(tmp_path, write_rows(spoken_corpus, range(20))), 6)
    rewrite(tmp_path, lambda states: {name: state for name, state in states.items() if name != "corpus"})
    build(tmp_path, write_rows(spoken_corpus, range(30)))
    output = capsys.readouterr().out
    assert f"{ORDER}epoch 2 is restarted." in output and CHANGED not in output


def test_changes_are_also_counted_with_new_corpus(spoken_corpus, tmp_path, capsys):
    train_until(build(tmp_path, write_rows(spoken_corpus, range(15))), 5)
    build(tmp_path, write_rows(spoken_corpus, range(14, 30)), "--new_corpus")
    output = capsys.readouterr().out
    assert (
        "Resuming with a different corpus" in output and f"{CHANGED}15 utterances added, 14 removed; epoch 2" in output
    )


def fingerprint(marks: Sequence[int], sketched: int, more: int = 0) -> Fingerprint:
    """Return a corpus of utterances with these hashes, with `more` repeated rows in the manifest."""
    return Fingerprint("train.jsonl", len(marks) + more, 1.0, tuple(sorted(marks)[:sketched]))


def test_changes_are_exact_within_the_sketch_and_estimated_beyond():
    marks = random.Random(1).sample(range(2**56), 3 * SKETCHED)
    small, grown = fingerprint(marks[:60_000], SKETCHED), fingerprint(marks[100:61_000], SKETCHED)
    assert small.change_to(grown) == CorpusChange(1000, 100, is_exact=True)
    large, other = fingerprint(marks[:150_000], SKETCHED), fingerprint(marks[30_000:190_000], SKETCHED)
    result = large.change_to(other)
    assert (result.added, result.removed) == pytest.approx((40_000, 30_000), rel=0.05) and not result.is_exact
    assert result.added - result.removed == 10_000
    assert result.sentence() == f"about {result.added:,} utterances added, about {result.removed:,} removed"
    assert large.change_to(fingerprint(marks[:150_100], SKETCHED)) == CorpusChange(100, 0, is_exact=False)
    assert large.change_to(fingerprint(marks[:150_000], SKETCHED)) is None


def test_smaller_sketch_of_an_older_version_is_compared():
    marks = random.Random(2).sample(range(2**56), 4000)
    old, same = fingerprint(marks[:3000], OLD_SKETCHED), fingerprint(marks[:3000], SKETCHED)
    assert old.change_to(same) is None and old.is_unchanged(same) and old.shared(same) == 1
    assert old.change_to(fingerprint(marks[:3030], SKETCHED)) == CorpusChange(30, 0, is_exact=False)
    exact = fingerprint(marks[:OLD_SKETCHED], OLD_SKETCHED)
    assert exact.change_to(fingerprint(marks[6:260], SKETCHED)) == CorpusChange(4, 6, is_exact=True)


def test_repeated_rows_are_counted_separately():
    one = fingerprint(range(10), SKETCHED, more=2)
    assert one.change_to(fingerprint(range(10), SKETCHED)) == CorpusChange(0, 2, is_exact=True)
    assert one.change_to(fingerprint(range(12), SKETCHED)) == CorpusChange(2, 2, is_exact=True)
    assert one.change_to(one) is None
