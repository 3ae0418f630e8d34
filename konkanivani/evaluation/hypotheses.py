"""Hypotheses and references, where both come from, and the file that a run over a manifest writes of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from konkanivani.base.config import DecodingConfig
from konkanivani.base.console import count, short_name
from konkanivani.base.errors import ResourceError, explained
from konkanivani.base.files import write_json_lines
from konkanivani.data.text import normalize_text
from konkanivani.evaluation.metrics import UtteranceEdits
from konkanivani.evaluation.transcripts import (
    ScoredText,
    TextFormat,
    TranscriptFile,
    are_probably_ids,
    match_hypotheses,
    pair_transcripts,
    read_transcripts,
)

NormalizerName = Literal["konkanivani", "spell", "none"]
# How texts are made alike before they are compared, references and hypotheses in the same way, and how that is told.
# Even with none, where and how wide the white space between words is makes no difference.
NORMALIZERS: dict[NormalizerName, tuple[Callable[[str], str], str]] = {
    "konkanivani": (normalize_text, "konkanivani: NFC, no punctuation, lower case"),
    "spell": (partial(normalize_text, digits="spell"), "spell: NFC, no punctuation, lower case, digits spelt"),
    "none": (lambda text: " ".join(text.split()), "none: texts unchanged"),
}


@dataclass(frozen=True)
class CheckpointRun:
    """A checkpoint's run over a manifest: losses in nats a token, seconds of work, rows that could not be used."""

    checkpoint: str
    step: int
    manifest: str
    left_out: int
    loss: float
    ctc_loss: float | None
    attention_loss: float | None
    seconds: float
    decoding: DecodingConfig

    @property
    def title(self) -> str:
        return f"{short_name(self.checkpoint)} on {short_name(self.manifest)}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        left_out = f" ({count(self.left_out, 'row')} skipped)" if self.left_out else ""
        terms = [("CTC", self.ctc_loss), ("attention", self.attention_loss)]
        told = ", ".join(f"{name} {loss:.3f}" for name, loss in terms if loss is not None)
        return (
            ("checkpoint", f"{self.checkpoint}, step {self.step:,}"),
            ("manifest", self.manifest + left_out),
            ("decoding", f"{decoding_words(self.decoding)}, {self.seconds:.1f} s including loading"),
            ("loss", f"{self.loss:.3f} ({told}) nats per token"),
        )


@dataclass(frozen=True)
class TextFiles:
    """Two files of transcripts; one may be both."""

    references: str
    hypotheses: str

    @property
    def title(self) -> str:
        if self.references == self.hypotheses:
            return short_name(self.hypotheses)
        return f"{short_name(self.hypotheses)} against {short_name(self.references)}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        return ("references", self.references), ("hypotheses", self.hypotheses)


@dataclass(frozen=True)
class OtherSystem:
    """Another system's normalised hypotheses of the same utterances in their order, None where it has none."""

    name: str
    hypotheses: tuple[str | None, ...]


@dataclass(frozen=True)
class TextPairs:
    """Utterances with both texts, where they come from, and how the texts are, or are to be, normalised."""

    texts: tuple[ScoredText, ...]
    source: CheckpointRun | TextFiles
    normalizer: NormalizerName
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """How the texts came about, and what was done to them."""
        return *self.source.facts, ("normalised", NORMALIZERS[self.normalizer][1])

    def normalized(self) -> "TextPairs":
        normalize, _ = NORMALIZERS[self.normalizer]
        texts = (replace(t, reference=normalize(t.reference), hypothesis=normalize(t.hypothesis)) for t in self.texts)
        return replace(self, texts=tuple(texts))


def read_pairs(references: str | None, hypotheses: str, text_format: TextFormat) -> TextPairs:
    """The transcripts of two files, or of one that has both, not normalised yet.

    A DataError where they cannot be read or paired.
    """
    said = read_transcripts(references or hypotheses, text_format, "reference")
    heard = read_transcripts(hypotheses, text_format, "hypothesis" if references else "own hypothesis")
    texts = tuple(pair_transcripts(said, heard))
    notes = ()
    if not (said.has_ids and heard.has_ids) and are_probably_ids(texts):
        notes = ("Each line of both files starts with the same word; if these are ids, use --format ids.",)
    return TextPairs(texts, TextFiles(references or hypotheses, hypotheses), "konkanivani", notes)


def other_system(heard: TextPairs, other: TranscriptFile) -> OtherSystem:
    """Another system's hypotheses of what was heard, normalised the same way."""
    normalize, _ = NORMALIZERS[heard.normalizer]
    found = match_hypotheses(heard.texts, other)
    return OtherSystem(other.path, tuple(None if text is None else normalize(text) for text in found))


def decoding_words(config: DecodingConfig) -> str:
    """The decoding with the settings that it goes by."""
    if config.decode == "greedy":
        return "greedy"
    said = [config.decode, f"beam {config.beam}"]
    if config.decode == "prefix":
        return ", ".join(said)
    said += [f"CTC weight {config.joint_ctc_weight:g}"] if config.decode == "joint" else []
    said += [f"length bonus {config.length_bonus:g}"] if config.length_bonus else []
    said += [f"{config.language_model} times {config.language_model_weight:g}"] if config.language_model else []
    return ", ".join(said)


HYPOTHESES = '"hypothesis": '  # stands in each row
COUNTS = ("word_errors", "words", "character_errors", "characters")


def write_hypotheses(path: Path, texts: Sequence[ScoredText], edits: UtteranceEdits) -> None:
    """Writes the utterances in their order beside `path` and renames it into place."""
    with explained(ResourceError, f"The hypotheses could not be written to {path}", "Choose another --output."):
        write_json_lines(path, _rows(texts, edits))


def _rows(texts: Sequence[ScoredText], edits: UtteranceEdits) -> Iterator[dict[str, object]]:
    for text, counts in zip(texts, edits.sums.tolist(), strict=True):
        known = {"duration": text.seconds, "speaker": text.speaker, "pattern": text.pattern}
        row = {"audio_filepath": text.id} | {name: value for name, value in known.items() if value not in (None, "")}
        row |= {"reference": text.reference, "hypothesis": text.hypothesis}
        yield row | dict(zip(COUNTS, counts, strict=True))
