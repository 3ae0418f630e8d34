"""Normalisation of transcripts, and SentencePiece tokenizers of normalised text.

Normalisation applies these steps in order: Unicode NFC; joiner sequences with an equivalent encoding are mapped to it
and other format characters are removed (format_characters.py); digits are kept or spelt one by one (`digits="spell"`);
dandas, punctuation and symbols become spaces; letters become lower case; spaces are merged. Vowel signs, anusvara,
candrabindu, virama, nukta and avagraha are kept.
"""

import dataclasses
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import sentencepiece

from konkanivani.base.console import announced
from konkanivani.base.errors import DataError, UsageError
from konkanivani.data.format_characters import drop_unwritten, map_equivalent
from konkanivani.data.generation import FREE

WORD_BOUNDARY = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark before a word
DIGIT_WORDS = ("शून्य", "एक", "दोन", "तीन", "चार", "पांच", "स", "सात", "आठ", "णव")
Digits = Literal["keep", "spell"]


def normalize_text(text: str, digits: Digits = "keep") -> str:
    """Return `text` as it is used for training and scoring; see the module's docstring."""
    characters = []
    for character in _spelt(_composed(text).lower(), digits):
        kind = unicodedata.category(character)
        if kind[0] in "LMN":  # letters, marks (vowel signs, virama, nukta) and numbers
            characters.append(character)
        elif kind != "Cf":
            characters.append(" ")
    # Lower-casing and removing joiners can leave a sequence that composes further.
    return " ".join(unicodedata.normalize("NFC", "".join(characters)).split())


def written_text(text: str, digits: Digits = "keep") -> str:
    """Return `text` with case and punctuation, for models that write them: NFC, digits kept or spelt, single spaces."""
    return " ".join(unicodedata.normalize("NFC", _spelt(_composed(drop_unwritten(text)), digits)).split())


def _composed(text: str) -> str:
    return map_equivalent(unicodedata.normalize("NFC", text))


def _spelt(text: str, digits: Digits) -> str:
    if digits == "keep":
        return text
    return "".join(f" {DIGIT_WORDS[unicodedata.digit(c)]} " if unicodedata.category(c) == "Nd" else c for c in text)


# Control characters except tab and line ends, and lone surrogates.
_CONTROL = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff"
_FORBIDDEN_IN_TEXT = re.compile(f"[{_CONTROL}]")
# A direction mark in a path or an id can make a terminal show another name.
_FORBIDDEN_IN_NAME = re.compile(f"[{_CONTROL}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def forbidden_character(text: str) -> str | None:
    """Return the first character that no path or id may contain, or None."""
    found = _FORBIDDEN_IN_NAME.search(text)
    return found.group() if found else None


def forbidden_in_transcript(text: str) -> str | None:
    """Return the first character that no transcript may contain, or None; format characters are allowed."""
    found = _FORBIDDEN_IN_TEXT.search(text)
    return found.group() if found else None


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of tokens without text: CTC's blank, the unknown token, and the start and end of a transcript.

    `blank` is None in a vocabulary without CTC, whose `rules` list the suppressed tokens; `unknown` is None in one that
    can encode any text.
    """

    blank: int | None = 0
    unknown: int | None = 1
    start: int = 2
    end: int = 3

    def __contains__(self, token: int) -> bool:
        return token in (self.blank, self.unknown, self.start, self.end)

    @property
    def never_generated(self) -> tuple[int, ...]:
        """Return the tokens that decoding must not generate, although the decoder assigns them some probability."""
        return () if self.blank is None else (self.blank, self.start)


OUR_TOKENS = SpecialTokens()
"""Special tokens of the tokenizers that KonkaniVani trains."""


class Tokenizer:
    """SentencePiece `Vocabulary` of normalised text; the ids of `special` precede the pieces."""

    def __init__(self, model: bytes) -> None:
        """Load a serialized model; raise a `DataError` if it is not a SentencePiece model with these special ids."""
        self.model = model
        self.special = OUR_TOKENS
        self.rules = FREE
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"The tokenizer is not a SentencePiece model: {error}. Use another checkpoint or bundle."
            ) from None
        made = self._processor
        ids = (made.pad_id(), made.unk_id(), made.bos_id(), made.eos_id())
        if ids != dataclasses.astuple(self.special):
            raise DataError(
                f"The tokenizer's special ids are {ids}, not (0, 1, 2, 3): it was not trained by KonkaniVani. "
                "Use another one."
            )

    def __reduce__(self) -> tuple:
        return Tokenizer, (self.model,)

    @property
    def size(self) -> int:
        return self._processor.get_piece_size()

    def normalize(self, text: str, digits: Digits) -> str:
        """Return a transcript normalised for `encode`: without case and punctuation."""
        return normalize_text(text, digits)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a normalised text."""
        return self._processor.encode(text)

    def encode_with_times(self, text: str, begin: float, end: float | None) -> list[int]:
        """Raise a `UsageError`: there are no timestamp tokens."""
        raise UsageError("The tokenizer has no timestamp tokens: omit --timestamp_share.")

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.decode([token for token in tokens if token not in self.special]).strip()

    def begins_word(self, token: int) -> bool:
        return self.piece(token).startswith(WORD_BOUNDARY)

    def seconds_of(self, token: int) -> None:
        """Return None: there are no timestamp tokens."""

    def piece(self, token: int) -> str:
        return self._processor.id_to_piece(token)


def train_tokenizer(texts: Iterable[str], kind: Literal["unigram", "bpe", "char"], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens on normalised texts; print a line if it had to be smaller."""
    texts = sorted(set(texts))  # the tokenizer must not depend on the manifest's order
    smallest = len(set("".join(texts)) - {" "}) + 5  # every character, the word boundary, and the four special tokens
    if vocab_size < smallest:
        raise UsageError(
            f"--vocab_size {vocab_size} is too small: the training text has {smallest - 5} different "
            f"characters and needs at least {smallest}. Use that, or remove rare characters from the text."
        )
    if kind == "char":
        return Tokenizer(_train_sentencepiece(texts, kind, smallest))
    # Measured on two cores with 1,000 tokens: 11 s for 0.3 million characters, 26 s for 3.3 million.
    seconds = 10 + 5e-6 * sum(map(len, texts))
    try:
        with announced(f"Training a {kind} tokenizer on {len(texts):,} transcripts: about {seconds:.0f} s."):
            return Tokenizer(_train_sentencepiece(texts, kind, vocab_size))
    except RuntimeError as error:
        # Only the error message states the largest size that this text allows.
        largest = re.search(r"value <= (\d+)", str(error))
        if not largest and "too small" not in str(error) and "too high" not in str(error).lower():
            raise DataError(
                f"SentencePiece training failed on the training text: {error}. Use more text, or --tokenizer_type char."
            ) from None
        size = int(largest.group(1)) if largest else smallest
    print(f"--vocab_size {vocab_size} reduced to {size}: the training text is too short for more.", flush=True)
    return Tokenizer(_train_sentencepiece(texts, kind, size))


def _train_sentencepiece(texts: list[str], kind: str, vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab_size,
        character_coverage=1.0,
        normalization_rule_name="identity",  # the texts are already normalised
        pad_id=OUR_TOKENS.blank,
        unk_id=OUR_TOKENS.unknown,
        bos_id=OUR_TOKENS.start,
        eos_id=OUR_TOKENS.end,
        pad_piece="<blank>",
        num_threads=1,  # the result must not depend on the machine
        max_sentence_length=1_000_000,
        minloglevel=2,
    )
    return model.getvalue()
