"""Detection of truncated files: the number of bytes of samples that a header states, compared with the file's size.

libsndfile reads a truncated file without an error, as if it were complete, so the header is parsed here.
"""

import struct
from collections.abc import Iterator

from konkanivani.data.audio.source import OpenedAudio

UNKNOWN_FROM = 0x7FFF0000  # lengths from here on, or 0, are placeholders of programs that did not know the length
MAX_CHUNKS = 1000
W64_DATA = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"


def missing_share(opened: OpenedAudio) -> float:
    """Return the bytes missing from a WAV, RF64, W64 or AIFF, divided by the bytes of samples that it has."""
    head = opened.at(0, 40)
    large = 0
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        samples = b"data"
        chunks = iterate_chunks(opened, "<4sL", 12)
        if head[:4] == b"RF64" and head[12:16] == b"ds64":
            large = struct.unpack("<Q", opened.at(28, 8))[0]
    elif head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        samples = b"SSND"
        chunks = iterate_chunks(opened, ">4sL", 12)
    elif head[:4] == b"riff" and head[24:28] == b"wave":
        samples = W64_DATA
        chunks = iterate_chunks(opened, "<16sQ", 40)
    else:
        return 0.0
    begin, claimed = next(((begin, claimed) for name, begin, claimed in chunks if name == samples), (0, 0))
    if claimed == 0xFFFFFFFF and large:  # RF64: the 64-bit length is in the ds64 chunk
        claimed = large
    there = opened.size - begin
    is_known = 0 < claimed < UNKNOWN_FROM or 2**32 <= claimed < 2**62
    return claimed / there - 1 if is_known and 0 < there < claimed else 0.0


def iterate_chunks(opened: OpenedAudio, shape: str, begin: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, content offset and stated length in bytes of each chunk from an offset on.

    `shape` is the struct format of a chunk's header.
    """
    size = struct.calcsize(shape)
    is_w64 = size == 24
    is_caf = size == 12
    for _ in range(MAX_CHUNKS):
        head = opened.at(begin, size)
        if len(head) < size:
            return
        name, claimed = struct.unpack(shape, head)
        yield name, begin + size, claimed - size if is_w64 else claimed
        if claimed == 0 and is_w64:
            return  # would repeat the same chunk
        # W64 lengths include the chunk's header and are padded to 8 bytes; RIFF and AIFF pad to 2 bytes, CAF does not.
        if is_w64:
            begin += -(-claimed // 8) * 8
        else:
            begin += size + claimed + (0 if is_caf else claimed % 2)
