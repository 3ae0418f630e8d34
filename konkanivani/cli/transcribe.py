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
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.rules import check_decoding, check_pretrained

if TYPE_CHECKING:
    from konkanivani.distributed import Topology

# Bounds of --longest_piece and --pause, in seconds.
MIN_PIECE = 1.0
MAX_PIECE = 600.0
MIN_PAUSE = 0.2
MAX_PAUSE = 60.0


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
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)


def transcribe(flags: Flags) -> str:
    """Print or write each transcript as soon as it is done; return a sentence on the written files, if any."""
    with print_on_local_rank0():
        check_flags(flags)
    # Imported after the flags are checked: usage errors do not wait for torch.
    from konkanivani.recipe.preflight import in_ranks

    with in_ranks() as topology:
        said = transcribe_portion(flags, topology)
    # Rank 0 reports for all ranks.
    return said if topology.is_first else ""


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
    from konkanivani.recipe.final_scores import best_checkpoint

    recordings = find_recordings(flags.files, spooled)
    checkpoint = Path(flags.checkpoint) if flags.checkpoint else best_checkpoint("checkpoints")
    if flags.checkpoint is None and flags.pretrained.pretrained is None and not checkpoint.is_file():
        raise CheckpointError(
            "There is no checkpoint in checkpoints/. Give one with --checkpoint, or train a model first."
        )
    # Loaded by Transcription, after it has checked the input and output files.
    load = partial(
        build_recognizer, checkpoint, flags.decoding, flags.device, flags.longest_piece, flags.pause, flags.pretrained
    )
    output = Path(flags.output_dir) if flags.output_dir is not None else None
    return Transcription(load, flags.format, flags.timestamps, output, flags.existing, topology).run(recordings)


def check_flags(flags: Flags) -> None:
    """Raise UsageError for flags that are invalid or contradict each other."""
    if not flags.files:
        raise UsageError("No input. Give audio files, or folders of them.")
    if flags.files.count(SIGN) > 1:
        raise UsageError(f"{SIGN} (standard input) is given more than once. Give it once.")
    if flags.longest_piece is not None and not MIN_PIECE <= flags.longest_piece <= MAX_PIECE:
        raise UsageError(f"--longest_piece must be from {MIN_PIECE:g} to {MAX_PIECE:g} seconds.")
    if not MIN_PAUSE <= flags.pause <= MAX_PAUSE:
        raise UsageError(f"--pause must be from {MIN_PAUSE:g} to {MAX_PAUSE:g} seconds.")
    check_decoding(flags.decoding)
    check_pretrained(flags.pretrained)
    if flags.pretrained.pretrained is not None and flags.checkpoint is not None:
        raise UsageError("--checkpoint and --pretrained are two models: give only one.")


def main(arguments: list[str]) -> str:
    """Transcribe according to the command line."""
    with print_on_local_rank0():
        flags = read_flags(Flags, arguments, hidden=TRAINING_ONLY, description=__doc__)
    return transcribe(flags)
