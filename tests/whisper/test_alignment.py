"""Word times from attention: weights and path equal transformers', the path is the cheapest, words get their times."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from konkanivani.config import PretrainedConfig
from konkanivani.errors import DataError
from konkanivani.inference.recognizer import with_word_times
from konkanivani.inference.speech_model import build_pretrained_model, read_pretrained
from konkanivani.inference.word_times import alignment_weights, attended_words, attention_spans, first_frames
from konkanivani.models.conformer import keep_activations
from konkanivani.models.whisper.folder import read_whisper_folder
from konkanivani.models.whisper.vocabulary import vocabulary_of
from tests.whisper.folders import read_reference
from tests.whisper.small_model import write_model

generation = pytest.importorskip(
    "transformers.models.whisper.generation_whisper",
    reason="transformers, with which word times are compared, is not installed: pip install -e .[test]",
)


def path_cost(costs: np.ndarray, first: list[int]) -> float:
    """Return the cost of the path through all columns that enters each row at column `first[row]`."""
    rows, columns = costs.shape
    ends = [*first[1:], columns]
    total = 0.0
    for row, (begin, end) in enumerate(zip(first, ends, strict=True)):
        total += costs[row, begin : max(end, begin + 1)].sum()
    return total


@pytest.mark.parametrize(
    ("rows", "columns", "seed"), [(3, 7, 0), (5, 5, 1), (1, 4, 2), (4, 2, 3), (9, 60, 4), (2, 1, 5)]
)
def test_alignment_path_equals_transformers(rows, columns, seed):
    costs = np.random.default_rng(seed).standard_normal((rows, columns))
    texts, times = generation._dynamic_time_warping(costs)
    begins = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
    assert first_frames(costs) == list(times[begins])


def test_alignment_path_has_minimal_cost():
    costs = np.random.default_rng(0).standard_normal((4, 9))
    paths = [(0, *rest) for rest in itertools.combinations(range(1, 9), 3)]
    assert path_cost(costs, first_frames(costs)) <= min(path_cost(costs, list(path)) for path in paths) + 1e-12


@pytest.mark.parametrize("frames", [2, 3, 9, 40])
def test_alignment_weights_equal_transformers(frames):
    seen = torch.rand(3, 2, 5, frames, dtype=torch.float64).softmax(dim=-1)
    chosen = torch.stack([seen[1, 0], seen[2, 1]])
    deviation, mean = torch.std_mean(chosen, dim=-2, keepdim=True, unbiased=False)
    expected = generation._median_filter((chosen - mean)[None] / deviation, 7)[0].mean(dim=0)
    assert torch.equal(alignment_weights(seen, ((1, 0), (2, 1))), expected)
    upper = tuple(itertools.product((1, 2), (0, 1)))
    assert torch.equal(alignment_weights(seen, ()), alignment_weights(seen, upper))


def test_cross_attention_equals_transformers(whisper_folders):
    folder = read_whisper_folder(whisper_folders["tiny"])
    theirs = read_reference(folder.path).double().eval()
    theirs.set_attn_implementation("eager")
    ours = folder.architecture.build().double().eval()
    ours.load_state_dict(folder.weights())
    features = torch.randn(1, folder.shape.window_frames, folder.shape.mel_bins, dtype=torch.float64)
    tokens = torch.randint(0, folder.shape.vocab_size, (1, 9))
    with torch.no_grad():
        result = theirs(
            input_features=features.transpose(1, 2), decoder_input_ids=tokens, output_attentions=True, use_cache=False
        )
        encoded, _ = ours.encoder(features, (folder.shape.window_frames,), keep_activations)
        decoded, scores = ours.decoder.with_scores(tokens, encoded)
        plain = ours.decoder(ours.decoder.embedding(tokens), encoded, keep_activations)
    assert torch.allclose(scores.softmax(dim=-1), torch.stack(result.cross_attentions), rtol=0, atol=1e-12)
    assert torch.allclose(ours.decoder.output(decoded), result.logits, rtol=0, atol=1e-10)
    assert torch.allclose(decoded, plain, rtol=0, atol=1e-12)


class ScriptedAttention(torch.nn.Module):
    """Decoder whose last tokens attend to given frames, and whose labels are all equally likely."""

    def __init__(self, frames: list[int], count: int, size: int) -> None:
        super().__init__()
        self.frames, self.count, self.size = frames, count, size

    def with_scores(self, tokens: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = tokens.shape[1]
        scores = torch.zeros(1, 1, 1, rows, len(encoded[0]))
        for row, frame in zip(range(rows - len(self.frames), rows), self.frames, strict=True):
            scores[..., row, frame : frame + 8] = 9.0
        return torch.zeros(1, rows, 1), scores

    def output(self, decoded: torch.Tensor) -> torch.Tensor:
        return decoded.expand(-1, self.size)


def test_word_times_follow_attention(tmp_path):
    pretrained = read_pretrained(write_model(tmp_path / "small"))
    vocabulary = pretrained.vocabulary(PretrainedConfig(language="en"))
    text = "paqi tara"
    tokens = vocabulary.encode(text)[len(vocabulary.prefix) :]
    space = next(place for place, token in enumerate(tokens) if place and vocabulary.begins_word(token))
    attended = [5 + 8 * place for place in range(len(tokens) + 1)]
    decoder = ScriptedAttention(attended, len(tokens), vocabulary.size)
    framing = pretrained.architecture(None, PretrainedConfig()).framing
    words = attended_words(decoder, torch.zeros(150, 16), tokens, vocabulary, framing)
    assert [word.text for word in words] == text.split()
    assert words[0].start == 0.0 and words[0].end == words[1].start
    assert words[1].start == pytest.approx(0.02 * attended[space], abs=0.05)
    assert words[1].end == pytest.approx(0.02 * attended[-1], abs=0.05)
    assert all(word.confidence == pytest.approx(1 / vocabulary.size) for word in words)
    timed_tokens = [vocabulary.time_token(0.5), *tokens, vocabulary.time_token(1.0)]
    bounded = attended_words(decoder, torch.zeros(150, 16), timed_tokens, vocabulary, framing)
    assert [word.text for word in bounded] == text.split()
    assert all(0.5 <= word.start <= word.end <= 1.0 for word in bounded)
    assert attended_words(decoder, torch.zeros(150, 16), [], vocabulary, framing) == []
    assert attention_spans(decoder, torch.zeros(150, 16), tokens, vocabulary)[-1][1] <= 150


def test_alignment_heads_are_stored_and_must_be_pairs(tmp_path):
    folder = write_model(tmp_path / "small")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"alignment_heads": [[0, 1], [0, 0]]}))
    vocabulary = read_pretrained(folder).vocabulary(PretrainedConfig(language="mr"))
    assert vocabulary_of(vocabulary.model).alignment_heads == vocabulary.alignment_heads == ((0, 1), (0, 0))
    tampered = vocabulary_of(vocabulary.model.replace(b"[[0, 1]", b'[[0, "1"]'))
    with pytest.raises(DataError, match="alignment_heads are not pairs"):
        _ = tampered.alignment_heads


def test_timestamps_are_enabled_only_for_models_trained_with_them(tmp_path):
    folder = read_pretrained(write_model(tmp_path / "small"))
    result = build_pretrained_model(folder, PretrainedConfig(language="mr"), torch.device("cpu"))
    assert result.tokenizer.has_times and with_word_times(result) is result
    assert with_word_times(replace(result, knows_times=True)).tokenizer.rules.times is not None  # negative control
