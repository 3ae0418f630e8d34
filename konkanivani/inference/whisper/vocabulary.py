"""Whisper's tokens: byte pairs behind a prompt of language and task, with times where they are asked for.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 2.3. Every id is read from
the model's files by the token's name, for it differs from one model to another.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from konkanivani.base.errors import DataError, UsageError
from konkanivani.data.generation import GenerationRules, TimeRules
from konkanivani.data.text import Digits, SpecialTokens, written_text
from konkanivani.inference.whisper.byte_pairs import BytePairs, byte_pairs_of

END, START = "<|endoftext|>", "<|startoftranscript|>"
NO_TIMES, FIRST_TIME = "<|notimestamps|>", "<|0.00|>"
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # the newer and the older name
TASKS = ("transcribe", "translate")
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
TIMES, STEP_SECONDS = 1501, 0.02  # 0.00 to 30.00
LATEST_FIRST = 50  # steps: speech begins in the first second, or what is before it is told apart
# An English-only model names languages too. It has one token less than the least of the others.
ENGLISH_ONLY_SIZE = 51_864
NEAREST = {"kok": "Konkani", "gom": "Konkani"}
# What of generation_config.json says how a search goes, and which heads look at the word that is said.
GENERATION = ("suppress_tokens", "begin_suppress_tokens", "max_initial_timestamp_index", "alignment_heads")
OTHER = "Use another model, or download its files again."


@dataclass(frozen=True)
class Prompt:
    """What a model is told before it hears: `task` None and `language` None for one that knows English alone."""

    language: str | None
    task: str | None


@dataclass(frozen=True)
class ModelTokens:
    """What a model's files say of its tokens: how many there are, some maybe without a name, and places for them.

    `generation` is what generation_config.json says; the rest of that file is not looked at.
    """

    size: int
    positions: int
    is_english_only: bool
    generation: Mapping[str, object]

    @property
    def said(self) -> dict[str, object]:
        """What of `generation` is looked at."""
        return {name: self.generation[name] for name in GENERATION if name in self.generation}


class PromptedVocabulary:
    """Byte pairs with Whisper's named tokens, and the prompt with which this model is trained; a `Vocabulary`.

    A label is language, task, "no times" and the text; `collate` puts the start before and the end behind it.
    """

    def __init__(self, byte_pairs: BytePairs, prompt: Prompt, tokens: ModelTokens, says_times: bool = False) -> None:
        """With `says_times` a search finds the times of what it finds.

        Raises a DataError where a token is missing that the model needs, or generation_config.json names one that is
        not there; a UsageError where the prompt asks for what the model cannot do.
        """
        self._pairs, self._prompt, self._tokens, self._says_times = byte_pairs, prompt, tokens, says_times
        self._source = byte_pairs.source
        self._size, self._is_english_only = tokens.size, tokens.is_english_only
        if byte_pairs.size > self._size:
            raise DataError(f"{self._source} has {byte_pairs.size} tokens, but its model has {self._size}. {OTHER}")
        self.special = SpecialTokens(None, None, self._named(START), self._named(END))
        self.no_times = self._named(NO_TIMES)
        self.first_time = byte_pairs.names.get(FIRST_TIME, self.no_times + 1)
        self.no_speech = next((byte_pairs.names[name] for name in NO_SPEECH if name in byte_pairs.names), None)
        self._beginning = self._checked_beginning()
        self.rules = self._rules()

    def __reduce__(self) -> tuple:
        return vocabulary_of, (self.model,)

    def _named(self, name: str) -> int:
        if name not in self._pairs.names:
            raise DataError(f"{self._source} has no token {name}: it is not a Whisper vocabulary. {OTHER}")
        return self._pairs.names[name]

    def _checked_beginning(self) -> tuple[int, ...]:
        """Language and task, as the prompt asks for them; nothing of a model of English alone."""
        language, task = self._prompt.language, self._prompt.task
        if self._is_english_only:
            if language is not None or task not in (None, TASKS[0]):
                flag = "--language" if language is not None else f"--task {task}"
                raise UsageError(f"{flag} is not supported by an English-only model: omit it, or use another model.")
            return ()
        if task is not None and task not in TASKS:
            raise UsageError(f"--task {task} is unknown: use {' or '.join(TASKS)}.")
        if language is None:
            raise UsageError(f"The language is missing: give --language with one of {', '.join(self.languages)}.")
        if language not in self.languages:
            raise UsageError(self._unknown(language))
        if task == TASKS[1] and f"<|{task}|>" not in self._pairs.names:
            raise UsageError(f"--task {task}: the model has no token for it. Omit it, or use another model.")
        return self._named(f"<|{language}|>"), self._named(f"<|{task or TASKS[0]}|>")

    def _unknown(self, language: str) -> str:
        there = ", ".join(self.languages)
        near = [code for code in ("mr", "hi") if code in self.languages]
        if language in NEAREST and near:
            return (
                f"--language {language}: the model has no token for {NEAREST[language]}, and other programs "
                f"would not recognise a new one. Use the closest language, {' or '.join(near)}; available: "
                f"{there}."
            )
        return f"--language {language or repr(language)}: the model has no token for it. Use one of {there}."

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """The codes of the languages that it has tokens for, sorted; none for one that knows English alone."""
        if self._is_english_only:
            return ()
        return tuple(sorted(found[1] for name in self._pairs.names if (found := LANGUAGE.fullmatch(name))))

    @property
    def prefix(self) -> tuple[int, ...]:
        """What every label without times begins with."""
        return *self._beginning, self.no_times

    @property
    def prefix_with_times(self) -> tuple[int, ...]:
        """What every label with times begins with: a time is next."""
        return self._beginning

    @property
    def has_times(self) -> bool:
        """Whether the model has tokens for all times."""
        return self.first_time + TIMES <= self._size

    @property
    def size(self) -> int:
        """The model's tokens."""
        return self._size

    @cached_property
    def model(self) -> bytes:
        """All of it, from which `vocabulary_of` makes an equal one."""
        tokens = dataclasses.replace(self._tokens, generation=self._tokens.said)
        about = {**vars(self._prompt), **vars(tokens), "says_times": self._says_times}
        return json.dumps(about).encode() + b"\n" + self._pairs.model

    def normalize(self, text: str, digits: Digits) -> str:
        """A transcript as it is learnt: with its case and punctuation."""
        return written_text(text, digits)

    def encode(self, text: str) -> list[int]:
        """The label of a text, without times."""
        return [*self.prefix, *self._pairs.encode(text)]

    def encode_with_times(self, text: str, begin: float, end: float | None) -> list[int]:
        """The label of a text said from `begin` to `end` seconds; with `end` None it goes on behind the window."""
        times = [self.time_token(begin)], [] if end is None else [self.time_token(end)]
        return [*self.prefix_with_times, *times[0], *self._pairs.encode(text), *times[1]]

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Block and number of each of the decoder's heads that look at what is said; none where nobody has found them.

        A DataError where they are no such pairs.
        """
        pairs = self._tokens.generation.get("alignment_heads") or []
        if not isinstance(pairs, list) or any(
            not isinstance(pair, list) or [type(number) for number in pair] != [int, int] for pair in pairs
        ):
            raise DataError(f"generation_config.json: alignment_heads are not pairs of numbers. {OTHER}")
        return tuple((block, head) for block, head in pairs)

    def time_token(self, seconds: float) -> int:
        """The token of a time, of the nearest that there is."""
        if not self.has_times:
            raise UsageError(
                "The model has no timestamp tokens: train and transcribe without them (--timestamp_share 0)."
            )
        return self.first_time + min(TIMES - 1, max(0, round(seconds / STEP_SECONDS)))

    def seconds_of(self, token: int) -> float | None:
        """The time that a token stands for; None for any other."""
        place = token - self.first_time
        return round(place * STEP_SECONDS, 2) if self.has_times and 0 <= place < TIMES else None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without a space at its ends; prompt, special tokens and times leave nothing."""
        return self._pairs.decode([token for token in tokens if token < self._pairs.size]).strip()

    def begins_word(self, token: int) -> bool:
        """Whether a word ends before token id `token`."""
        return token < self._pairs.size and self._pairs.begins_word(token)

    def piece(self, token: int) -> str:
        """What token id `token` stands for; of one without a name, its number."""
        return self._pairs.piece(token) if token < self._pairs.size else f"<|{token}|>"

    def saying_times(self) -> "PromptedVocabulary":
        """The same, of which a search finds the times too; a UsageError where there are none."""
        self.time_token(0.0)
        return PromptedVocabulary(self._pairs, self._prompt, self._tokens, says_times=True)

    def _rules(self) -> GenerationRules:
        """How a search goes, by generation_config.json; what it leaves out is made of the tokens."""
        settings, with_times = self._tokens.generation, self._says_times
        latest = settings.get("max_initial_timestamp_index", LATEST_FIRST)
        if latest is not None and type(latest) is not int:
            raise DataError(f"generation_config.json: max_initial_timestamp_index is not an integer. {OTHER}")
        prompt = self.prefix_with_times if with_times else self.prefix
        return GenerationRules(
            prompt=prompt,
            suppressed=self._ids(settings, "suppress_tokens", self.unspoken),
            suppressed_first=self._ids(settings, "begin_suppress_tokens", self.unspoken_first),
            times=TimeRules(self.no_times, self.first_time, latest) if with_times else None,
            most_tokens=self._tokens.positions - 1 - len(prompt),
        )

    def _ids(self, settings: Mapping[str, object], name: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        if name not in settings:
            return otherwise
        ids = settings[name]
        ids = [] if ids is None else ids
        if not isinstance(ids, list) or not all(type(token) is int and -1 <= token < self._size for token in ids):
            raise DataError(
                f"generation_config.json: {name} is not a list of the model's tokens, 0 to {self._size - 1}. {OTHER}"
            )
        return otherwise if ids == [-1] else tuple(ids)

    @cached_property
    def unspoken_first(self) -> tuple[int, ...]:
        """What no text begins with where the files do not say it: a space alone, and the end."""
        return *self._pairs.encode(" ")[:1], self.special.end

    @cached_property
    def unspoken(self) -> tuple[int, ...]:
        """What is never said where the files do not say it: signs that are no speech, and what belongs to prompts."""
        found = {self._pairs.encode(" -")[0], self._pairs.encode(" '")[0]}
        for sign in (*SIGNS, *NOTES):
            for tokens in (self._pairs.encode(sign), self._pairs.encode(f" {sign}")):
                if len(tokens) == 1 or sign in NOTES:
                    found.add(tokens[0])
        names = (START, *(f"<|{task}|>" for task in TASKS), "<|startoflm|>", "<|startofprev|>", *NO_SPEECH)
        return tuple(sorted(found | {self._pairs.names[name] for name in names if name in self._pairs.names}))


# What the first line of `PromptedVocabulary.model` holds.
KINDS = {
    "language": (str, type(None)),
    "task": (str, type(None)),
    "size": (int,),
    "positions": (int,),
    "is_english_only": (bool,),
    "generation": (dict,),
    "says_times": (bool,),
}
SIGNS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),
)
NOTES = tuple("♩♪♫♬♭♮♯")


def is_english_only(byte_pairs: BytePairs, size: int, settings: Mapping[str, object]) -> bool:
    """Whether a model knows English alone: as generation_config.json says, or else as its tokens do."""
    said = settings.get("is_multilingual")
    if isinstance(said, bool):
        return not said
    return size == ENGLISH_ONLY_SIZE or not any(map(LANGUAGE.fullmatch, byte_pairs.names))


def vocabulary_of(model: bytes) -> PromptedVocabulary:
    """The one whose `PromptedVocabulary.model` these bytes are; a DataError where they are none."""
    about, _, pairs = model.partition(b"\n")
    try:
        found = json.loads(about)
        kinds = {name: type(found[name]) for name in KINDS}
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DataError(f"The tokenizer is not a Whisper tokenizer. {OTHER}") from None
    if not all(kind in KINDS[name] for name, kind in kinds.items()):
        raise DataError(f"The tokenizer is not a Whisper tokenizer. {OTHER}")
    prompt = Prompt(found["language"], found["task"])
    tokens = ModelTokens(found["size"], found["positions"], found["is_english_only"], found["generation"])
    try:
        return PromptedVocabulary(byte_pairs_of(pairs, "The tokenizer"), prompt, tokens, found["says_times"])
    except UsageError as error:  # nobody has asked for this
        raise DataError(f"The tokenizer lacks the tokens of its prompt. {error}") from None
