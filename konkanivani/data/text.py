"""Text: normalisation, format characters and tokenizers."""

import dataclasses
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import sentencepiece

from konkanivani.config import PretrainedConfig
from konkanivani.console import announced, count
from konkanivani.errors import DataError, UsageError

# --------------------
# Format characters (Unicode general category Cf) in transcripts: kept, mapped or dropped.
#
# | characters | scored and trained text | written text (Whisper) |
# |---|---|---|
# | ZWJ in a sequence of `EQUIVALENT` | mapped | mapped |
# | other ZWJ and ZWNJ (Bengali ya-phalaa, Kannada, Sinhala, Persian) | dropped | kept |
# | visible signs of `VISIBLE` (Arabic, Syriac, Kaithi) | dropped | kept |
# | all others (direction marks, BOM, soft hyphen, tags) | dropped | dropped |
#
# Unicode names no equivalent encoding without the joiner for the second row, so the joiner cannot be mapped.


MAX_NAMED = 8  # kinds of characters listed in a message
ZWNJ = "\u200c"
ZWJ = "\u200d"
JOINERS = frozenset((ZWNJ, ZWJ))
VISIBLE = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")

# Unicode Standard, chapter 12: rule R5 of Devanagari (eyelash ra) and the table of Malayalam chillus.
EQUIVALENT = {
    "\u0930\u094d\u200d": "\u0931\u094d",
    "\u0d23\u0d4d\u200d": "\u0d7a",
    "\u0d28\u0d4d\u200d": "\u0d7b",
    "\u0d30\u0d4d\u200d": "\u0d7c",
    "\u0d32\u0d4d\u200d": "\u0d7d",
    "\u0d33\u0d4d\u200d": "\u0d7e",
    "\u0d15\u0d4d\u200d": "\u0d7f",
}
_SEQUENCE = re.compile("|".join(EQUIVALENT))


def map_equivalent(text: str) -> str:
    """Replace each joiner sequence with the encoding that Unicode names as equivalent."""
    if ZWJ not in text:
        return text
    return _SEQUENCE.sub(lambda match: EQUIVALENT[match.group()], text)


def is_dropped_from_written(character: str) -> bool:
    """Return whether `character` is a format character that written text does not keep."""
    return unicodedata.category(character) == "Cf" and character not in JOINERS and character not in VISIBLE


def drop_unwritten(text: str) -> str:
    """Return `text` without format characters that have no effect on its letters."""
    if text.isascii():
        return text
    return "".join(character for character in text if not is_dropped_from_written(character))


# Category Cf without `VISIBLE`. Written out, because computing the ranges takes a sixth of a second at each start.
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


def find_removed(text: str) -> list[str]:
    """Return the invisible format characters that scored text drops, in their order; a mapped joiner is not dropped."""
    if text.isascii():
        return []
    return _find_invisible(map_equivalent(unicodedata.normalize("NFC", text)) if ZWJ in text else text)


def find_unwritten(text: str) -> list[str]:
    """Return the invisible format characters that even written text drops, in their order; joiners are kept."""
    return [] if text.isascii() else [character for character in _find_invisible(text) if character not in JOINERS]


def _find_invisible(text: str) -> list[str]:
    # Python's Unicode version may be older than the ranges, with fewer characters in Cf.
    return [character for character in _INVISIBLE.findall(text) if unicodedata.category(character) == "Cf"]


def count_mapped_joiners(text: str) -> int:
    """Return how many joiners of `text` are part of a sequence that is mapped to its equivalent encoding."""
    return text.count(ZWJ) - find_removed(text).count(ZWJ) if ZWJ in text else 0


@dataclass
class FormatCharacterCount:
    """Counts of invisible format characters removed from transcripts, and of the transcripts that contain any.

    `unwritten_texts` counts the transcripts with a character that even written text drops, that is, not a joiner.
    """

    characters: Counter[str] = field(default_factory=Counter)
    texts: int = 0
    unwritten_texts: int = 0

    def add(self, removed: Iterable[str]) -> None:
        """Count the characters that `find_removed` finds in one transcript."""
        counts = Counter(removed)
        if counts:
            self.characters += counts
            self.texts += 1
            self.unwritten_texts += not JOINERS.issuperset(counts)

    def add_all(self, other: "FormatCharacterCount") -> None:
        """Add the counts of other transcripts."""
        self.characters += other.characters
        self.texts += other.texts
        self.unwritten_texts += other.unwritten_texts

    def to_json(self) -> str:
        """Return the counts as JSON."""
        return json.dumps((self.characters, self.texts, self.unwritten_texts))

    @classmethod
    def from_json(cls, content: str) -> "FormatCharacterCount":
        """Return the counts of `to_json`; raise a ValueError or TypeError for other content."""
        characters, texts, unwritten_texts = json.loads(content)
        return cls(Counter(dict(characters)), int(texts), int(unwritten_texts))

    def sentence(self, keeps_joiners: bool = False) -> str:
        """Return one sentence with the counts; empty if nothing is removed. Written text keeps its joiners."""
        remaining = {c: n for c, n in self.characters.items() if not (keeps_joiners and c in JOINERS)}
        if not remaining:
            return ""
        texts = self.unwritten_texts if keeps_joiners else self.texts
        codes = [f"U+{ord(character):04X}" for character in sorted(remaining)]
        listed = ", ".join(codes[:MAX_NAMED]) + (f" and {len(codes) - MAX_NAMED} more" if codes[MAX_NAMED:] else "")
        removed = count(sum(remaining.values()), "invisible format character")
        return f"Removed {removed} from {count(texts, 'transcript')} ({listed})."


# --------------------
# Constraints of decoding: prompt, suppressed tokens, timestamp rules and maximum length.


@dataclass(frozen=True)
class TimeRules:
    """Timestamp tokens, as in Whisper: all ids from `first` on.

    `no_times` is the token for "no timestamps", which is never generated. The first generated token must be a
    timestamp between `first` and `first + latest_first` (None: no upper bound).
    """

    no_times: int
    first: int
    latest_first: int | None = None


@dataclass(frozen=True)
class GenerationRules:
    """Rules of decoding for one vocabulary; tokens are given by their ids.

    `prompt` follows the start token. `suppressed` tokens are never generated, `suppressed_first` tokens not directly
    after the prompt. A hypothesis has at most `most_tokens` tokens (None: the number of encoder frames). With
    `ends_loops`, one that only repeats itself is ended.
    """

    prompt: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimeRules | None = None
    most_tokens: int | None = None
    ends_loops: bool = False

    @property
    def forbids(self) -> bool:
        """Return whether any token is forbidden at some step."""
        return bool(self.suppressed or self.suppressed_first or self.times or self.ends_loops)


FREE = GenerationRules()


# --------------------
# Normalisation of transcripts, and SentencePiece tokenizers of normalised text.
#
# Normalisation applies these steps in order: Unicode NFC; joiner sequences with an equivalent encoding are mapped to it
# and other format characters are removed (table above); digits are kept or spelt one by one (`digits="spell"`); dandas,
# punctuation and symbols become spaces; letters become lower case; spaces are merged. Vowel signs, anusvara,
# candrabindu, virama, nukta and avagraha are kept.


WORD_BOUNDARY = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark before a word
DIGIT_WORDS = ("शून्य", "एक", "दोन", "तीन", "चार", "पांच", "स", "सात", "आठ", "णव")
Digits = Literal["keep", "spell"]


def normalize_text(text: str, digits: Digits = "keep") -> str:
    """Return `text` as it is used for training and scoring, by the steps of the comment above."""
    characters = []
    for character in _spell_digits(_compose(text).lower(), digits):
        kind = unicodedata.category(character)
        if kind[0] in "LMN":  # letters, marks (vowel signs, virama, nukta) and numbers
            characters.append(character)
        elif kind != "Cf":
            characters.append(" ")
    # Lower-casing and removing joiners can leave a sequence that composes further.
    return " ".join(unicodedata.normalize("NFC", "".join(characters)).split())


def written_text(text: str, digits: Digits = "keep") -> str:
    """Return `text` with case and punctuation, for models that write them: NFC, digits kept or spelt, single spaces."""
    return " ".join(unicodedata.normalize("NFC", _spell_digits(_compose(drop_unwritten(text)), digits)).split())


def _compose(text: str) -> str:
    return map_equivalent(unicodedata.normalize("NFC", text))


def _spell_digits(text: str, digits: Digits) -> str:
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
    match = _FORBIDDEN_IN_NAME.search(text)
    return match.group() if match else None


def forbidden_in_transcript(text: str) -> str | None:
    """Return the first character that no transcript may contain, or None; format characters are allowed."""
    match = _FORBIDDEN_IN_TEXT.search(text)
    return match.group() if match else None


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
        processor = self._processor
        ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
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


# --------------------
# Interface of vocabularies, which convert transcripts to token ids and token ids to text.


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


@dataclass(frozen=True)
class TextLimits:
    """Largest numbers of tokens of an input and of a target, end tokens included; longer texts are cut or skipped."""

    input_tokens: int
    target_tokens: int
    cuts: bool = True


DEFAULT_LIMIT = 512  # tokens, as in T5's pretraining


def text_limits(config: PretrainedConfig) -> TextLimits:
    """Return the limits of the settings, by default 512 tokens each."""
    return TextLimits(
        config.max_input_tokens or DEFAULT_LIMIT,
        config.max_target_tokens or DEFAULT_LIMIT,
        cuts=config.long_texts == "cut",
    )


@runtime_checkable
class TextVocabulary(Vocabulary, Protocol):
    """Vocabulary of a model whose input is text as well."""

    limits: TextLimits

    def count_input(self, text: str) -> int:
        """Return the number of tokens of a normalised input with its end token, before it is cut."""

    def encode_input(self, text: str) -> list[int]:
        """Return the tokens of a normalised input with its end token, within the limit if inputs are cut."""

    def encode_target(self, text: str) -> list[int]:
        """Return the tokens of a normalised target without its end token, within the limit if targets are cut."""


def reads_text(tokenizer: Vocabulary) -> TypeGuard[TextVocabulary]:
    """Return whether the input of the tokenizer's model is text, not audio."""
    return isinstance(tokenizer, TextVocabulary)
