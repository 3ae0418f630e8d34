"""What the amount of speech decides where a person has not: tokens, losses, epochs. No torch here."""

import dataclasses

from konkanivani.config import AUTO, TrainConfig
from konkanivani.settings import settings_of, with_setting

DECIDED = ("tokenizer_type", "ctc_weight", "epochs", "speed_perturbation")
MUCH_SPEECH = float("inf")
LITTLE_HOURS = 10.0  # with less, subwords are too rare to be learnt, and attention alone aligns too late
HOURS_HEARD = 30.0  # of speech in all epochs together, where that is between the two bounds
FEWEST_EPOCHS, MOST_EPOCHS = 20, 60


def settled(config: TrainConfig, hours: float = MUCH_SPEECH) -> TrainConfig:
    """The configuration with every "auto" that the hours of speech to train on decide."""
    is_little = hours < LITTLE_HOURS
    chosen = {
        "tokenizer_type": "char" if is_little else "unigram",
        "ctc_weight": 0.7 if is_little else 0.3,
        "speed_perturbation": (1.0,) if is_little else (0.9, 1.0, 1.1),
        "epochs": round(min(MOST_EPOCHS, max(FEWEST_EPOCHS, HOURS_HEARD / max(hours, 1e-9)))),
    }
    for setting in settings_of(config):
        if setting.name in chosen and setting.value == AUTO:
            config = with_setting(config, dataclasses.replace(setting, value=chosen[setting.name]))
    return config


def decisions(asked: TrainConfig, config: TrainConfig) -> str:
    """What has been decided, as flags; empty where all was said."""
    pairs = zip(settings_of(asked), settings_of(config), strict=True)
    decided = [new for old, new in pairs if old.value == AUTO != new.value]
    return " ".join(f"--{new.name} {_as_typed(new.value)}" for new in decided)


def _as_typed(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_stored(config: TrainConfig, stored: TrainConfig, names: tuple[str, ...] = DECIDED) -> TrainConfig:
    """The configuration with what a run has decided before in place of every "auto" of these names."""
    kept = {setting.name: setting for setting in settings_of(stored)}
    for setting in settings_of(config):
        if setting.name in names and setting.value == AUTO:
            config = with_setting(config, kept[setting.name])
    return config
