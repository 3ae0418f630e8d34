"""Text normalisation by a table of cases, and round trips through tokenizers."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.data.text import DIGIT_WORDS, OUR_TOKENS, Tokenizer, normalize_text, train_tokenizer
from konkanivani.errors import DataError, UsageError
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from tests.conftest import TINY_MODEL, WORDS, Corpus, run_folders
from tests.run_setup import begin_run

ZWNJ, ZWJ, NUKTA, VIRAMA = "\u200c", "\u200d", "\u093c", "\u094d"
CASES = [
    ("म्हजें नांव", "म्हजें नांव", "plain text is unchanged"),
    ("  एक \t दोन\n\nतीन ", "एक दोन तीन", "runs of white space"),
    ("एक\u00a0दोन\u3000तीन", "एक दोन तीन", "Unicode spaces"),
    (f"क{VIRAMA}{ZWJ}ष", f"क{VIRAMA}ष", "zero-width joiner"),
    (f"क{VIRAMA}{ZWNJ}ष", f"क{VIRAMA}ष", "zero-width non-joiner"),
    ("\ufeffएक\u200bदोन\u00adतीन", "एकदोनतीन", "byte order mark, zero-width space, soft hyphen"),
    ("आयलो। गेलो॥", "आयलो गेलो", "danda and double danda"),
    ("किदें? व्हय! (ना) “बरें” – ‘कशें’…", "किदें व्हय ना बरें कशें", "punctuation"),
    ("एक-दोन/तीन", "एक दोन तीन", "punctuation between words becomes a space"),
    ("₹५००", "५००", "symbol"),
    ("घर 🏠", "घर", "emoji"),
    ("GOA गोंय Café", "goa गोंय café", "Latin letters in lower case"),
    ("Cafe\u0301", "café", "decomposed Latin is composed"),
    (f"ड{NUKTA}", f"ड{NUKTA}", "nukta is not composed (NFC)"),
    ("\u095c", f"ड{NUKTA}", "precomposed nukta letter is decomposed (NFC)"),
    ("\u0928\u093c", "\u0929", "letter NNNA is composed (NFC)"),
    ("आँ अं अः ऽ ॐ", "आँ अं अः ऽ ॐ", "candrabindu, anusvara, visarga, avagraha, om"),
    ("e\u200d\u0301", "é", "letters compose after a joiner is removed"),
    ("। ! …", "", "only punctuation"),
    ("", "", "empty"),
    ("a\u0000b\u0007", "a b", "control characters"),
    ("\ud800a", "a", "lone surrogate"),
]


@pytest.mark.parametrize("text, expected", [case[:2] for case in CASES], ids=[case[2] for case in CASES])
def test_normalisation_of_each_case(text, expected):
    assert normalize_text(text) == expected


@pytest.mark.parametrize(
    "text, kept, spelt",
    [
        ("५", "५", "पांच"),
        ("५2", "५2", "पांच दोन"),
        ("वर्स १९", "वर्स १९", "वर्स एक णव"),
        ("क१ख", "क१ख", "क एक ख"),
        ("0123456789", "0123456789", " ".join(DIGIT_WORDS)),
        ("٣", "٣", "तीन"),  # Arabic-Indic
        ("½", "½", "½"),  # a number, but not a digit
    ],
)
def test_digits_are_kept_or_spelt_one_by_one(text, kept, spelt):
    assert normalize_text(text, "keep") == kept
    assert normalize_text(text, "spell") == spelt


LETTERS = "कखगशाळएाीें़्ऽ॒०९।॥ \u200c\u200d\u0928\u0930\u0933\u095cABİßΣς'-.´\u0301\u0323"
INDIC = st.text(st.sampled_from(LETTERS), max_size=30)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), INDIC), st.sampled_from(["keep", "spell"]))
def test_normalisation_is_idempotent_composed_and_single_spaced(text, digits):
    once = normalize_text(text, digits)
    assert normalize_text(once, digits) == once
    assert unicodedata.is_normalized("NFC", once)
    assert once == " ".join(once.split())
    assert all(character == " " or unicodedata.category(character)[0] in "LMN" for character in once)


@settings(max_examples=200, deadline=None)
@given(INDIC)
def test_normalisation_does_not_depend_on_unicode_form(text):
    assert normalize_text(unicodedata.normalize("NFD", text)) == normalize_text(text)


TEXTS = [normalize_text(f"{a} {b} {c}") for a in WORDS for b in WORDS[:4] for c in WORDS[5:9]]


@pytest.fixture(scope="module", params=["char", "bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TEXTS, request.param, 40)


def test_tokenizer_round_trip_returns_the_text(tokenizer):
    for text in (*TEXTS, *WORDS):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert min(tokens) > OUR_TOKENS.end
        assert tokenizer.decode([OUR_TOKENS.start, *tokens, OUR_TOKENS.blank, OUR_TOKENS.end]) == text
    assert tokenizer.size <= 40
    assert OUR_TOKENS.unknown in tokenizer.encode("xyz")  # negative control: unseen characters are unknown


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))
def test_any_sentence_of_known_words_round_trips(tokenizer, words):
    assert tokenizer.decode(tokenizer.encode(" ".join(words))) == " ".join(words)


@pytest.mark.parametrize("kind", ["char", "bpe", "unigram"])
def test_tokenizer_training_does_not_depend_on_text_order(kind):
    there, back = (train_tokenizer(order, kind, 40).model for order in (TEXTS, [*TEXTS[::-1], TEXTS[0]]))
    assert there == back
    assert there != train_tokenizer(TEXTS[:60], kind, 40).model


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("texts", [["अ"], ["एक दोन तीन"], ["a" * 50], TEXTS], ids=["one", "three", "long", "many"])
def test_too_large_vocabulary_size_is_reduced_and_reported(kind, texts, capsys):
    tokenizer = train_tokenizer(texts, kind, 5000)
    assert tokenizer.size < 5000
    assert f"--vocab_size 5000 reduced to {tokenizer.size}" in capsys.readouterr().out
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


def test_attainable_vocabulary_size_prints_nothing(capsys):
    assert train_tokenizer(TEXTS, "bpe", 40).size == 40
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["char", "bpe", "unigram"])
def test_vocabulary_smaller_than_alphabet_raises_with_minimum_size(kind):
    smallest = len(set("".join(TEXTS)) - {" "}) + 5
    with pytest.raises(UsageError, match=f"at least {smallest}"):
        train_tokenizer(TEXTS, kind, smallest - 1)
    assert train_tokenizer(TEXTS, kind, smallest).size == smallest


def test_bytes_that_are_not_a_tokenizer_are_rejected():
    for model in (b"", b"not a model", bytes(100)):
        with pytest.raises(DataError, match="tokenizer"):
            Tokenizer(model)


def test_checkpoint_stores_the_tokenizer_byte_for_byte(corpus: Corpus, tmp_path: Path):
    flags = [*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *run_folders(tmp_path), "--max_steps", "1"]
    run = build_run(begin_run(flags))
    train(run)
    checkpoint = read_checkpoint(tmp_path / "checkpoints" / LAST)
    assert checkpoint.tokenizer == run.data.tokenizer.model
    assert checkpoint.vocab_size == Tokenizer(checkpoint.tokenizer).size == run.step.architecture.vocab_size
    resumed = build_run(begin_run([*flags, "--resume", "auto"]))
    assert resumed.data.tokenizer.model == run.data.tokenizer.model
