"""Repositories on the Hugging Face Hub: resolve a revision to a commit, and download files into the Hub's cache.

The cache is that of `huggingface_hub` (HF_HOME, HF_HUB_CACHE), so other programs share it. Each downloaded file is
compared with the size and the digest that the Hub's listing states. No code of a repository is run.
Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from konkanivani.console import say
from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError, exit_cleanly_at_signals
from konkanivani.files import PIECE_BYTES, atomic_replace

Kind = Literal["model", "dataset"]
Result = TypeVar("Result")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
REVISION = re.compile(r"\w[\w./+-]{0,199}", re.ASCII)
ETAG = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)
SHA1 = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
FOREIGN_ANSWER = "the answer is not the hub's but probably the login page of a proxy"
SPARE_BYTES = 2**26  # disk space that stays free
MARKER = ".unverified-"  # prefix of a file in the cache that names a file whose check has not ended
ABSENT = ".no_exist"  # folder of the cache with an empty file for each file that a commit does not have
TIMEOUT = 10.0  # seconds until a silent Hub counts as unreachable


@dataclass(frozen=True)
class RemoteFile:
    """File in the Hub's listing; `sha256` is None for a file that git itself stores, whose digest is `blob`."""

    name: str
    size: int | None
    blob: str | None
    sha256: str | None

    def is_in(self, folder: Path) -> bool:
        """Return whether the folder has the file, in the size of the listing."""
        path = folder / self.name
        return path.is_file() and self.size in (None, path.stat().st_size)

    def may_have_etag(self, etag: str) -> bool:
        """Return whether an ETag is a file name, and not the digest of other content than the listing's."""
        is_other = (self.sha256 and SHA256.fullmatch(etag) and etag != self.sha256) or (
            self.sha256 is None and self.blob and SHA1.fullmatch(etag) and etag != self.blob
        )
        return ETAG.fullmatch(etag) is not None and not is_other

    def is_sound(self, path: Path) -> bool:
        """Return whether the file at `path` has the size and the digest of the listing."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return False
        if self.sha256 is not None:
            return _digest(path, hashlib.sha256()) == self.sha256
        if self.blob is not None:
            # The object id of git: SHA-1 over a header with the size, and the content.
            return _digest(path, hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)) == self.blob
        return True


@dataclass(frozen=True)
class Listing:
    """Commit of a revision, its files by name, and `configs` of its card, which is unchecked."""

    commit: str
    files: Mapping[str, RemoteFile]
    configs: object = None


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form OWNER/MODEL of a name on the Hub."""
    return NAME.fullmatch(name) is not None and ".." not in name and "--" not in name and not name.endswith(".nemo")


def is_commit(revision: str | None) -> bool:
    """Return whether `revision` is a full commit hash, which never changes its content."""
    return revision is not None and COMMIT.fullmatch(revision) is not None


def check_revision(revision: str | None) -> None:
    """Raise UsageError if `revision` cannot be the name of a branch, tag or commit."""
    if revision is not None and (REVISION.fullmatch(revision) is None or ".." in revision):
        raise UsageError(f"{revision!r:.80} is not the name of a branch, tag or commit. Give another revision.")


class Repository:
    """A repository at one revision, and its folder in the cache."""

    def __init__(self, name: str, revision: str, kind: Kind = "model"):
        self.name = name
        self.revision = revision
        self.kind = kind
        self.hub = _import_hub(name)
        from huggingface_hub import constants

        self.cache = Path(constants.HF_HUB_CACHE)
        self.endpoint = _without_password(constants.ENDPOINT)
        self.folder = self.cache / f"{kind}s--{name.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit in the cache; it may contain only some of the files."""
        return self.folder / "snapshots" / commit

    def cached_commit(self) -> str | None:
        """Return the commit that the revision had when it was last downloaded, or None."""
        if is_commit(self.revision):
            return self.revision
        with contextlib.suppress(OSError, ValueError):
            commit = (self.folder / "refs" / self.revision).read_text(encoding="ascii").strip()
            return commit if is_commit(commit) else None
        return None

    def store_ref(self, commit: str, is_complete: bool = True) -> None:
        """Store the commit of a branch or tag, for later use without a network.

        A snapshot that is not complete does not replace the reference to another one.
        """
        path = self.folder / "refs" / self.revision
        if is_commit(self.revision) or (not is_complete and path.exists()):
            return
        with contextlib.suppress(OSError):  # a cache that is read-only is fine
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replace(path) as partial:
                partial.write_text(commit, encoding="ascii")

    def store_absence(self, commit: str, name: str) -> None:
        """Store that a commit has no such file, where `huggingface_hub` does, for later use without a network."""
        path = self.folder / ABSENT / commit / name
        with contextlib.suppress(OSError):  # a cache that is read-only is fine
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def is_absent(self, commit: str, name: str) -> bool:
        """Return whether the cache states that a commit has no such file."""
        return (self.folder / ABSENT / commit / name).is_file()

    def from_cache_or_hub(self, cached: Callable[[], Result | None], download: Callable[[], Result]) -> Result:
        """Return what `download` returns, or `cached`: for a commit if it has it, else if the Hub is unreachable.

        Raises the ResourceError for an unreachable Hub if `cached` returns None.
        """
        self.discard_unverified()
        # A commit never changes, so that a complete copy of it needs no request.
        result = cached() if is_commit(self.revision) else None
        if result is not None:
            return result
        try:
            return download()
        except Unreachable as error:
            result = cached()
            if result is None:
                raise ResourceError(str(error)) from None
        say(f"{self.endpoint} cannot be reached: using {self.name} from the cache.", sys.stderr)
        return result

    def listing(self) -> Listing:
        """Return the commit of the revision and its files, after their names are checked.

        Raises:
            Unreachable: The Hub does not answer; the cache may have the files.
        """
        with quiet(), self._convert_errors():
            info = self.hub.HfApi().repo_info(
                self.name, revision=self.revision, repo_type=self.kind, files_metadata=True, timeout=TIMEOUT
            )
            commit = info.sha
            card = getattr(info, "card_data", None)
            configs = card.get("configs") if card else None
            files = [
                RemoteFile(
                    sibling.rfilename, sibling.size, sibling.blob_id, sibling.lfs.sha256 if sibling.lfs else None
                )
                for sibling in info.siblings or []
            ]
        if not isinstance(commit, str) or not is_commit(commit):
            raise Unreachable(self._no_answer_message("its answer has no commit"))
        for file in files:
            if not is_plain(file.name):
                raise self.refused(f"its listing has the file name {file.name!r:.60}, which is outside of the folder")
        return Listing(commit, {file.name: file for file in files}, configs)

    def fetch(self, commit: str, files: Iterable[RemoteFile]) -> None:
        """Download the files that the cache lacks, in this order, and verify them.

        Raises:
            CheckpointError: A file differs from the listing; it is deleted.
            ResourceError: The disk has too little space, or the download fails.
        """
        folder = self.snapshot(commit)
        missing = [file for file in files if not file.is_in(folder)]
        self._check_disk(missing)
        for file in missing:
            try:
                with quiet(), exit_cleanly_at_signals(), self._convert_errors(file.name), self._lock_folder():
                    if file.is_in(folder):  # another process has downloaded it meanwhile
                        continue
                    self._check_etag(commit, file)
                    # `huggingface_hub` would return a file of another size unchanged.
                    _remove_from_cache(folder / file.name)
                    self._download(commit, file)
            except Unreachable as error:
                raise ResourceError(str(error)) from None

    def discard_unverified(self) -> None:
        """Delete the files whose verification was cut short by SIGKILL or a crash of the system."""
        if any(self.folder.glob(f"{MARKER}*")):
            with self._convert_errors(), self._lock_folder():
                pass

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Delete unverified files, and hold an exclusive lock of the repository's folder during the block."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"Another process is downloading {self.name}: waiting for it.", sys.stderr)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks
            # The kernel releases the lock when a process ends: who left these markers has ended.
            for marker in self.folder.glob(f"{MARKER}*"):
                name = marker.read_text(encoding="utf-8", errors="replace")
                if is_plain(name):
                    _remove_from_cache(self.folder / "snapshots" / name)
                marker.unlink()
            yield
        finally:
            os.close(descriptor)

    def _download(self, commit: str, file: RemoteFile) -> None:
        """Download and verify one file; delete it if it differs from the listing, or if the check is interrupted."""
        name = f"{commit}/{file.name}"
        marker = self.folder / f"{MARKER}{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        # Written before the download and deleted after the check, for the case that SIGKILL comes in between.
        marker.write_text(name, encoding="utf-8")
        path = self.snapshot(commit) / file.name
        is_sound = False
        try:
            self.hub.hf_hub_download(self.name, file.name, revision=commit, repo_type=self.kind)
            is_sound = file.is_sound(path)
        finally:
            # After an interruption too: the next start would take a file in the cache for a verified one.
            if not is_sound:
                _remove_from_cache(path)
            marker.unlink(missing_ok=True)
        if not is_sound:
            raise self.refused(
                f"its {file.name} differs in size or digest from the hub's listing, and was deleted", "Start again"
            )

    def _check_etag(self, commit: str, file: RemoteFile) -> None:
        """Refuse an ETag that is a path or the digest of other content.

        `huggingface_hub` uses it as a file name, and a file of this name as the content.
        """
        url = self.hub.hf_hub_url(self.name, file.name, revision=commit, repo_type=self.kind)
        etag = self.hub.get_hf_file_metadata(url, timeout=TIMEOUT).etag
        if etag is not None and not file.may_have_etag(etag):
            raise self.refused(f"the hub states {etag!r:.60} as the digest of its {file.name}")

    def refused(self, reason: str, advice: str = "Use another repository, or a local folder") -> CheckpointError:
        """Return the error for a repository that cannot be used."""
        return CheckpointError(f"{self.name} on {self.endpoint} cannot be used: {reason}. {advice}.")

    def _check_disk(self, files: Iterable[RemoteFile]) -> None:
        needed = sum(file.size or 0 for file in files)
        existing_folder = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        free = max(0, shutil.disk_usage(existing_folder).free - SPARE_BYTES)
        if needed > free:
            raise ResourceError(
                f"{self.name} needs {needed / 1e6:,.0f} MB, and {self.cache} has {free / 1e6:,.0f} MB free. "
                "Free disk space, or set HF_HOME to a folder on another disk."
            )

    # Errors.

    def _convert_errors(self, file: str | None = None) -> contextlib.AbstractContextManager[None]:
        return converting_errors(lambda error: self._explain(error, file))

    def _explain(self, error: Exception, file: str | None) -> Exception:
        """Return the error to raise.

        Texts of the exceptions are not repeated: some contain the token, such as that of an invalid HTTP header.
        """
        from huggingface_hub import errors as hub_errors

        at = f"{self.name} on {self.endpoint}"
        match error:
            case hub_errors.GatedRepoError():
                return ResourceError(
                    f"There is no folder {self.name}, and {at} is gated: accept its conditions on its page, and set "
                    "HF_TOKEN to a token of your account."
                )
            case hub_errors.RepositoryNotFoundError():
                return UsageError(
                    f"There is no folder {self.name}, and no public repository {at}. Correct the name, or set HF_TOKEN "
                    "if it is private."
                )
            case hub_errors.RevisionNotFoundError():
                return UsageError(f"{at} has no branch, tag or commit {self.revision}. Give another --revision.")
            case hub_errors.RemoteEntryNotFoundError():
                return CheckpointError(f"{at} lists {file} but does not have it. Give another --revision.")
            case (
                hub_errors.LocalEntryNotFoundError()
                | hub_errors.OfflineModeIsEnabled()
                | hub_errors.FileMetadataError()
            ):
                return Unreachable(self._no_answer_message(root_reason(error)))
            case hub_errors.HfHubHTTPError():
                return self._explain_status(error.response.status_code)
        return self._explain_other(error, file)

    def _explain_status(self, status: int) -> Exception:
        if status in (401, 403):
            return ResourceError(
                f"{self.endpoint} denies access to {self.name} (HTTP {status}). Set HF_TOKEN to a valid token of an "
                "account that may read it."
            )
        if status == 404:
            return UsageError(
                f"There is no folder {self.name}, and no repository {self.name} on {self.endpoint}. Correct the name."
            )
        return Unreachable(self._no_answer_message(f"HTTP {status}"))

    def _explain_other(self, error: Exception, file: str | None) -> Exception:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return ResourceError(
                f"The disk with {self.cache} is full: {self.name} was not downloaded. Free disk space, or set HF_HOME "
                "to a folder on another disk."
            )
        if isinstance(error, OSError) and error.filename is not None:
            return ResourceError(
                f"The cache {self.cache} cannot be used: {error.strerror}. Repair it, or set HF_HOME to another folder."
            )
        if isinstance(error, OSError) and str(error).startswith("Consistency check failed"):
            return self.refused(f"its {file} does not have the size that the hub states", "Start again")
        if isinstance(error, UnicodeError) or type(error).__name__ == "LocalProtocolError":
            return UsageError("HF_TOKEN, or the stored token, contains characters that are not allowed. Set it again.")
        if isinstance(error, ValueError):
            return Unreachable(self._no_answer_message(FOREIGN_ANSWER))
        return Unreachable(self._no_answer_message(root_reason(error), file))

    def _no_answer_message(self, reason: str, file: str | None = None) -> str:
        cut = f"the download of {file} from " if file else ""
        return (
            f"There is no folder {self.name}, and {cut}{self.endpoint} failed: {reason}. Check the network, or copy "
            f"the files of {self.endpoint}/{self.name} by hand and give their folder."
        )


class Unreachable(Exception):
    """The Hub does not answer, or something else answers for it; the cache may still have the model."""


def _import_hub(name: str):  # noqa: ANN202 - a module
    try:
        import huggingface_hub
    except ImportError:
        raise ResourceError(
            f"There is no folder {name}, and downloading {name} needs the package `huggingface_hub`, which is not "
            "installed. Install it with .venv/bin/python -m pip install huggingface_hub, or copy the files by hand and "
            "give their folder."
        ) from None
    except Exception as error:  # a malformed variable, such as HF_HUB_ETAG_TIMEOUT, raises a ValueError at import
        raise ResourceError(
            f"The package `huggingface_hub` cannot be loaded ({type(error).__name__}). Correct or unset the "
            "environment variables whose names start with HF_."
        ) from None
    return huggingface_hub


@contextlib.contextmanager
def converting_errors(convert: Callable[[Exception], Exception]) -> Iterator[None]:
    """Convert any exception of `huggingface_hub` and of the HTTP client below it, in the block, with `convert`."""
    try:
        yield
    except (KonkaniVaniError, Unreachable):
        raise
    except Exception as error:
        converted = convert(error)
    else:
        return
    # Without the chained exception, which holds the request and with it the token.
    raise converted from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of `huggingface_hub`, which can name URLs with signatures; bars are for terminals only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level = logging.get_verbosity()
    were_disabled = are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if not were_disabled:
                enable_progress_bars()


def root_reason(error: BaseException) -> str:
    """Return the operating system's reason for a failed connection, else the name of the exception's class."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    if any(type(link).__name__ == "OfflineModeIsEnabled" and "HF_HUB_OFFLINE" in str(link) for link in causes):
        return "HF_HUB_OFFLINE is set, and the cache has no complete copy"
    for link in reversed(causes):
        # Only the system's own text: other texts can contain the request.
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    return type(causes[-1]).__name__


def _without_password(endpoint: str) -> str:
    """Return the endpoint without user name and password."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def is_plain(name: object) -> bool:
    """Return whether a file name of the listing stays inside the folder."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    return not name.startswith("/") and not any(part in ("", ".", "..") for part in name.split("/"))


def _remove_from_cache(path: Path) -> None:
    """Delete a file of a snapshot, and the blob that it links to."""
    with contextlib.suppress(OSError):
        blob = path.resolve()
        path.unlink()
        blob.unlink(missing_ok=True)


def _digest(path: Path, digest: "hashlib._Hash") -> str:
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
