"""What occurs twice in a corpus: equal 64-bit keys of sentences, paths and audio, within a manifest and across.

A key of 0 stands for none. Two different contents share a key with a chance of 3 in a million among ten million.
"""

import hashlib
import os
import stat
from dataclasses import dataclass

import numpy as np

from konkanivani.data.audio.files import AudioSource, content_digest


@dataclass(frozen=True)
class Pairing:
    """Rows of the second list whose key the first one holds; `pairs` of indices (first, second) show the first few."""

    count: int
    pairs: tuple[tuple[int, int], ...]


def text_key(text: str) -> int:
    """A text's key; 0 for the empty one."""
    if not text:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def repeats_within(keys: np.ndarray, most: int) -> Pairing:
    """The rows whose key an earlier row has, each beside the first that has it."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    again = np.flatnonzero((first[inverse] != np.arange(len(keys))) & (keys != 0))
    return Pairing(len(again), tuple((int(first[inverse[i]]), int(i)) for i in again[:most]))


def repeats_across(first: np.ndarray, second: np.ndarray, most: int) -> Pairing:
    """The rows of `second` whose key `first` holds."""
    again = np.flatnonzero(np.isin(second, first) & (second != 0))
    shown = again[:most]
    return Pairing(len(again), tuple((int(np.flatnonzero(first == second[i])[0]), int(i)) for i in shown))


def span_key(source: AudioSource) -> str:
    """Return the span and channel that the source is of its audio file, as text; the same for all whole files."""
    span = "whole" if source.start is None else f"{source.start:.3f} {source.seconds:.3f}"
    return span if source.channel is None else f"{span} channel {source.channel}"


def extent_key(source: AudioSource, size: int) -> int:
    """A key that two sources with the same audio share: of their bytes' number and their span, so nothing is read."""
    return text_key(f"{source.byte_count or size} {span_key(source)}")


def occur_again(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Of each list of keys, bool: which keys are more than once in all the lists together."""
    together = np.concatenate(parts)
    _, inverse, counts = np.unique(together, return_inverse=True, return_counts=True)
    again = (counts[inverse] > 1) & (together != 0)
    return np.split(again, np.cumsum([len(keys) for keys in parts])[:-1])


def file_size(source: AudioSource) -> int | None:
    """Bytes of the regular file that holds the audio; None where there is none."""
    try:
        status = os.stat(source.path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def content_key(source: AudioSource) -> int:
    """The key of the audio file's bytes and the span in them; 0 where they cannot be read.

    Two utterances have the same audio when the bytes of their files (or shard members) and their spans are the same.
    """
    try:
        return text_key(f"{content_digest(source)} {span_key(source)}")
    except (OSError, ValueError):
        return 0
