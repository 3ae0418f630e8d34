"""Tokens of T5: SentencePiece for T5, FLAN-T5 and mT5, bytes for ByT5 (Xue et al., 2022).

Sentinels such as <extra_id_0>, which stand for gaps in pretraining, have ids after the pieces. They are not looked for
in texts, and have no text.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import sentencepiece

from konkanivani.config import PretrainedConfig
from konkanivani.data.text import (
    WORD_BOUNDARY,
    Digits,
    GenerationRules,
    SpecialTokens,
    TextLimits,
    drop_unwritten,
    text_limits,
)
from konkanivani.errors import DataError, UsageError

BYTE_IDS = 3  # padding, end and unknown come before the bytes
BYTES = 256
OTHER = "Use another model, or download its files again."


@dataclass(frozen=True)
class T5Tokens:
    """Number of rows of the embedding (the last ones have no piece), and the ids of special tokens."""

    size: int
    padding: int = 0
    end: int = 1
    start: int = 0
    """First token of the decoder's input; the padding token in all published models."""


class TextCodec(Protocol):
    """Conversion of text to ids and back."""

    @property
    def model(self) -> bytes:
        """The serialized model; empty for bytes."""

    @property
    def size(self) -> int:
        """Number of ids that have a piece."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids below `size` that are not special."""

    def piece(self, token: int) -> str:
        """Return the string of an id below `size`."""


class Pieces:
    """SentencePiece model with T5's special ids: padding, end, unknown."""

    def __init__(self, model: bytes, tokens: T5Tokens) -> None:
        """Load a serialized model; raise a `DataError` if it is not one, or has other special ids."""
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"spiece.model is not a SentencePiece model: {error}. {OTHER}") from None
        ids = self._processor.pad_id(), self._processor.eos_id()
        if ids != (tokens.padding, tokens.end):
            raise DataError(
                f"spiece.model has the padding and end tokens {ids}, but its model {tokens.padding, tokens.end}. "
                f"{OTHER}"
            )

    @property
    def size(self) -> int:
        return self._processor.get_piece_size()

    @property
    def unknown(self) -> int:
        return self._processor.unk_id()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    def piece(self, token: int) -> str:
        return self._processor.id_to_piece(token)


class Utf8Bytes:
    """Bytes of UTF-8, with ids from 3 on; can encode any text."""

    model = b""
    size = BYTE_IDS + BYTES
    unknown = None

    def encode(self, text: str) -> list[int]:
        return [BYTE_IDS + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        # A model can generate bytes that are no character.
        return bytes(token - BYTE_IDS for token in ids if token >= BYTE_IDS).decode(errors="ignore")

    def piece(self, token: int) -> str:
        byte = token - BYTE_IDS
        if byte == ord(" "):
            return WORD_BOUNDARY
        return chr(byte) if 0 <= byte < 128 else f"<0x{max(0, byte):02X}>"


class T5Vocabulary:
    """Tokens of a T5 model for inputs and targets; implements `TextVocabulary`."""

    def __init__(self, codec: Pieces | Utf8Bytes, tokens: T5Tokens, limits: TextLimits) -> None:
        """Raise a DataError if the model has fewer tokens than the codec."""
        if codec.size > tokens.size:
            raise DataError(f"The tokenizer has {codec.size} tokens, but its model has {tokens.size}. {OTHER}")
        self._codec = codec
        self._tokens = tokens
        self.limits = limits
        self.special = SpecialTokens(None, codec.unknown, tokens.start, tokens.end)
        # One token of the limit is the end.
        self.rules = GenerationRules(most_tokens=limits.target_tokens - 1)

    def __reduce__(self) -> tuple:
        return vocabulary_of, (self.model,)

    @property
    def size(self) -> int:
        """Number of the model's tokens."""
        return self._tokens.size

    @property
    def model(self) -> bytes:
        """Serialized form, from which `vocabulary_of` builds an equal vocabulary."""
        is_bytes = isinstance(self._codec, Utf8Bytes)
        about = {"bytes": is_bytes, "tokens": dataclasses.asdict(self._tokens), "limits": vars(self.limits)}
        return json.dumps(about).encode() + b"\n" + self._codec.model

    def normalize(self, text: str, digits: Digits) -> str:
        """Return a text without format characters that have no effect on its letters; case and punctuation stay."""
        return drop_unwritten(text).strip()

    def count_input(self, text: str) -> int:
        """Return the number of tokens of an input with its end token, before it is cut."""
        return len(self._codec.encode(text)) + 1

    def encode_input(self, text: str) -> list[int]:
        """Return the tokens of an input with its end token, within the limit if inputs are cut."""
        ids = self._codec.encode(text)
        return [*self._truncate(ids, self.limits.input_tokens), self._tokens.end]

    def encode_target(self, text: str) -> list[int]:
        """Return the tokens of a target without its end token, within the limit if targets are cut."""
        return self._truncate(self._codec.encode(text), self.limits.target_tokens)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a target, uncut."""
        return self._codec.encode(text)

    def encode_with_times(self, text: str, begin: float, end: float | None) -> list[int]:
        """Raise a `UsageError`: there are no timestamp tokens."""
        raise UsageError("A text-to-text model has no timestamp tokens: omit --timestamp_share.")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the stripped text of token ids; special tokens and sentinels are skipped."""
        skipped = (self._tokens.padding, self._tokens.end, self._tokens.start)
        return self._codec.decode([t for t in tokens if t < self._codec.size and t not in skipped]).strip()

    def begins_word(self, token: int) -> bool:
        """Return whether the token starts with a space."""
        return self.piece(token).startswith(WORD_BOUNDARY)

    def seconds_of(self, token: int) -> None:
        """Return None: there are no timestamp tokens."""

    def piece(self, token: int) -> str:
        """Return the token's spelling, or its id if it has none."""
        return self._codec.piece(token) if token < self._codec.size else f"<{token}>"

    def _truncate(self, ids: list[int], most: int) -> list[int]:
        return ids[: most - 1] if self.limits.cuts else ids


def limits_of(config: PretrainedConfig) -> TextLimits:
    """Return the limits of the settings."""
    return text_limits(config)


def vocabulary_of(model: bytes) -> T5Vocabulary:
    """Return the vocabulary serialized in `T5Vocabulary.model`; raise a DataError if the bytes are invalid."""
    about, _, pieces = model.partition(b"\n")
    try:
        match json.loads(about):
            case {
                "bytes": bool(is_bytes),
                "tokens": {"size": int(size), "padding": int(padding), "end": int(end), "start": int(start)},
                "limits": {"input_tokens": int(inputs), "target_tokens": int(targets), "cuts": bool(cuts)},
            }:
                tokens = T5Tokens(size, padding, end, start)
            case _:
                raise ValueError("other keys or types")
    except (ValueError, RecursionError):
        raise DataError(f"The tokenizer is not a T5 tokenizer. {OTHER}") from None
    if min(inputs, targets) < 2 or not all(0 <= token < size for token in (padding, end, start)):
        raise DataError(f"The tokenizer's limits or special tokens are invalid. {OTHER}")
    codec = Utf8Bytes() if is_bytes else Pieces(pieces, tokens)
    return T5Vocabulary(codec, tokens, TextLimits(inputs, targets, cuts))
