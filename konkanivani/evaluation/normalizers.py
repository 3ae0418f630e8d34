"""How texts are made alike before they are compared; references and hypotheses in the same way, always."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from konkanivani.data.text import normalize_text

NormalizerName = Literal["konkanivani", "spell", "none"]
Normalize = Callable[[str], str]


def build_normalizer(name: NormalizerName) -> Normalize:
    """konkanivani: as text is trained on (text.py); spell: with each digit spelt, too; none: the text as it stands.

    Even with none, where and how wide the white space between words is makes no difference.
    """
    normalizers: dict[NormalizerName, Normalize] = {
        "konkanivani": normalize_text,
        "spell": partial(normalize_text, digits="spell"),
        "none": _join_words,
    }
    return normalizers[name]


def _join_words(text: str) -> str:
    return " ".join(text.split())
