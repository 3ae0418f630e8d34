"""Byte-pair vocabularies for tests: small generated ones, and Whisper's from a file of ranked byte strings."""

import base64
import functools
import itertools
import json
import os
from pathlib import Path

from tests.conftest import ROOT

DATA = Path(os.environ.get("KONKANIVANI_DATA", ROOT.parent / "shared" / "data"))
RANKS, SENTENCES = DATA / "whisper_tokenizer" / "multilingual.tiktoken", DATA / "konkani_text"
END, START, NO_TIMES, NO_SPEECH = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>", "<|nospeech|>"
TASKS = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", NO_SPEECH, NO_TIMES)
TIMES = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))
HOSTILE = (
    "",
    " ",
    "   ",
    "\n",
    "a\n\n b\r\n\tc  ",
    "  two  three   four    ",
    "I'm we'll they've he'd 'S 'T don''t ' 's",
    "०१२ 123 ١٢٣ ½ Ⅷ a1b2",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 🙂",
    "e\u0301 é कि\u200dष क़ क़ ं ् \u0301",
    "\x00\x01\x1b\x1c\x1d\x1e\x1f\x7f\x85\xa0",
    "\u2028\u2029\u3000\u200b\ufeff\u202e",
    "कोंकणीकोंकणीabcकोंकणी漢字かなカナ한글русский",
    "<|endoftext|><|mr|> <|0.00|>",
    "\U0010ffff\U000e0001\uffff\ue000",
    "a" * 3000,
    "ab" * 700 + " " * 900,
    "—“”‘’…!?!!??",
)


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the visible character that represents each of the 256 bytes in vocabulary files, as GPT-2 defines them."""
    # Printable Latin-1 characters represent themselves, other bytes map to U+0100 and above.
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    invisible = iter(range(256, 512))
    return tuple(chr(byte if byte in visible else next(invisible)) for byte in range(256))


def write_vocabulary_files(
    folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], added: dict[str, int]
) -> Path:
    """Write the three files of a vocabulary to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    return folder


def added_token_ids(vocabulary: dict[str, int], languages: tuple[str, ...]) -> dict[str, int]:
    """Return the ids of the start, language, task and time tokens, which follow the end token of `vocabulary`."""
    names = (START, *(f"<|{language}|>" for language in languages), *TASKS, *TIMES)
    return {name: len(vocabulary) + place for place, name in enumerate(names)}


def derive_merges(strings: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the last merge of each string of several bytes: the two earlier strings that merging by rank ends with."""
    ranks = {string: rank for rank, string in enumerate(strings)}
    results = []
    for string in strings:
        if len(string) < 2:
            continue
        parts = [string[place : place + 1] for place in range(len(string))]
        while len(parts) > 2:
            lowest = min(range(len(parts) - 1), key=lambda at: ranks.get(parts[at] + parts[at + 1], len(ranks)))
            parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
        results.append((parts[0], parts[1]))
    return results


def bytes_to_characters(string: bytes) -> str:
    """Encode a byte string as in vocabulary files, one visible character per byte."""
    return "".join(byte_characters()[byte] for byte in string)


def real_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the ids and merges of Whisper's vocabulary, derived from `RANKS`; the end token is last."""
    strings = [base64.b64decode(line.split()[0]) for line in RANKS.read_bytes().splitlines()]
    vocabulary = {bytes_to_characters(string): token for token, string in enumerate(strings)}
    merges = [(bytes_to_characters(left), bytes_to_characters(right)) for left, right in derive_merges(strings)]
    return vocabulary | {END: len(vocabulary)}, merges


def small_vocabulary(pairs: list[tuple[int, int]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ids and merges of the 256 bytes and one new token per pair of earlier tokens; the end token is last."""
    tokens, merges = list(byte_characters()), []
    for left, right in pairs:
        merge = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if "".join(merge) not in tokens:
            merges.append(merge)
            tokens.append("".join(merge))
    return {token: place for place, token in enumerate([*tokens, END])}, merges


def train_vocabulary(text: str, size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train byte-pair encoding on the text up to `size` tokens, and return ids and merges; the end token is last."""
    words = [[bytes_to_characters(bytes([byte])) for byte in (" " + word).encode()] for word in text.split()]
    tokens, merges = list(byte_characters()), []
    while len(tokens) < size:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(sorted(counts), key=counts.__getitem__)
        merges.append(best)
        tokens.append("".join(best))
        for word in words:
            for at in range(len(word) - 2, -1, -1):
                if tuple(word[at : at + 2]) == best:
                    word[at : at + 2] = ["".join(best)]
    return {token: place for place, token in enumerate([*dict.fromkeys(tokens), END])}, merges
