"""Whisper's tokenizer with its prompt, and the timed segments of its output.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 2.3: each segment is a start
timestamp, its text and an end timestamp. A segment that continues after Whisper's 30 s window has no end timestamp.
Token ids differ between models, so special tokens are looked up by name in the model's files.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from konkanivani.data.text import Digits, GenerationRules, SpecialTokens, TimeRules, Vocabulary, written_text
from konkanivani.errors import DataError, UsageError
from konkanivani.models.whisper.byte_pairs import BytePairs, byte_pairs_of

# --------------------
# Segments of a hypothesis with timestamp tokens.


@dataclass(frozen=True)
class TimedSegment:
    """Text tokens between two timestamps, in seconds from the start of the audio."""

    begin: float
    end: float
    tokens: tuple[int, ...]


def timed_segments(tokens: Sequence[int], vocabulary: Vocabulary, seconds: float) -> list[TimedSegment]:
    """Return the segments of a hypothesis for audio of `seconds`, in order; segments without text are dropped.

    Without a start timestamp, a segment starts at the end of the previous segment or at 0. Without an end timestamp, it
    ends at `seconds`.
    """
    segments = []
    text = []
    latest = 0.0
    for token in tokens:
        time = vocabulary.seconds_of(token)
        if time is None:
            text.append(token)
            continue
        # The model may predict decreasing timestamps, or timestamps in the padding after the audio: clamp both.
        time = min(max(time, latest), seconds)
        if text:
            segments.append(TimedSegment(latest, time, tuple(text)))
        # The same token ends one segment and starts the next, so a repeated timestamp gives no empty segment.
        text = []
        latest = time
    return segments + ([TimedSegment(latest, seconds, tuple(text))] if text else [])


# --------------------
# Whisper's tokenizer: byte-pair encoding with a prompt for language and task, and optional timestamps.


END = "<|endoftext|>"
START = "<|startoftranscript|>"
NO_TIMES = "<|notimestamps|>"
FIRST_TIME = "<|0.00|>"
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # the newer and the older name
TASKS = ("transcribe", "translate")
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
# 0.00 to 30.00 s
TIMES = 1501
STEP_SECONDS = 0.02
LATEST_FIRST = 50  # steps, 1 s: default bound of a hypothesis's first timestamp
# English-only vocabularies contain language tokens too. They have one token less than the smallest multilingual one.
ENGLISH_ONLY_SIZE = 51_864
KONKANI = ("kok", "gom")  # codes without a token
# Keys of generation_config.json that are read: decoding rules, and cross-attention heads for word times.
GENERATION = ("suppress_tokens", "begin_suppress_tokens", "max_initial_timestamp_index", "alignment_heads")
OTHER = "Use another model, or download its files again."


@dataclass(frozen=True)
class Prompt:
    """Language and task tokens of the decoder prompt; both are None for an English-only model."""

    language: str | None
    task: str | None


@dataclass(frozen=True)
class ModelTokens:
    """Number of tokens (some may have no name), decoder positions, and generation settings of a model.

    `generation` is the content of generation_config.json; only the keys in `GENERATION` are read.
    """

    size: int
    positions: int
    is_english_only: bool
    generation: Mapping[str, object]

    @property
    def used_settings(self) -> dict[str, object]:
        """Return the entries of `generation` that are read."""
        return {name: self.generation[name] for name in GENERATION if name in self.generation}


class PromptedVocabulary:
    """Byte-pair encoding with Whisper's special tokens and the prompt used in training; implements `Vocabulary`.

    A label is language, task, "no timestamps" and the text; `collate` adds the start and end tokens.
    """

    def __init__(self, byte_pairs: BytePairs, prompt: Prompt, tokens: ModelTokens, says_times: bool = False) -> None:
        """Check the special tokens and build the decoding rules.

        Args:
            says_times: predict timestamps when decoding.

        Raises a DataError if a required token is missing or generation_config.json contains an invalid one, and a
        UsageError if the model does not support the prompt.
        """
        self._pairs = byte_pairs
        self._prompt = prompt
        self._tokens = tokens
        self._says_times = says_times
        # The embedding may be padded to more rows than there are tokens, but not fewer.
        if byte_pairs.size > tokens.size:
            raise DataError(
                f"{byte_pairs.source} has {byte_pairs.size} tokens, but its model has {tokens.size}. {OTHER}"
            )
        self.special = SpecialTokens(None, None, self._token_of(START), self._token_of(END))
        self.no_times = self._token_of(NO_TIMES)
        # Some tokenizer files omit the timestamp tokens, which follow "no timestamps" in every model.
        self.first_time = byte_pairs.names.get(FIRST_TIME, self.no_times + 1)
        self.no_speech = next((byte_pairs.names[name] for name in NO_SPEECH if name in byte_pairs.names), None)
        self._beginning = self._check_prompt()
        self.rules = self._rules()

    def __reduce__(self) -> tuple:
        return vocabulary_of, (self.model,)

    def _token_of(self, name: str) -> int:
        if name not in self._pairs.names:
            raise DataError(f"{self._pairs.source} has no token {name}: it is not a Whisper vocabulary. {OTHER}")
        return self._pairs.names[name]

    def _check_prompt(self) -> tuple[int, ...]:
        """Return the language and task tokens of the prompt, or () for an English-only model."""
        language = self._prompt.language
        task = self._prompt.task
        if self._tokens.is_english_only:
            if language is not None or task not in (None, TASKS[0]):
                flag = "--language" if language is not None else f"--task {task}"
                raise UsageError(f"{flag} is not supported by an English-only model: omit it, or use another model.")
            return ()
        if task is not None and task not in TASKS:
            raise UsageError(f"--task {task} is unknown: use {' or '.join(TASKS)}.")
        if language is None:
            raise UsageError(f"The language is missing: give --language with one of {', '.join(self.languages)}.")
        if language not in self.languages:
            language_words = language or repr(language)
            raise UsageError(
                f"--language {language_words}: the model has no token for it. {self._languages_to_use(language)}"
            )
        if task == TASKS[1] and f"<|{task}|>" not in self._pairs.names:
            raise UsageError(f"--task {task}: the model has no token for it. Omit it, or use another model.")
        return self._token_of(f"<|{language}|>"), self._token_of(f"<|{task or TASKS[0]}|>")

    def _languages_to_use(self, language: str) -> str:
        """Return the languages to use in place of one without a token."""
        available = ", ".join(self.languages)
        near = [code for code in ("mr", "hi") if code in self.languages]
        if language not in KONKANI or not near:
            return f"Use one of {available}."
        return (
            "Other programs would not recognise a new one for Konkani. Use the closest language, "
            f"{' or '.join(near)}; available: {available}."
        )

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """Sorted codes of the languages that have a token; empty for an English-only model."""
        if self._tokens.is_english_only:
            return ()
        return tuple(sorted(match[1] for name in self._pairs.names if (match := LANGUAGE.fullmatch(name))))

    @property
    def prefix(self) -> tuple[int, ...]:
        """First tokens of every label without timestamps."""
        return *self._beginning, self.no_times

    @property
    def prefix_with_times(self) -> tuple[int, ...]:
        """First tokens of every label with timestamps; the next token is a timestamp."""
        return self._beginning

    @property
    def has_times(self) -> bool:
        """Whether the model has tokens for all timestamps."""
        return self.first_time + TIMES <= self._tokens.size

    @property
    def size(self) -> int:
        """Number of the model's tokens."""
        return self._tokens.size

    @cached_property
    def model(self) -> bytes:
        """Serialized form, from which `vocabulary_of` builds an equal vocabulary."""
        tokens = dataclasses.replace(self._tokens, generation=self._tokens.used_settings)
        about = {**vars(self._prompt), **vars(tokens), "says_times": self._says_times}
        return json.dumps(about).encode() + b"\n" + self._pairs.model

    def normalize(self, text: str, digits: Digits) -> str:
        """Return a transcript as used for training labels: with case and punctuation."""
        return written_text(text, digits)

    def encode(self, text: str) -> list[int]:
        """Return the label of a text, without timestamps."""
        return [*self.prefix, *self._pairs.encode(text)]

    def encode_with_times(self, text: str, begin: float, end: float | None) -> list[int]:
        """Return the label of a text with its start and end times in seconds.

        With `end` None the speech continues after Whisper's 30 s window, and the label has no end timestamp.
        """
        label = [*self.prefix_with_times, self.time_token(begin), *self._pairs.encode(text)]
        if end is not None:
            label.append(self.time_token(end))
        return label

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Pairs (block, head) of the decoder heads that follow the spoken word; empty if the model names none.

        Raises a DataError if they are not pairs of integers.
        """
        pairs = self._tokens.generation.get("alignment_heads") or []
        if not isinstance(pairs, list) or any(
            not isinstance(pair, list) or [type(number) for number in pair] != [int, int] for pair in pairs
        ):
            raise DataError(f"generation_config.json: alignment_heads are not pairs of numbers. {OTHER}")
        return tuple((block, head) for block, head in pairs)

    def time_token(self, seconds: float) -> int:
        """Return the timestamp token closest to `seconds`."""
        if not self.has_times:
            raise UsageError(
                "The model has no timestamp tokens: train and transcribe without them (--timestamp_share 0)."
            )
        return self.first_time + min(TIMES - 1, max(0, round(seconds / STEP_SECONDS)))

    def seconds_of(self, token: int) -> float | None:
        """Return the time of a timestamp token, or None for any other token."""
        offset = token - self.first_time
        return round(offset * STEP_SECONDS, 2) if self.has_times and 0 <= offset < TIMES else None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the stripped text of token ids; prompt, special and timestamp tokens are skipped."""
        return self._pairs.decode([token for token in tokens if token < self._pairs.size]).strip()

    def begins_word(self, token: int) -> bool:
        """Return whether the token starts with a space."""
        return token < self._pairs.size and self._pairs.begins_word(token)

    def piece(self, token: int) -> str:
        """Return the token's spelling in the vocabulary, or its id if it has no name."""
        return self._pairs.piece(token) if token < self._pairs.size else f"<|{token}|>"

    def saying_times(self) -> "PromptedVocabulary":
        """Return a copy that predicts timestamps when decoding; raise a UsageError if the model cannot."""
        self.time_token(0.0)
        return PromptedVocabulary(self._pairs, self._prompt, self._tokens, says_times=True)

    def _rules(self) -> GenerationRules:
        """Return the decoding rules of generation_config.json, with defaults for missing entries."""
        settings = self._tokens.generation
        with_times = self._says_times
        # None removes the bound, a missing key means the default.
        latest = settings.get("max_initial_timestamp_index", LATEST_FIRST)
        if latest is not None and type(latest) is not int:
            raise DataError(f"generation_config.json: max_initial_timestamp_index is not an integer. {OTHER}")
        prompt = self.prefix_with_times if with_times else self.prefix
        return GenerationRules(
            prompt=prompt,
            suppressed=self._ids(settings, "suppress_tokens", self.unspoken),
            suppressed_first=self._ids(settings, "begin_suppress_tokens", self.unspoken_first),
            times=TimeRules(self.no_times, self.first_time, latest) if with_times else None,
            # Positions that remain after the start token and the prompt.
            most_tokens=self._tokens.positions - 1 - len(prompt),
        )

    def _ids(self, settings: Mapping[str, object], name: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        if name not in settings:
            return otherwise
        ids = settings[name]
        ids = [] if ids is None else ids
        size = self._tokens.size
        # As in OpenAI's code, [-1] stands for the default list. Among other tokens it would be taken for the last one.
        if ids == [-1]:
            return otherwise
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < size for token in ids):
            raise DataError(
                f"generation_config.json: {name} is not a list of the model's tokens, 0 to {size - 1}. {OTHER}"
            )
        return tuple(ids)

    @cached_property
    def unspoken_first(self) -> tuple[int, ...]:
        """Default for `begin_suppress_tokens`: a single space, and the end token."""
        return *self._pairs.encode(" ")[:1], self.special.end

    @cached_property
    def unspoken(self) -> tuple[int, ...]:
        """Default for `suppress_tokens`: symbols that are not speech, and tokens of prompts.

        The same tokens as `non_speech_tokens` in OpenAI's whisper/tokenizer.py.
        """
        # Hyphens and apostrophes are allowed within words, but not at the start of a word.
        suppressed = {self._pairs.encode(" -")[0], self._pairs.encode(" '")[0]}
        for sign in (*SIGNS, *NOTES):
            for tokens in (self._pairs.encode(sign), self._pairs.encode(f" {sign}")):
                # A symbol of several tokens is kept, since its tokens occur in other text too. For notes the first
                # token is suppressed nevertheless: it only occurs in symbols from U+2640 to U+267F.
                if len(tokens) == 1 or sign in NOTES:
                    suppressed.add(tokens[0])
        names = (START, *(f"<|{task}|>" for task in TASKS), "<|startoflm|>", "<|startofprev|>", *NO_SPEECH)
        return tuple(sorted(suppressed | {self._pairs.names[name] for name in names if name in self._pairs.names}))


SIGNS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),
)
NOTES = tuple("♩♪♫♬♭♮♯")


def is_english_only(byte_pairs: BytePairs, size: int, settings: Mapping[str, object]) -> bool:
    """Return whether a model is English-only, from generation_config.json or else from its tokens."""
    # Older files lack this key.
    is_multilingual = settings.get("is_multilingual")
    if isinstance(is_multilingual, bool):
        return not is_multilingual
    return size == ENGLISH_ONLY_SIZE or not any(map(LANGUAGE.fullmatch, byte_pairs.names))


def vocabulary_of(model: bytes) -> PromptedVocabulary:
    """Return the vocabulary serialized in `PromptedVocabulary.model`; raise a DataError if the bytes are invalid."""
    about, _, pairs = model.partition(b"\n")
    try:
        match json.loads(about):
            case {
                "language": str() | None as language,
                "task": str() | None as task,
                "size": int(size),
                "positions": int(positions),
                "is_english_only": bool(english),
                "generation": dict(generation),
                "says_times": bool(says_times),
            }:
                prompt = Prompt(language, task)
                tokens = ModelTokens(size, positions, english, generation)
            case _:
                raise ValueError("other keys or types")
    except (ValueError, RecursionError):
        raise DataError(f"The tokenizer is not a Whisper tokenizer. {OTHER}") from None
    try:
        return PromptedVocabulary(byte_pairs_of(pairs, "The tokenizer"), prompt, tokens, says_times)
    except UsageError as error:  # not an error of the user's flags
        raise DataError(f"The tokenizer lacks the tokens of its prompt. {error}") from None
