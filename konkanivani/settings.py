"""The settings of `config.py` one by one. No torch here."""

import dataclasses
from dataclasses import dataclass

from konkanivani.config import TrainConfig


@dataclass(frozen=True)
class Setting:
    """One flag with its value, found by walking a configuration."""

    group: str
    name: str
    value: object


def settings_of(config: TrainConfig) -> list[Setting]:
    """Every flag of `config`, in the order of the command line's help."""
    return [
        Setting(group.name, leaf.name, getattr(getattr(config, group.name), leaf.name))
        for group in dataclasses.fields(config)
        for leaf in dataclasses.fields(getattr(config, group.name))
    ]


def with_setting(config: TrainConfig, setting: Setting) -> TrainConfig:
    """`config` with one flag changed."""
    group = dataclasses.replace(getattr(config, setting.group), **{setting.name: setting.value})
    return dataclasses.replace(config, **{setting.group: group})
