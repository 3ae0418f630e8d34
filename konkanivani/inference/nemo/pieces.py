"""Conversion of SentencePiece models to this project's layout: blank, unknown, start and end tokens, then the pieces.

A model is a protocol buffer (sentencepiece_model.proto). Field 1 holds the pieces in the order of their ids, and a
later occurrence of a field overrides an earlier one. Pieces can therefore be inserted and ids overridden without
parsing the rest.
"""

from dataclasses import dataclass

import sentencepiece

from konkanivani.data.text import OUR_TOKENS, Tokenizer

PIECE = 1
TRAINER = 2
TEXT = 1
KIND = 3
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
