"""Transcribe live speech: raw PCM or WAV from standard input.

    arecord -q -t raw -f S16_LE -r 16000 | konkanivani listen -
    konkanivani listen --json - < speech.wav

The final text of each sentence is printed to stdout; on a terminal, words are shown while they are spoken. Nothing is
stored on disk.
"""

import contextlib
import fcntl
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags
from konkanivani.config import TRAINING_ONLY, DecodingConfig, PretrainedConfig
from konkanivani.console import say
from konkanivani.data.audio.files import SIGN
from konkanivani.errors import DataError, UsageError
from konkanivani.rules import check_model_choice, check_segmentation

# Upper bounds of --longest_piece and --pause, in seconds.
MAX_PIECE = 30.0
MAX_PAUSE = 10.0
PIPE_BYTES = 2**20  # half a minute of 16-bit audio at 16 kHz


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
    """Interleaved channels of raw PCM, mixed to mono; a WAV header replaces it."""
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
    enlarge_pipe()
    # Imported after the flags are checked: usage errors do not wait for torch.
    from konkanivani.data.audio.pcm import PcmFormat, check_format
    from konkanivani.inference import live
    from konkanivani.inference.recognizer import build_recognizer
    from konkanivani.memory.monitor import set_mmap_threshold
    from konkanivani.recipe.final_scores import choose_checkpoint

    raw = PcmFormat(flags.sample_rate, flags.channels, flags.sample_format)
    try:
        check_format(raw)
    except DataError as error:
        raise UsageError(f"{error}") from None
    checkpoint = choose_checkpoint(flags.checkpoint, flags.pretrained)
    set_mmap_threshold()  # before the model is loaded
    recognizer = live.for_live_speech(
        build_recognizer(checkpoint, flags.decoding, flags.device, flags.longest_piece, flags.pause, flags.pretrained)
    )
    say(live.expected_delay(recognizer), sys.stderr)
    problem = live.listen(recognizer, sys.stdin.fileno(), raw, live.LiveOutput(flags.json))
    if problem:
        say(problem, sys.stderr)
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
    check_segmentation(flags.longest_piece, flags.pause, MAX_PIECE, MAX_PAUSE)
    check_model_choice(flags.checkpoint, flags.pretrained, flags.decoding)


def enlarge_pipe() -> None:
    """Let a recorder continue while the model is loaded and while a segment is decoded."""
    # It may be refused, or standard input may be a file or a socket: then the usual buffer serves.
    with contextlib.suppress(OSError):
        fcntl.fcntl(sys.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def main(arguments: list[str]) -> str:
    """Transcribe standard input according to the command line."""
    return listen(read_flags(Flags, arguments, hidden=TRAINING_ONLY, description=__doc__))
