"""References and hypotheses, their origin, and the file of hypotheses that an evaluation of a manifest writes."""

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
# Normalisation of references and hypotheses before they are compared, and its description in reports.
# Even with `none`, the amount and kind of whitespace between words makes no difference.
NORMALIZERS: dict[NormalizerName, tuple[Callable[[str], str], str]] = {
    "konkanivani": (normalize_text, "konkanivani: NFC, no punctuation, lower case"),
    "spell": (partial(normalize_text, digits="spell"), "spell: NFC, no punctuation, lower case, digits spelt"),
    "none": (lambda text: " ".join(text.split()), "none: texts unchanged"),
}


@dataclass(frozen=True)
class CheckpointRun:
    """Evaluation of a checkpoint on a manifest: losses in nats per token, time in seconds, number of skipped rows."""

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
    """Two files of transcripts; one file may contain both."""

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
    """Normalised hypotheses of another system for the same utterances, in their order; None for a missing one."""

    name: str
    hypotheses: tuple[str | None, ...]


@dataclass(frozen=True)
class TextPairs:
    """Utterances with reference and hypothesis, their origin, and the normalisation that is or will be applied."""

    texts: tuple[ScoredText, ...]
    source: CheckpointRun | TextFiles
    normalizer: NormalizerName
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the origin of the texts and their normalisation, as (name, value)."""
        return *self.source.facts, ("normalised", NORMALIZERS[self.normalizer][1])

    def normalized(self) -> "TextPairs":
        normalize, _ = NORMALIZERS[self.normalizer]
        texts = (replace(t, reference=normalize(t.reference), hypothesis=normalize(t.hypothesis)) for t in self.texts)
        return replace(self, texts=tuple(texts))


def read_pairs(references: str | None, hypotheses: str, text_format: TextFormat) -> TextPairs:
    """Load the transcripts of two files, or of one file with both, without normalising them.

    Raises:
        DataError: If they cannot be read or paired.
    """
    said = read_transcripts(references or hypotheses, text_format, "reference")
    heard = read_transcripts(hypotheses, text_format, "hypothesis" if references else "own hypothesis")
    texts = tuple(pair_transcripts(said, heard))
    notes: tuple[str, ...] = ()
    # Ids scored as words would lower the WER: they are always right.
    if not (said.has_ids and heard.has_ids) and are_probably_ids(texts):
        notes = ("Each line of both files starts with the same word; if these are ids, use --format ids.",)
    return TextPairs(texts, TextFiles(references or hypotheses, hypotheses), "konkanivani", notes)


def other_system(heard: TextPairs, other: TranscriptFile) -> OtherSystem:
    """Return another system's hypotheses for the utterances of `heard`, normalised the same way."""
    normalize, _ = NORMALIZERS[heard.normalizer]
    found = match_hypotheses(heard.texts, other)
    return OtherSystem(other.path, tuple(None if text is None else normalize(text) for text in found))


def decoding_words(config: DecodingConfig) -> str:
    """Return the decoding method with the settings that affect it."""
    if config.decode == "greedy":
        return "greedy"
    said = [config.decode, f"beam {config.beam}"]
    if config.decode == "prefix":
        return ", ".join(said)
    said += [f"CTC weight {config.joint_ctc_weight:g}"] if config.decode == "joint" else []
    said += [f"length bonus {config.length_bonus:g}"] if config.length_bonus else []
    said += [f"{config.language_model} times {config.language_model_weight:g}"] if config.language_model else []
    return ", ".join(said)


HYPOTHESES = '"hypothesis": '  # occurs in each row
COUNTS = ("word_errors", "words", "character_errors", "characters")


def write_hypotheses(path: Path, texts: Sequence[ScoredText], edits: UtteranceEdits) -> None:
    """Write one JSON line per utterance, in order, to a temporary file and rename it to `path`."""
    with explained(ResourceError, f"The hypotheses could not be written to {path}", "Choose another --output."):
        write_json_lines(path, _rows(texts, edits))


def _rows(texts: Sequence[ScoredText], edits: UtteranceEdits) -> Iterator[dict[str, object]]:
    # tolist() converts to Python integers, which JSON can represent.
    for text, counts in zip(texts, edits.sums.tolist(), strict=True):
        known = {"duration": text.seconds, "speaker": text.speaker, "pattern": text.pattern}
        row = {"audio_filepath": text.id} | {name: value for name, value in known.items() if value not in (None, "")}
        row |= {"reference": text.reference, "hypothesis": text.hypothesis}
        yield row | dict(zip(COUNTS, counts, strict=True))
