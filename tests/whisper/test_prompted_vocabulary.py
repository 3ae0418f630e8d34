"""Labels, prompts and suppressed tokens equal those of transformers' tokenizer, whatever the ids of special tokens."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from konkanivani.data.batching import Example, check_tokens, collate
from konkanivani.data.filtering import Limits, reason_to_reject
from konkanivani.data.index import Utterance
from konkanivani.data.text import TimeRules
from konkanivani.errors import DataError, UsageError
from konkanivani.models.whisper.byte_pairs import BytePairs, read_byte_pairs
from konkanivani.models.whisper.vocabulary import (
    ModelTokens,
    Prompt,
    PromptedVocabulary,
    is_english_only,
    vocabulary_of,
)
from tests.conftest import WORDS
from tests.whisper.byte_vocabularies import (
    RANKS,
    added_token_ids,
    real_vocabulary,
    train_vocabulary,
    write_vocabulary_files,
)

transformers = pytest.importorskip("transformers")
whisper = pytest.importorskip("transformers.models.whisper.tokenization_whisper")
configuration = pytest.importorskip("transformers.models.whisper.configuration_whisper")

LANGUAGES = tuple(whisper.LANGUAGES)
KINDS = {"99": LANGUAGES[:-1], "100": LANGUAGES}  # 100 as in large-v3: the ids after the languages are one higher
TEXT = f"{WORDS[0]} {WORDS[4]}, {WORDS[5]}!"


def write_small_vocabulary(folder: Path, languages: tuple[str, ...]) -> Path:
    return write_vocabulary_files(
        folder, *(result := train_vocabulary(" ".join(WORDS), 300)), added_token_ids(result[0], languages)
    )


@pytest.fixture(scope="module", params=["99", "100", "real", "saved"])
def folder(request, tmp_path_factory) -> Path:
    """Write a small vocabulary of 99 or 100 languages, the real one, or one saved by transformers."""
    place = tmp_path_factory.mktemp(request.param) / "files"
    if request.param == "real":
        if not RANKS.exists():
            pytest.skip(f"{RANKS} is missing: only small vocabularies are tested.")
        result = real_vocabulary()
        return write_vocabulary_files(place, *result, added_token_ids(result[0], KINDS["99"]))
    if request.param == "saved":
        hf_tokenizer = transformers.WhisperTokenizer.from_pretrained(
            str(write_small_vocabulary(place.with_name("apart"), KINDS["99"]))
        )
        hf_tokenizer.save_pretrained(place)
        assert not (place / "vocab.json").exists()
        return place
    return write_small_vocabulary(place, KINDS[request.param])


@pytest.fixture(scope="module")
def pairs(folder) -> BytePairs:
    return read_byte_pairs(folder)


@pytest.fixture(scope="module")
def hf_tokenizer(folder):
    return transformers.WhisperTokenizer.from_pretrained(str(folder))


def prompted_vocabulary(of: Path | BytePairs, language: str | None = "mr", task: str | None = "transcribe", **changes):
    """Return the vocabulary of a folder, or of byte pairs that were read before, with this prompt."""
    pairs = read_byte_pairs(of) if isinstance(of, Path) else of
    tokens = ModelTokens(
        changes.get("size", pairs.size), 448, changes.get("en", False), changes.get("generation_config", {})
    )
    return PromptedVocabulary(pairs, Prompt(language, task), tokens)


@pytest.mark.parametrize("language, task", [("mr", "transcribe"), ("hi", "translate"), ("en", "transcribe")])
def test_labels_and_prompts_equal_transformers(pairs, hf_tokenizer, language, task):
    hf_tokenizer.set_prefix_tokens(language=language, task=task, predict_timestamps=False)
    ours = prompted_vocabulary(pairs, language, task)
    assert [ours.special.start, *ours.prefix] == hf_tokenizer.prefix_tokens
    assert [ours.special.start, *ours.encode(TEXT), ours.special.end] == hf_tokenizer(TEXT)["input_ids"]
    assert (ours.special.end, ours.size) == (hf_tokenizer.eos_token_id, len(hf_tokenizer))
    # `bos_token_id` equals the end token; a transcript starts with the start token.
    assert hf_tokenizer.bos_token_id == ours.special.end != ours.special.start
    hf_tokenizer.set_prefix_tokens(predict_timestamps=True)
    assert [ours.special.start, *ours.prefix_with_times] == hf_tokenizer.prefix_tokens
    text = hf_tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    begin, end = hf_tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|3.42|>"])
    assert ours.encode_with_times(TEXT, 0.0, 3.42) == [*hf_tokenizer.prefix_tokens[1:], begin, *text, end]


def test_batch_has_prompt_in_decoder_inputs_and_targets(pairs):
    ours = prompted_vocabulary(pairs)
    transcript = pairs.decode([0]) + TEXT
    speech = Example("u", torch.zeros(10), ours.encode(transcript), None)
    check_tokens(speech, ours.size, ours.special)
    batch = collate([speech], ours.special)
    text = pairs.encode(transcript)
    assert text[0] == 0  # the blank of other vocabularies has this id
    assert batch.decoder_tokens[0].tolist() == [ours.special.start, *ours.prefix, *text]
    assert batch.targets[0].tolist() == [*ours.prefix, *text, ours.special.end]
    assert batch.decoder_tokens[0].tolist().count(ours.special.start) == 1


def test_decoding_omits_prompt_and_timestamps(pairs, hf_tokenizer):
    ours = prompted_vocabulary(pairs)
    tokens = [
        ours.special.start,
        *ours.encode_with_times(f" {TEXT}", 1.0, None),
        ours.time_token(30.0),
        ours.special.end,
    ]
    text = tokens[len(ours.prefix_with_times) + 2 : -2]
    assert ours.decode(tokens) == TEXT == hf_tokenizer.decode(text).strip() and text == pairs.encode(f" {TEXT}")
    assert [ours.seconds_of(token) for token in tokens[3:4] + tokens[-2:]] == [1.0, 30.0, None]
    assert ours.time_token(99.0) == ours.time_token(30.0) == ours.size - 1


def test_stored_vocabulary_is_restored_equal(pairs):
    ours = prompted_vocabulary(pairs, "hi", "translate")
    for other in (vocabulary_of(ours.model), copy.copy(ours)):
        assert (other.model, other.prefix, other.special) == (ours.model, ours.prefix, ours.special)
        assert other.encode(TEXT) == ours.encode(TEXT)
    assert prompted_vocabulary(pairs, "mr").model != ours.model  # cached label counts have it as key


def test_unknown_language_is_rejected_with_available_ones(tmp_path):
    folder = write_small_vocabulary(tmp_path / "files", ("en", "hi", "mr"))
    refused = {
        "kok": "no token for it.*new one for Konkani.* Use the closest language, mr or hi; available: en, hi, mr.",
        "xx": "the model has no token for it. Use one of en, hi, mr.",
        "Marathi": "the model has no token for it. Use one of en, hi, mr.",
        None: "--language with one of en, hi, mr",
    }
    for language, message in refused.items():
        with pytest.raises(UsageError, match=message):
            prompted_vocabulary(folder, language)
    with pytest.raises(UsageError, match="--task sing is unknown: use transcribe or translate"):
        prompted_vocabulary(folder, "mr", "sing")


def test_english_only_model_rejects_language_and_task(tmp_path):
    folder = write_small_vocabulary(tmp_path / "files", LANGUAGES[:-1])
    ours = prompted_vocabulary(folder, None, None, en=True)
    hf_tokenizer = transformers.WhisperTokenizer.from_pretrained(str(folder))
    assert [ours.special.start, *ours.prefix] == hf_tokenizer.prefix_tokens and ours.languages == ()
    assert ours.encode(TEXT) == hf_tokenizer(TEXT)["input_ids"][1:-1]
    for language, task, flag in (("en", None, "--language"), (None, "translate", "--task translate")):
        with pytest.raises(UsageError, match=f"{flag} is not supported by an English-only model"):
            prompted_vocabulary(folder, language, task, en=True)
    pairs = read_byte_pairs(folder)
    assert is_english_only(pairs, 51_864, {}) and not is_english_only(pairs, 51_865, {})
    assert is_english_only(pairs, 51_865, {"is_multilingual": False})


def test_vocabulary_files_may_omit_only_timestamp_tokens(tmp_path):
    folder = write_vocabulary_files(tmp_path / "files", *(result := train_vocabulary(TEXT, 280)), {})
    with pytest.raises(DataError, match=r"has no token <\|startoftranscript\|>"):
        prompted_vocabulary(folder)
    named = {name: token for name, token in added_token_ids(result[0], ("mr",)).items() if "." not in name}
    write_vocabulary_files(folder, *result, named)
    # The files have no time tokens; the model of the first vocabulary has them.
    older, plain = (prompted_vocabulary(folder, size=len(result[0]) + len(named) + 1501), prompted_vocabulary(folder))
    assert older.seconds_of(older.size - 1) == 30.0 and older.piece(older.size - 1) == f"<|{older.size - 1}|>"
    assert older.decode([*older.encode(TEXT), older.size - 1]) == TEXT
    with pytest.raises(UsageError, match="no timestamp tokens"):
        plain.encode_with_times(TEXT, 0.0, 1.0)
    with pytest.raises(DataError, match="tokens, but its model has 100"):
        prompted_vocabulary(folder, size=100)


@pytest.mark.parametrize("kept", [b"", b"{}", b"[1]\n{}", b'{"language": 5, "task": null, "size": 9}\n{}', b"\xff\n"])
def test_invalid_stored_vocabulary_is_rejected_with_one_sentence(kept):
    with pytest.raises(DataError, match="tokenizer") as refused:
        vocabulary_of(kept)
    assert "\n" not in str(refused.value)


def test_generation_rules_come_from_files_or_vocabulary(folder, pairs):
    settings = {"suppress_tokens": [1, 2], "begin_suppress_tokens": [7], "max_initial_timestamp_index": 3}
    ours = prompted_vocabulary(pairs, generation_config=settings | {"return_timestamps": False})
    rules = vocabulary_of(ours.saying_times().model).rules
    assert (rules.suppressed, rules.suppressed_first, rules.most_tokens) == ((1, 2), (7,), 445)
    assert rules.times == TimeRules(ours.no_times, ours.first_time, 3) and rules.prompt == ours.prefix_with_times
    made = prompted_vocabulary(pairs).rules
    assert (made.most_tokens, ours.rules.times) == (444, None)
    assert made.times is None and made.prompt == ours.prefix
    assert made.suppressed_first == (*pairs.encode(" "), ours.special.end)
    assert {ours.special.start, ours.no_speech} <= set(made.suppressed)
    assert not {ours.special.end, ours.no_times} & set(made.suppressed)
    if folder.parent.name.startswith("real"):
        tasks = {pairs.names[f"<|{task}|>"] for task in ("transcribe", "translate")}
        assert set(made.suppressed) == tasks | set(configuration.NON_SPEECH_TOKENS_MULTI)
        assert made.suppressed_first == (220, 50257)
    default = prompted_vocabulary(pairs, generation_config={"suppress_tokens": [-1], "begin_suppress_tokens": [-1]})
    assert (default.rules.suppressed, default.rules.suppressed_first) == (made.suppressed, made.suppressed_first)
    for wrong in ([ours.size], [-2], [-1, 5], ["a"], 5, [True]):
        with pytest.raises(DataError, match="suppress_tokens is not a list of the model's tokens"):
            prompted_vocabulary(pairs, generation_config={"suppress_tokens": wrong})
    with pytest.raises(DataError, match="max_initial_timestamp_index"):
        prompted_vocabulary(pairs, generation_config={"max_initial_timestamp_index": "50"})


def test_labels_beyond_decoder_positions_are_rejected_with_reason(pairs):
    ours, limits = prompted_vocabulary(pairs), Limits(0.1, 40.0, 10**9, 1.0, is_aligned=False).within(30.0, 447, 0.9)
    utterance = Utterance("u.wav", "u.wav", 5.0, "!")
    longest = ours.encode("") + [0] * ours.rules.most_tokens
    assert len(collate([Example("u", torch.zeros(5), longest, None)], ours.special).decoder_tokens[0]) == 448
    assert reason_to_reject(utterance, longest, limits) is None
    assert reason_to_reject(utterance, [*longest, 0], limits) == "448 tokens are more than the decoder's 447"
    assert reason_to_reject(dataclasses.replace(utterance, duration=28.0), longest, limits) == (
        "28.00 s is longer than the model's window at speed 0.9, 27 s"
    )
    assert Limits(0.1, 20.0, 400, 1.0).within(30.0, 447) == Limits(0.1, 20.0, 400, 1.0)
