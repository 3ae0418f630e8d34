"""KonkaniVani: speech recognition for languages with little data.

    from konkanivani import load_recognizer

    load_recognizer("checkpoints/checkpoint_best.pt").transcribe("speech.wav").text

Imports are lazy (PEP 562), so that `--help` and usage errors do not wait for torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from konkanivani.inference.recognizer import load_recognizer

__version__ = "0.2.0"

__all__ = ["load_recognizer"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from konkanivani.inference.recognizer import load_recognizer

    return load_recognizer
