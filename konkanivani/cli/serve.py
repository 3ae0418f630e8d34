"""Serve a page to speak into: words appear in the browser while you speak.

    konkanivani serve --checkpoint checkpoint_best.pt
    konkanivani serve --pretrained whisper-small --language mr

Audio files can be dropped on the page. Lines can be corrected, and saved as training data (--corrections).
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from konkanivani.command_line import read_flags
from konkanivani.config import TRAINING_ONLY, DecodingConfig, PretrainedConfig
from konkanivani.console import say
from konkanivani.errors import UsageError
from konkanivani.rules import check_model_choice

OLDEST_WEBSOCKETS = 15
MAX_PORT = 65_535


@dataclass(frozen=True)
class Flags:
    """Model, address and corrections."""

    checkpoint: str | None = None
    """Checkpoint, or bundle written by konkanivani export (None: the best checkpoint in checkpoints/)."""
    host: str = "127.0.0.1"
    """Address to bind to (in a container: 0.0.0.0). Browsers open the microphone only for localhost."""
    port: int = 8010
    """Port (0: any free port)."""
    corrections: str | None = None
    """Folder for corrected transcripts with their audio, saved from the page (None: not saved)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)


def serve(flags: Flags) -> str:
    """Serve the page until Ctrl-C."""
    check_flags(flags)
    check_websockets()
    # Imported after the flags are checked: usage errors do not wait for torch.
    from konkanivani.inference.listener import Listener
    from konkanivani.inference.live import expected_delay, for_live_speech
    from konkanivani.inference.recognizer import build_recognizer
    from konkanivani.memory.monitor import set_mmap_threshold
    from konkanivani.recipe.final_scores import choose_checkpoint
    from konkanivani.serve.corrections import open_corrections
    from konkanivani.serve.messages import Ready
    from konkanivani.serve.server import PageServer, bind

    checkpoint = choose_checkpoint(flags.checkpoint, flags.pretrained)
    corrections = open_corrections(flags.corrections) if flags.corrections is not None else None
    # Before the model is loaded, which takes seconds.
    listening = bind(flags.host, flags.port)
    set_mmap_threshold()
    recognizer = for_live_speech(
        build_recognizer(checkpoint, flags.decoding, flags.device, pretrained=flags.pretrained)
    )
    name = Path(flags.pretrained.pretrained or checkpoint).name
    ready = Ready(name, flags.pretrained.language or "", corrections is not None)
    server = PageServer(partial(Listener, recognizer), ready, listening, flags.host, corrections)
    say(expected_delay(recognizer))
    say(f"Open {server.address} in a browser on this computer. Ctrl-C stops the server.")
    try:
        server.serve()
    finally:
        server.close()
    return ""


def check_flags(flags: Flags) -> None:
    """Raise UsageError for flags that are invalid or contradict each other."""
    if not 0 <= flags.port <= MAX_PORT:
        raise UsageError(f"--port must be from 0 to {MAX_PORT}.")
    check_model_choice(flags.checkpoint, flags.pretrained, flags.decoding)


def check_websockets() -> None:
    """Raise UsageError if the package `websockets` is missing or too old."""
    try:
        version = metadata.version("websockets")
    except metadata.PackageNotFoundError:
        version = ""
    if not version or int(version.partition(".")[0]) < OLDEST_WEBSOCKETS:
        raise UsageError(
            f"The page needs the package websockets, version {OLDEST_WEBSOCKETS} or later. Install it: "
            f"{sys.executable} -m pip install 'websockets>={OLDEST_WEBSOCKETS}'."
        )


def main(arguments: list[str]) -> str:
    """Serve according to the command line."""
    return serve(read_flags(Flags, arguments, hidden=TRAINING_ONLY, description=__doc__))
