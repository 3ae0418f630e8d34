"""Interface of vocabularies, which convert transcripts to token ids and token ids to text."""

from collections.abc import Sequence
from typing import Protocol

from konkanivani.data.generation import GenerationRules
from konkanivani.data.text import Digits, SpecialTokens


class Vocabulary(Protocol):
    """Tokens of a recogniser: ids from 0 to `size` - 1, some of them special."""

    special: SpecialTokens
    """Ids without text."""
    rules: GenerationRules
    """Constraints of decoding with this vocabulary."""

    @property
    def model(self) -> bytes:
        """Return the serialized vocabulary, as stored in a checkpoint; equal bytes mean equal vocabularies."""

    @property
    def size(self) -> int:
        """Return the number of tokens."""

    def normalize(self, text: str, digits: Digits) -> str:
        """Return a transcript normalised for `encode`, with digits kept or spelt."""

    def encode(self, text: str) -> list[int]:
        """Return the label of a normalised text, without the start and end tokens."""

    def encode_with_times(self, text: str, begin: float, end: float | None) -> list[int]:
        """Return the label with timestamps.

        Args:
            text: Normalised transcript.
            begin: Start of the speech in seconds.
            end: Its end in seconds; None if it continues past the end of the audio.

        Raises:
            UsageError: The vocabulary has no timestamp tokens.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are omitted."""

    def begins_word(self, token: int) -> bool:
        """Return whether `token` is the first of a word."""

    def seconds_of(self, token: int) -> float | None:
        """Return the time of a timestamp token in seconds; None for other tokens."""

    def piece(self, token: int) -> str:
        """Return the string of one token, for display."""
