"""Defaults of unset options follow from the hours of audio; set or decided options stay."""

import dataclasses

import pytest

from konkanivani import flags as auto_defaults
from konkanivani.config import (
    AUTO,
    PRESETS,
    AugmentConfig,
    DataConfig,
    LossConfig,
    OptimizerConfig,
    PretrainedConfig,
    RunConfig,
    TextConfig,
    TrainConfig,
)
from konkanivani.data.manifest import measure_corpus_size, read_manifest
from konkanivani.flags import (
    CorpusSize,
    as_stored,
    config_from_text,
    config_to_text,
    contradictions,
    decisions,
    resolve,
)
from konkanivani.training.optimizer_state import learning_rate, resolve_warmup
from tests.starts import parse_flags

LITTLE = CorpusSize(hours=0.5, utterances=600)


@pytest.mark.parametrize(
    ("hours", "tokens", "ctc_weight", "epochs", "speeds", "accumulation"),
    [
        (0.0, "char", 0.7, 60, "1.0", 4),
        (0.6, "char", 0.7, 50, "1.0", 4),
        (9.9, "char", 0.7, 20, "1.0", 1),
        (10.0, "unigram", 0.3, 20, "0.9 1.0 1.1", 4),
    ],
)
def test_the_amount_of_speech_decides_what_nobody_has_said(hours, tokens, ctc_weight, epochs, speeds, accumulation):
    config = resolve(TrainConfig(), CorpusSize(hours, utterances=1000))
    assert (config.text.tokenizer_type, config.loss.ctc_weight, config.run.epochs) == (tokens, ctc_weight, epochs)
    said = decisions(TrainConfig(), config)
    first = "shuffled" if hours >= 10 else "shortest_first"
    words = f"--gradient_accumulation_steps {accumulation} --first_epoch {first} "
    words += f"--tokenizer_type {tokens} --speed_perturbation {speeds} --augmentation light --ctc_weight {ctc_weight} "
    words += f"--learning_rate 0.001 --epochs {epochs}"
    assert said == words
    assert parse_flags(words.split()) == dataclasses.replace(config, model=PRESETS["original"])


def test_what_has_learnt_already_hears_its_first_epoch_as_any_other_and_so_does_a_run_of_before():
    assert resolve(TrainConfig(), LITTLE).data.first_epoch == "shortest_first"
    assert resolve(TrainConfig(run=RunConfig(init_from="a.pt")), LITTLE).data.first_epoch == "shuffled"
    assert resolve(TrainConfig(), LITTLE).augment.augmentation == "light"
    for settings in (TrainConfig(run=RunConfig(init_from="a.pt")), TrainConfig(pretrained=PretrainedConfig("folder"))):
        assert resolve(settings, LITTLE).augment.augmentation == "none"
    older = config_to_text(TrainConfig()).replace("--first_epoch 'auto'\n", "")
    assert resolve(config_from_text(older), LITTLE).data.first_epoch == "shuffled"


def test_a_small_model_takes_twice_the_rate_for_many_words_of_little_speech_from_nothing():
    small = TrainConfig(model=PRESETS["minimal"])
    said = dataclasses.replace(small, optimizer=OptimizerConfig(learning_rate=0.003))
    tuned = dataclasses.replace(small, run=RunConfig(init_from="a.pt"))
    for config, hours, words, rate in (
        (small, 0.8, 100, 2e-3),
        (small, 0.8, 99, 1e-3),
        (small, 0.7, 100, 1e-3),
        (small, 10.0, 100, 1e-3),
        (said, 0.8, 100, 3e-3),
        (tuned, 0.8, 100, 1e-3),
        (TrainConfig(), 0.8, 100, 1e-3),
    ):
        assert resolve(config, CorpusSize(hours, 600, words=words)).optimizer.learning_rate == rate
    older = config_to_text(small).replace("--learning_rate 'auto'", "--learning_rate 0.001")
    assert resolve(config_from_text(older), CorpusSize(0.8, 600, words=100)).optimizer.learning_rate == 1e-3


def test_words_are_counted_of_little_speech_alone(corpus, monkeypatch):
    manifest = read_manifest(corpus.manifest("train"))
    assert measure_corpus_size(manifest).words == len({word for one in manifest for word in one.text.split()}) > 1
    monkeypatch.setattr(auto_defaults, "LITTLE_HOURS", 0.0)
    assert measure_corpus_size(manifest).words == 0


def test_what_is_said_stays_and_is_not_told():
    asked = TrainConfig(
        data=DataConfig(gradient_accumulation_steps=3, first_epoch="shuffled"),
        text=TextConfig("bpe"),
        augment=AugmentConfig(speed_perturbation=(0.8, 1.2), augmentation="strong"),
        loss=LossConfig(ctc_weight=0.5),
        run=RunConfig(epochs=3),
        optimizer=OptimizerConfig(learning_rate=0.003),
    )
    assert resolve(asked, LITTLE) == asked and decisions(asked, asked) == ""
    one = dataclasses.replace(asked, run=RunConfig())
    assert decisions(one, resolve(one, LITTLE)) == "--epochs 60"


def test_a_run_that_goes_on_keeps_what_was_decided_though_auto_is_asked_for_again():
    stored = config_from_text(config_to_text(resolve(TrainConfig(), LITTLE)))
    again = parse_flags(["--train_manifest", "a.jsonl", "--tokenizer_type", AUTO, "--epochs", AUTO], stored)
    assert again.text == stored.text and again.run.epochs == 60
    assert parse_flags(["--train_manifest", "a.jsonl", "--epochs", "7"], stored).run.epochs == 7


def test_weights_that_are_taken_over_keep_their_tokens_and_nothing_else():
    config = as_stored(TrainConfig(), resolve(TrainConfig()), names=("tokenizer_type",))
    assert config == TrainConfig(text=TextConfig("unigram"))


@pytest.mark.parametrize(("asked", "total", "steps"), [(AUTO, 1000, 100), (AUTO, 90000, 500), (AUTO, 5, 1), (7, 9, 3)])
def test_the_warm_up_follows_from_the_steps(asked, total, steps):
    config = OptimizerConfig(warmup_steps=asked)
    assert resolve_warmup(config, total) == steps
    peak = max(range(total), key=lambda step: learning_rate(config, step, total))
    assert peak in (steps - 1, steps)


@pytest.mark.parametrize(
    ("seconds", "batch_size", "ranks", "window"),
    [(2.3, 2, 1, 8), (2.3, 4, 1, 8), (6.3, 2, 1, 4), (6.3, 1, 1, 3), (15.0, 2, 1, 2), (15.0, "auto", 1, 2)]
    + [(6.3, "auto", 1, 3), (2.3, "auto", 1, 8), (6.3, "auto", 6, 6), (6.3, 1, 4, 4), (2.3, 16, 1, 16)],
)
def test_of_little_speech_a_step_hears_about_twenty_seconds(seconds, batch_size, ranks, window):
    config = TrainConfig(data=DataConfig(batch_size=batch_size))
    amount = CorpusSize(hours=1000 * seconds / 3600, utterances=1000, ranks=ranks)
    assert resolve(config, amount).global_batch_size == window
    much = CorpusSize(hours=100.0, utterances=round(360_000 / seconds))
    assert (
        resolve(config, much).global_batch_size
        == resolve(config).global_batch_size
        == config.global_batch_size
        == max(8, window)
    )


def test_a_run_that_goes_on_in_other_micro_batches_keeps_its_window():
    asked = TrainConfig(data=DataConfig(batch_size=2))
    stored = resolve(asked, CorpusSize(hours=7.0, utterances=4000))
    assert stored.global_batch_size == 4
    for given, window in ((["--batch_size", "1"], 4), (["--batch_size", "4"], 4), (["--batch_size", "3"], 3)):
        again = parse_flags(given, stored)
        assert again.global_batch_size == window
        assert bool(contradictions(stored, again)) == (window != 4)
    assert parse_flags(["--batch_size", "auto"], stored).global_batch_size == 4
    both = ["--batch_size", "1", "--gradient_accumulation_steps", "2"]
    assert contradictions(stored, parse_flags(both, stored))
