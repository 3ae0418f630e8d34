"""Transcribe audio files of any length, or folders of them, to text, JSON or subtitles.

    konkanivani transcribe interview.mp3 recordings/ \\
        --format srt --output_dir subtitles
    konkanivani transcribe - < speech.wav
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from konkanivani.command_line import print_on_local_rank0, read_flags
from konkanivani.config import TRAINING_ONLY, DecodingConfig, PretrainedConfig
from konkanivani.data.audio.files import SIGN, spooled_input
from konkanivani.errors import UsageError
from konkanivani.rules import check_model_choice, check_segmentation

if TYPE_CHECKING:
    from collections.abc import Callable

    from konkanivani.distributed import Topology
    from konkanivani.inference.recognizer import Recognizer

# Upper bounds of --longest_piece and --pause, in seconds.
MAX_PIECE = 600.0
MAX_PAUSE = 60.0

SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True)
class Flags:
    """Input, model and output."""

    files: Annotated[tuple[str, ...], Positional, arg(metavar="FILE ...")]
    """Audio files (WAV, FLAC, MP3, OGG; with PyAV also M4A, WebM, MP4 and more), folders, or - for standard input."""
    checkpoint: str | None = None
    """Checkpoint, or bundle written by konkanivani export (None: the best checkpoint in checkpoints/)."""
    format: Literal["txt", "json", "srt", "vtt"] = "txt"
    """txt (one line per segment), json (one line of JSON per file), srt or vtt (subtitles)."""
    timestamps: Literal["segment", "word"] = "segment"
    """Timestamps per segment or per word."""
    output_dir: str | None = None
    """Folder for one transcript per file (None: print them)."""
    existing: Literal["refuse", "keep", "replace"] = "refuse"
    """If transcripts exist in --output_dir: refuse to start, keep them, or replace them."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on."""
    longest_piece: float | None = None
    """Maximum segment length in seconds (None: the longest training utterance, at most 30)."""
    pause: float = 0.4
    """Minimum silence between segments, in seconds."""
    corrector: str | None = None
    """Checkpoint or folder of a T5 model that corrects each segment; JSON keeps the raw text."""
    keep_confidence: float = 0.95
    """With --corrector: leave words that the recogniser is this sure of, except their case and punctuation."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)


def transcribe(flags: Flags) -> str:
    """Print or write each transcript as soon as it is done; return a sentence on the written files, if any."""
    with print_on_local_rank0():
        check_flags(flags)
    # Imported after the flags are checked: usage errors do not wait for torch.
    from konkanivani.recipe.preflight import in_ranks

    # The ranks wait for each other only at the end, after recordings of very different lengths.
    with in_ranks(timeout=SECONDS_A_DAY) as topology:
        summary = transcribe_portion(flags, topology)
    # Rank 0 reports for all ranks.
    return summary if topology.is_first else ""


def transcribe_portion(flags: Flags, topology: "Topology") -> str:
    """Transcribe this rank's share of the files; standard input is first saved to a file."""
    if SIGN not in flags.files:
        return transcribe_files(flags, topology, spooled=None)
    if not topology.is_single_process:
        raise UsageError("Standard input cannot be split over ranks. Save it as a file and give its path.")
    with spooled_input() as spooled:
        return transcribe_files(flags, topology, spooled)


def transcribe_files(flags: Flags, topology: "Topology", spooled: Path | None) -> str:
    """Transcribe this rank's share of the files; `spooled` is the file with the standard input, or None."""
    from konkanivani.inference.recognizer import build_recognizer
    from konkanivani.inference.transcribe import Transcription, find_recordings
    from konkanivani.recipe.final_scores import choose_checkpoint

    recordings = find_recordings(flags.files, spooled)
    checkpoint = choose_checkpoint(flags.checkpoint, flags.pretrained)
    # Loaded by Transcription, after it has checked the input and output files.
    load: Callable[[], Recognizer] = partial(
        build_recognizer, checkpoint, flags.decoding, flags.device, flags.longest_piece, flags.pause, flags.pretrained
    )
    if flags.corrector is not None:
        load = partial(load_corrected, load, flags.corrector, flags.device, flags.keep_confidence)
    output = Path(flags.output_dir) if flags.output_dir is not None else None
    return Transcription(load, flags.format, flags.timestamps, output, flags.existing, topology).run(recordings)


def load_corrected(
    load: "Callable[[], Recognizer]", corrector: str, device: str, keep_confidence: float
) -> "Recognizer":
    """Return the recogniser with the corrector, which is read first, since it is the smaller one."""
    from konkanivani.recipe.correction import load_corrector, with_corrector

    loaded = load_corrector(corrector, device)
    return with_corrector(load(), loaded, keep_confidence)


def check_flags(flags: Flags) -> None:
    """Raise UsageError for flags that are invalid or contradict each other."""
    if not flags.files:
        raise UsageError("No input. Give audio files, or folders of them.")
    if flags.files.count(SIGN) > 1:
        raise UsageError(f"{SIGN} (standard input) is given more than once. Give it once.")
    check_segmentation(flags.longest_piece, flags.pause, MAX_PIECE, MAX_PAUSE)
    check_model_choice(flags.checkpoint, flags.pretrained, flags.decoding)
    if not 0 <= flags.keep_confidence <= 1:
        raise UsageError("--keep_confidence must be between 0 and 1.")


def main(arguments: list[str]) -> str:
    """Transcribe according to the command line."""
    with print_on_local_rank0():
        flags = read_flags(Flags, arguments, hidden=TRAINING_ONLY, description=__doc__)
    return transcribe(flags)
