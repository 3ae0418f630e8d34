"""SentencePiece models and byte-pair tokenizers of NeMo, converted to this project's layout.

A model is a protocol buffer (sentencepiece_model.proto). Field 1 holds the pieces in the order of their ids, and a
later occurrence of a field overrides an earlier one. Pieces can therefore be inserted and ids overridden without
parsing the rest.
"""

import base64
import re
import struct
from dataclasses import dataclass
from typing import Any

import sentencepiece

from konkanivani.data.text import OUR_TOKENS, Tokenizer

# --------------------
# Conversion of SentencePiece models to this project's layout: blank, unknown, start and end tokens, then the pieces.


PIECE = 1
TRAINER = 2
TEXT = 1
CONTROL = 3
assert OUR_TOKENS.blank is not None and OUR_TOKENS.unknown is not None  # only Whisper's vocabulary lacks them
# Fields 40 to 43 of TrainerSpec: ids of the unknown, start, end and padding tokens. Fields 46 to 48: their pieces.
IDS = {40: OUR_TOKENS.unknown, 41: OUR_TOKENS.start, 42: OUR_TOKENS.end, 43: OUR_TOKENS.blank}
NAMES = {46: "<s>", 47: "</s>", 48: "<blank>"}


@dataclass(frozen=True)
class Pieces:
    """Converted tokenizer, and for each of its tokens the id in the original model, None for an added token."""

    tokenizer: Tokenizer
    old_ids: tuple[int | None, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of pieces of the original model."""
        return len(self.names)


def read_pieces(model: bytes) -> Pieces:
    """Convert a SentencePiece model to this project's layout.

    Raises a ValueError unless its first piece is the unknown token, followed by start and end tokens or by neither.
    """
    try:
        old = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ValueError("its tokenizer is not a SentencePiece model") from None
    ids = old.unk_id(), old.bos_id(), old.eos_id(), old.pad_id()
    names = tuple(map(old.id_to_piece, range(old.get_piece_size())))
    if ids not in ((0, -1, -1, -1), (0, 1, 2, -1)) or NAMES[48] in names or not model.startswith(b"\x0a"):
        raise ValueError(
            f"its tokenizer has the ids {ids} for <unk>, <s>, </s> and <pad>, but only (0, -1, -1, -1) and (0, "
            "1, 2, -1) are supported"
        )
    # The model starts with the tag of the first piece and its length.
    size, start = _read_number(model, 1)
    is_bare = old.bos_id() < 0
    added = b"".join(_piece(NAMES[number]) for number in (46, 47)) if is_bare else b""
    trainer = b"".join(field(number, token) for number, token in IDS.items())
    trainer += b"".join(field(number, name.encode()) for number, name in NAMES.items())
    unknown = model[: start + size]
    others = model[start + size :]
    # A later TrainerSpec is merged with the model's own and overrides its ids.
    whole = _piece(NAMES[48]) + unknown + added + others + field(TRAINER, trainer)
    old_ids = (None, 0, *((None, None) if is_bare else ()), *range(1, len(names)))
    return Pieces(_checked(whole, names, old_ids), old_ids, names)


def _checked(model: bytes, names: tuple[str, ...], old_ids: tuple[int | None, ...]) -> Tokenizer:
    """Return the tokenizer after checking that every original piece has kept its spelling."""
    tokenizer = Tokenizer(model)
    found = tuple(tokenizer.piece(token) for token, old in enumerate(old_ids) if old is not None)
    if tokenizer.size != len(old_ids) or found != names:
        raise ValueError("its tokenizer lists its tokens in a different order than SentencePiece")
    return tokenizer


def _piece(name: str) -> bytes:
    """Return a control piece, which has no text."""
    return field(PIECE, field(TEXT, name.encode()) + field(KIND, CONTROL))


def field(number: int, value: int | bytes) -> bytes:
    """Return an encoded field of a protocol buffer, with a number or bytes as its value."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Return a varint: 7 bits per byte, lowest first, the high bit set in all bytes but the last."""
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)


def _read_number(data: bytes, start: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    value = shift = 0
    for place in range(start, min(len(data), start + 5)):  # at most 35 bits
        value |= (data[place] & 127) << shift
        shift += 7
        if data[place] < 128:
            return value, place + 1
    raise ValueError("its tokenizer is not a SentencePiece model")


# --------------------
# Conversion of a byte-pair tokenizer.json to a SentencePiece model, from which it was made.


# Field numbers and enumeration values in sentencepiece_model.proto.
SCORE = 2
KIND = 3
NORMALIZER = 3
MODEL_TYPE = 3
SIZE = 4
BYTES = 35
CHARACTERS = 2
UNKNOWN = 2
BYTE = 6
BYTE_PAIRS = 2
UNCHANGING = {"Strip", "Replace"}  # SentencePiece normalises spaces in the same way by itself


def sentencepiece_of(tokenizer: Any) -> bytes:
    """Return the serialized SentencePiece model; raise a ValueError for another kind of tokenizer.

    Args:
        tokenizer: content of a tokenizer.json, not yet checked.
    """
    try:
        model = tokenizer["model"]
        added = tokenizer["normalizer"]
        kind = model["type"]
        names = sorted(model["vocab"], key=model["vocab"].get)
        merges = model["merges"]
        are_bytes = bool(model.get("byte_fallback"))
        spaces = tokenizer["pre_tokenizer"]["type"], tokenizer["pre_tokenizer"].get("prepend_scheme")
        characters = _characters(added)
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            pair = pair.split(" ") if isinstance(pair, str) else pair
            # Of two merges with the same result, the earlier one counts.
            ranks.setdefault("".join(pair), rank)
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ValueError("its tokenizer.json is not byte-pair encoding with marked spaces") from None
    # SentencePiece always adds a space marker before the text, the scheme "always" here.
    if kind != "BPE" or spaces != ("Metaspace", "always") or list(model["vocab"].values()).count(0) != 1:
        raise ValueError("its tokenizer.json is not byte-pair encoding with marked spaces")
    if [model["vocab"][name] for name in names] != list(range(len(names))) or names[0] != model.get("unk_token"):
        raise ValueError("its tokenizer.json has gaps between its tokens, or does not start with the unknown token")
    pieces = b""
    for number, name in enumerate(names):
        # SentencePiece merges the pair with the highest score first, byte-pair encoding the pair that was merged
        # earliest in training: the score is the negative rank. 0x15 is the tag of a float field.
        score = field(TEXT, name.encode()) + b"\x15" + struct.pack("<f", -ranks.get(name, len(merges) + number))
        is_byte = are_bytes and re.fullmatch("<0x[0-9A-F]{2}>", name)
        special = UNKNOWN if number == 0 else BYTE if is_byte else 1
        pieces += field(PIECE, score + field(KIND, special))
    has_bytes = field(BYTES, 1) if are_bytes and "<0x00>" in names else b""
    trainer = field(MODEL_TYPE, BYTE_PAIRS) + field(SIZE, len(names)) + has_bytes + field(45, names[0].encode())
    return pieces + field(TRAINER, trainer) + field(NORMALIZER, field(CHARACTERS, characters))


def _characters(normalizer: Any) -> bytes:
    """Return the precompiled character map of the normalizer, b"" without one."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= {*UNCHANGING, "Precompiled"}:
        raise ValueError(f"its tokenizer.json uses an unsupported normalisation: {kinds}")
    return b"".join(base64.b64decode(s["precompiled_charsmap"]) for s in steps if s["type"] == "Precompiled")
