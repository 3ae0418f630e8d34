"""Upload a folder written by export --hub_folder to the Hugging Face hub.

    konkanivani publish konkani goa/konkani --private

Prints the files and the destination, and uploads after a confirmation. The token is taken from HF_TOKEN or from the
login of `hf auth login`.
"""

import glob
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags
from konkanivani.console import count, say, show_text, table_lines
from konkanivani.data.audio.paths import AUDIO_SUFFIXES
from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.hub import FOREIGN_ANSWER, converting_errors, quiet

if TYPE_CHECKING:
    from huggingface_hub import HfApi


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


CARD = "README.md"
TASK = "automatic-speech-recognition"
REPOSITORY = re.compile(r"(?=.{1,96}\Z)[A-Za-z0-9][\w-]*(\.[\w-]+)*/\w([\w.-]*\w)?", re.ASCII)
TIMEOUT = 120.0  # seconds without an answer; the hub needs up to a minute for a commit
HEAD_BYTES = 4096
MAX_TEXT_BYTES = 2**24  # the largest tokenizer.json has 4 MB

# --------------------
# Files that must not be uploaded.


SECRET_NAME = re.compile(
    r"(?i)(.*\.(pem|key|p12|pfx|jks|kdbx?|keystore)|id_(rsa|dsa|ecdsa|ed25519).*|.*(credential|password|secret)s?\b.*"
    r"|(.*[_-])?token(\.txt)?|netrc|htpasswd|service[_-]account.*\.json)"
)
SECRET_TEXT = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z0-9]{30,}\b|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b"
    rb"|\bgithub_pat_\w{60,}|\bxox[abprs]-[\w-]{20,}|\bsk-[A-Za-z0-9_-]{40,}"
)
PICKLE_NAME = re.compile(r"(?i).*\.(pt|pth|bin|ckpt|pkl|pickle|joblib|dill|npz|npy|nemo|h5|msgpack)")
ARCHIVE_NAME = re.compile(r"(?i).*\.(zip|tar|tgz|gz|bz2|xz|zst|7z|rar)")
AUDIO_NAME = re.compile(rf"(?i).*({'|'.join(map(re.escape, AUDIO_SUFFIXES))})")
PICKLE_START = re.compile(rb"\x80[\x02-\x05]")
ARCHIVE_START = re.compile(rb"PK\x03\x04|\x1f\x8b|BZh[1-9]1AY|\xfd7zXZ|7z\xbc\xaf|Rar!|.{257}ustar", re.DOTALL)
AUDIO_START = re.compile(
    rb"RIFF....WAVE|fLaC|OggS|ID3[\x02-\x04]|FORM....AIF|#!AMR|caff\x00|NIST_1A|\x1aE\xdf\xa3|....ftyp"
    rb"|\xff[\xf2-\xf3\xfa-\xfb]",
    re.DOTALL,
)


@dataclass(frozen=True)
class UploadFile:
    """File to upload: its path in the folder, with slashes, and its size in bytes."""

    name: str
    size: int


def list_files(folder: Path) -> tuple[UploadFile, ...]:
    """Return all files of the folder, sorted by name.

    Raises UsageError if there is no folder, CheckpointError if it has no model card or a file that must not be
    uploaded, and ResourceError if a file cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}. Give a folder written by konkanivani export --hub_folder.")
    files = []
    for directory, folders, names in os.walk(folder, onerror=_raise_unreadable):
        links = [name for name in folders if Path(directory, name).is_symlink()]
        for name in (*links, *names):
            path = Path(directory, name)
            shown = path.relative_to(folder).as_posix()
            try:
                problem = _problem(path, shown)
                files.append(UploadFile(shown, path.lstat().st_size))
            except OSError as error:
                raise ResourceError(
                    f"{path} cannot be read: {error.strerror or error}. Make it readable and start again."
                ) from None
            if problem is not None:
                raise CheckpointError(
                    f"{path} {problem}, so nothing of {folder} is uploaded. Remove the file from the folder."
                )
    _check_card(folder)
    return tuple(sorted(files, key=lambda file: file.name))


def _raise_unreadable(error: OSError) -> None:
    raise ResourceError(
        f"{error.filename} cannot be read: {error.strerror or error}. Make it readable and start again."
    )


def _problem(path: Path, shown: str) -> str | None:
    """Return the reason not to upload a file; None if there is none."""
    if path.is_symlink():
        return "is a link, possibly to a file outside of the folder"
    if not stat.S_ISREG(path.lstat().st_mode):
        return "is not a regular file"
    if any(part.startswith(".") for part in shown.split("/")) and shown != ".gitattributes":
        return "is hidden"
    if SECRET_NAME.fullmatch(path.name):
        return "has the name of a file with a secret"
    if PICKLE_NAME.fullmatch(path.name):
        return "may contain pickle, which can run code when it is read"
    if AUDIO_NAME.fullmatch(path.name):
        return "is audio or video, which may contain private speech"
    if ARCHIVE_NAME.fullmatch(path.name):
        return "is an archive, whose content cannot be checked"
    return _content_problem(path)


def _content_problem(path: Path) -> str | None:
    with open(path, "rb") as file:
        start = file.read(HEAD_BYTES)
        if path.suffix == ".safetensors":
            # The JSON header follows 8 bytes with its length.
            is_whole = 8 + int.from_bytes(start[:8], "little") <= path.stat().st_size
            return None if start[8:9] == b"{" and is_whole else "is not a safetensors file"
        if PICKLE_START.match(start):
            return "is pickle, which can run code when it is read"
        if AUDIO_START.match(start):
            return "is audio or video, which may contain private speech"
        if ARCHIVE_START.match(start):
            return "is an archive, whose content cannot be checked"
        text = start + file.read(MAX_TEXT_BYTES)
    return "contains a password, token or private key" if SECRET_TEXT.search(text) else None


def _check_card(folder: Path) -> None:
    advice = "Export the model with konkanivani export --hub_folder, which writes one."
    path = folder / CARD
    if not path.is_file():
        raise CheckpointError(f"{folder} has no model card ({CARD}). {advice}")
    with open(path, "rb") as file:
        start = file.read(HEAD_BYTES)
    if not re.match(rb"---\r?\n", start):
        raise CheckpointError(f"{path} is not a model card: it has no metadata block. {advice}")


# --------------------
# Upload.


@dataclass(frozen=True)
class Destination:
    """Repository on the hub: its address, and its state before the upload; `commit` is None if it is new."""

    name: str
    address: str
    is_private: bool
    commit: str | None
    files: frozenset[str]

    def sentence(self, uploaded: Sequence[UploadFile]) -> str:
        """Return the destination and its visibility in words."""
        visibility = "private" if self.is_private else "public: everyone can download it"
        if self.commit is None:
            return f"Destination: {self.address} (new repository, {visibility})"
        replaced = self.files & {file.name for file in uploaded}
        kept_files = len(self.files - replaced - {".gitattributes"})
        return (
            f"Destination: {self.address} (existing repository, {visibility}; up to {count(len(replaced), 'file')} "
            f"replaced, {count(kept_files, 'file')} kept)"
        )


def publish(folder: Path, name: str, is_private: bool = False, is_confirmed: bool = False) -> str:
    """Upload the folder to the model repository `name` (OWNER/NAME), and return a sentence with its address.

    Prints the files and the destination, and requests a confirmation on the terminal unless `is_confirmed`.

    Raises:
        UsageError: unsuitable name, no token, no confirmation, or a repository of another type or visibility.
        CheckpointError: no model card, or a file that must not be uploaded.
        ResourceError: the hub cannot be reached, or refuses the upload.
    """
    if not REPOSITORY.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git"):
        raise UsageError(f"{name} is not a name on the hub. Give OWNER/NAME, such as goa/konkani-asr.")
    files = list_files(folder)
    _require_hub()
    token = _token()
    with quiet(), converting_errors(lambda error: _sentence(error, name, token)):
        api = _connect(token)
        _check_metadata(folder)
        destination = _destination(api, name, is_private)
    say(_overview(folder, files, destination))
    if not is_confirmed:
        _confirm()
    with quiet(), converting_errors(lambda error: _sentence(error, name, token)):
        if destination.commit is None:
            api.create_repo(name, private=is_private, repo_type="model", exist_ok=False)
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            repo_type="model",
            commit_message="Upload model",
            # The listed files only: another program may add files meanwhile.
            allow_patterns=[glob.escape(file.name) for file in files],
        )
    if done.oid == destination.commit:
        return f"{destination.address} already contains these files: nothing was uploaded."
    return f"Published: {destination.address} (commit {str(done.oid)[:12]})"


def _require_hub() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ResourceError(
            "Uploading needs huggingface_hub, which is not installed. Install: "
            f"{sys.executable} -m pip install huggingface_hub."
        )


def _token() -> str:
    """Return the token of HF_TOKEN or of the stored login."""
    from huggingface_hub import get_token

    advice = "Set HF_TOKEN, or log in with: hf auth login. Create a token with write permission in your hub settings."
    try:
        token = get_token()
    except Exception as error:  # a damaged login file, or a failed refresh of a token
        raise UsageError(f"The stored login cannot be read ({type(error).__name__}). {advice}") from None
    if token is None:
        raise UsageError(f"There is no token for the hub. {advice}")
    # Checked here, since the HTTP library would quote the token in its error.
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UsageError(f"The token for the hub contains a space or a character outside of ASCII. {advice}")
    return token


def _connect(token: str) -> "HfApi":
    """Return the client, with a time limit."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import get_session

    get_session().timeout = TIMEOUT
    return HfApi(token=token)


def _check_metadata(folder: Path) -> None:
    """Raise a CheckpointError if the metadata of the model card cannot be parsed."""
    from huggingface_hub import ModelCard

    try:
        card = ModelCard.load(folder / CARD)
        fields = card.data.to_dict()
    except Exception as error:  # YAML errors, wrong types, or text that is not UTF-8
        raise CheckpointError(
            f"The metadata of {folder / CARD} is invalid ({type(error).__name__}). Correct it, or export again."
        ) from None
    if not fields:
        raise CheckpointError(f"The metadata of {folder / CARD} is empty. Export the model again.")
    if "license" not in fields:
        say("Note: the model card names no licence. Without one, others may not use the model.")


def _destination(api: "HfApi", name: str, is_private: bool) -> Destination:
    """Return the state of the repository; raise UsageError if it is of another kind or visibility."""
    from huggingface_hub.errors import HfHubHTTPError

    address = f"{api.endpoint}/{name}"
    try:
        info = api.model_info(name, timeout=TIMEOUT)
    except HfHubHTTPError as error:
        if error.response.status_code == 404:
            return Destination(name, address, is_private, None, frozenset())
        raise
    if info.pipeline_tag not in (None, TASK):
        raise UsageError(
            f"{address} exists and is a model for another task ({show_text(str(info.pipeline_tag), 40)}). Choose "
            "another name."
        )
    if is_private and not info.private:
        raise UsageError(
            f"{address} exists and is public, so the files would be public. Make it private in its settings, or choose "
            "another name."
        )
    files = frozenset(file.rfilename for file in info.siblings or ())
    return Destination(name, address, bool(info.private), str(info.sha), files)


def _overview(folder: Path, files: Sequence[UploadFile], destination: Destination) -> str:
    """Return the files with their sizes, the total and the destination."""
    rows = [(file.name, size_words(file.size)) for file in files]
    total = sum(file.size for file in files)
    return "\n".join(
        [
            f"Upload of {folder}: {count(len(files), 'file')}, {size_words(total)}",
            *(f"  {line}" for line in table_lines(rows)),
            destination.sentence(files),
        ]
    )


def size_words(size: int) -> str:
    """Return a size in bytes, kB or MB (powers of 1000)."""
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def _confirm() -> None:
    """Request a confirmation on the terminal; raise UsageError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise UsageError("The upload is not confirmed, and the input is not a terminal. Give --yes to confirm.")
    try:
        answer = input("Upload these files? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was uploaded, since the answer was not yes. Start again to upload.")


def _sentence(error: Exception, name: str, token: str) -> KonkaniVaniError:
    """Return the error for the user, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return UsageError("HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it and start again.")
    if isinstance(error, HfHubHTTPError):
        return _refusal(error.response.status_code, error.server_message or "", name, token)
    if isinstance(error, json.JSONDecodeError | KeyError):
        return ResourceError(f"The upload to {name} failed: {FOREIGN_ANSWER}. Check the connection and HF_ENDPOINT.")
    first = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, ValueError) and "README.md" in first:
        return CheckpointError(f"The hub refuses the metadata of {CARD}: {_redact(str(error), token)}. Correct it.")
    return ResourceError(
        f"The upload to {name} failed: {_redact(first, token)} ({type(error).__name__}). Check the connection, and "
        "start again: files that were uploaded completely are not sent again."
    )


def _refusal(status: int, message: str, name: str, token: str) -> KonkaniVaniError:
    """Return the error for an HTTP status of the hub."""
    reason = f": {_redact(message, token)}" if message else ""
    if status == 401:
        return UsageError(f"The hub does not accept the token (401){reason}. Create a new one, or run: hf auth login.")
    if status == 403:
        return ResourceError(
            f"The token may not write to {name} (403){reason}. Use a token with write permission, and a name of your "
            "own account or organisation."
        )
    if status == 409:
        return UsageError(f"{name} cannot be created: a repository of this name exists{reason}. Choose another name.")
    if status == 400:
        return UsageError(f"The hub refuses the request for {name} (400){reason}. Correct the name or the files.")
    if status == 413:
        return ResourceError(f"The hub refuses {name} as too large (413){reason}. Remove files, or split them.")
    return ResourceError(f"The hub could not process the upload to {name} ({status}){reason}. Start again later.")


def _redact(text: str, token: str) -> str:
    """Return text on one line without the token."""
    hidden = text.replace(token, "<token>")
    return show_text(" ".join(hidden.split()), 300).rstrip(".")


# --------------------
# The command.


def main(arguments: list[str]) -> str:
    """Upload the folder that the command line names; return the address of the result."""
    flags = read_flags(Flags, arguments, description=__doc__)
    if flags.folder is None or flags.name is None:
        raise UsageError("Give the folder to upload and its name on the hub, such as konkani-asr goa/konkani-asr.")
    return publish(Path(flags.folder), flags.name, flags.private, flags.yes)
