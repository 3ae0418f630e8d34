"""The members of tar shards, found by their headers alone: name, where their bytes begin, how many there are.

Nothing is unpacked. A name in a tar is a name here, never a path that is opened.
"""

import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from konkanivani.errors import DataError

MOST_TEXT_BYTES = 2**20


@dataclass(frozen=True)
class Member:
    """A regular file in a tar: its bytes are `byte_count` from `byte_offset` on."""

    name: str
    byte_offset: int
    byte_count: int


def read_members(path: Path) -> Iterator[Member]:
    """The regular files of the tar at `path`, in its order; a DataError where it is compressed or no tar."""
    try:
        size = path.stat().st_size if stat.S_ISREG(path.stat().st_mode) else 0
        if is_compressed(path):
            raise DataError(
                f"{path} is compressed, so an utterance in it cannot be read without all before it. "
                "Decompress it (gunzip, unzstd, …) to a plain .tar."
            )
        with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as shard:
            for member in shard:
                shard.members.clear()  # it would remember every header
                if member.isreg() and not member.issparse() and member.offset_data + member.size <= size:
                    yield Member(member.name, member.offset_data, member.size)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}. Download it again.") from None


def is_compressed(path: Path) -> bool:
    """Whether a file begins as gzip, bzip2, xz or zstd do."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no file")
    with open(path, "rb") as file:
        head = file.read(6)
    return head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"))


def read_member_text(path: Path, member: Member) -> str:
    """A short text in a tar; bytes that are not UTF-8 stay recognisable. Longer ones are cut, and so refused later."""
    with open(path, "rb") as file:
        file.seek(member.byte_offset)
        return file.read(min(member.byte_count, MOST_TEXT_BYTES)).decode("utf-8-sig", errors="surrogateescape")
