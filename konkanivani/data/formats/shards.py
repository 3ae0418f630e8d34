"""Index of the members of tar shards by their headers alone: name, byte offset and byte count.

Nothing is unpacked: a name in a tar is only a name, never a path that is opened. tarfile trusts the lengths in headers,
even if they are huge or negative. Therefore the bytes that it may read per member are bounded, and each member must
follow the previous one.
"""

import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from konkanivani.base.errors import DataError

MAX_TEXT_BYTES = 2**20
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # magic numbers of gzip, bzip2, xz, zstd
MAX_HEADER_BYTES = 2**13  # per member, including its long name and its PAX records


@dataclass(frozen=True)
class Member:
    """A regular file in a tar, of `byte_count` bytes from `byte_offset`."""

    name: str
    byte_offset: int
    byte_count: int


def read_members(path: Path) -> Iterator[Member]:
    """Yield the regular files of the tar at `path`, in order.

    Raises:
        DataError: If the file is compressed or not a tar.
    """
    try:
        # Opening a named pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is not a file")
        with open(path, "rb") as file:
            if file.peek(6).startswith(COMPRESSED):
                raise DataError(
                    f"{path} is compressed, so single utterances cannot be read. Decompress it (gunzip, "
                    "unzstd, …) to a plain .tar."
                )
            yield from _walk(_Headers(file), path.stat().st_size)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}. Download it again.") from None


class _Headers:
    """A tar file that permits tarfile to read only a bounded number of header bytes per member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.begin_member()
        self.seek = file.seek
        self.tell = file.tell

    def begin_member(self) -> None:
        self._left = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._left:
            raise tarfile.ReadError(f"a member's header at byte {self.tell()} is longer than {MAX_HEADER_BYTES} bytes")
        self._left -= size
        return self._file.read(size)


def _walk(headers: _Headers, size: int) -> Iterator[Member]:
    """Yield the regular files of a tar of `size` bytes.

    Raises:
        ValueError: If the headers are not contiguous up to the end of the file.
    """
    before = -1
    # The stub demands write() and close(), which tarfile never calls on a file object that it only reads.
    with tarfile.open(  # type: ignore[call-overload]
        fileobj=headers, mode="r:", encoding="utf-8", errors="surrogateescape"
    ) as shard:
        for member in shard:
            # tarfile keeps every header, and copies global PAX headers into each of them.
            shard.members.clear()
            shard.pax_headers.clear()
            headers.begin_member()
            # A negative size would send tarfile back to an earlier header, in an endless loop.
            if member.size < 0 or member.offset <= before:
                raise ValueError(f"its header at byte {member.offset} points backwards")
            before = member.offset
            # A sparse file has holes in its bytes; the last member of a truncated tar is incomplete.
            if member.isreg() and not member.issparse() and member.offset_data + member.size <= size:
                yield Member(member.name, member.offset_data, member.size)
        # tarfile stops at an invalid header without an error; a complete tar ends with a block of zeros.
        headers.begin_member()
        headers.seek(shard.offset)
        if headers.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise ValueError(f"there is no header at byte {shard.offset}, but {size - shard.offset} bytes follow")


def read_member_text(path: Path, member: Member) -> str:
    """Return a short text from a tar; bytes that are not UTF-8 become lone surrogates (`surrogateescape`)."""
    with open(path, "rb") as file:
        file.seek(member.byte_offset)
        # A longer text is cut, and refused later because of its length or as invalid JSON.
        return file.read(min(member.byte_count, MAX_TEXT_BYTES)).decode("utf-8-sig", errors="surrogateescape")
