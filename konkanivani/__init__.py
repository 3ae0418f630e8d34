"""KonkaniVani: speech recognition for languages with little data.

    import konkanivani
    from konkanivani import DataConfig, TrainConfig

    data = DataConfig(train_manifest="train.jsonl", valid_manifest="valid.jsonl")
    summary = konkanivani.train(TrainConfig(data=data))
    print(konkanivani.load_recognizer(summary.checkpoint).transcribe("speech.wav").text)
    print(konkanivani.plan(TrainConfig(), gpu="T4").as_table())

Imports are lazy (PEP 562), so that `--help` and usage errors do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from konkanivani.child_process import TrainingSummary, train
    from konkanivani.cli.plan import plan
    from konkanivani.config import (
        DataConfig,
        LossConfig,
        MemoryConfig,
        ModelConfig,
        OptimizerConfig,
        PretrainedConfig,
        RunConfig,
        TextConfig,
        TrainConfig,
        TuningConfig,
    )
    from konkanivani.inference.recognizer import load_recognizer

__version__ = "0.2.0"

_MODULES = {
    "load_recognizer": "inference.recognizer",
    "plan": "cli.plan",
    "train": "child_process",
    "TrainingSummary": "child_process",
    "TrainConfig": "config",
    "DataConfig": "config",
    "LossConfig": "config",
    "MemoryConfig": "config",
    "ModelConfig": "config",
    "OptimizerConfig": "config",
    "PretrainedConfig": "config",
    "RunConfig": "config",
    "TextConfig": "config",
    "TuningConfig": "config",
}
__all__ = [
    "DataConfig",
    "LossConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainedConfig",
    "RunConfig",
    "TextConfig",
    "TrainConfig",
    "TrainingSummary",
    "TuningConfig",
    "load_recognizer",
    "plan",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"konkanivani.{_MODULES[name]}"), name)
