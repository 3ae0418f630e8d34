"""Compute WER and CER, with confidence intervals, of a checkpoint or of existing transcripts.

    konkanivani evaluate \\
        --checkpoint checkpoints/checkpoint_best.pt --manifest test.jsonl
    konkanivani evaluate \\
        --references reference.txt --hypotheses hypothesis.txt --html score.html
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from konkanivani.command_line import print_on_local_rank0, read_flags
from konkanivani.config import TRAINING_ONLY, DecodingConfig, PretrainedConfig
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import UsageError
from konkanivani.files import check_own_file
from konkanivani.rules import check_model_choice
from konkanivani.scoring.html import PAGE_START, write_page
from konkanivani.scoring.metrics import count_edits
from konkanivani.scoring.report import draw_score_page, score_json, score_lines
from konkanivani.scoring.score import (
    HYPOTHESES,
    ConditionTexts,
    TextPairs,
    build_report,
    inputs_as_system,
    other_system,
    read_pairs,
    score_conditions,
    write_hypotheses,
)
from konkanivani.scoring.transcripts import TranscriptFile, is_json_file, read_transcripts

if TYPE_CHECKING:
    from konkanivani.distributed import Topology


@dataclass(frozen=True)
class Flags:
    """Input, scoring and output."""

    checkpoint: str | None = None
    """Checkpoint to evaluate on --manifest."""
    manifest: str | None = None
    """JSONL manifest to evaluate on."""
    audio_roots: tuple[str, ...] = ()
    """Folders, besides the manifest's own, that may contain its audio."""
    references: str | None = None
    """Without a checkpoint: reference transcripts, text or JSON lines (None: taken from --hypotheses)."""
    hypotheses: str | None = None
    """Without a checkpoint: recognised transcripts, text or JSON lines (as written by --output)."""
    format: Literal["lines", "ids"] = "lines"
    """Format of text files: lines (same order in both files) or ids (an utterance id first, as in Kaldi)."""
    normalize: Literal["auto", "konkanivani", "spell", "none"] = "auto"
    """Text normalisation of both sides: konkanivani (NFC, lower case, no punctuation), spell (also spells digits) or
    none (auto: as the checkpoint was trained, else konkanivani)."""
    interval_by: Literal["auto", "utterances", "speakers"] = "auto"
    """Unit of bootstrap resampling: utterances or speakers (auto: speakers if there are ten or more)."""
    compare: str | None = None
    """Transcripts of another system to compare with, in any format of --hypotheses."""
    worst: int = 10
    """Number of worst utterances to show, with their alignment."""
    conditions: bool = False
    """Also evaluate under 13 simulated recording conditions, such as silence, noise, a telephone or a room."""
    html: str | None = None
    """Also write the report to this HTML file."""
    output: str | None = None
    """File for the hypotheses and their errors (None: CHECKPOINT.MANIFEST.hypotheses.jsonl in the checkpoint's folder,
    with the decoding method in the name unless greedy; without a checkpoint, no file)."""
    json: bool = False
    """Print one line of JSON instead of text; rates are fractions."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)

    @property
    def model(self) -> str | None:
        """The checkpoint, or the folder of the pretrained model, to evaluate; None for existing transcripts."""
        return self.checkpoint or self.pretrained.pretrained

    @property
    def output_path(self) -> Path | None:
        """`output`, or the default file next to the checkpoint."""
        if self.output is not None:
            return Path(self.output)
        if self.checkpoint is None or self.manifest is None:  # no file is added to a --pretrained folder
            return None
        checkpoint = Path(self.checkpoint)
        decode = self.decoding.decode
        searched = "" if decode == DecodingConfig.decode else f".{decode}"  # one file per decoding method
        return checkpoint.parent / f"{checkpoint.stem}.{Path(self.manifest).stem}{searched}.hypotheses.jsonl"


def score(flags: Flags) -> str:
    """Evaluate, write the output files, and return the text to print."""
    with print_on_local_rank0():
        check_flags(flags)
    # Before recognition, which may take hours.
    compared = None if flags.compare is None else read_transcripts(flags.compare, flags.format, "hypothesis")
    if flags.hypotheses is not None:
        check_output(flags)
        return report_on(flags, read_pairs(flags.references, flags.hypotheses, flags.format), compared)
    # Imported late: scoring transcripts does not need torch.
    from konkanivani.recipe.preflight import in_ranks

    with in_ranks() as topology:
        pairs, conditions = recognize(flags, topology)
        # Rank 0 has gathered all hypotheses.
        return report_on(flags, pairs, compared, conditions) if topology.is_first else ""


def report_on(
    flags: Flags, raw: TextPairs, compared: TranscriptFile | None, conditions: tuple[ConditionTexts, ...] = ()
) -> str:
    """Score the hypotheses, write the output files, and return the text to print."""
    pairs = (raw if flags.normalize == "auto" else replace(raw, normalizer=flags.normalize)).normalized()
    edits = count_edits([text.reference for text in pairs.texts], [text.hypothesis for text in pairs.texts])
    if flags.output_path:
        write_hypotheses(flags.output_path, pairs.texts, edits)
    system = inputs_as_system(pairs) if compared is None else other_system(pairs, compared)
    report = build_report(pairs, edits, flags.interval_by, flags.worst, system)
    if conditions:
        report = replace(report, conditions=score_conditions(conditions, pairs.normalizer, flags.interval_by))
    if flags.html is not None:
        write_page(flags.html, draw_score_page(report))
    if flags.json:
        return score_json(pairs, report, flags.output_path)
    written = [path for path in (flags.output_path, flags.html) if path]
    return score_lines(report) + "".join(f"\n\nWritten: {path}" for path in written)


def recognize(flags: Flags, topology: "Topology") -> tuple[TextPairs, tuple[ConditionTexts, ...]]:
    """Recognize the manifest with the model, as in the final scoring of training, and under --conditions.

    Each rank processes its share.
    """
    assert flags.model is not None and flags.manifest is not None  # check_flags requires both
    # Read before torch is imported, so that errors in it are reported at once.
    manifest = read_manifest(flags.manifest, flags.audio_roots)
    from konkanivani.distributed import choose_device
    from konkanivani.lengths import TOKENS
    from konkanivani.recipe.evaluation_model import (
        load_evaluation_model,
        load_pretrained_evaluation,
        recognize_manifest,
        recognize_under_conditions,
    )

    device = choose_device(flags.device)
    if flags.checkpoint is not None:
        trained = load_evaluation_model(flags.checkpoint, device, topology)
    else:
        trained = load_pretrained_evaluation(flags.pretrained, device, topology)
    if flags.conditions and trained.architecture.framing.unit == TOKENS:
        raise UsageError(f"--conditions changes recordings, but {flags.model} is a model of text: omit it.")
    # Before the recognition, whose result could otherwise not be saved.
    check_output(flags)
    pairs = recognize_manifest(trained, flags.model, manifest, flags.decoding)
    if not flags.conditions:
        return pairs, ()
    return pairs, recognize_under_conditions(trained, pairs, manifest, flags.decoding)


def check_output(flags: Flags) -> None:
    """Raise an error if the file of hypotheses cannot be written."""
    if flags.output_path:
        check_own_file(flags.output_path, "--output", "list of hypotheses", HYPOTHESES)


def check_flags(flags: Flags) -> None:
    """Check the flags before any work.

    Raises UsageError if the input is not clear or flags contradict each other, and ResourceError if an output file
    cannot be written.
    """
    check_model_choice(flags.checkpoint, flags.pretrained, flags.decoding)
    of_checkpoint = (flags.model, flags.manifest)
    of_texts = (flags.references, flags.hypotheses)
    # Exactly one of the two inputs, each complete.
    is_checkpoint = None not in of_checkpoint and of_texts == (None, None)
    is_text = False
    if of_checkpoint == (None, None) and flags.hypotheses is not None:
        is_text = flags.references is not None or is_json_file(flags.hypotheses)
    if not is_checkpoint and not is_text:
        raise UsageError(
            "Give --checkpoint and --manifest to evaluate a checkpoint, or --references and --hypotheses to "
            "score existing transcripts (--hypotheses alone if its JSON lines contain both texts)."
        )
    if flags.conditions and is_text:
        raise UsageError("--conditions changes recordings: use it with --checkpoint and --manifest.")
    if flags.worst < 0:
        raise UsageError(f"--worst {flags.worst} must be at least 0.")
    if flags.html is not None:
        check_own_file(Path(flags.html), "--html", "page", PAGE_START)
        if flags.output_path and flags.output_path.resolve() == Path(flags.html).resolve():
            raise UsageError(f"--html {flags.html} and --output are the same file: choose another path for one.")
    inputs = [path for path in (*of_checkpoint, *of_texts, flags.compare) if path is not None]
    if flags.output_path and any(flags.output_path.resolve() == Path(path).resolve() for path in inputs):
        raise UsageError(
            f"--output {flags.output_path} is an input file and would be overwritten: choose another path."
        )


def main(arguments: list[str]) -> str:
    """Evaluate according to the command line."""
    with print_on_local_rank0():
        flags = read_flags(Flags, arguments, Flags(), hidden=TRAINING_ONLY, description=__doc__)
    return score(flags)
