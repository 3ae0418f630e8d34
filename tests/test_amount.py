"""What a person has not said follows from the hours of speech; what has been said, or decided, stays."""

import dataclasses

import pytest

from konkanivani.amount import as_stored, decisions, settled
from konkanivani.config import (
    AUTO,
    PRESETS,
    AugmentConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    TextConfig,
    TrainConfig,
)
from konkanivani.flags import config_from_text, config_to_text, parse_flags
from konkanivani.optimizer import learning_rate, warmup_of


@pytest.mark.parametrize(
    ("hours", "tokens", "ctc_weight", "epochs", "speeds"),
    [
        (0.0, "char", 0.7, 60, "1.0"),
        (0.6, "char", 0.7, 50, "1.0"),
        (9.9, "char", 0.7, 20, "1.0"),
        (10.0, "unigram", 0.3, 20, "0.9 1.0 1.1"),
    ],
)
def test_the_amount_of_speech_decides_what_nobody_has_said(hours, tokens, ctc_weight, epochs, speeds):
    config = settled(TrainConfig(), hours)
    assert (config.text.tokenizer_type, config.loss.ctc_weight, config.run.epochs) == (tokens, ctc_weight, epochs)
    said = decisions(TrainConfig(), config)
    words = f"--epochs {epochs} --tokenizer_type {tokens} --speed_perturbation {speeds} --ctc_weight {ctc_weight}"
    assert said == words
    assert parse_flags(words.split()) == dataclasses.replace(config, model=PRESETS["original"])


def test_what_is_said_stays_and_is_not_told():
    asked = TrainConfig(
        text=TextConfig("bpe"),
        augment=AugmentConfig(speed_perturbation=(0.8, 1.2)),
        loss=LossConfig(ctc_weight=0.5),
        run=RunConfig(epochs=3),
    )
    assert settled(asked, 0.5) == asked and decisions(asked, asked) == ""
    one = dataclasses.replace(asked, run=RunConfig())
    assert decisions(one, settled(one, 0.5)) == "--epochs 60"


def test_a_run_that_goes_on_keeps_what_was_decided_though_auto_is_asked_for_again():
    stored = config_from_text(config_to_text(settled(TrainConfig(), 0.5)))
    again = parse_flags(["--train_manifest", "a.jsonl", "--tokenizer_type", AUTO, "--epochs", AUTO], stored)
    assert again.text == stored.text and again.run.epochs == 60
    assert parse_flags(["--train_manifest", "a.jsonl", "--epochs", "7"], stored).run.epochs == 7


def test_weights_that_are_taken_over_keep_their_tokens_and_nothing_else():
    config = as_stored(TrainConfig(), settled(TrainConfig(), 100.0), names=("tokenizer_type",))
    assert config == TrainConfig(text=TextConfig("unigram"))


@pytest.mark.parametrize(("asked", "total", "steps"), [(AUTO, 1000, 100), (AUTO, 90000, 500), (AUTO, 5, 1), (7, 9, 3)])
def test_the_warm_up_follows_from_the_steps(asked, total, steps):
    config = OptimizerConfig(warmup_steps=asked)
    assert warmup_of(config, total) == steps
    peak = max(range(total), key=lambda step: learning_rate(config, step, total))
    assert peak in (steps - 1, steps)
