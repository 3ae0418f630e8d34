"""What turns transcripts into token ids and token ids into text, whichever way it is done."""

from collections.abc import Sequence
from typing import Protocol

from konkanivani.data.generation import GenerationRules
from konkanivani.data.text import Digits, SpecialTokens


class Vocabulary(Protocol):
    """The tokens of a recogniser: ids from 0 to `size` - 1, some of them special.

    `model` is all of it as bytes, as a checkpoint keeps it: of equal bytes are equal vocabularies.
    """

    special: SpecialTokens
    """The ids that stand for no text."""
    rules: GenerationRules
    """How a search over its tokens goes."""
    model: bytes
    size: int

    def normalize(self, text: str, digits: Digits) -> str:
        """A transcript as its tokens are made of it, digits left or spelt."""

    def encode(self, text: str) -> list[int]:
        """What a model learns to say for a text, without the start and the end."""

    def encode_with_times(self, text: str, begin: float, end: float | None) -> list[int]:
        """The same with the seconds at which it is said; a UsageError where there are no tokens for times."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; special ones leave nothing."""

    def begins_word(self, token: int) -> bool:
        """Whether a word ends before token id `token`."""

    def seconds_of(self, token: int) -> float | None:
        """The time that token id `token` says; None where it says none."""

    def piece(self, token: int) -> str:
        """What token id `token` stands for."""
