"""Detection of repeated content: equal 64-bit keys of sentences, paths and audio, within and across manifests.

A key of 0 means none. Among ten million different contents, two share a key with a probability of 3 in a million.
"""

import hashlib
import os
import stat
from dataclasses import dataclass

import numpy as np

from konkanivani.data.audio.files import AudioSource, content_digest


@dataclass(frozen=True)
class Pairing:
    """Rows of the second list whose key occurs in the first; `pairs` has the first few as indices (first, second)."""

    count: int
    pairs: tuple[tuple[int, int], ...]


def text_key(text: str) -> int:
    """Return the key of a text; 0 for the empty text."""
    if not text:
        return 0
    # surrogatepass: JSON may contain lone surrogates.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def repeats_within(keys: np.ndarray, most: int) -> Pairing:
    """Return the rows whose key an earlier row has, each paired with the first row of that key."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    again = np.flatnonzero((first[inverse] != np.arange(len(keys))) & (keys != 0))
    return Pairing(len(again), tuple((int(first[inverse[i]]), int(i)) for i in again[:most]))


def repeats_across(first: np.ndarray, second: np.ndarray, most: int) -> Pairing:
    """Return the rows of `second` whose key occurs in `first`."""
    again = np.flatnonzero(np.isin(second, first) & (second != 0))
    shown = again[:most]
    # The search in `first` is linear, but only for the few pairs shown.
    return Pairing(len(again), tuple((int(np.flatnonzero(first == second[i])[0]), int(i)) for i in shown))


def span_key(source: AudioSource) -> str:
    """Return the span and channel of the source as text; the same for all whole files."""
    # Milliseconds, so that rounding in a manifest does not hide a repeat.
    span = "whole" if source.start is None else f"{source.start:.3f} {source.seconds:.3f}"
    return span if source.channel is None else f"{span} channel {source.channel}"


def extent_key(source: AudioSource, size: int) -> int:
    """Return a key of the audio's byte count and span; equal for equal audio, without reading it."""
    return text_key(f"{source.byte_count or size} {span_key(source)}")


def occur_again(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each array of keys a bool mask: keys that occur more than once in all arrays together."""
    together = np.concatenate(parts)
    _, inverse, counts = np.unique(together, return_inverse=True, return_counts=True)
    again = (counts[inverse] > 1) & (together != 0)
    return np.split(again, np.cumsum([len(keys) for keys in parts])[:-1])


def file_size(source: AudioSource) -> int | None:
    """Return the bytes of the regular file that contains the audio; None if there is none."""
    try:
        status = os.stat(source.path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def content_key(source: AudioSource) -> int:
    """Return the key of the audio file's bytes and the span in them; 0 if they cannot be read.

    Two utterances have the same audio if the bytes of their files (or shard members) and their spans are equal.
    """
    try:
        return text_key(f"{content_digest(source)} {span_key(source)}")
    except (OSError, ValueError):
        return 0
