"""Upload a folder written by export --hub_folder to the Hugging Face hub.

    konkanivani publish konkani goa/konkani --private

Prints the files and the destination, and uploads after a confirmation. The token is taken from HF_TOKEN or from the
login of `hf auth login`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags
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
    """Upload without confirmation."""


def main(arguments: list[str]) -> str:
    """Upload the folder that the command line names; return the address of the result."""
    flags = read_flags(Flags, arguments, description=__doc__)
    if flags.folder is None or flags.name is None:
        raise UsageError("Give the folder to upload and its name on the hub, such as konkani-asr goa/konkani-asr.")
    return publish(Path(flags.folder), flags.name, flags.private, flags.yes)
