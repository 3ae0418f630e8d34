"""Byte-level byte-pair encoding of a Whisper folder, with the `tokenizers` library.

Radford et al. (2019), Language Models are Unsupervised Multitask Learners, section 2.2. The encoding has no unknown
token: any text can be encoded. Files write each byte as one visible character, the space as `Ġ`.
"""

import functools
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from konkanivani.errors import DataError, ResourceError

if TYPE_CHECKING:  # an extra
    from tokenizers import Tokenizer

PACKAGE = "tokenizers"  # the extra `whisper` of setup.cfg
LARGEST_FILE = 64 * 2**20
SPACE = "Ġ"
NAMED = re.compile(r"<\|[^|\s]+\|>")  # special tokens in a vocab.json, which does not mark them
# Options of the model in tokenizer.json that change the encoding.
MODEL_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
OTHER = "Use another model's files, or download them again."


class BytePairs:
    """Vocabulary of byte strings with its merges, and special tokens, which represent no text.

    The name of a special token in a text is encoded like any other text.

    Args:
        named: special tokens and their ids.
        source: description of the origin, used in error messages.

    Raises a DataError if the arguments are inconsistent, and a ResourceError if `tokenizers` is not installed.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], named: Mapping[str, int], source: str
    ) -> None:
        self.names = dict(named)
        self.source = source
        self._merges = merges
        self._pieces = _sorted_by_id({**vocabulary, **named}, source)
        self._special = frozenset(named.values())
        # Special tokens are not added to the library's tokenizer, which would find their names in a text.
        self._tokenizer = _build_tokenizer(vocabulary, merges, source)

    def __reduce__(self) -> tuple:
        return byte_pairs_of, (self.model, self.source)

    @property
    def size(self) -> int:
        """Number of tokens, including special ones."""
        return len(self._pieces)

    @functools.cached_property
    def model(self) -> bytes:
        """Serialized form, from which `byte_pairs_of` builds an equal vocabulary."""
        vocabulary = {piece: token for token, piece in enumerate(self._pieces) if piece not in self.names}
        names = [{"id": token, "content": name} for name, token in self.names.items()]
        content = {"type": "BPE", "vocab": vocabulary, "merges": self._merges}
        return json.dumps({"added_tokens": names, "model": content}, ensure_ascii=False).encode(errors="surrogatepass")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; a lone UTF-16 surrogate is replaced by U+FFFD."""
        # A surrogate comes from a JSON escape; UTF-8, which the library reads, cannot encode it.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are skipped, and incomplete characters become U+FFFD."""
        return self._tokenizer.decode([token for token in tokens if token not in self._special])

    def piece(self, token: int) -> str:
        """Return the spelling of a token in the vocabulary."""
        return self._pieces[token]

    def begins_word(self, token: int) -> bool:
        """Return whether the token starts with a space."""
        return self._pieces[token].startswith(SPACE)


def read_byte_pairs(folder: Path) -> BytePairs:
    """Return the byte-pair encoding of a folder.

    Reads tokenizer.json, or else vocab.json, merges.txt and, if it exists, added_tokens.json. Raises a DataError if a
    file is missing, damaged, or not byte-level byte-pair encoding.
    """
    tokenizer_file = folder / "tokenizer.json"
    if tokenizer_file.exists():
        return byte_pairs_of(_read(tokenizer_file), str(tokenizer_file))
    vocabulary = _read_ids(folder / "vocab.json")
    merges = _read_merges(folder / "merges.txt")
    added = folder / "added_tokens.json"
    # Some vocab.json files list special tokens among the others.
    special_tokens = {piece: token for piece, token in vocabulary.items() if NAMED.fullmatch(piece)}
    if added.exists():
        special_tokens |= _read_ids(added)
    return BytePairs(vocabulary, merges, special_tokens, str(folder))


def byte_pairs_of(content: bytes, source: str) -> BytePairs:
    """Return the byte-pair encoding of a tokenizer.json, or of `BytePairs.model`; errors as in `read_byte_pairs`."""
    settings = _parse_object(content, source)
    model = settings.get("model")
    added = settings.get("added_tokens") or []
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(added, list):
        raise DataError(f"{source} does not use byte-pair encoding. {OTHER}")
    _check_plain(settings, model, source)
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise DataError(f"{source} has no list of merges. {OTHER}")
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in added):
        raise DataError(f"{source} has an added token without a name. {OTHER}")
    special_tokens = _checked_ids({token["content"]: token.get("id") for token in added}, source)
    return BytePairs(_checked_ids(model.get("vocab"), source), _parse_merges(merges, source), special_tokens, source)


def _check_plain(settings: dict, model: dict, source: str) -> None:
    """Raise a DataError if a tokenizer.json has settings other than those of Whisper's tokenizers."""
    unsupported = [name for name in MODEL_OPTIONS if model.get(name)]
    if settings.get("normalizer"):
        unsupported.append("normalizer")
    splits = settings.get("pre_tokenizer") or {"type": "ByteLevel"}
    is_byte_level = isinstance(splits, dict) and splits.get("type") == "ByteLevel"
    if not is_byte_level or splits.get("add_prefix_space", False) or not splits.get("use_regex", True):
        unsupported.append("pre_tokenizer")
    if unsupported:
        raise DataError(
            f"{source} does not use plain byte-level byte-pair encoding: its {unsupported[0]} differs. {OTHER}"
        )


def _build_tokenizer(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], source: str) -> "Tokenizer":
    """Return the library's tokenizer; raise a DataError if it refuses the vocabulary or cannot encode every byte."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ResourceError(
            f"A Whisper model needs the package {PACKAGE}, which is not installed. Install: "
            f"{sys.executable} -m pip install {PACKAGE}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Checked first: the library panics, with a backtrace on stderr, if a merged token is longer than every other token.
    for rank, (left, right) in enumerate(merges):
        for piece in (left, right, left + right):
            if piece not in vocabulary:
                raise DataError(f"{source}: merge {rank + 1} needs the token {piece!r:.60}, which is missing. {OTHER}")
    # The library drops a byte that has no token.
    absent = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
    if absent:
        raise DataError(f"{source} has no token for the byte {min(absent)}, so it cannot encode some texts. {OTHER}")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges))
    except Exception as error:  # the library raises Exception itself, and TypeError for a lone surrogate
        reason = str(error).partition("\n")[0]
        raise DataError(f"{source} is not a byte-pair vocabulary: {reason:.200}. {OTHER}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sorted_by_id(ids: Mapping[str, int], source: str) -> list[str]:
    """Return the tokens sorted by id; raise a DataError unless each id from 0 occurs once."""
    pieces = sorted(ids, key=ids.__getitem__)
    for expected, piece in enumerate(pieces):
        if ids[piece] != expected:
            raise DataError(
                f"{source} gives the token {piece!r:.60} the id {ids[piece]!s:.20}, but {expected} is expected: ids "
                f"start at 0, and none is missing or used twice. {OTHER}"
            )
    return pieces


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise DataError(f"{path} could not be read: {error.strerror or error}. Use a folder that has it.") from None
    if len(content) > LARGEST_FILE:
        raise DataError(f"{path} is larger than {LARGEST_FILE >> 20} MiB. {OTHER}")
    return content


def _parse_object(content: bytes, source: str) -> dict:
    try:
        values = json.loads(content)
    except ValueError as error:
        raise DataError(f"{source} is not JSON: {error}. {OTHER}") from None
    except RecursionError:
        raise DataError(f"{source} is not JSON: it is nested too deeply. {OTHER}") from None
    if not isinstance(values, dict):
        raise DataError(f"{source} is not a JSON object. {OTHER}")
    return values


def _read_ids(path: Path) -> dict[str, int]:
    return _checked_ids(_parse_object(_read(path), str(path)), str(path))


def _checked_ids(ids: object, source: str) -> dict[str, int]:
    if not isinstance(ids, dict):
        raise DataError(f"{source} has no vocabulary of tokens and ids. {OTHER}")
    for piece, token in ids.items():
        if type(token) is not int:
            raise DataError(f"{source} gives the token {piece!r:.60} an id that is not an integer. {OTHER}")
    return ids


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        text = _read(path).decode("utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8. {OTHER}") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return _parse_merges([line for line in lines if line and not line.startswith("#version")], str(path))


def _parse_merges(merges: list, source: str) -> list[tuple[str, str]]:
    """Return merges, written as "left right" or as a list, as pairs."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    for rank, pair in enumerate(pairs):
        if not isinstance(pair, list) or [*map(type, pair)] != [str, str]:
            raise DataError(f"{source}: merge {rank + 1} does not have two tokens. {OTHER}")
    return [(left, right) for left, right in pairs]
