"""Token language models: estimation and scores equal their definitions; ARPA files; the training script."""

import gzip
import json
import math
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from konkanivani.checkpoints.checkpoint import Checkpoint, write_checkpoint
from konkanivani.cli import language_model
from konkanivani.config import TextConfig, TrainConfig
from konkanivani.data.text import OUR_TOKENS, Tokenizer, train_tokenizer
from konkanivani.decoding import ngram
from konkanivani.decoding.language_model import (
    LanguageModel,
    RepeatedNgram,
    build_language_model,
    read_language_model,
    score_sentences,
)
from konkanivani.decoding.ngram import (
    LN_10,
    MAX_NGRAMS,
    USUAL_DISCOUNTS,
    Ngrams,
    estimate_ngrams,
    read_arpa,
    write_arpa,
)
from konkanivani.errors import DataError, KonkaniVaniError, ResourceError
from konkanivani.flags import config_to_text
from tests.conftest import WORDS, checked, run_script

SCRIPT = "training_scripts/train_language_model.py"
CPU = torch.device("cpu")
UNKNOWN, START, END = OUR_TOKENS.unknown, OUR_TOKENS.start, OUR_TOKENS.end
VOCABULARY = 8  # size in these tests: four special tokens and four pieces
PIECES = range(4, VOCABULARY)
Gram = tuple[int, ...]
Model = dict[Gram, tuple[float, float]]  # log probability and log weight


def ngrams_of(model: Model) -> list[Ngrams]:
    """Return the model as arrays, in file order."""
    orders = []
    for order in range(1, max(map(len, model)) + 1):
        rows = [(gram, *values) for gram, values in model.items() if len(gram) == order]
        grams, probabilities, backoffs = zip(*rows, strict=True) if rows else ((), (), ())
        tokens = np.array(grams, np.int32).reshape(-1, order)
        orders.append(Ngrams(tokens, np.array(probabilities, float), np.array(backoffs, float)))
    return orders


def model_of(orders: Sequence[Ngrams]) -> Model:
    rows = (zip(n.tokens.tolist(), n.log_probabilities.tolist(), n.backoffs.tolist(), strict=True) for n in orders)
    return {tuple(gram): (probability, backoff) for order in rows for gram, probability, backoff in order}


def log_probability(model: Model, history: Gram, token: int) -> float:
    """Return the probability by the definition of a back-off model."""
    if (*history, token) in model:
        return model[(*history, token)][0]
    return model.get(history, (0.0, 0.0))[1] + log_probability(model, history[1:], token) if history else -math.inf


def expected_scores(model: Model, tokens: Gram) -> list[float]:
    """Return the scores of all tokens after the start and these tokens; unknown tokens count as `UNKNOWN`."""
    order = max(map(len, model))

    def known(token: int) -> int:
        return token if (token,) in model or (UNKNOWN,) not in model else UNKNOWN

    history = (START, *map(known, tokens))[-(order - 1) :] if order > 1 else ()
    scores = [log_probability(model, history, known(token)) for token in range(VOCABULARY)]
    scores[OUR_TOKENS.blank] = scores[START] = -math.inf
    return scores


def states_along(model: LanguageModel, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the initial state and the state after each token."""
    states = [model.initial(1)]
    for token in tokens:
        states.append(model.advance(states[-1], torch.tensor([token])))
    return states


def state_after(model: LanguageModel, tokens: Gram) -> torch.Tensor:
    return states_along(model, tokens)[-1]


def is_close(one: Sequence[float], other: Sequence[float], bound: float = 1e-12) -> bool:
    """Return whether the values agree to the bound; two infinities are equal, a NaN equals nothing."""
    return len(one) == len(other) and all(
        a == b or math.isclose(a, b, rel_tol=bound, abs_tol=bound) for a, b in zip(one, other, strict=True)
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw any back-off model: lower orders may lack n-grams of higher ones, weights may exceed one."""
    words = [START, END, *draw(st.lists(st.sampled_from([UNKNOWN, *PIECES]), unique=True, min_size=1))]
    grams = draw(st.lists(st.lists(st.sampled_from(words), min_size=2, max_size=4).map(tuple), unique=True))
    logarithm = st.integers(-9000, 0).map(lambda number: number / 1000)
    weight = st.one_of(st.just(0.0), st.integers(-3000, 1000).map(lambda number: number / 1000))
    chosen = {(word,): (draw(logarithm), draw(weight)) for word in words}
    return chosen | {gram: (draw(logarithm), draw(weight)) for gram in grams}


histories = st.lists(st.lists(st.sampled_from([UNKNOWN, *PIECES]), max_size=6).map(tuple), min_size=1, max_size=4)


@settings(max_examples=120, deadline=None)
@given(models(), histories)
def test_scores_equal_the_back_off_definition(model, sentences):
    built = build_language_model(ngrams_of(model), VOCABULARY, CPU)
    states = torch.cat([state_after(built, tokens) for tokens in sentences])
    assert built.score(states).dtype == torch.float64
    for tokens, scores in zip(sentences, built.score(states).tolist(), strict=True):
        assert is_close(scores, expected_scores(model, tokens))
    following = torch.tensor([PIECES[0]] * len(sentences))
    alone = torch.cat([state_after(built, (*tokens, PIECES[0])) for tokens in sentences])
    assert torch.equal(built.advance(states, following), alone)


@pytest.mark.parametrize("forgotten", ["backoffs", "shorter", "log_probabilities"])
def test_negative_control_wrong_score_is_detected(forgotten):
    """Scores differ without back-off weights, with states that cannot back off, or with wrong probabilities."""
    model = {(token,): (-1.0 - token / 10, -0.3) for token in (START, END, *PIECES)}
    model |= {(4, 5): (-0.5, -0.7), (4, 5, 6): (-0.1, 0.0), (5, 6): (-0.2, 0.0), (START, 4): (-0.6, -0.2)}
    built = build_language_model(ngrams_of(model), VOCABULARY, CPU)
    broken = replace(built, **{forgotten: torch.zeros_like(getattr(built, forgotten))})

    def is_right(made: LanguageModel) -> bool:
        sentences = [(), (4,), (4, 5), (4, 5, 6), (7, 5)]
        return all(is_close(made.score(state_after(made, t))[0].tolist(), expected_scores(model, t)) for t in sentences)

    assert is_right(built) and not is_right(broken)


def test_state_depends_only_on_the_relevant_context():
    model = {(token,): (-1.0, -0.3) for token in (START, END, *PIECES)} | {(4, 5): (-0.5, -0.7)}
    built = build_language_model(ngrams_of(model), VOCABULARY, CPU)
    assert state_after(built, (4, 4, 5, 6)).tolist() == state_after(built, (6,)).tolist()
    assert state_after(built, (4,)).tolist() != state_after(built, (6,)).tolist()
    assert built.initial(3).shape == (3,)


def test_without_unknown_token_other_tokens_are_impossible():
    model = {(token,): (-1.0, -0.3) for token in (START, END, 4)} | {(4, 4): (-0.5, 0.0)}
    built = build_language_model(ngrams_of(model), VOCABULARY, CPU)
    scores = built.score(built.initial(1))[0]
    assert (scores[[UNKNOWN, 5, 6, 7]] == -math.inf).all() and (scores[[END, 4]] > -math.inf).all()
    assert is_close(built.score(state_after(built, (4, 5)))[0].tolist(), expected_scores(model, (5,)))


def test_repeated_ngram_and_token_without_unigram_are_rejected():
    (unigrams,) = ngrams_of({(4,): (-1.0, 0.0), (5,): (-1.0, 0.0)})
    bigrams = Ngrams(np.array([[4, 5], [5, 5], [4, 5]], np.int32), np.full(3, -1.0), np.zeros(3))
    with pytest.raises(RepeatedNgram, match=r"\[4, 5\]"):
        build_language_model([unigrams, bigrams], VOCABULARY, CPU)
    with pytest.raises(ValueError, match="order 1"):
        build_language_model([unigrams, replace(bigrams, tokens=bigrams.tokens + 1)], VOCABULARY, CPU)


# Estimation


class KneserNey:
    """Interpolated modified Kneser-Ney smoothing by its definition, with sets and dictionaries."""

    def __init__(self, sentences: Sequence[Sequence[int]], order: int) -> None:
        texts = [(START, *tokens, END) for tokens in sentences]
        self.order = min(order, max(map(len, texts)))
        occurrences, before = Counter(), defaultdict(set)
        for text in texts:
            for first in range(len(text)):
                for end in range(first + 1, min(first + self.order, len(text)) + 1):
                    occurrences[text[first:end]] += 1
                    if first:
                        before[text[first:end]].add(text[first - 1])
        del occurrences[START,]
        self.counts = {
            gram: count if len(gram) == self.order or gram[0] == START else len(before[gram])
            for gram, count in occurrences.items()
        }
        self.followed = defaultdict(list)
        for gram, count in self.counts.items():
            self.followed[gram[:-1]].append(count)
        self.discounts = {n: self._discounts(n) for n in range(1, self.order + 1)}

    def _discounts(self, order: int) -> list[float]:
        n = Counter(count for gram, count in self.counts.items() if len(gram) == order)
        if not all(n[count] for count in (1, 2, 3, 4)):
            return [0, *USUAL_DISCOUNTS]
        y = n[1] / (n[1] + 2 * n[2])
        results = [0, 1 - 2 * y * n[2] / n[1], 2 - 3 * y * n[3] / n[2], 3 - 4 * y * n[4] / n[3]]
        return results if all(0 < results[k] < k for k in (1, 2, 3)) else [0, *USUAL_DISCOUNTS]

    def probability(self, history: Gram, token: int) -> float:
        """Return P(token | history), for a history no longer than the order allows."""
        counts, discounts = self.followed[history], self.discounts[len(history) + 1]
        shorter = self.probability(history[1:], token) if history else 1 / (VOCABULARY - 2)
        if not counts:
            return shorter
        count = self.counts.get((*history, token), 0)
        left = sum(discounts[min(each, 3)] for each in counts)
        return (count - discounts[min(count, 3)] + left * shorter) / sum(counts)


FOLLOWING = [token for token in range(VOCABULARY) if token not in (OUR_TOKENS.blank, START)]
texts = st.lists(st.lists(st.sampled_from([UNKNOWN, *PIECES]), max_size=7), min_size=1, max_size=12)


def contexts_of(sentences: Sequence[Sequence[int]], order: int) -> set[Gram]:
    """Return every context that occurs and some that do not."""
    framed = [(START, *tokens) for tokens in sentences]
    seen = {tuple(t[a:b]) for t in framed for a in range(len(t)) for b in range(a, min(a + order - 1, len(t)) + 1)}
    return seen | {(4,), (7, 7), (6, 5, 4), (START, 7)}


def is_kneser_ney(sentences: Sequence[Sequence[int]], order: int) -> bool:
    """Return whether the estimated model equals the definition in every context."""
    truth = KneserNey(sentences, order)
    model = model_of(estimate_ngrams(sentences, VOCABULARY, order))
    for context in contexts_of(sentences, order):
        context = context[-(truth.order - 1) :] if truth.order > 1 else ()
        results = [log_probability(model, context, token) for token in FOLLOWING]
        if not is_close(results, [math.log(truth.probability(context, token)) for token in FOLLOWING], 1e-10):
            return False
    return True


@settings(max_examples=120, deadline=None)
@given(texts, st.integers(1, 6))
def test_estimate_equals_the_kneser_ney_definition(sentences, order):
    assert is_kneser_ney(sentences, order)


def zipf(count: int, seed: int = 0) -> list[list[int]]:
    """Return sentences with very different token frequencies."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 9, size=count)
    return [[int(t) for t in generator.choice(PIECES, size=n, p=(0.6, 0.25, 0.1, 0.05))] for n in lengths]


def test_discounts_are_estimated_from_sufficient_text():
    sentences = zipf(60)
    assert KneserNey(sentences, 5).discounts[5] != [0, *USUAL_DISCOUNTS]
    assert is_kneser_ney(sentences, 5)


@pytest.mark.parametrize("part, mistake", [
    ("_kneser_ney_counts", lambda level, above, start: np.where(level.tokens == START, 0, level.counts)),
    ("_discounts", lambda counts: np.array([0.0, 0.7, 0.7, 0.7])),
])  # fmt: skip
def test_negative_control_wrong_estimate_is_detected(part, mistake, monkeypatch):
    """The estimate differs if lower orders count occurrences or with absolute discounting."""
    assert is_kneser_ney(zipf(30), 3)
    monkeypatch.setattr(ngram, part, mistake)
    assert not is_kneser_ney(zipf(30), 3)


def scores_along(model: LanguageModel, sentences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the scores in every state along the sentences."""
    return model.score(torch.cat([state for tokens in sentences for state in states_along(model, tokens)]))


@pytest.mark.parametrize("order", [1, 2, 3, 6, 12])
@pytest.mark.parametrize(
    "sentences",
    [[[]], [[4]], [[4, 5], [4, 5], [6, 4]], zipf(80)],
    ids=["empty", "one token", "three sentences", "many sentences"],
)
def test_probabilities_sum_to_one_for_any_text_size(sentences, order):
    model = build_language_model(estimate_ngrams(sentences, VOCABULARY, order), VOCABULARY, CPU)
    scores = scores_along(model, [*sentences, *zipf(5, seed=1), [UNKNOWN, 7, 7]])
    assert (scores[:, FOLLOWING] > -math.inf).all()
    assert (scores.exp().sum(dim=1) - 1).abs().max() < 1e-9
    assert (scores_along(replace(model, backoffs=model.backoffs / 2), zipf(9)).exp().sum(1) - 1).abs().max() > 1e-3 or (
        order == 1
    )


def test_training_text_is_more_probable_than_random_text():
    sentences = [[4, 5, 6, 7]] * 20
    model = build_language_model(estimate_ngrams(sentences, VOCABULARY, 3), VOCABULARY, CPU)
    seen, noise, nothing = score_sentences(model, [sentences[0], [7, 6, 5, 4], []])
    assert seen > -1 and noise < -6 and nothing < -2
    step = model.score(model.initial(1))[0, END].item()
    assert nothing == pytest.approx(step)
    many = [*zipf(300), []]
    assert score_sentences(model, many)[::10] == pytest.approx([score_sentences(model, [t])[0] for t in many[::10]])


# Files


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(WORDS, "char", 60)


@pytest.fixture(scope="module")
def orders(tokenizer) -> tuple[Ngrams, ...]:
    sentences = [tokenizer.encode(f"{one} {other}") for one in WORDS for other in WORDS[::3]]
    return estimate_ngrams(sentences, tokenizer.size, 3)


@pytest.mark.parametrize("name", ["lm.arpa", "lm.arpa.gz"])
def test_written_arpa_file_reads_back_equal(orders, tokenizer, tmp_path, name):
    write_arpa(tmp_path / name, orders, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b" if name.endswith(".gz") else b"\\data\\\nngram 1=")
    for written, read in zip(orders, read_arpa(tmp_path / name, tokenizer), strict=True):
        assert np.array_equal(written.tokens, read.tokens)
        assert np.allclose(written.log_probabilities, read.log_probabilities, rtol=1e-11, atol=0)
        assert np.allclose(written.backoffs, read.backoffs, rtol=1e-11, atol=1e-15)
    model = read_language_model(tmp_path / name, tokenizer, CPU)
    sums = scores_along(model, [tokenizer.encode(word) for word in WORDS]).exp().sum(dim=1)
    assert (sums - 1).abs().max() < 1e-9


def test_arpa_file_of_other_tools_is_read(tokenizer, tmp_path):
    """Blank lines and comments, spaces for tabs, missing weights, n-grams in any order, Windows line endings."""
    piece = tokenizer.piece(4)
    rows = ["# made by hand", "", "\\data\\", "ngram  1=4", "ngram 2 = 2", "", "\\1-grams:", f"-0.5 {piece} -0.25"]
    rows += ["-1 <unk>", "-99\t<s>\t-0.5", "", "-0.5\t</s>", "\\2-grams:", f"-0.125 {piece} </s>", f"-1 <s> {piece}"]
    path = tmp_path / "hand.arpa"
    path.write_bytes("\r\n".join([*rows, "", "\\end\\", "anything"]).encode())
    unigrams, bigrams = read_arpa(path, tokenizer)
    assert unigrams.tokens[:, 0].tolist() == [4, UNKNOWN, START, END]
    assert unigrams.backoffs.tolist() == [-0.25 * LN_10, 0.0, -0.5 * LN_10, 0.0]
    assert bigrams.tokens.tolist() == [[4, END], [START, 4]]
    assert bigrams.log_probabilities.tolist() == [-0.125 * LN_10, -LN_10]


ARPA = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-0.5\t▁\t-0.25
-1\t<unk>\t0
-99\t<s>\t-0.5
-0.5\t</s>\t0

\\2-grams:
-0.125\t▁ </s>
-1\t<s> ▁

\\end\\
"""
BROKEN = {
    "empty": ("", "ends before"),
    "text": ("हांव घरा वतां\n" * 5, "ends before"),
    "long text": ("हांव घरा वतां\n" * 2000, "line 1001: more than 1000 lines"),
    "one long line": ("a" * 100_000, "line 1: a line has more than"),
    "truncated in a section": (ARPA[:58], "ends before"),
    "truncated before its end": (ARPA[:-3], '"\\en" is found at its end'),
    "no end": (ARPA.replace("\\end\\\n", ""), "ends before"),
    "truncated in the header": (ARPA[:17], "ends before"),
    "no 1-grams": ("\\data\\\n\\end\\\n", "no 1-grams"),
    "more n-grams than stated": (ARPA.replace("ngram 2=2", "ngram 2=1"), "more 2-grams than the 1 in its header"),
    "fewer n-grams than stated": (ARPA.replace("ngram 1=4", "ngram 1=5"), "fewer 1-grams than the 5 in its header"),
    "2^60 n-grams": (ARPA.replace("ngram 2=2", f"ngram 2={2**60}"), f"more than the limit of {MAX_NGRAMS}"),
    "count at the limit": (ARPA.replace("ngram 2=2", f"ngram 2={MAX_NGRAMS - 4}"), "fewer 2-grams than"),
    "2^60 words": (ARPA.replace("ngram 1=4", f"ngram 1={2**60}"), f"more than the limit of {MAX_NGRAMS}"),
    "order 2 first": (ARPA.replace("ngram 1=4", "ngram 2=4"), "its header must list the orders 1, 2"),
    "missing section": (ARPA.replace("\\2-grams:", "\\3-grams:"), '"\\3-grams:" is found at the start of its 2-grams'),
    "not a number": (ARPA.replace("-0.125", "x0.125"), 'line 12: "x0.125 ▁ </s>" is not a log probability, 2 words'),
    "NaN": (ARPA.replace("-0.125", "nan"), "line 12: "),
    "NaN weight": (ARPA.replace("-0.25", "nan"), "line 6: "),
    "positive logarithm": (ARPA.replace("-0.125", "0.125"), "line 12: 0.125 and 0 are not a log probability"),
    "infinite weight": (ARPA.replace("-0.25", "inf"), "line 6: -0.5 and inf are not a log probability"),
    "one word too many": (ARPA.replace("<s> ▁", "<s> ▁ ▁ ▁"), "is not a log probability, 2 words"),
    "one word too few": (ARPA.replace("<s> ▁", "▁"), "line 13: "),
    "words not in the vocabulary": (
        ARPA.replace("<unk>", "home").replace("-0.5\t▁", "-0.5\tgo"),
        '"go", "home" is not a token',
    ),
    "words of another tokenizer": (
        "\\data\\\nngram 1=900\n\\1-grams:\n" + "".join(f"-2\t▁{number}\n" for number in range(900)),
        '"▁0", "▁1", "▁2", ... is not a token of the tokenizer. It must use this checkpoint\'s tokenizer',
    ),
    "blank token": (ARPA.replace("<unk>", "<blank>"), '"<blank>" is not a token of the tokenizer. It must use'),
    "2-gram word without 1-gram": (ARPA.replace("▁ </s>", "▁ घ"), '"घ" in its 2-grams is not in its 1-grams'),
    "repeated n-gram": (ARPA.replace("▁ </s>", "<s> ▁"), '"<s> ▁" is listed twice in its 2-grams'),
    "repeated word": (ARPA.replace("<unk>", "▁"), '"▁" is listed twice in its 1-grams'),
    "too few pieces": (ARPA, "has only 1 of the tokenizer's"),
}


def rejection_message(content: bytes, tokenizer: Tokenizer, path: Path) -> str:
    """Return the error message for a file that is not a language model for the tokenizer."""
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_language_model(path, tokenizer, CPU)
    message = str(caught.value)
    assert (
        str(path) in message and "\n" not in message and message.isprintable() and len(message) < 400 + len(str(path))
    )
    return message


@pytest.mark.parametrize("name", BROKEN)
def test_broken_arpa_file_is_rejected_with_one_sentence(name, tokenizer, tmp_path):
    content, expected_message = BROKEN[name]
    assert expected_message in rejection_message(content.encode(), tokenizer, tmp_path / "lm.arpa")
    assert expected_message in rejection_message(gzip.compress(content.encode()), tokenizer, tmp_path / "lm.arpa")


@pytest.mark.parametrize("line", ["\n", "-1\t▁ ▁\t0\n", "a" * 9999])
def test_gzip_decompression_bomb_is_rejected(line, tokenizer, tmp_path):
    bomb = gzip.compress(
        (ARPA.replace("ngram 2=2", "ngram 2=29999999")[:-7] + line * (20_000_000 // len(line))).encode()
    )
    assert len(bomb) < 200_000
    assert "line " in rejection_message(bomb, tokenizer, tmp_path / "bomb.arpa.gz")


def test_missing_or_damaged_file_is_rejected(orders, tokenizer, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere.arpa", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(DataError, match="cannot be read"):
            read_language_model(path, tokenizer, CPU)
    write_arpa(tmp_path / "lm.arpa.gz", orders, tokenizer)
    packed = (tmp_path / "lm.arpa.gz").read_bytes()
    rejection_message(packed[: len(packed) // 2], tokenizer, tmp_path / "short.gz")
    rejection_message(packed[:-8] + b"\0" * 8, tokenizer, tmp_path / "checksum.gz")
    rejection_message(np.random.default_rng(0).bytes(100_000), tokenizer, tmp_path / "noise.arpa")


def _first(ngrams: Ngrams, count: int) -> Ngrams:
    return Ngrams(ngrams.tokens[:count], ngrams.log_probabilities[:count], ngrams.backoffs[:count])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fuzzed_arpa_file_gives_a_model_or_a_one_line_error(data, orders, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "lm.arpa"
    write_arpa(path, [_first(ngrams, 40) for ngrams in orders[:2]], tokenizer)
    content = bytearray(path.read_bytes())
    some = st.sampled_from(
        [b"", b"\n", b"\t", b"-", b"9", b"nan", b"\\end\\", b"\\data\\", "▁".encode(), b"\xff", b"1e999"]
    )
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 6))] = data.draw(st.one_of(some, st.binary(max_size=4)))
    assume(bytes(content) != path.read_bytes())
    path.write_bytes(gzip.compress(content) if data.draw(st.booleans()) else content)
    try:
        model = read_language_model(path, tokenizer, CPU)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert not model.score(state_after(model, (4, 5))).isnan().any()


def test_failed_write_leaves_no_file(orders, tokenizer, tmp_path):
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "taken", tmp_path / "nowhere" / "lm.arpa"):
        with pytest.raises(ResourceError, match="cannot be written"):
            write_arpa(path, orders, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


# The script


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    """Return a folder with a checkpoint without weights, and text in a file and in a manifest."""
    directory = tmp_path_factory.mktemp("script")
    config = replace(TrainConfig(), text=TextConfig(tokenizer_type="char", digits="spell"))
    checkpoint = Checkpoint(config_to_text(config), tokenizer.model, tokenizer.size, 0, 0, {})
    write_checkpoint(directory / "checkpoint_best.pt", checkpoint)
    sentences = [f"{one} {other}" for one in WORDS for other in WORDS]
    (directory / "text.txt").write_bytes(("\ufeff" + "\r\n\r\n".join([*sentences, "१ घर।", "..."])).encode())
    (directory / "few.txt").write_text("घर\nqwerty घर\n", encoding="utf-8")
    (directory / "blank.txt").write_text("\n...\n", encoding="utf-8")
    (directory / "latin.txt").write_bytes(b"caf\xe9\n")
    row = {"audio_filepath": "a.flac", "duration": 1.0, "text": "पांच घर"}
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n\n{}\n", encoding="utf-8")
    return directory


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the script in the folder, and check that it leaves no partial file."""
    done = run_script(SCRIPT, "--checkpoint", "checkpoint_best.pt", *flags, cwd=folder)
    assert "Traceback" not in done.stdout + done.stderr
    assert list(folder.glob("*.partial")) == []
    return done


def test_script_writes_model_and_reports_perplexity(folder, tokenizer):
    flags = ("--text", "text.txt", "--manifest", "rows.jsonl", "--order", "3", "--output", "lm.arpa")
    done = checked(train(folder, *flags, "--held_out", "few.txt"))
    model = read_language_model(folder / "lm.arpa", tokenizer, CPU)
    # Digits are spelt out as in the transcripts of the checkpoint.
    texts = [f"{one} {other}" for one in WORDS for other in WORDS] + ["एक घर", "पांच घर"]
    again = model_of(estimate_ngrams([tokenizer.encode(text) for text in texts], tokenizer.size, 3))
    written = model_of(read_arpa(folder / "lm.arpa", tokenizer))
    assert written.keys() == again.keys()
    assert not {gram: (written[gram], again[gram]) for gram in again if not is_close(written[gram], again[gram], 1e-10)}
    held_out = [tokenizer.encode(text) for text in ("घर", "qwerty घर")]
    total = sum(score_sentences(model, held_out))
    tokens = sum(map(len, held_out))
    read, sizes, measured = done.stdout.splitlines()
    assert read.startswith("read: 102 sentences, 204 words, ") and read.endswith(" tokens; 1 broken row skipped")
    assert sizes == f"lm.arpa: {', '.join(f'{len([g for g in again if len(g) == n]):,} {n}-grams' for n in (1, 2, 3))}"
    assert f"2 sentences, 3 words, {tokens} tokens, " in measured and "unknown to the tokenizer" in measured
    assert f"perplexity {math.exp(-total / (tokens + 2)):.4g} per token" in measured
    assert measured.endswith(f"{math.exp(-total / (3 + 2)):.4g} per word")


@pytest.mark.parametrize("flags, code, expected_message", [
    (("--output", "x.arpa"), 2, "give --text sentences.txt, --manifest"),
    (("--text", "text.txt", "--output", "x.arpa", "--order", "0"), 2, "--order must be between 1 and 16"),
    (("--text", "text.txt", "--output", "text.txt"), 2, "would overwrite an input file"),
    (("--text", "text.txt", "--output", "checkpoint_best.pt"), 2, "would overwrite an input file"),
    (("--text", "text.txt", "--output", "few.txt"), 2, "few.txt already exists. Choose another"),
    (("--text", "text.txt", "--output", "nowhere/x.arpa"), 6, "cannot be written"),
    (("--text", "nowhere.txt", "--output", "x.arpa"), 3, "nowhere.txt cannot be read: No such file"),
    (("--text", "/dev/zero", "--output", "x.arpa"), 3, "/dev/zero cannot be read: it is not a file"),
    (("--text", "latin.txt", "--output", "x.arpa"), 3, "latin.txt, line 1: not UTF-8"),
    (("--text", "blank.txt", "--output", "x.arpa"), 3, "No sentence found in blank.txt"),
    (("--text", "text.txt", "--output", "x.arpa", "--held_out", "blank.txt"), 3, "No sentence found in blank.txt"),
    (("--text", "text.txt", "--output", "x.arpa", "--checkpoint", "text.txt"), 4, "text.txt is damaged or not a"),
])  # fmt: skip
def test_script_reports_errors_in_one_sentence(folder, flags, code, expected_message, monkeypatch):
    """Call the function of the script in this process."""
    monkeypatch.chdir(folder)
    with pytest.raises(KonkaniVaniError) as caught:
        language_model.main(["--checkpoint", "checkpoint_best.pt", *flags])
    assert caught.value.exit_code == code
    assert expected_message in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder / "x.arpa").exists() and list(folder.glob("*.partial")) == []


def test_script_exits_with_the_code_of_the_error(folder):
    done = train(folder, "--text", "nowhere.txt", "--output", "x.arpa")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
