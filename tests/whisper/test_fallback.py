"""Good hypotheses are kept, repetitive and unlikely ones are sampled again, and silence gives an empty text.

Utterances are computed from the decoder weights: if all encoded frames are equal, attention returns the same vector
for every query, so frames can be solved for that lead the decoder into a given direction.
"""

import dataclasses
import itertools
import zlib

import pytest
import torch

from konkanivani.decoding.decode import BeamDecode
from konkanivani.inference import whisper_generation as generation
from konkanivani.inference.whisper_generation import FallbackDecode, compression_ratio, generate
from konkanivani.models.whisper.model import Whisper, WhisperShape
from konkanivani.models.whisper.vocabulary import PromptedVocabulary
from konkanivani.planning.tensors import LiveBytes
from tests.conftest import WORDS, mark_full
from tests.whisper.folders import FRAMES, reference, to_project_model, transformers
from tests.whisper.vocabularies import POSITIONS, kind_of, read_vocabulary, write_vocabulary

processors = pytest.importorskip("transformers.generation.logits_process")
whisper = pytest.importorskip("transformers.models.whisper.generation_whisper").WhisperGenerationMixin
LETTERS = 97, 98  # two letters
FAR = 600.0  # so large that the other blocks change the direction only slightly


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> PromptedVocabulary:
    return read_vocabulary(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


@pytest.fixture(scope="module")
def model(vocabulary: PromptedVocabulary) -> Whisper:
    """Return a random model that is confident and rarely predicts times."""
    result = to_project_model(reference(kind_of(vocabulary)), kind_of(vocabulary))
    with torch.no_grad():
        result.decoder.norm.weight.mul_(1.5)
        weight = result.decoder.embedding.weight
        weight[vocabulary.no_times :].mul_(0.1)
        weight[[vocabulary.special.end, *LETTERS]] *= 3.0 / weight[[vocabulary.special.end, *LETTERS]].norm(
            dim=1, keepdim=True
        )
    return result


@torch.no_grad()
def frames(model: Whisper, direction: torch.Tensor) -> torch.Tensor:
    """Return equal encoded frames (T', D) that lead the decoder into a direction (D,)."""
    attentions = [block.cross_attention for block in model.decoder.blocks]
    gain = sum(attention.output.weight @ attention.value.weight for attention in attentions)
    added = sum(attention.output(attention.value.bias) for attention in attentions)
    return torch.linalg.solve(gain.double(), (FAR * direction - added).double()).float().expand(FRAMES, -1)


@pytest.fixture(scope="module")
def utterances(model: Whisper, vocabulary: PromptedVocabulary) -> dict[str, torch.Tensor]:
    """Return encoded frames (T', D) of good utterances, loops, barely audible speech and silence."""
    weight = model.decoder.embedding.weight.detach()
    units = weight / weight.norm(dim=1, keepdim=True)
    end, one, other = (units[token] for token in (vocabulary.special.end, *LETTERS))
    drawn = torch.randn(300, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        flattest = drawn[model.decoder.output(model.decoder.norm(FAR * drawn)).softmax(dim=1).amax(dim=1).argmin()]
    flat = flattest / flattest.norm()
    directions = {
        "good": end + 0.96 * one,
        "other": end + 0.96 * other,
        "unsure": end + 0.8 * one,  # likely only because the rules exclude an early end
        "loop": other + 0.9 * one,
        "sure loop": other,
        "guess": flat,
        "silence": units[vocabulary.no_speech],
    }
    return {name: frames(model, direction) for name, direction in directions.items()}


def build_fallback(vocabulary: PromptedVocabulary, beam: int = 1, **changes) -> FallbackDecode:
    return FallbackDecode(
        BeamDecode(beam, 0.0, 0.0, None, 0.0, vocabulary.special, vocabulary.rules), vocabulary, **changes
    )


def with_token_limit(decode: FallbackDecode, most: int) -> FallbackDecode:
    rules = dataclasses.replace(decode.inner.rules, most_tokens=most)
    return dataclasses.replace(decode, inner=dataclasses.replace(decode.inner, rules=rules))


def decode_frames(decode, model: Whisper, *utterances: torch.Tensor) -> list[list[int]]:
    return decode(model, torch.stack(utterances), (FRAMES,) * len(utterances))


class DecoderStarts:
    """Record of the number of utterances at each start of the decoder."""

    def __init__(self, model: Whisper, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes, begin = [], model.decoder.begin
        monkeypatch.setattr(model.decoder, "begin", lambda *given: self.sizes.append(len(given[0])) or begin(*given))


@pytest.mark.parametrize("beam", [1, 3])
def test_good_hypotheses_are_kept_without_sampling_again(model, vocabulary, utterances, beam, monkeypatch):
    decode, starts = build_fallback(vocabulary, beam), DecoderStarts(model, monkeypatch)
    good = utterances["good"], utterances["other"], utterances["good"]
    first = decode_frames(decode.inner, model, *good)
    assert decode_frames(decode, model, *good) == first and starts.sizes == [3, 3]
    assert decode_frames(decode, model, utterances["unsure"]) == decode_frames(
        decode.inner, model, utterances["unsure"]
    )
    assert starts.sizes[2:] == [1, 1, 1, 1]  # its tokens are scored again, and it is checked for silence
    strict = dataclasses.replace(decode, min_log_probability=0.1)  # negative control: every hypothesis is rejected
    assert decode_frames(strict, model, *good) and starts.sizes[6:] == [3] * (3 + len(decode.temperatures))


@pytest.mark.parametrize("beam", [3, *mark_full(1)])
def test_only_repetitive_hypotheses_are_sampled_again(model, vocabulary, utterances, beam, monkeypatch):
    decode, given = build_fallback(vocabulary, beam), [utterances[name] for name in ("good", "loop", "other", "good")]
    first = decode_frames(decode.inner, model, *given)
    assert compression_ratio(vocabulary.decode(first[1]).encode()) > 2.4
    starts = DecoderStarts(model, monkeypatch)
    result = decode_frames(decode, model, *given)
    assert [one == other for one, other in zip(result, first, strict=True)] == [True, False, True, True]
    assert starts.sizes[0] == 4 and set(starts.sizes[1:]) == {1} and 3 <= len(starts.sizes[1:]) <= 7
    assert decode_frames(dataclasses.replace(decode, seed=1), model, *given)[1] != result[1]
    lenient = dataclasses.replace(decode, max_compression=100.0, min_log_probability=-100.0)  # negative control
    assert decode_frames(lenient, model, *given) == first


def test_first_good_sample_is_taken_or_else_the_last(model, vocabulary, utterances, monkeypatch):
    # Sampled hypotheses are compared, so final loops must not be cut (test_trailing_silence.py).
    monkeypatch.setattr(generation, "without_final_loop", lambda tokens, vocabulary: tokens)
    decode, loop = build_fallback(vocabulary, temperatures=(0.2, 0.6, 1.0)), utterances["loop"]
    tried = [
        decode_frames(dataclasses.replace(decode, temperatures=(temperature,), max_compression=0.0), model, loop)[0]
        for temperature in decode.temperatures
    ]
    ratios = [compression_ratio(vocabulary.decode(tokens).encode()) for tokens in tried]
    assert len(set(map(tuple, tried))) > 2 and ratios[0] > ratios[-1]
    for wanted in range(len(tried)):
        lowest = min(ratios[: wanted + 1])
        if ratios[wanted] == lowest and ratios.index(lowest) == wanted:
            chosen = dataclasses.replace(decode, max_compression=lowest, min_log_probability=-100.0)
            assert decode_frames(chosen, model, loop) == [tried[wanted]]
    assert decode_frames(dataclasses.replace(decode, max_compression=0.0), model, loop) == [tried[-1]]
    assert decode_frames(
        dataclasses.replace(decode, max_compression=0.0, temperatures=()), model, loop
    ) == decode_frames(decode.inner, model, loop)


@pytest.mark.parametrize("beam", [3, *mark_full(1)])
def test_fallback_does_not_depend_on_the_batch(model, vocabulary, utterances, beam):
    decode = build_fallback(vocabulary, beam, temperatures=(0.4, 1.0))
    alone = {name: decode_frames(decode, model, frames)[0] for name, frames in utterances.items()}
    # "unsure" gives the tokens of "good"; the loop of "sure loop" is cut down to the token of "other".
    assert alone["silence"] == [] and len(set(map(tuple, alone.values()))) == len(alone) - 2
    for order in (list(alone)[::-1], ["loop", "good", "loop"], ["guess", "sure loop", "loop"]):
        result = decode_frames(decode, model, *(utterances[name] for name in order))
        assert result == [alone[name] for name in order]
    other = decode_frames(dataclasses.replace(decode, seed=1), model, utterances["loop"])
    assert other != [alone["loop"]]  # negative control


def test_silence_gives_no_tokens(model, vocabulary, utterances, monkeypatch):
    decode, silence = build_fallback(vocabulary), utterances["silence"]
    first = decode_frames(decode.inner, model, silence, utterances["good"])
    assert first[0] and decode_frames(decode, model, silence, utterances["good"]) == [[], first[1]]
    for change in ({"max_no_speech": 1.0}, {"min_log_probability": -100.0}):  # both conditions are required
        assert decode_frames(dataclasses.replace(decode, **change), model, silence)[0]
    monkeypatch.setattr(vocabulary, "no_speech", None)
    assert decode_frames(decode, model, silence)[0]


def test_nan_utterance_gives_no_tokens_and_affects_no_other(model, vocabulary, utterances):
    decode, broken = build_fallback(vocabulary), torch.full_like(utterances["good"], torch.nan)
    names = ("good", "loop")
    alone = [decode_frames(decode, model, utterances[name])[0] for name in names]
    assert decode_frames(decode, model, broken, *(utterances[name] for name in names)) == [[], *alone]


def test_compression_ratio_equals_transformers(vocabulary):
    """transformers compresses ids, OpenAI's code and this project the text, with the same function."""
    generator = torch.Generator().manual_seed(0)
    for size, tokens in itertools.product(
        (300, 70_000), (torch.randint(200, (n,), generator=generator) for n in (1, 9, 300))
    ):
        width = 2 if size == 300 else 3
        data = b"".join(token.to_bytes(width, "little") for token in tokens.tolist())
        assert compression_ratio(data) == pytest.approx(whisper._retrieve_compression_ratio(tokens, size), abs=1e-5)
    loop, text = "एक दोन " * 20, " ".join(WORDS)
    assert compression_ratio(loop.encode()) > 2.4 > compression_ratio(text.encode())
    assert compression_ratio(loop.encode()) == len(loop.encode()) / len(zlib.compress(loop.encode()))


def transformers_greedy(model: torch.nn.Module, encoded: torch.Tensor, vocabulary: PromptedVocabulary):
    """Return tokens (B, U) with the end, and scores (B, U, V), from transformers' greedy search with the same rules."""
    rules, end = vocabulary.rules, vocabulary.special.end
    start = torch.tensor([[vocabulary.special.start, *rules.prompt]] * len(encoded))
    begin = start.shape[1]
    steps = [
        processors.SuppressTokensAtBeginLogitsProcessor(rules.suppressed_first, begin),
        processors.SuppressTokensLogitsProcessor(rules.suppressed),
    ]
    settings = transformers.GenerationConfig(
        max_new_tokens=rules.most_tokens, do_sample=False, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        no_timestamps_token_id=vocabulary.no_times, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    if rules.times:
        settings.max_initial_timestamp_index = rules.times.latest_first
        steps.append(processors.WhisperTimeStampLogitsProcessor(settings, begin_index=begin))
    hidden = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=encoded)
    given = {"decoder_input_ids": start, "encoder_outputs": hidden, "generation_config": settings}
    result = transformers.GenerationMixin.generate(model, logits_processor=steps, **given)
    return result.sequences[:, begin:], torch.stack(result.scores, dim=1)


@pytest.mark.parametrize("with_times", [False, True])
def test_mean_log_probability_equals_transformers(vocabulary, with_times):
    vocabulary = vocabulary.saying_times() if with_times else vocabulary
    end, compared = vocabulary.special.end, 0
    for seed in range(4):
        theirs = reference(kind_of(vocabulary), seed)
        with torch.no_grad():
            theirs.model.decoder.embed_tokens.weight[end] *= 2.5  # makes some hypotheses end
        ours = to_project_model(theirs, kind_of(vocabulary))
        encoded = torch.randn(3, FRAMES, 32, generator=torch.Generator().manual_seed(seed))
        tokens, scores = transformers_greedy(theirs, encoded, vocabulary)
        search = build_fallback(vocabulary).inner
        with torch.no_grad():
            scorer = search.attention(ours, encoded, (FRAMES,) * 3, 1)
            limits = dict(enumerate(search.limits(ours, (FRAMES,) * 3)))
            actual = generate(scorer, lambda _step, _rows, likely: likely.argmax(dim=1), limits, end)
        for row in range(3):
            length = len(actual[row].tokens)
            is_ended, ids = length < limits[row], tokens[row, : length + 1]
            assert ids.tolist()[:length] == actual[row].tokens
            for temperature in (1.0, 0.4):  # transformers divides the scores by the temperature
                of_row = list(scores[row] / temperature)
                expected = whisper._retrieve_avg_logprobs(of_row[: len(ids)], ids, temperature).item()
                # Without an end, transformers averages over one token less; OpenAI's code and this project count
                # the end.
                expected *= 1 if is_ended else length / (length + 1)
                assert actual[row].mean_log_probability == pytest.approx(expected, abs=1e-5)
            compared += is_ended
            plain = search.search(ours, encoded[row : row + 1], (FRAMES,), best=1)[0][0]
            # Negative control: suppressed tokens change the normalisation.
            assert plain.log_probability / (length + 1) < actual[row].mean_log_probability - 1e-3
    assert compared > 3


def test_tokens_are_sampled_from_softmax_at_temperature(model, vocabulary, utterances):
    loop, draws, inner = utterances["loop"], 300, build_fallback(vocabulary).inner
    with torch.no_grad():
        scores = inner.attention(model, loop[None], (FRAMES,), 1).score()[0, 0]
    for temperature, others in ((0.6, 1.5), (1.0, 0.4)):
        decode = build_fallback(vocabulary, temperatures=(temperature,), max_compression=-1.0)
        seeds = [dataclasses.replace(with_token_limit(decode, 1), seed=seed) for seed in range(draws)]
        results = [int(one._sampler(temperature)(0, [0], scores.log_softmax(0)[None])) for one in seeds]
        for one, first in zip(seeds[:5], results, strict=False):
            assert decode_frames(one, model, loop)[0] == [first] * (first != vocabulary.special.end)
        counts = torch.bincount(torch.tensor(results), minlength=len(scores))
        likely = (scores / temperature).softmax(dim=0)
        deviation = (likely * (1 - likely) / draws).sqrt()
        common = likely > 0.02
        assert common.sum() >= 2
        assert ((counts / draws - likely).abs() < 4 * deviation + 1e-3)[common].all()
        unlike = (scores / others).softmax(dim=0)  # negative control
        assert not ((counts / draws - unlike).abs() < 4 * deviation + 1e-3)[common].all()


def test_fallback_does_not_increase_peak_memory(vocabulary):
    shape = WhisperShape(64, 2, 1, 4, 256, 80, vocabulary.size, 400, POSITIONS)
    torch.manual_seed(0)
    model, encoded = Whisper(shape).eval(), torch.randn(3, shape.source_positions, 64)
    decode = with_token_limit(build_fallback(vocabulary, temperatures=(0.2, 1.0)), 6)

    def peak(decode, rows: int = 3) -> int:
        with LiveBytes() as live:
            live.count([encoded, *model.parameters()])
            decode(model, encoded[:rows], (shape.source_positions,) * rows)
        return live.peak

    results = [
        hypotheses[0] for hypotheses in decode.inner.search(model, encoded, (shape.source_positions,) * 3, best=1)
    ]
    likely = sorted(hypothesis.log_probability / (len(hypothesis.tokens) + 1) for hypothesis in results)
    most = peak(decode.inner)
    for bad in range(1, 4):
        threshold = sum(likely[bad - 1 : bad + 1]) / 2 if bad < 3 else 0.0
        assert peak(dataclasses.replace(decode, min_log_probability=threshold)) <= most
    assert peak(decode.inner, 2) < 0.9 * most  # negative control
