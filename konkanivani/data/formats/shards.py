"""The members of tar shards, found by their headers alone: name, where their bytes begin, how many there are.

Nothing is unpacked. A name in a tar is a name here, never a path that is opened. tarfile believes what a header says of
lengths, forwards and backwards; so what it may read for one member is bounded, and members lie one behind another.
"""

import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from konkanivani.base.errors import DataError

MAX_TEXT_BYTES = 2**20
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # as gzip, bzip2, xz and zstd begin
MAX_HEADER_BYTES = 2**13  # of one member, its long name and its PAX records among them


@dataclass(frozen=True)
class Member:
    """A regular file in a tar: its bytes are `byte_count` from `byte_offset` on."""

    name: str
    byte_offset: int
    byte_count: int


def read_members(path: Path) -> Iterator[Member]:
    """The regular files of the tar at `path`, in its order; a DataError where it is compressed or no tar."""
    try:
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
    """A tar's file as tarfile sees it, who reads nothing but headers of it: a bounded number of bytes for a member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.begin_member()
        self.seek, self.tell = file.seek, file.tell

    def begin_member(self) -> None:
        self._left = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._left:
            raise tarfile.ReadError(f"a member's header at byte {self.tell()} is longer than {MAX_HEADER_BYTES} bytes")
        self._left -= size
        return self._file.read(size)


def _walk(headers: _Headers, size: int) -> Iterator[Member]:
    """The regular files of a tar of `size` bytes; a ValueError where not one header follows another to its end."""
    before = -1
    with tarfile.open(fileobj=headers, mode="r:", encoding="utf-8", errors="surrogateescape") as shard:
        for member in shard:
            # It would remember every header, and copy those that count for all into each.
            shard.members.clear()
            shard.pax_headers.clear()
            headers.begin_member()
            if member.size < 0 or member.offset <= before:
                raise ValueError(f"its header at byte {member.offset} points backwards")
            before = member.offset
            if member.isreg() and not member.issparse() and member.offset_data + member.size <= size:
                yield Member(member.name, member.offset_data, member.size)
        headers.begin_member()
        headers.seek(shard.offset)
        if headers.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise ValueError(f"there is no header at byte {shard.offset}, but {size - shard.offset} bytes follow")


def read_member_text(path: Path, member: Member) -> str:
    """A short text in a tar; bytes that are not UTF-8 stay recognisable. Longer ones are cut, and so refused later."""
    with open(path, "rb") as file:
        file.seek(member.byte_offset)
        return file.read(min(member.byte_count, MAX_TEXT_BYTES)).decode("utf-8-sig", errors="surrogateescape")
