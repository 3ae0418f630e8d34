"""A SentencePiece model of others as a tokenizer of ours: blank, unknown, start and end first, then its pieces.

The model's bytes are a protocol buffer (sentencepiece_model.proto): pieces are its field 1, in the order of their ids,
and a field that comes again later overrules the earlier one. So pieces are put in, and ids overruled, without reading
the rest.
"""

from dataclasses import dataclass

import sentencepiece

from konkanivani.data.text import OUR_TOKENS, Tokenizer

PIECE, TRAINER, TEXT, KIND, CONTROL = 1, 2, 1, 3, 3
IDS = {40: OUR_TOKENS.unknown, 41: OUR_TOKENS.start, 42: OUR_TOKENS.end, 43: OUR_TOKENS.blank}
NAMES = {46: "<s>", 47: "</s>", 48: "<blank>"}


@dataclass(frozen=True)
class Pieces:
    """A tokenizer of ours, and the id that each of its tokens had: None for one that the model did not have."""

    tokenizer: Tokenizer
    old_ids: tuple[int | None, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Pieces that the model had."""
        return len(self.names)


def read_pieces(model: bytes) -> Pieces:
    """The pieces of a SentencePiece model whose first is what is unknown; a ValueError where it is another one.

    It may have a start and an end behind that, as ours have, or none at all.
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
    size, start = _read_number(model, 1)
    is_bare = old.bos_id() < 0
    added = b"".join(_piece(NAMES[number]) for number in (46, 47)) if is_bare else b""
    trainer = b"".join(field(number, token) for number, token in IDS.items())
    trainer += b"".join(field(number, name.encode()) for number, name in NAMES.items())
    unknown, others = model[: start + size], model[start + size :]
    whole = _piece(NAMES[48]) + unknown + added + others + field(TRAINER, trainer)
    old_ids = (None, 0, *((None, None) if is_bare else ()), *range(1, len(names)))
    return Pieces(_checked(whole, names, old_ids), old_ids, names)


def _checked(model: bytes, names: tuple[str, ...], old_ids: tuple[int | None, ...]) -> Tokenizer:
    """The tokenizer, each of its pieces being the one that it was."""
    tokenizer = Tokenizer(model)
    found = tuple(tokenizer.piece(token) for token, old in enumerate(old_ids) if old is not None)
    if tokenizer.size != len(old_ids) or found != names:
        raise ValueError("its tokenizer lists its tokens in a different order than SentencePiece")
    return tokenizer


def _piece(name: str) -> bytes:
    """A piece that stands for no text."""
    return field(PIECE, field(TEXT, name.encode()) + field(KIND, CONTROL))


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: a number, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first, each but the last with its highest bit set."""
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)


def _read_number(data: bytes, start: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    for place in range(start, min(len(data), start + 5)):
        value |= (data[place] & 127) << shift
        shift += 7
        if data[place] < 128:
            return value, place + 1
    raise ValueError("its tokenizer is not a SentencePiece model")
