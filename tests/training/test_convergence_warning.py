"""A run that does not learn reports this, with advice, after a third of its steps; a run that learns does not."""

import dataclasses
import math

import pytest

from konkanivani.checkpoints.checkpoint import ScoreKind
from konkanivani.lengths import TOKENS
from konkanivani.training.progress import EpochLearning, failures
from konkanivani.training.run import TrainState

HEALTHY = EpochLearning(3000, 4000, 10_000, loss=0.5, first_loss=3.0, clipped_share=0.2, cer=0.3, blank_share=0.7)


def test_learning_run_gives_no_warning():
    assert failures(HEALTHY) == []
    assert failures(dataclasses.replace(HEALTHY, cer=math.nan, blank_share=math.nan)) == []
    early = EpochLearning(300, 400, 1000, loss=0.5, first_loss=3.0, clipped_share=1.0)
    assert failures(early) == []  # as in the first steps of every run


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ({"cer": 0.95}, "CER is still 95 % after 4,000 of 10,000 steps"),
        ({"cer": 1.0, "blank_share": 1.0}, "The model still outputs only blanks after 4,000 of 10,000 steps (100.0 %"),
        ({"loss": 2.95}, "loss does not decrease after 4,000 of 10,000 steps: 2.950 per token, 3.000 in the first"),
        ({"clipped_share": 0.97}, "97 % of the epoch's gradients were clipped after 4,000 of 10,000 steps"),
    ],
)
def test_each_sign_of_failure_is_one_line_with_advice(sign, words):
    (line,) = failures(dataclasses.replace(HEALTHY, **sign))
    assert words in line and "--" in line and "\n" not in line
    of_whisper = str(failures(dataclasses.replace(HEALTHY, cer=1.0, blank_share=None)))
    assert "--language" in of_whisper and "--ctc" not in of_whisper and "--preset" not in of_whisper


def test_advice_for_text_models_mentions_neither_ctc_nor_audio():
    short = dataclasses.replace(HEALTHY, first_step=200, last_step=350, total_steps=900, cer=1.0, loss=2.95)
    of_texts = str(failures(dataclasses.replace(short, blank_share=None), TOKENS))
    assert "smaller effective batch;" in of_texts and "--learning_rate" in of_texts
    for word in ("CTC", "ctc", "audio", "--language", "--tokenizer_type"):
        assert word not in of_texts
        of_speech = str(failures(short)) + str(failures(dataclasses.replace(short, blank_share=None)))
        assert word in of_speech  # negative control


@pytest.mark.parametrize(("first", "last", "is_time"), [(0, 3333, False), (3000, 3334, True), (3334, 6000, False)])
def test_learning_is_checked_after_one_and_two_thirds_of_the_steps(first, last, is_time):
    epoch = dataclasses.replace(HEALTHY, first_step=first, last_step=last, cer=1.0)
    assert bool(failures(epoch)) is epoch.is_time_to_look is is_time
    assert dataclasses.replace(epoch, first_step=6000, last_step=7000).is_time_to_look


def test_epoch_statistics_are_summed_and_reset_at_the_next_epoch():
    state = TrainState(step=5, epoch=1)
    for loss, is_clipped in ((4.0, True), (2.0, False)):
        state.step += 1
        state.add_up(loss, is_clipped)
    first = state.learning(total_steps=20, cer=0.9)
    assert (first.first_step, first.last_step, first.loss, first.clipped_share) == (5, 7, 3.0, 0.5)
    assert first.first_loss == 0 and first.blank_share is None
    restored = TrainState()
    restored.load_state_dict(state.state_dict())
    assert restored == state
    state.finish_epoch(0.9, ScoreKind.CER)
    assert (state.epoch_steps, state.epoch_clipped, state.epoch_loss, state.first_loss) == (0, 0, 0.0, 3.0)
    state.finish_epoch(0.8, ScoreKind.CER)
    assert state.first_loss == 3.0


def test_scores_of_another_kind_are_not_compared():
    state = TrainState()
    assert state.finish_epoch(-1.0, ScoreKind.EPOCH) and state.finish_epoch(-2.0, ScoreKind.EPOCH)
    assert state.finish_epoch(0.9, ScoreKind.CER)  # lower is better, but -2 is no CER
    assert not state.finish_epoch(0.95, ScoreKind.CER)  # negative control
    assert state.finish_epoch(3.5, ScoreKind.LOSS) and state.best_score == 3.5
    restored = TrainState()
    restored.load_state_dict(state.state_dict())
    assert restored == state and not restored.finish_epoch(3.6, ScoreKind.LOSS)
    # The score of an older version is of unknown kind and stays.
    older = {key: value for key, value in state.state_dict().items() if key != "score_kind"}
    restored.load_state_dict(older | {"best_score": 0.5})
    assert not restored.finish_epoch(0.6, ScoreKind.CER) and restored.finish_epoch(0.4, ScoreKind.CER)


def test_score_that_is_nan_is_never_the_best():
    state = TrainState()
    assert not state.finish_epoch(math.nan, ScoreKind.LOSS)
    assert state.finish_epoch(3.5, ScoreKind.LOSS)
    assert not state.finish_epoch(math.nan, ScoreKind.LOSS) and not state.finish_epoch(3.6, ScoreKind.LOSS)
    assert state.finish_epoch(3.4, ScoreKind.LOSS) and state.best_score == 3.4
    state.best_score = math.nan  # as older versions stored it
    assert state.finish_epoch(3.5, ScoreKind.LOSS) and state.best_score == 3.5


def test_restarted_epoch_resets_its_statistics():
    state = TrainState(step=5, epoch=1, consumed=2, epoch_steps=2, epoch_clipped=1, epoch_loss=6.0, first_loss=3.0)
    state.begin_epoch()
    assert state == TrainState(step=5, epoch=1, first_loss=3.0)


def test_statistics_of_an_older_checkpoint_start_at_zero():
    old = {name: value for name, value in TrainState(step=9).state_dict().items() if "epoch_" not in name}
    del old["first_loss"]
    state = TrainState()
    state.load_state_dict(old | {"epochs_without_improvement": 0})
    assert state == TrainState(step=9)
