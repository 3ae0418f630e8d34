"""Defaults of unset options follow from the hours of audio; given or already decided options are kept."""

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
from tests.run_setup import parse_flags

SMALL_CORPUS = CorpusSize(hours=0.5, utterances=600)


@pytest.mark.parametrize(
    ("hours", "tokens", "ctc_weight", "epochs", "speeds", "accumulation"),
    [
        (0.0, "char", 0.7, 60, "0.9 1.0 1.0 1.1 1.1 1.2", 4),
        (0.6, "char", 0.7, 50, "0.9 1.0 1.0 1.1 1.1 1.2", 4),
        (9.9, "char", 0.7, 20, "0.9 1.0 1.0 1.1 1.1 1.2", 1),
        (10.0, "unigram", 0.3, 20, "0.9 1.0 1.1", 4),
    ],
)
def test_unset_options_follow_from_the_hours_of_audio(hours, tokens, ctc_weight, epochs, speeds, accumulation):
    config = resolve(TrainConfig(), CorpusSize(hours, utterances=1000))
    assert (config.text.tokenizer_type, config.loss.ctc_weight, config.run.epochs) == (tokens, ctc_weight, epochs)
    output = decisions(TrainConfig(), config)
    first = "shuffled" if hours >= 10 else "shortest_first"
    words = f"--gradient_accumulation_steps {accumulation} --first_epoch {first} "
    words += f"--tokenizer_type {tokens} --speed_perturbation {speeds} --augmentation light --ctc_weight {ctc_weight} "
    words += f"--learning_rate 0.001 --epochs {epochs}"
    assert output == words
    assert parse_flags(words.split()) == dataclasses.replace(config, model=PRESETS["original"])


def test_first_epoch_and_augmentation_for_initialized_and_older_runs():
    assert resolve(TrainConfig(), SMALL_CORPUS).data.first_epoch == "shortest_first"
    assert resolve(TrainConfig(run=RunConfig(init_from="a.pt")), SMALL_CORPUS).data.first_epoch == "shuffled"
    assert resolve(TrainConfig(), SMALL_CORPUS).augment.augmentation == "light"
    for settings in (TrainConfig(run=RunConfig(init_from="a.pt")), TrainConfig(pretrained=PretrainedConfig("folder"))):
        assert resolve(settings, SMALL_CORPUS).augment.augmentation == "none"
        assert resolve(settings, SMALL_CORPUS).augment.speed_perturbation == (1.0,)
    older = config_to_text(TrainConfig()).replace("--first_epoch 'auto'\n", "")
    assert resolve(config_from_text(older), SMALL_CORPUS).data.first_epoch == "shuffled"


def test_small_model_doubles_the_rate_for_many_words_in_a_small_corpus():
    small = TrainConfig(model=PRESETS["minimal"])
    output = dataclasses.replace(small, optimizer=OptimizerConfig(learning_rate=0.003))
    tuned = dataclasses.replace(small, run=RunConfig(init_from="a.pt"))
    for config, hours, words, rate in (
        (small, 0.8, 100, 2e-3),
        (small, 0.8, 99, 1e-3),
        (small, 0.7, 100, 1e-3),
        (small, 10.0, 100, 1e-3),
        (output, 0.8, 100, 3e-3),
        (tuned, 0.8, 100, 1e-3),
        (TrainConfig(), 0.8, 100, 1e-3),
    ):
        assert resolve(config, CorpusSize(hours, 600, words=words)).optimizer.learning_rate == rate
    older = config_to_text(small).replace("--learning_rate 'auto'", "--learning_rate 0.001")
    assert resolve(config_from_text(older), CorpusSize(0.8, 600, words=100)).optimizer.learning_rate == 1e-3


def test_words_are_counted_only_in_a_small_corpus(corpus, monkeypatch):
    manifest = read_manifest(corpus.manifest("train"))
    assert measure_corpus_size(manifest).words == len({word for one in manifest for word in one.text.split()}) > 1
    monkeypatch.setattr(auto_defaults, "LITTLE_HOURS", 0.0)
    assert measure_corpus_size(manifest).words == 0


def test_given_options_are_kept_and_not_reported():
    asked = TrainConfig(
        data=DataConfig(gradient_accumulation_steps=3, first_epoch="shuffled"),
        text=TextConfig("bpe"),
        augment=AugmentConfig(speed_perturbation=(0.8, 1.2), augmentation="strong"),
        loss=LossConfig(ctc_weight=0.5),
        run=RunConfig(epochs=3),
        optimizer=OptimizerConfig(learning_rate=0.003),
    )
    assert resolve(asked, SMALL_CORPUS) == asked and decisions(asked, asked) == ""
    one = dataclasses.replace(asked, run=RunConfig())
    assert decisions(one, resolve(one, SMALL_CORPUS)) == "--epochs 60"


def test_resumed_run_keeps_its_decided_options_even_if_auto_is_given():
    stored = config_from_text(config_to_text(resolve(TrainConfig(), SMALL_CORPUS)))
    again = parse_flags(["--train_manifest", "a.jsonl", "--tokenizer_type", AUTO, "--epochs", AUTO], stored)
    assert again.text == stored.text and again.run.epochs == 60
    assert parse_flags(["--train_manifest", "a.jsonl", "--epochs", "7"], stored).run.epochs == 7


def test_initial_checkpoint_sets_only_the_tokenizer_type():
    config = as_stored(TrainConfig(), resolve(TrainConfig()), names=("tokenizer_type",))
    assert config == TrainConfig(text=TextConfig("unigram"))


@pytest.mark.parametrize(("asked", "total", "steps"), [(AUTO, 1000, 100), (AUTO, 90000, 500), (AUTO, 5, 1), (7, 9, 3)])
def test_auto_warmup_follows_from_the_number_of_steps(asked, total, steps):
    config = OptimizerConfig(warmup_steps=asked)
    assert resolve_warmup(config, total) == steps
    peak = max(range(total), key=lambda step: learning_rate(config, step, total))
    assert peak in (steps - 1, steps)


@pytest.mark.parametrize(
    ("seconds", "batch_size", "ranks", "global_batch"),
    [(2.3, 2, 1, 8), (2.3, 4, 1, 8), (6.3, 2, 1, 4), (6.3, 1, 1, 3), (15.0, 2, 1, 2), (15.0, "auto", 1, 2)]
    + [(6.3, "auto", 1, 3), (2.3, "auto", 1, 8), (6.3, "auto", 6, 6), (6.3, 1, 4, 4), (2.3, 16, 1, 16)],
)
def test_global_batch_of_a_small_corpus_has_about_20_seconds(seconds, batch_size, ranks, global_batch):
    config = TrainConfig(data=DataConfig(batch_size=batch_size))
    amount = CorpusSize(hours=1000 * seconds / 3600, utterances=1000, ranks=ranks)
    assert resolve(config, amount).global_batch_size == global_batch
    much = CorpusSize(hours=100.0, utterances=round(360_000 / seconds))
    assert (
        resolve(config, much).global_batch_size
        == resolve(config).global_batch_size
        == config.global_batch_size
        == max(8, global_batch)
    )


def test_resumed_run_with_other_micro_batches_keeps_its_global_batch():
    asked = TrainConfig(data=DataConfig(batch_size=2))
    stored = resolve(asked, CorpusSize(hours=7.0, utterances=4000))
    assert stored.global_batch_size == 4
    for given, global_batch in ((["--batch_size", "1"], 4), (["--batch_size", "4"], 4), (["--batch_size", "3"], 3)):
        again = parse_flags(given, stored)
        assert again.global_batch_size == global_batch
        assert bool(contradictions(stored, again)) == (global_batch != 4)
    assert parse_flags(["--batch_size", "auto"], stored).global_batch_size == 4
    both = ["--batch_size", "1", "--gradient_accumulation_steps", "2"]
    assert contradictions(stored, parse_flags(both, stored))
