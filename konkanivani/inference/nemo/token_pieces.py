"""Conversion of a byte-pair tokenizer.json to a SentencePiece model, from which it was made."""

import base64
import re
import struct
from typing import Any

from konkanivani.inference.nemo.pieces import PIECE, TEXT, TRAINER, field

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
