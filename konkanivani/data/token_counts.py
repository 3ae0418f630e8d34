"""Number of tokens and of frames needed by CTC for each row of a manifest, cached per tokenizer."""

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context

import numpy as np

from konkanivani.base.console import progress_bar, say, short_name
from konkanivani.base.files import atomic_replace
from konkanivani.base.lengths import ctc_frames_needed
from konkanivani.data.manifest import Manifest
from konkanivani.data.text import Digits
from konkanivani.data.vocabulary import Vocabulary

FEW_ROWS = 20_000  # up to this size, counted without worker processes
BLOCK_ROWS = 100_000
MAX_COUNT = 2**16 - 1
NORMALISATION_VERSION = b"2"  # increment when normalize_text changes, to invalidate stored counts


@dataclass(frozen=True)
class TokenCounts:
    """Counts per row (rows,) uint16, saturated at 65,535: tokens of the normalised transcript, frames needed by CTC."""

    tokens: np.ndarray
    frames_needed: np.ndarray


def count_tokens(manifest: Manifest, tokenizer: Vocabulary, digits: Digits) -> TokenCounts:
    """Return the counts of all rows, stored in the folder of the manifest's index if it has one."""
    kept = manifest.index.folder
    key = hashlib.sha256(tokenizer.model + digits.encode() + NORMALISATION_VERSION).hexdigest()[:16]
    # With the tokenizer and the normalisation in the name, only a changed manifest can make the file stale; its index
    # folder is then rebuilt without it.
    path = kept and kept / f"tokens-{key}"
    if path and path.exists():
        both = np.memmap(path, np.uint16, mode="r").reshape(2, -1)
        return TokenCounts(both[0], both[1])
    if path:
        say(f"Tokenizing the transcripts of {manifest.path}, once for this tokenizer.")
    counts = np.concatenate(list(_counted(manifest, tokenizer, digits)), axis=1)
    if path:
        try:
            with atomic_replace(path) as partial:
                counts.tofile(partial)
        except OSError as error:
            say(
                f"The token counts cannot be stored in {path} ({error.strerror or error}) and are recomputed at "
                "each start."
            )
    return TokenCounts(counts[0], counts[1])


def _counted(manifest: Manifest, tokenizer: Vocabulary, digits: Digits) -> list[np.ndarray]:
    if len(manifest) <= FEW_ROWS:
        return [_count(manifest, 0, len(manifest), tokenizer, digits)]
    firsts = range(0, len(manifest), BLOCK_ROWS)
    ends = [min(first + BLOCK_ROWS, len(manifest)) for first in firsts]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        counts = pool.map(_count, repeat(manifest), firsts, ends, repeat(tokenizer), repeat(digits))
        return list(progress_bar(counts, len(ends), f"tokenizing {short_name(str(manifest.path))}", "block"))


def _count(manifest: Manifest, first: int, end: int, tokenizer: Vocabulary, digits: Digits) -> np.ndarray:
    """Return tokens and frames needed of rows `first` to `end - 1`, (2, end - first) uint16."""
    counts = np.empty((2, end - first), np.uint16)
    for place, utterance in enumerate(manifest.between(first, end)):
        text = tokenizer.normalize(utterance.text, digits)
        tokens = tokenizer.encode(text) if text else []
        counts[:, place] = min(MAX_COUNT, len(tokens)), min(MAX_COUNT, ctc_frames_needed(tokens))
    return counts
