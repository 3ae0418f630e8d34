"""Byte-pair tokens equal transformers' and the definition's, and damaged files are rejected with one sentence."""

import copy
import functools
import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.errors import DataError, ResourceError
from konkanivani.models.whisper import byte_pairs
from konkanivani.models.whisper.byte_pairs import BytePairs, byte_pairs_of, read_byte_pairs
from tests.conftest import WORDS
from tests.whisper.byte_vocabularies import (
    HOSTILE,
    NO_TIMES,
    RANKS,
    SENTENCES,
    added_token_ids,
    byte_characters,
    bytes_to_characters,
    real_vocabulary,
    small_vocabulary,
    train_vocabulary,
    write_vocabulary_files,
)

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXTS = st.text(
    st.one_of(st.sampled_from(" \n\t'sab1२.कि\u0301\u00a0\u1680🙂"), st.characters(exclude_categories=("Cs",))),
    max_size=40,
)
# Tokens that form pairs in texts: the bytes of a few characters, and merged tokens.
PLACES = st.sampled_from(sorted({byte_characters().index(c) for c in "Ġab"} | set("किण".encode()) | {*range(256, 290)}))
LIKELY_PAIRS = st.lists(st.tuples(PLACES, PLACES), max_size=40)
PAIRS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=60)


def merge_by_definition(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Tokenize a word by definition: merge the leftmost pair of the lowest rank until no pair can be merged."""
    tokens = bytes_to_characters(word.encode())
    while True:
        pairs = [*itertools.pairwise(tokens)]
        ranks = [merges.index(pair) for pair in pairs if pair in merges]
        if not ranks:
            return [*tokens]
        place = pairs.index(merges[min(ranks)])
        tokens = [*tokens[:place], "".join(merges[min(ranks)]), *tokens[place + 2 :]]


@settings(deadline=None, max_examples=150)
@given(st.one_of(PAIRS, LIKELY_PAIRS), st.lists(st.text("abcक\u093fण", min_size=1, max_size=12), max_size=6))
def test_words_are_merged_by_rank(pairs, words):
    vocabulary, merges = small_vocabulary(pairs)
    ours = BytePairs(vocabulary, merges, {}, "small")
    for word in [*words, "abab", "किकिकण"]:
        # Only a word of letters is one piece: a combining sign starts another.
        if word.isalpha():
            assert ours.encode(f" {word}") == [vocabulary[token] for token in merge_by_definition(f" {word}", merges)]
        assert ours.decode(ours.encode(word)) == word


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_are_decoded_as_by_python(values):
    vocabulary, merges = small_vocabulary([])
    tokens = [vocabulary[byte_characters()[value]] for value in values]
    assert BytePairs(vocabulary, merges, {}, "small").decode(tokens) == bytes(values).decode(errors="replace")


def test_partial_characters_decode_to_replacement_characters():
    vocabulary, merges = small_vocabulary([])
    ours = BytePairs(vocabulary, merges, {}, "small")
    assert ours.decode(ours.encode("a\ud83d\ude42b")) == "a🙂b"
    assert ours.decode(ours.encode("a\ud83db\udc00")) == "a\ufffdb\ufffd"
    whole = ours.encode("क")
    assert [ours.decode(whole[:2]), ours.decode(whole[2:]), ours.decode(whole)] == ["\ufffd", "\ufffd", "क"]


read_byte_pairs_once = functools.cache(read_byte_pairs)


@functools.cache
def transformers_tokenizer(folder: Path):
    return transformers.WhisperTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    if not RANKS.exists():
        pytest.skip(f"{RANKS} is missing: only small vocabularies are tested.")
    vocabulary, merges = real_vocabulary()
    return write_vocabulary_files(
        tmp_path_factory.mktemp("real") / "files", vocabulary, merges, added_token_ids(vocabulary, ("hi", "mr"))
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    vocabulary, merges = train_vocabulary(" ".join(WORDS) + " I'm we're 12 २०", 330)
    return write_vocabulary_files(
        tmp_path_factory.mktemp("small") / "files", vocabulary, merges, added_token_ids(vocabulary, ("hi", "mr"))
    )


@pytest.mark.parametrize("kind", ["real", "small"])
def test_tokens_of_corpus_and_hostile_texts_equal_transformers(kind, request):
    folder = request.getfixturevalue(kind)
    ours, hf_tokenizer = read_byte_pairs(folder), transformers.WhisperTokenizer.from_pretrained(str(folder))
    lines = [line for path in sorted(SENTENCES.glob("*.txt")) for line in path.read_text("utf-8").splitlines()]
    assert ours.size == len(hf_tokenizer)
    for text in [*WORDS, *HOSTILE, *lines]:
        tokens = ours.encode(text)
        assert ours.decode(tokens) == text
        if "<|" not in text:  # transformers encodes names of special tokens as tokens, this project as text
            assert tokens == hf_tokenizer(text, add_special_tokens=False)["input_ids"]


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, tokens=st.lists(st.integers(0, 299), max_size=20))
def test_random_texts_and_tokens_equal_transformers(small, text, tokens):
    ours, hf_tokenizer = read_byte_pairs_once(small), transformers_tokenizer(small)
    encoded = ours.encode(text)
    assert encoded == hf_tokenizer(text, add_special_tokens=False)["input_ids"] and ours.decode(encoded) == text
    assert max(tokens, default=0) < min(ours.names.values())
    assert ours.decode(tokens) == hf_tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_special_token_name_in_text_is_encoded_as_text(small):
    ours = read_byte_pairs(small)
    tokens = ours.encode(f"{NO_TIMES}<|mr|>")
    assert max(tokens) < min(ours.names.values()) and ours.decode(tokens) == f"{NO_TIMES}<|mr|>"
    assert ours.decode([*tokens, *ours.names.values(), ours.size + 5]) == f"{NO_TIMES}<|mr|>"


def test_both_file_formats_and_stored_bytes_are_equivalent(small, tmp_path):
    apart = read_byte_pairs(small)
    transformers.WhisperTokenizer.from_pretrained(str(small)).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / "merges.txt").exists()
    for other in (read_byte_pairs(tmp_path), byte_pairs_of(apart.model, "kept"), copy.copy(apart)):
        assert (other.size, other.names, other.model) == (apart.size, apart.names, apart.model)
        assert all(other.encode(text) == apart.encode(text) for text in (*WORDS, *HOSTILE))


def test_words_start_with_a_space(small):
    ours = read_byte_pairs(small)
    tokens = ours.encode(" उदक घर")
    assert ours.begins_word(tokens[0]) and sum(map(ours.begins_word, tokens)) == 2
    assert "".join(map(ours.piece, tokens)).count("Ġ") == 2


def test_long_word_does_not_take_quadratic_time(small):
    def seconds(count: int) -> float:
        text = "क" * count
        ours = read_byte_pairs(small)  # without cached words
        began = time.process_time()
        assert ours.decode(ours.encode(text)) == text
        return time.process_time() - began

    # The time of a quadratic algorithm grows 64-fold.
    assert min(seconds(200_000) for _ in range(3)) < 24 * min(seconds(25_000) for _ in range(3))


VALID, VALID_MERGES = small_vocabulary([(97, 98)])
LAST = len(VALID)
DAMAGED = {
    "is not JSON": {"vocab.json": b"{"},
    "is not JSON: it is nested too deeply": {"vocab.json": b'{"a":' + b"[" * 200_000},
    "is not JSON: 'utf-8' codec": {"vocab.json": b'{"\xff": 1}'},
    "is not a JSON object": {"vocab.json": b"[1, 2]"},
    "is larger than 64 MiB": {"vocab.json": b" " * (byte_pairs.LARGEST_FILE + 1)},
    "an id that is not an integer": {"vocab.json": VALID | {"xx": "5"}},
    "the token 'yes' an id that is not an integer": {"vocab.json": VALID | {"yes": True}},
    "the id -1, but 0 is expected": {"vocab.json": VALID | {"xx": -1}},
    f"the id {2**40}, but {LAST} is expected": {"vocab.json": VALID | {"xx": 2**40}},
    f"{'9' * 20}, but {LAST} is expected": {"vocab.json": VALID | {"xx": int("9" * 4000)}},
    "the id 5, but 6 is expected": {"vocab.json": VALID | {"xx": 5}},
    f"the id {LAST + 1}, but {LAST} is expected": {"vocab.json": VALID | {"xx": LAST + 1}},
    "is not a byte-pair vocabulary": {"vocab.json": VALID | {"\ud800": LAST}},
    "no token for the byte b": {
        "vocab.json": {piece.replace("b", "bb"): token for piece, token in VALID.items()},
        "merges.txt": b"",
    },
    "merge 2 needs the token 'zz'": {"merges.txt": b"#version: 0.2\na b\nx zz\n"},
    "merge 1 needs the token 'ac'": {"merges.txt": b"a c\n"},
    f"merge 1 needs the token '{'é' * 59}": {"merges.txt": "é{} a\n".format("é" * 99).encode()},
    "merge 1 does not have two tokens": {"merges.txt": b"a b c\n"},
    "is not UTF-8": {"merges.txt": b"\xff\xfe\n"},
    f"'<|mr|>' the id {LAST + 1}, but {LAST} is expected": {
        "vocab.json": VALID | {"<|mr|>": LAST},
        "added_tokens.json": {"<|mr|>": LAST + 1},
    },
    "could not be read: No such file": {"vocab.json": None},
    "merges.txt could not be read": {"merges.txt": None},
}
MODEL = {"type": "BPE", "vocab": VALID, "merges": ["a b"]}
DAMAGED_TOKENIZER_JSON = {
    "does not use byte-pair encoding": [{}, {"model": {"type": "Unigram"}}, {"model": 5}],
    "does not use byte-pair encoding: added tokens": [{"model": MODEL, "added_tokens": {"a": 1}}],
    "no vocabulary of tokens and ids": [{"model": MODEL | {"vocab": ["a"]}}],
    "has no list of merges": [{"model": MODEL | {"merges": None}}],
    "merge 1 does not have two tokens": [
        {"model": MODEL | {"merges": [merge]}} for merge in (5, None, {}, "ab", ["a"], ["a", 5])
    ],
    "an added token without a name": [
        {"model": MODEL, "added_tokens": [token]} for token in (5, {}, {"content": 5, "id": 1})
    ],
    "an id that is not an integer": [{"model": MODEL, "added_tokens": [{"content": "x", "id": None}]}],
    "its byte_fallback differs": [{"model": MODEL | {"byte_fallback": True}}],
    "its normalizer differs": [{"model": MODEL, "normalizer": {"type": "NFC"}}],
    "its pre_tokenizer differs": [
        {"model": MODEL, "pre_tokenizer": cut}
        for cut in (5, {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": True})
    ],
}
KEYS = ("model", "vocab", "merges", "type", "added_tokens", "content", "id", "a")
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


def error_message(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_byte_pairs(folder)
    text = str(refused.value)
    assert "\n" not in text and len(text) < 400 and text.endswith(".")
    return text


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_files_are_rejected_with_one_sentence(message, tmp_path):
    folder = write_vocabulary_files(tmp_path / "files", VALID, VALID_MERGES, {})
    read_byte_pairs(folder)  # the undamaged files are accepted
    for name, content in DAMAGED[message].items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert message in error_message(folder)


@pytest.mark.parametrize("message", DAMAGED_TOKENIZER_JSON)
def test_damaged_tokenizer_json_is_rejected_with_one_sentence(message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": MODEL}))
    assert read_byte_pairs(tmp_path).encode("ab")[0] == VALID["ab"]
    for content in DAMAGED_TOKENIZER_JSON[message]:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert message.partition(":")[0] in error_message(tmp_path)


@settings(deadline=None, max_examples=100)
@given(ANY_JSON)
def test_arbitrary_json_raises_data_error(content):
    with pytest.raises(DataError):
        byte_pairs_of(json.dumps(content).encode(), "made up")


def test_missing_tokenizers_library_is_reported(small, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"not installed\. Install: .* -m pip install tokenizers$"):
        read_byte_pairs(small)
