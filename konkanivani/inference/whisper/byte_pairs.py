"""Byte-level byte-pair encoding, which encodes any text without an unknown token and decodes any tokens.

Radford et al. (2019), Language Models are Unsupervised Multitask Learners, section 2.2: a text is split into pieces (a
word with the space before it, digits, symbols), and adjacent tokens of the UTF-8 bytes in each piece are merged by
rank. Files write each byte as one visible character, so that no token contains a space.
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

LARGEST_FILE = 64 * 2**20
MOST_TOKENS = 2**20
# longer pieces, such as a text without spaces, are not cached
CACHED_PIECES = 2**16
LONGEST_CACHED = 64
PLANES_WITH_LETTERS = 4 * 2**16  # Unicode has no letters or numbers above
# Unicode's White_Space. Python's \s includes four more control characters.
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
NAMED = re.compile(r"<\|[^|\s]+\|>")  # special tokens in a vocab.json, which does not mark them
VOCABULARY = "vocab.json"
MERGES = "merges.txt"
ADDED = "added_tokens.json"
WHOLE = "tokenizer.json"
# Options of tokenizer.json that change the encoding.
BESIDE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
OTHER = "Use another model's files, or download them again."


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the visible character that represents each of the 256 bytes in files."""
    # As in GPT-2: printable Latin-1 characters represent themselves, other bytes map to U+0100 and above.
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    invisible = iter(range(256, 512))
    return tuple(chr(byte if byte in visible else next(invisible)) for byte in range(256))


def _classes_of(*kinds: str) -> list[str]:
    """Return, for each initial letter of Unicode categories, a regular expression range of its characters."""
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
    """Return GPT-2's pattern of pieces: contractions, letters, numbers, symbols and spaces.

    Pieces other than English contractions and spaces include one preceding space.
    """
    letters, numbers = _classes_of("L", "N")
    return re.compile(
        # The last two alternatives leave the last space of several to the next piece.
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+| ?[^{SPACES}{letters}{numbers}]+"
        f"|[{SPACES}]+(?![^{SPACES}])|[{SPACES}]+"
    )


def split_pieces(text: str) -> list[str]:
    """Split a text into pieces, within which tokens are merged; joined they are equal to the text."""
    return _pieces().findall(text)


@dataclass(frozen=True)
class Merges:
    """Merge table: (left id, right id) -> (rank, id). The lowest rank is merged first, then the leftmost pair."""

    of: Mapping[tuple[int, int], tuple[int, int]]

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Merge tokens until no pair in the table remains, in O(n log n)."""
        tokens, end = list(tokens), len(tokens)
        following = list(range(1, end + 1))
        before = list(range(-1, end - 1))
        pairs = enumerate(itertools.pairwise(tokens))
        waiting = [(rank, at, merged) for at, pair in pairs if pair in self.of for rank, merged in [self.of[pair]]]
        # A heap instead of repeated scans: a hostile piece without spaces may be very long.
        heapq.heapify(waiting)
        while waiting:
            _, at, merged = heapq.heappop(waiting)
            after = following[at]
            if tokens[at] < 0 or after == end or self.of.get((tokens[at], tokens[after]), (0, -1))[1] != merged:
                continue  # outdated entry: one of the two tokens has been merged
            # A doubly linked list over positions; -1 marks a merged position.
            tokens[at], tokens[after], following[at] = merged, -1, following[after]
            if following[at] < end:
                before[following[at]] = at
            # Only pairs with the new token are new.
            for left in (before[at], at):
                right = following[left] if left >= 0 else end
                if right < end and (found := self.of.get((tokens[left], tokens[right]))):
                    heapq.heappush(waiting, (found[0], left, found[1]))
        return [token for token in tokens if token >= 0]


class BytePairs:
    """Vocabulary of byte strings with its merges, and special tokens, which represent no text.

    The name of a special token in a text is encoded like any other text.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], named: Mapping[str, int], source: str
    ) -> None:
        """Build the lookup tables.

        Args:
            named: special tokens and their ids.
            source: description of the origin, used in error messages.

        Raises a DataError if the arguments are inconsistent.
        """
        self.names = dict(named)
        self.source = source
        self._merges_written = tuple(merges)
        self._check_names(vocabulary)
        self._spelt = _spelt({**vocabulary, **named}, source)
        self._merges = Merges(self._ranked(vocabulary))
        # With a token for every byte no text is unknown.
        absent = [byte for byte, character in enumerate(byte_characters()) if character not in vocabulary]
        if absent:
            raise DataError(f"{source} has no token for the byte {absent[0]}, so some texts cannot be encoded. {OTHER}")
        self._of_bytes = [vocabulary[character] for character in byte_characters()]
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        self._bytes = [b"" if piece in named else _bytes_of(piece, byte_of) for piece in self._spelt]
        self._merged = functools.lru_cache(CACHED_PIECES)(self._tokens_of)

    def __reduce__(self) -> tuple:
        # The cache of pieces cannot be pickled.
        return byte_pairs_of, (self.model, self.source)

    def _check_names(self, vocabulary: Mapping[str, int]) -> None:
        for name, token in self.names.items():
            if vocabulary.get(name, token) != token:
                raise DataError(f"{self.source} gives {name} two ids, {vocabulary[name]} and {token}. {OTHER}")

    def _ranked(self, vocabulary: Mapping[str, int]) -> dict[tuple[int, int], tuple[int, int]]:
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right) in enumerate(self._merges_written):
            try:
                pair = (vocabulary[left], vocabulary[right])
                merged = vocabulary[left + right]
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
        """Number of tokens, including special ones."""
        return len(self._spelt)

    @functools.cached_property
    def model(self) -> bytes:
        """Serialized form, from which `byte_pairs_of` builds an equal vocabulary."""
        vocabulary = {piece: token for token, piece in enumerate(self._spelt) if piece not in self.names}
        names = [{"id": token, "content": name} for name, token in self.names.items()]
        content = {"type": "BPE", "vocab": vocabulary, "merges": self._merges_written}
        return json.dumps({"added_tokens": names, "model": content}, ensure_ascii=False).encode(errors="surrogatepass")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; a lone UTF-16 surrogate is replaced by U+FFFD."""
        if not text.isascii():
            # Such a text comes from JSON escapes; UTF-8 cannot encode it.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        tokens: list[int] = []
        for piece in split_pieces(text):
            tokens += self._merged(piece) if len(piece) <= LONGEST_CACHED else self._tokens_of(piece)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are skipped."""
        # Join the bytes before decoding: a character may be split over several tokens.
        return b"".join(self._bytes[token] for token in tokens if token < len(self._bytes)).decode(errors="replace")

    def piece(self, token: int) -> str:
        """Return the spelling of a token in the vocabulary."""
        return self._spelt[token]

    def begins_word(self, token: int) -> bool:
        """Return whether the token starts with a space."""
        return self._bytes[token].startswith(b" ")

    def _tokens_of(self, piece: str) -> list[int]:
        return self._merges([self._of_bytes[byte] for byte in piece.encode()])


def _spelt(ids: Mapping[str, int], source: str) -> list[str]:
    """Return the tokens sorted by id; raise a DataError if an id is missing or duplicated."""
    spelt: dict[int, str] = {}
    for piece, token in ids.items():
        if not 0 <= token < MOST_TOKENS:
            raise DataError(f"{source} gives the token {_shown(piece)} the id {token}, which is out of range. {OTHER}")
        if token >= len(ids):
            continue  # the count then shows that another id is missing or duplicated
        if token in spelt:
            raise DataError(f"{source} has the id {token} twice: {_shown(spelt[token])} and {_shown(piece)}. {OTHER}")
        spelt[token] = piece
    for token in range(len(ids)):
        if token not in spelt:
            raise DataError(f"{source} has {len(ids)} tokens but none with the id {token}. {OTHER}")
    return [spelt[token] for token in range(len(ids))]


def _bytes_of(piece: str, byte_of: Mapping[str, int]) -> bytes:
    """Return the bytes of a vocabulary entry; an entry with other characters is taken as UTF-8."""
    try:
        return bytes(map(byte_of.__getitem__, piece))
    except KeyError:
        return piece.encode(errors="replace")


def _shown(piece: str) -> str:
    return repr(piece if len(piece) <= 40 else piece[:40] + "...")


def read_byte_pairs(folder: Path) -> BytePairs:
    """Return the byte-pair encoding of a folder.

    Reads tokenizer.json, or else vocab.json, merges.txt and, if it exists, added_tokens.json. Raises a DataError if a
    file is missing, damaged, or not byte-level byte-pair encoding.
    """
    if (folder / WHOLE).exists():
        return byte_pairs_of(_read(folder / WHOLE), str(folder / WHOLE))
    vocabulary = _ids_in_file(folder / VOCABULARY)
    merges = [line.split(" ") for line in _merge_lines(folder / MERGES)]
    named = _ids_in_file(folder / ADDED) if (folder / ADDED).exists() else {}
    # Some vocab.json files list special tokens among the others.
    names = {piece: token for piece, token in vocabulary.items() if NAMED.fullmatch(piece)}
    return BytePairs(vocabulary, _pairs_in(merges, str(folder / MERGES)), names | named, str(folder))


def byte_pairs_of(content: bytes, source: str) -> BytePairs:
    """Return the byte-pair encoding of a tokenizer.json, or of `BytePairs.model`; errors as in `read_byte_pairs`."""
    whole = _json_in(content, source)
    model = whole.get("model")
    named = whole.get("added_tokens") or []
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(named, list):
        raise DataError(f"{source} does not use byte-pair encoding. {OTHER}")
    _check_plain(whole, model, source)
    vocabulary = _ids_in(model.get("vocab"), source)
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise DataError(f"{source} has no list of merges. {OTHER}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in named):
        raise DataError(f"{source} has an added token without a name. {OTHER}")
    names = _ids_in({token["content"]: token.get("id") for token in named}, source)
    return BytePairs(vocabulary, _pairs_in(merges, source), names, source)


def _check_plain(whole: dict, model: dict, source: str) -> None:
    """Raise a DataError if a tokenizer.json contains settings that lead to other tokens than this implementation."""
    asked = [name for name in BESIDE if model.get(name)]
    asked += ["normalizer"] if whole.get("normalizer") else []
    cut = whole.get("pre_tokenizer") or {"type": "ByteLevel"}
    is_ours = isinstance(cut, dict) and cut.get("type") == "ByteLevel"
    # `use_regex` false would split nowhere.
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
        # utf-8-sig drops a byte order mark.
        lines = [line.removesuffix("\r") for line in _read(path).decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8. {OTHER}") from None
    return [line for place, line in enumerate(lines) if line and not (place == 0 and line.startswith("#version"))]


def _pairs_in(merges: list, source: str) -> list[tuple[str, str]]:
    for rank, merge in enumerate(merges):
        if not isinstance(merge, list) or [*map(type, merge)] != [str, str] or not all(merge):
            raise DataError(f"{source}: merge {rank + 1} does not have two tokens. {OTHER}")
    return [(left, right) for left, right in merges]
