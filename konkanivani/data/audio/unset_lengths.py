"""Containers with unset length fields, as written by killed recorders and into pipes.

Programs that cannot seek back, or were stopped before they could, leave 0 (or all ones) in the header. FFmpeg reads
such files to their end; libsndfile reports an empty file or refuses it. `length_patches` returns the header bytes that
make libsndfile read to the end; they are replaced while reading, the file itself is never changed.
"""

import struct

from konkanivani.data.audio.sizes import iterate_chunks
from konkanivani.data.audio.source import OpenedAudio

TO_THE_END = 0xFFFFFFFF  # libsndfile reads a WAV, AIFF or AU with this length to the end of the file
UNSET_64 = (0, 2**63 - 1, 2**64 - 1)
DS64_SIZES = 20  # offset of ds64's three fields: size of the RIFF chunk, size of the data chunk, number of frames

Patches = dict[int, bytes]


def length_patches(opened: OpenedAudio) -> Patches:
    """Return the header bytes to replace, by offset in the file; empty if the lengths are set."""
    head = opened.at(0, 16)
    if head[:4] in (b"RIFF", b"RIFX") and head[8:12] == b"WAVE":
        order = "<" if head[:4] == b"RIFF" else ">"
        return _chunk_patches(opened, order, b"data", fixed_bytes=0)
    if head[:4] == b"RF64" and head[8:16] == b"WAVEds64":
        return _ds64_patches(opened)
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        # The 8 bytes are SSND's own fields, offset and block size.
        return _chunk_patches(opened, ">", b"SSND", fixed_bytes=8)
    if head[:4] == b"caff":
        return _caf_patches(opened)
    if head[:4] in (b".snd", b"dns."):
        order = ">" if head[:4] == b".snd" else "<"
        begin, claimed = struct.unpack(f"{order}2L", opened.at(4, 8).ljust(8, b"\xff"))
        if claimed == 0 and opened.size > begin:
            return {8: struct.pack(f"{order}L", TO_THE_END)}
    return {}


def _chunk_patches(opened: OpenedAudio, order: str, name: bytes, fixed_bytes: int) -> Patches:
    """Return the patch of the sample chunk of a WAV or AIFF, in which `fixed_bytes` precede the samples."""
    for found, begin, claimed in iterate_chunks(opened, f"{order}4sL", 12):
        if found != name:
            continue
        if claimed in (0, fixed_bytes) and _holds_samples(opened, begin + fixed_bytes, f"{order}4sL"):
            return {begin - 4: struct.pack(f"{order}L", TO_THE_END)}
        break
    return {}


def _ds64_patches(opened: OpenedAudio) -> Patches:
    """Return the patch of an RF64's ds64 chunk."""
    fields = opened.at(DS64_SIZES, 24)
    if len(fields) < 24:
        return {}
    riff, data, frames = struct.unpack("<3Q", fields)
    for name, begin, claimed in iterate_chunks(opened, "<4sL", 12):
        if name != b"data":
            continue
        is_unset = data in UNSET_64 and claimed in (0, TO_THE_END)
        if is_unset and _holds_samples(opened, begin, "<4sL"):
            patches = {DS64_SIZES: struct.pack("<2Q", opened.size - 8, opened.size - begin)}
            patches[begin - 4] = struct.pack("<L", TO_THE_END)  # means that the length is in ds64
            return patches
        break
    return {}


def _caf_patches(opened: OpenedAudio) -> Patches:
    """Return the patch of a CAF's data chunk, in which a length of -1 means "to the end of the file"."""
    for name, begin, claimed in iterate_chunks(opened, ">4sQ", 8):
        if name != b"data":
            continue
        is_unset = claimed in (*UNSET_64, 4)  # 4: the chunk's own field alone, the edit count
        if is_unset and _holds_samples(opened, begin + 4, ">4sQ"):
            return {begin - 8: struct.pack(">Q", opened.size - begin)}
        break
    return {}


def _holds_samples(opened: OpenedAudio, start: int, shape: str) -> bool:
    """Return whether the bytes from `start` on are samples, not empty or a list of chunks up to the end of the file.

    A list of chunks means that the file was closed properly and contains no samples.
    """
    # Chunk names must be ASCII: digital silence would otherwise look like a list of empty chunks.
    place = start
    for name, content, claimed in iterate_chunks(opened, shape, start):
        if not all(0x20 <= character < 0x7F for character in name):
            return True
        place = content + claimed + claimed % 2
        if place >= opened.size:
            break
    return place < opened.size or place > opened.size + 1
