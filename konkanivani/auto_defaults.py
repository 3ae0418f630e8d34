"""Values of the "auto" settings, chosen from the amount of training audio. Does not import torch."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeVar

from konkanivani.config import AUTO, DEFAULT_EFFECTIVE_BATCH_SIZE, DEFAULT_RATE, DataConfig, TrainConfig
from konkanivani.rules import settings_of, with_values

DECIDED = (
    *("tokenizer_type", "ctc_weight", "epochs", "speed_perturbation", "gradient_accumulation_steps", "first_epoch"),
    "learning_rate",
)
# With less audio, subwords are too rare to be learnt, and attention without CTC aligns too late.
LITTLE_HOURS = 10.0
TARGET_HOURS = 30.0  # audio in all epochs together, as far as the bounds on the epochs allow
MIN_EPOCHS = 20
MAX_EPOCHS = 60
# fine-tuning of a pretrained model
MIN_TUNED_EPOCHS = 3
MAX_TUNED_EPOCHS = 10
# Audio per optimizer step of a small corpus: half the audio per step means twice the steps, which learn more in the
# same number of epochs.
GLOBAL_BATCH_SECONDS = 20.0
MIN_GLOBAL_BATCH_SIZE = 2
# LARGE_RATE is for models up to SMALL_WIDTH, from MANY_WORDS and MIN_HOURS on (docs/experiments.md).
LARGE_RATE = 2e-3
SMALL_WIDTH = 128
MANY_WORDS = 100
MIN_HOURS = 0.75
TUNED_GLOBAL_BATCH_SIZE = 16  # utterances, as in the published fine-tuning recipes of the pretrained models

Value = TypeVar("Value")


def resolved(value: Value | Literal["auto"]) -> Value:
    """Return the value of a setting that `resolve` has set; raise a ValueError if it is still "auto"."""
    if value == AUTO:
        raise ValueError("an automatic setting is used before it is resolved")
    return value


@dataclass(frozen=True)
class CorpusSize:
    """Amount of training data.

    `hours` of audio, number of `utterances` and of distinct `words`, and the `ranks` that share a global batch.
    """

    hours: float
    utterances: int
    ranks: int = 1
    words: int = 0

    @property
    def is_little(self) -> bool:
        """Return whether the corpus is too small for the usual defaults (under LITTLE_HOURS)."""
        return self.hours < LITTLE_HOURS

    @property
    def global_batch_size(self) -> int:
        """Utterances per optimizer step."""
        if not self.is_little:
            return DEFAULT_EFFECTIVE_BATCH_SIZE
        seconds_each = 3600 * self.hours / max(1, self.utterances)
        wanted = round(min(DEFAULT_EFFECTIVE_BATCH_SIZE, GLOBAL_BATCH_SECONDS / max(seconds_each, 1e-9)))
        # Each rank needs at least one utterance.
        return max(MIN_GLOBAL_BATCH_SIZE, self.ranks, wanted)


UNLIMITED = CorpusSize(float("inf"), 0)


def resolve(config: TrainConfig, amount: CorpusSize = UNLIMITED) -> TrainConfig:
    """Return the configuration with the "auto" settings of DECIDED resolved for this amount of data."""
    is_tuned = config.pretrained.pretrained is not None
    utterances = max(TUNED_GLOBAL_BATCH_SIZE, amount.ranks) if is_tuned else amount.global_batch_size
    config = dataclasses.replace(config, data=_with_global_batch(config.data, utterances))
    fewest, most = (MIN_TUNED_EPOCHS, MAX_TUNED_EPOCHS) if is_tuned else (MIN_EPOCHS, MAX_EPOCHS)
    # Shortest utterances first help CTC to align early, which a model with initial weights does already.
    from_nothing = not is_tuned and config.run.init_from is None
    may_be_fast = from_nothing and config.model.d_model <= SMALL_WIDTH and MIN_HOURS <= amount.hours < LITTLE_HOURS
    chosen = {
        "learning_rate": LARGE_RATE if may_be_fast and amount.words >= MANY_WORDS else DEFAULT_RATE,
        # The tokenizer of a pretrained model comes with its folder.
        "tokenizer_type": AUTO if is_tuned else "char" if amount.is_little else "unigram",
        "ctc_weight": 1.0 if not config.model.decoder_layers else 0.7 if amount.is_little else 0.3,
        "speed_perturbation": (1.0,) if amount.is_little else (0.9, 1.0, 1.1),
        "first_epoch": "shortest_first" if amount.is_little and from_nothing else "shuffled",
        "epochs": round(min(most, max(fewest, TARGET_HOURS / max(amount.hours, 1e-9)))),
    }
    return with_values(config, {name: chosen[name] for name in _left_open(config) if name in chosen})


def _with_global_batch(data: DataConfig, utterances: int) -> DataConfig:
    """Return `data` with a global batch of at least `utterances`, unless the flags set one."""
    if data.batch_size == AUTO:
        return dataclasses.replace(data, effective_batch_size=data.effective_batch_size or utterances)
    if data.gradient_accumulation_steps == AUTO:
        # Rounded up, so that the step has at least `utterances`.
        return dataclasses.replace(data, gradient_accumulation_steps=-(-utterances // max(1, data.batch_size)))
    return data


def decisions(asked: TrainConfig, config: TrainConfig) -> str:
    """Return the resolved "auto" settings as flags, such as `--epochs 20`; empty if there are none."""
    pairs = zip(settings_of(asked), settings_of(config), strict=True)
    decided = [new for old, new in pairs if old.value != new.value]
    typed = (new.value if isinstance(new.value, tuple) else (new.value,) for new in decided)
    return " ".join(f"--{new.name} {' '.join(map(str, values))}" for new, values in zip(decided, typed, strict=True))


def as_stored(config: TrainConfig, stored: TrainConfig, names: tuple[str, ...] = DECIDED) -> TrainConfig:
    """Return the configuration with the "auto" settings in `names` replaced by their values in `stored`."""
    kept = {setting.name: setting.value for setting in settings_of(stored)}
    return with_values(config, {name: kept[name] for name in _left_open(config) if name in names})


def _left_open(config: TrainConfig) -> list[str]:
    return [setting.name for setting in settings_of(config) if setting.value == AUTO]
