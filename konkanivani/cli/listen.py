"""Transcribe live speech: raw PCM or WAV from standard input.

    arecord -q -t raw -f S16_LE -r 16000 | konkanivani listen -
    konkanivani listen --json - < speech.wav

The final text of each sentence is printed to stdout; on a terminal, words are shown while they are spoken. Nothing is
stored on disk.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags
from konkanivani.config import TRAINING_ONLY, DecodingConfig, PretrainedConfig
from konkanivani.console import say
from konkanivani.data.audio.files import SIGN
from konkanivani.errors import CheckpointError, DataError, UsageError
from konkanivani.rules import check_decoding, check_pretrained

# Bounds of --longest_piece and --pause, in seconds.
MIN_PIECE = 1.0
MAX_PIECE = 30.0
MIN_PAUSE = 0.2
MAX_PAUSE = 10.0


@dataclass(frozen=True)
class Flags:
    """Input, model and output."""

    source: Annotated[str, Positional, arg(metavar="-")] = SIGN
    """- for standard input."""
    checkpoint: str | None = None
    """Checkpoint, or bundle written by konkanivani export (None: the best checkpoint in checkpoints/)."""
    sample_rate: int = 16_000
    """Sampling rate of raw PCM in Hz; a WAV header replaces it."""
    sample_format: Literal["s16le", "f32le"] = "s16le"
    """Sample format of raw PCM; a WAV header replaces it."""
    channels: int = 1
    """Interleaved channels of raw PCM, which are averaged; a WAV header replaces it."""
    json: bool = False
    """Print one line of JSON per event, partial or final, instead of the final text."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on."""
    longest_piece: float | None = None
    """Maximum segment length in seconds (None: the longest training utterance, at most 30)."""
    pause: float = 0.4
    """Silence that ends a segment, in seconds."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)


def listen(flags: Flags) -> str:
    """Print text while audio arrives on standard input."""
    check_flags(flags)
    # Imported after the flags are checked: usage errors do not wait for torch.
    from konkanivani.data.audio.pcm import PcmFormat, check_format
    from konkanivani.inference import live
    from konkanivani.inference.recognizer import build_recognizer
    from konkanivani.recipe.final_scores import best_checkpoint

    raw = PcmFormat(flags.sample_rate, flags.channels, flags.sample_format)
    try:
        check_format(raw)
    except DataError as error:
        raise UsageError(f"{error}") from None
    checkpoint = Path(flags.checkpoint) if flags.checkpoint else best_checkpoint("checkpoints")
    if flags.checkpoint is None and flags.pretrained.pretrained is None and not checkpoint.is_file():
        raise CheckpointError(
            "There is no checkpoint in checkpoints/. Give one with --checkpoint, or train a model first."
        )
    recognizer = build_recognizer(
        checkpoint, flags.decoding, flags.device, flags.longest_piece, flags.pause, flags.pretrained
    )
    say(live.expected_delay(recognizer), sys.stderr)
    said = live.listen(recognizer, sys.stdin.fileno(), raw, live.LiveOutput(flags.json))
    if said:
        say(said, sys.stderr)
    return ""


def check_flags(flags: Flags) -> None:
    """Raise UsageError for flags that are invalid or contradict each other."""
    if flags.source != SIGN:
        raise UsageError(
            f"{flags.source} is not {SIGN}: only standard input is read. Use konkanivani transcribe for files."
        )
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "Standard input is a terminal. Pipe audio: arecord -t raw -f S16_LE -r 16000 | konkanivani listen -."
        )
    if flags.longest_piece is not None and not MIN_PIECE <= flags.longest_piece <= MAX_PIECE:
        raise UsageError(f"--longest_piece must be from {MIN_PIECE:g} to {MAX_PIECE:g} seconds.")
    if not MIN_PAUSE <= flags.pause <= MAX_PAUSE:
        raise UsageError(f"--pause must be from {MIN_PAUSE:g} to {MAX_PAUSE:g} seconds.")
    check_decoding(flags.decoding)
    check_pretrained(flags.pretrained)
    if flags.pretrained.pretrained is not None and flags.checkpoint is not None:
        raise UsageError("--checkpoint and --pretrained are two models: give only one.")


def main(arguments: list[str]) -> str:
    """Transcribe standard input according to the command line."""
    return listen(read_flags(Flags, arguments, hidden=TRAINING_ONLY, description=__doc__))
