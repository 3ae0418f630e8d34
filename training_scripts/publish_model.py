#!/usr/bin/env python3
"""Upload a folder written by export_asr.py --hub_folder to the Hugging Face hub.

    python3 training_scripts/publish_model.py konkani-asr goa/konkani-asr --private

Lists the files and the destination and asks before it uploads. The token is taken from HF_TOKEN or from the login of
`hf auth login`.
"""

import bootstrap

bootstrap.rerun_under_venv()

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import UsageError
from konkanivani.hub_upload import publish


@dataclass(frozen=True)
class Flags:
    """Input and destination."""

    folder: Annotated[str | None, Positional, arg(metavar="DIR")] = None
    """Folder to upload, with a model card."""
    name: Annotated[str | None, Positional, arg(metavar="OWNER/NAME")] = None
    """Model repository on the hub; it is created if it does not exist."""
    private: bool = False
    """Create a private repository."""
    yes: bool = False
    """Upload without asking."""


def run_upload(flags: Flags) -> str:
    """Upload according to the command line; return the address of the result."""
    if flags.folder is None or flags.name is None:
        raise UsageError("Give the folder to upload and its name on the hub, such as konkani-asr goa/konkani-asr.")
    return publish(Path(flags.folder), flags.name, flags.private, flags.yes)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: run_upload(flags)))
