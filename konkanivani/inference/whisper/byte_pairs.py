"""Byte-level byte-pair encoding: any text as tokens, without an unknown one; any tokens as text again.

Radford et al. (2019), Language Models are Unsupervised Multitask Learners, section 2.2: a text is cut into pieces (a
word with the space before it, digits, signs), and in each piece's UTF-8 bytes neighbours are merged by rank. In files a
byte is written as one visible character, so that no token holds a space.
"""

import functools
import heapq
import itertools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.errors import DataError

LARGEST_FILE, MOST_TOKENS = 64 * 2**20, 2**20
CACHED_PIECES, LONGEST_CACHED = 2**16, 64  # a text of one endless word is not kept
PLANES_WITH_LETTERS = 4 * 2**16  # behind them Unicode has no letter and no number
# Unicode's White_Space. Python's \s has four control characters more.
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
NAMED = re.compile(r"<\|[^|\s]+\|>")  # in a file of ids alone, a token that stands for no text
VOCABULARY, MERGES, ADDED, WHOLE = "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.json"
# What a whole tokenizer file may ask for beside, which makes another encoding of it.
BESIDE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
OTHER = "Use another model's files, or download them again."


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The visible character that stands for each of the 256 bytes."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    invisible = iter(range(256, 512))
    return tuple(chr(byte if byte in visible else next(invisible)) for byte in range(256))


def _classes_of(*kinds: str) -> list[str]:
    """For each kind, the characters of Unicode categories that begin with it, as ranges of a regular expression."""
    ranges: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    for code in range(PLANES_WITH_LETTERS):
        known = ranges.get(unicodedata.category(chr(code))[0])
        if known is None:
            continue
        if known and known[-1][1] == code - 1:
            known[-1][1] = code
        else:
            known.append([code, code])
    return ["".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in found) for found in ranges.values()]


@functools.cache
def _pieces() -> re.Pattern[str]:
    """GPT-2's: English endings, letters, numbers, signs, each with a space before it, and spaces but the last."""
    letters, numbers = _classes_of("L", "N")
    return re.compile(
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+| ?[^{SPACES}{letters}{numbers}]+"
        f"|[{SPACES}]+(?![^{SPACES}])|[{SPACES}]+"
    )


def split_pieces(text: str) -> list[str]:
    """The pieces of a text, in which alone tokens are merged; joined they are the text."""
    return _pieces().findall(text)


@dataclass(frozen=True)
class Merges:
    """Which neighbours become one token: (left id, right id) -> (rank, id); lowest rank first, then the leftmost."""

    of: Mapping[tuple[int, int], tuple[int, int]]

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """The tokens when nothing can be merged any more; n log n, as a hostile piece may be long."""
        tokens, end = list(tokens), len(tokens)
        following, before = list(range(1, end + 1)), list(range(-1, end - 1))
        pairs = enumerate(itertools.pairwise(tokens))
        waiting = [(rank, at, merged) for at, pair in pairs if pair in self.of for rank, merged in [self.of[pair]]]
        heapq.heapify(waiting)
        while waiting:
            _, at, merged = heapq.heappop(waiting)
            after = following[at]
            if tokens[at] < 0 or after == end or self.of.get((tokens[at], tokens[after]), (0, -1))[1] != merged:
                continue  # one of the two has become part of another token
            tokens[at], tokens[after], following[at] = merged, -1, following[after]
            if following[at] < end:
                before[following[at]] = at
            for left in (before[at], at):
                right = following[left] if left >= 0 else end
                if right < end and (found := self.of.get((tokens[left], tokens[right]))):
                    heapq.heappush(waiting, (found[0], left, found[1]))
        return [token for token in tokens if token >= 0]


class BytePairs:
    """A vocabulary of byte strings with its merges, and named tokens beside it that stand for no text.

    In a text a named token's name is text like any other.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], named: Mapping[str, int], source: str
    ) -> None:
        """Raises a DataError where the three do not fit; `source` is what the error says of where they come from."""
        self.names = dict(named)
        self.source, self._merges_written = source, tuple(merges)
        self._check_names(vocabulary)
        self._spelt = _spelt({**vocabulary, **named}, source)
        self._merges = Merges(self._ranked(vocabulary))
        absent = [byte for byte, character in enumerate(byte_characters()) if character not in vocabulary]
        if absent:
            raise DataError(f"{source} has no token for the byte {absent[0]}, so some texts cannot be encoded. {OTHER}")
        self._of_bytes = [vocabulary[character] for character in byte_characters()]
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        self._bytes = [b"" if piece in named else _bytes_of(piece, byte_of) for piece in self._spelt]
        self._merged = functools.lru_cache(CACHED_PIECES)(self._tokens_of)

    def __reduce__(self) -> tuple:
        return byte_pairs_of, (self.model, self.source)

    def _check_names(self, vocabulary: Mapping[str, int]) -> None:
        for name, token in self.names.items():
            if vocabulary.get(name, token) != token:
                raise DataError(f"{self.source} gives {name} two ids, {vocabulary[name]} and {token}. {OTHER}")

    def _ranked(self, vocabulary: Mapping[str, int]) -> dict[tuple[int, int], tuple[int, int]]:
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right) in enumerate(self._merges_written):
            try:
                pair, merged = (vocabulary[left], vocabulary[right]), vocabulary[left + right]
            except KeyError as absent:
                raise DataError(
                    f"{self.source}: merge {rank + 1}, {_shown(left)} and {_shown(right)}, gives the token "
                    f"{_shown(absent.args[0])}, which is not in the vocabulary. {OTHER}"
                ) from None
            if pair in found:
                raise DataError(f"{self.source} has the merge of {_shown(left)} and {_shown(right)} twice. {OTHER}")
            found[pair] = rank, merged
        return found

    @property
    def size(self) -> int:
        """Tokens, the named ones included."""
        return len(self._spelt)

    @functools.cached_property
    def model(self) -> bytes:
        """All of it as one file, from which `byte_pairs_of` makes an equal one."""
        vocabulary = {piece: token for token, piece in enumerate(self._spelt) if piece not in self.names}
        names = [{"id": token, "content": name} for name, token in self.names.items()]
        content = {"type": "BPE", "vocab": vocabulary, "merges": self._merges_written}
        return json.dumps({"added_tokens": names, "model": content}, ensure_ascii=False).encode(errors="surrogatepass")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Half of a character's UTF-16 that stands alone is read as U+FFFD."""
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        tokens: list[int] = []
        for piece in split_pieces(text):
            tokens += self._merged(piece) if len(piece) <= LONGEST_CACHED else self._tokens_of(piece)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, the bytes joined before they are read; named tokens leave nothing."""
        return b"".join(self._bytes[token] for token in tokens if token < len(self._bytes)).decode(errors="replace")

    def piece(self, token: int) -> str:
        """What a token id stands for, as the vocabulary spells it."""
        return self._spelt[token]

    def begins_word(self, token: int) -> bool:
        """Whether a word ends before token id `token`."""
        return self._bytes[token].startswith(b" ")

    def _tokens_of(self, piece: str) -> list[int]:
        return self._merges([self._of_bytes[byte] for byte in piece.encode()])


def _spelt(ids: Mapping[str, int], source: str) -> list[str]:
    """The tokens by their ids, of which none may be missing or there twice."""
    spelt: list[str | None] = [None] * len(ids)
    for piece, token in ids.items():
        if not 0 <= token < MOST_TOKENS:
            raise DataError(f"{source} gives the token {_shown(piece)} the id {token}, which is out of range. {OTHER}")
        if token >= len(ids):
            continue  # then another id is missing, or there twice
        if spelt[token] is not None:
            raise DataError(f"{source} has the id {token} twice: {_shown(spelt[token])} and {_shown(piece)}. {OTHER}")
        spelt[token] = piece
    if None in spelt:
        raise DataError(f"{source} has {len(ids)} tokens but none with the id {spelt.index(None)}. {OTHER}")
    return spelt


def _bytes_of(piece: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes that a piece of a vocabulary file writes; of one that is written in other characters, its own."""
    try:
        return bytes(map(byte_of.__getitem__, piece))
    except KeyError:
        return piece.encode(errors="replace")


def _shown(piece: str) -> str:
    return repr(piece if len(piece) <= 40 else piece[:40] + "...")


def read_byte_pairs(folder: Path) -> BytePairs:
    """Of a folder: tokenizer.json, or else vocab.json, merges.txt and, where it is there, added_tokens.json.

    Raises a DataError where they are absent, damaged, or not of byte-level byte pairs.
    """
    if (folder / WHOLE).exists():
        return byte_pairs_of(_read(folder / WHOLE), str(folder / WHOLE))
    vocabulary = _ids_in_file(folder / VOCABULARY)
    merges = [line.split(" ") for line in _merge_lines(folder / MERGES)]
    named = _ids_in_file(folder / ADDED) if (folder / ADDED).exists() else {}
    names = {piece: token for piece, token in vocabulary.items() if NAMED.fullmatch(piece)}
    return BytePairs(vocabulary, _pairs_in(merges, str(folder / MERGES)), names | named, str(folder))


def byte_pairs_of(content: bytes, source: str) -> BytePairs:
    """Of a whole tokenizer file, or of `BytePairs.model`; a DataError as of `read_byte_pairs`."""
    whole = _json_in(content, source)
    model, named = whole.get("model"), whole.get("added_tokens") or []
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(named, list):
        raise DataError(f"{source} does not use byte-pair encoding. {OTHER}")
    _check_plain(whole, model, source)
    vocabulary, merges = _ids_in(model.get("vocab"), source), model.get("merges")
    if not isinstance(merges, list):
        raise DataError(f"{source} has no list of merges. {OTHER}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in named):
        raise DataError(f"{source} has an added token without a name. {OTHER}")
    names = _ids_in({token["content"]: token.get("id") for token in named}, source)
    return BytePairs(vocabulary, _pairs_in(merges, source), names, source)


def _check_plain(whole: dict, model: dict, source: str) -> None:
    """Raises a DataError where a tokenizer file asks for what would make other tokens than ours."""
    asked = [name for name in BESIDE if model.get(name)]
    asked += ["normalizer"] if whole.get("normalizer") else []
    cut = whole.get("pre_tokenizer") or {"type": "ByteLevel"}
    is_ours = isinstance(cut, dict) and cut.get("type") == "ByteLevel"
    if not is_ours or cut.get("add_prefix_space", False) or not cut.get("use_regex", True):
        asked.append("pre_tokenizer")
    if asked:
        raise DataError(f"{source} does not use plain byte-level byte-pair encoding: its {asked[0]} differs. {OTHER}")


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise DataError(
            f"{path} could not be read: {error.strerror or error}. Use a folder that contains it."
        ) from None
    if len(content) > LARGEST_FILE:
        raise DataError(f"{path} is larger than {LARGEST_FILE >> 20} MiB. {OTHER}")
    return content


def _json_in(content: bytes, source: str) -> dict:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{source} is not JSON: {error}. {OTHER}") from None
    except RecursionError:
        raise DataError(f"{source} is not JSON: it is nested too deeply. {OTHER}") from None
    if isinstance(found, dict):
        return found
    raise DataError(f"{source} is not a JSON object. {OTHER}")


def _ids_in_file(path: Path) -> dict[str, int]:
    return _ids_in(_json_in(_read(path), str(path)), str(path))


def _ids_in(found: object, source: str) -> dict[str, int]:
    if not isinstance(found, dict):
        raise DataError(f"{source} has no vocabulary of tokens and ids. {OTHER}")
    for piece, token in found.items():
        if type(token) is not int:
            raise DataError(f"{source} gives the token {_shown(piece)} an id that is not an integer. {OTHER}")
    return found


def _merge_lines(path: Path) -> list[str]:
    try:
        lines = [line.removesuffix("\r") for line in _read(path).decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8. {OTHER}") from None
    return [line for place, line in enumerate(lines) if line and not (place == 0 and line.startswith("#version"))]


def _pairs_in(merges: list, source: str) -> list[tuple[str, str]]:
    for rank, merge in enumerate(merges):
        if not isinstance(merge, list) or [*map(type, merge)] != [str, str] or not all(merge):
            raise DataError(f"{source}: merge {rank + 1} does not have two tokens. {OTHER}")
    return [(left, right) for left, right in merges]
