"""Correction of transcripts by a text-to-text model, within limits on what it may change, and pairs to train one."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.config import PretrainedConfig, TuningConfig
from konkanivani.data.text import normalize_text, reads_text
from konkanivani.decoding.decode import Decode, greedy_decode
from konkanivani.distributed import choose_device
from konkanivani.errors import DataError, UsageError, explained
from konkanivani.files import write_json_lines
from konkanivani.inference.recognizer import Audio, Recognizer
from konkanivani.inference.speech_model import SpeechModel, build_pretrained_model, build_speech_model, read_pretrained
from konkanivani.inference.word_times import Segment, Word
from konkanivani.lengths import SAMPLE_RATE, TOKENS
from konkanivani.randomness import derive_seed
from konkanivani.scoring.metrics import align_words, count_edits

TEXTS_AT_ONCE = 16
LONGER = 8  # a correction may have an eighth more tokens than its text
MAX_INSERTED = 2  # words beyond those that a change replaces
# A recogniser's wrong words are nearly right: a quarter of their letters at most, or one letter, may change. Beyond
# that, a corrector writes other words than it reads, above all for sentences unlike those of its training.
LETTERS_PER_CHANGE = 4


@dataclass(frozen=True)
class Corrector:
    """Text-to-text model with greedy search."""

    model: SpeechModel
    decode: Decode

    def correct(self, texts: list[str]) -> list[str]:
        """Return each text with the model's changes within the limits of `corrected_words`; an empty text stays empty.

        A text that is longer than the model's inputs in training is corrected in windows of whole words.
        """
        windows = [self._windows(text) for text in texts]
        waiting = [window for of_text in windows for window, is_read in of_text if is_read]
        corrected: list[str] = []
        for start in range(0, len(waiting), TEXTS_AT_ONCE):
            corrected += self._generate(waiting[start : start + TEXTS_AT_ONCE])
        in_order = iter(corrected)
        results = []
        for text, of_text in zip(texts, windows, strict=True):
            outputs = [next(in_order) if is_read else window for window, is_read in of_text]
            results.append(_within_limits(text, " ".join(outputs)) if text.strip() else text)
        return results

    def _windows(self, text: str) -> list[tuple[str, bool]]:
        """Return the text, or windows of its words, each with whether the model reads it whole (not a longer word)."""
        is_read = self._is_read(text)
        words = text.split()
        if is_read or len(words) < 2:
            return [(text, is_read)]
        half = len(words) // 2
        return [*self._windows(" ".join(words[:half])), *self._windows(" ".join(words[half:]))]

    def _is_read(self, text: str) -> bool:
        """Return whether the text has letters and the model reads and writes it without cutting it."""
        tokenizer = self.model.tokenizer
        assert reads_text(tokenizer)  # load_corrector accepts no other model
        limits = tokenizer.limits
        # The correction may be longer than the text.
        max_tokens = min(limits.input_tokens, limits.target_tokens - limits.target_tokens // LONGER)
        return bool(text.strip()) and tokenizer.count_input(tokenizer.normalize(text, "keep")) <= max_tokens

    @torch.no_grad()
    def _generate(self, texts: list[str]) -> list[str]:
        tokenizer = self.model.tokenizer
        assert reads_text(tokenizer)  # load_corrector accepts no other model
        inputs = [torch.tensor(tokenizer.encode_input(tokenizer.normalize(text, "keep"))) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        encoded = self.model.encode(padded, tuple(map(len, inputs)))
        return [tokenizer.decode(tokens) for tokens in self.decode(self.model.model, *encoded)]


def load_corrector(path: str, device: str = "auto") -> Corrector:
    """Return the corrector of a checkpoint or a T5 folder; raise a UsageError for a model of speech."""
    target_device = choose_device(device)
    of_speech = UsageError(f"{path} is a model of speech. Give a checkpoint or folder of a T5 model.")
    if Path(path).is_file():
        model = build_speech_model(read_checkpoint(path), target_device)
    else:
        pretrained = read_pretrained(path)
        settings = pretrained.complete_settings(PretrainedConfig(pretrained=path))
        # Before it is built: the tokenizer of a Whisper model would ask for --language, which `correct` does not have.
        if pretrained.architecture(TuningConfig(), settings).framing.unit != TOKENS:
            raise of_speech
        model = build_pretrained_model(pretrained, settings, target_device)
    if not reads_text(model.tokenizer):
        raise of_speech
    return Corrector(model, greedy_decode(model.architecture, model.tokenizer))


def corrected_words(words: tuple[Word, ...], text: str, keep_confidence: float) -> tuple[Word, ...]:
    """Return the words with the corrected `text`, as far as the limits allow.

    A word with a confidence of `keep_confidence` or more may get another case and punctuation only. Others may be
    replaced, split, joined or removed. Such a change affects one in `LETTERS_PER_CHANGE` letters at most, or one
    letter; it adds at most `MAX_INSERTED` words, and none without a word that it replaces. Each word has the time of
    the word that it replaces, or a part of it.
    """
    new = text.split()
    old_forms = [normalize_text(word.text) for word in words]
    new_forms = [normalize_text(word) for word in new]
    corrected: list[Word] = []
    matcher = SequenceMatcher(None, old_forms, new_forms, autojunk=False)
    for kind, first, last, start, end in matcher.get_opcodes():
        old_words = words[first:last]
        if kind == "equal":
            # The same words: the correction's case and punctuation.
            corrected += [replace(word, text=written) for word, written in zip(old_words, new[start:end], strict=True)]
            continue
        is_sure = any(word.confidence is None or word.confidence >= keep_confidence for word in old_words)
        is_small = _is_small_change("".join(old_forms[first:last]), "".join(new_forms[start:end]))
        if kind == "insert" or is_sure or not is_small or end - start > len(old_words) + MAX_INSERTED:
            corrected += old_words
        elif kind == "replace":
            corrected += _spread(old_words, new[start:end])
    return tuple(corrected)


def _is_small_change(old: str, new: str) -> bool:
    """Return whether few enough letters differ; spaces are not among the letters of `old` and `new`."""
    changed = count_edits([old], [new]).rates().characters.errors
    return changed <= max(1, len(old) // LETTERS_PER_CHANGE)


def _within_limits(text: str, corrected: str) -> str:
    """Return the corrected text without the changes that invent words; any word of `text` may change."""
    unsure = tuple(Word(word, float(number), number + 1.0, 0.0) for number, word in enumerate(text.split()))
    return " ".join(word.text for word in corrected_words(unsure, corrected, keep_confidence=1.0)) or text


def _spread(old_words: tuple[Word, ...], texts: list[str]) -> list[Word]:
    """Return words with these texts over the time of the words that they replace."""
    if len(old_words) == len(texts):
        return [replace(word, text=text) for word, text in zip(old_words, texts, strict=True)]
    begin = old_words[0].start
    word_seconds = (old_words[-1].end - begin) / len(texts)
    confidences = [word.confidence for word in old_words if word.confidence is not None]
    confidence = min(confidences, default=None)
    return [
        Word(text, begin + number * word_seconds, begin + (number + 1) * word_seconds, confidence)
        for number, text in enumerate(texts)
    ]


@dataclass(frozen=True)
class CorrectingRecognizer(Recognizer):
    """Recogniser whose segments a corrector has changed; each keeps its raw text."""

    corrector: Corrector | None = None
    keep_confidence: float = 1.0

    def segments(self, audio: Audio, sample_rate: int = SAMPLE_RATE) -> Iterator[Segment]:
        """Yield the corrected segments of a transcript as soon as they are recognised."""
        for segment in super().segments(audio, sample_rate):
            if self.corrector is None:
                yield segment
                continue
            (text,) = self.corrector.correct([segment.text])
            words = corrected_words(segment.words, text, self.keep_confidence)
            yield Segment(words or segment.words, raw_text=segment.text)


def with_corrector(recognizer: Recognizer, corrector: Corrector, keep_confidence: float) -> CorrectingRecognizer:
    """Return the recogniser with a corrector of its segments."""
    return CorrectingRecognizer(
        recognizer.speech_model,
        recognizer.decode,
        recognizer.segmentation,
        recognizer.limits_final,
        corrector=corrector,
        keep_confidence=keep_confidence,
    )


# --------------------
# Pairs of texts with artificial errors and without, to train a corrector.


ADVICE = "Give the path of a file that konkanivani evaluate has written, or of a text file."


@dataclass(frozen=True)
class Confusions:
    """Characters that a recogniser writes in place of another one, with their counts."""

    characters: Mapping[str, Counter[str]] = field(default_factory=dict)

    def draw(self, character: str, generator: random.Random) -> str:
        """Return a character to write in place of another one, in proportion to its count; "" if none is known."""
        counts = self.characters.get(character)
        if not counts:
            return ""
        names = sorted(counts)
        return generator.choices(names, [counts[name] for name in names])[0]


def read_confusions(path: Path) -> Confusions:
    """Return the confused characters of a hypotheses file; raise a DataError if it has another format."""
    references, hypotheses = [], []
    for number, row in enumerate(read_lines(path), start=1):
        if not row:
            continue
        try:
            match json.loads(row):
                case {"reference": str(reference), "hypothesis": str(hypothesis)}:
                    references.append(normalize_text(reference))
                    hypotheses.append(normalize_text(hypothesis))
                    continue
        except (ValueError, RecursionError):
            pass
        raise DataError(f"{path}, line {number}: it has no reference and hypothesis. {ADVICE}")
    confusions: dict[str, Counter[str]] = {}
    for edits in align_words(references, hypotheses):
        for edit in (edit for edit in edits if edit.kind == "substitution"):
            matcher = SequenceMatcher(None, edit.reference, edit.hypothesis, autojunk=False)
            for kind, first, last, start, end in matcher.get_opcodes():
                if kind == "replace" and last - first == end - start:
                    for character, replacement in zip(
                        edit.reference[first:last], edit.hypothesis[start:end], strict=True
                    ):
                        confusions.setdefault(character, Counter())[replacement] += 1
    return Confusions(confusions)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, blank ones as ""; raise a DataError if it cannot be read or has no text."""
    with explained(DataError, f"{path} cannot be read", ADVICE, UnicodeDecodeError):
        # Not splitlines(), which also divides lines at U+2028, U+0085 and form feeds.
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    lines = [line if line.strip() else "" for line in lines]
    if not any(lines):
        raise DataError(f"{path} has no text. {ADVICE}")
    return lines


def corrupt(text: str, share: float, confusions: Confusions, generator: random.Random) -> str:
    """Return the text in lower case without punctuation, with an error in a `share` of its words.

    An error drops, doubles or, if the table has the character, confuses one character.
    """
    words = []
    for word in normalize_text(text).split():
        if generator.random() < share:
            place = generator.randrange(len(word))
            character = word[place]
            drawn = confusions.draw(character, generator)
            kinds = ["", 2 * character] if len(word) > 1 else [2 * character]
            # A known confusion is as likely as both others together.
            replacement = drawn if drawn and generator.random() < 0.5 else generator.choice(kinds)
            word = word[:place] + replacement + word[place + 1 :]
        words.append(word)
    return " ".join(words)


def pairs_of(
    texts: Sequence[str], share: float, confusions: Confusions, seed: int, copies: int = 1
) -> Iterator[dict[str, str]]:
    """Yield rows of a text-to-text manifest, `copies` of each text, each with other errors.

    The errors of a row depend on the seed and the row's number only.
    """
    for number in range(copies * len(texts)):
        text = texts[number % len(texts)]
        generator = random.Random(derive_seed(seed, "corrupt", number))
        wrong = corrupt(text, share, confusions, generator)
        if wrong:
            yield {"input": wrong, "text": text.strip()}


def write_corrupted(
    texts: Sequence[str], share: float, confusions: Confusions, seed: int, output: Path, copies: int = 1
) -> int:
    """Write a text-to-text manifest and return its number of rows."""
    return write_json_lines(output, pairs_of(texts, share, confusions, seed, copies))
