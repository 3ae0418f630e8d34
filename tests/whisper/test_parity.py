"""Features, logits, losses, gradients and greedy ids of random Whisper models equal those from transformers."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from konkanivani.config import AugmentConfig, LossConfig
from konkanivani.decoding.decode import BeamDecode
from konkanivani.lengths import CHUNK_FRAMES, SMALL_CHUNK_FRAMES
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.asr import LossCounts
from konkanivani.models.conformer import WrapBlock, keep_activations
from konkanivani.models.whisper import model as blocks
from konkanivani.models.whisper.architecture import WhisperArchitecture, WhisperFrontEnd
from konkanivani.models.whisper.folder import name_in_file, read_whisper_folder
from konkanivani.models.whisper.model import Whisper, WhisperShape, sinusoids
from tests.conftest import parameter_grid
from tests.invariants.parts import max_relative_difference
from tests.whisper.folders import (
    KINDS,
    Kind,
    labels_of,
    random_batch,
    random_features,
    read_reference,
    reference,
    to_project_model,
    transformers,
)

LENGTHS = (9, 3, 1)


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of the trained parameters by name."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def our_loss(model: Whisper, features: torch.Tensor, kind: Kind, runner: WrapBlock, chunk: int) -> torch.Tensor:
    batch = random_batch(kind, *LENGTHS)
    objective = WhisperArchitecture(model.shape).objective(LossConfig(label_smoothing=0.0))
    output = model(features, (features.shape[1],) * len(LENGTHS), batch.decoder_tokens, runner, chunk)
    sums = model.loss_sums(output, batch, objective, chunk)
    return objective.total(sums, LossCounts(sum(LENGTHS), len(LENGTHS)))


def transformers_features(waveform: torch.Tensor, mel_bins: int, seconds: int) -> torch.Tensor:
    """Return features (T, F) from transformers."""
    extract = transformers.WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=seconds)
    result = extract(waveform.numpy(), sampling_rate=16_000)["input_features"]
    return torch.from_numpy(np.array(result))[0].T


@pytest.mark.parametrize(
    ("mel_bins", "seconds", "loudness"), parameter_grid((80, 128), (1, 30), (1.0, 1e-3, 1e-7, 0.0))
)
def test_features_equal_transformers(mel_bins, seconds, loudness):
    shape = WhisperShape(8, 1, 1, 1, 8, mel_bins, 10, 50 * seconds)
    front_end, generator = WhisperFrontEnd(shape, AugmentConfig()), torch.Generator().manual_seed(0)
    window = 16_000 * seconds
    lengths = (1, 399, 5_001, window - 161, window - 1, window)
    waves = [loudness * torch.randn(n, generator=generator) * torch.linspace(0, 9, n).sin() for n in lengths]
    expected = torch.stack([transformers_features(wave, mel_bins, seconds) for wave in waves])
    # The padding value must not matter.
    padded = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True, padding_value=0.3)
    together, frames = front_end(padded, lengths, None)
    assert frames == (100 * seconds,) * 6 and float((together - expected).abs().max()) <= 2e-5
    for wave, row in zip(waves[:3], together, strict=False):
        alone, _ = front_end(wave[None], (len(wave),), None)
        assert float((alone[0] - row).abs().max()) <= 1e-6
        silence = row[-(-(len(wave) + 200) // 160) :]
        unpadded, floor = front_end.log_mel(wave[None], (len(wave),))
        assert unpadded.shape[2] <= 3 + len(wave) / 160
        assert len(silence) > 60 and (silence == floor.item()).all()


def test_negative_control_other_clamp_or_scaled_bands_are_detected():
    loud, quiet = torch.randn(16_000), 1e-4 * torch.randn(8_000)
    front_end = WhisperFrontEnd(WhisperShape(8, 1, 1, 1, 8, 80, 10, 50), AugmentConfig())
    expected = transformers_features(quiet, 80, 1)
    clamped, _ = front_end((loud + F.pad(quiet, (0, 8_000)))[None], (16_000,), None)
    assert float((clamped[0] - expected).abs().max()) > 0.1
    front_end.log_mel.bands.mul_(1.001)
    assert float((front_end(quiet[None], (8_000,), None)[0][0] - expected).abs().max()) > 2e-5


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers(name, whisper_folders):
    """The logits are bit-identical if both models use the same library for matrix products."""
    kind, tokens = KINDS[name], random_batch(KINDS[name], *LENGTHS).decoder_tokens
    model, features = read_whisper_folder(whisper_folders[name]).build().eval(), random_features(kind, 3)
    other = read_reference(whisper_folders[name])
    for is_same_library in (False, True):
        enabled = torch.backends.mkldnn.enabled and not is_same_library
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=enabled):
            expected = other(features.transpose(1, 2), decoder_input_ids=tokens).logits
            output = model(features, (features.shape[1],) * 3, tokens)
            actual = model.decoder.output(output.decoded)
        assert float((actual - expected).abs().max()) <= 1e-6 * float(expected.abs().max()) and expected.abs().max() > 1
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype, most", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_all_gradients_equal_transformers(name, dtype, most):
    kind, features = KINDS[name], random_features(KINDS[name], 3).to(dtype)
    model, batch = reference(kind).to(dtype), random_batch(kind, *LENGTHS)
    ours = to_project_model(model, kind)
    loss = model(features.transpose(1, 2), decoder_input_ids=batch.decoder_tokens, labels=labels_of(batch.targets)).loss
    expected = gradients_of(model, loss)
    found_loss = our_loss(ours, features, kind, keep_activations, CHUNK_FRAMES)
    values = {name_in_file(key): gradient for key, gradient in gradients_of(ours, found_loss).items()}
    assert abs(found_loss.item() - loss.item()) <= most * loss.item()
    assert max_relative_difference(expected, values) <= most
    assert ours.encoder.positions.requires_grad is False and "model.encoder.embed_positions.weight" not in expected


def test_recomputation_and_chunked_logits_keep_the_gradients():
    kind = KINDS["tiny"]
    ours, features = to_project_model(reference(kind), kind).double(), random_features(kind, 3).double()
    plain = gradients_of(ours, our_loss(ours, features, kind, keep_activations, CHUNK_FRAMES))
    recomputed = gradients_of(ours, our_loss(ours, features, kind, RecomputePolicy("always")(1.0), CHUNK_FRAMES))
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert (
        max_relative_difference(plain, gradients_of(ours, our_loss(ours, features, kind, keep_activations, 4))) < 1e-13
    )
    assert SMALL_CHUNK_FRAMES > 4


@pytest.mark.parametrize("change", ["epsilon", "tanh", "bias of keys", "positions"])
def test_negative_control_changed_network_is_detected(change, monkeypatch):
    kind, features = KINDS["tiny"], random_features(KINDS["tiny"], 3).double()
    model, batch = reference(kind).double(), random_batch(kind, *LENGTHS)
    ours = to_project_model(model, kind)
    with torch.no_grad():
        expected = model(features.transpose(1, 2), decoder_input_ids=batch.decoder_tokens).logits
        if change == "epsilon":
            for module in ours.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.eps = 1e-6
        elif change == "tanh":
            monkeypatch.setattr(blocks.F, "gelu", functools.partial(F.gelu, approximate="tanh"))
        elif (
            change == "bias of keys"
        ):  # a bias of the keys would not change the softmax, so the values' bias is changed
            ours.encoder.blocks[0].self_attention.value.bias.zero_()
        else:
            ours.encoder.positions.copy_(ours.encoder.positions.flip(0))
        output = ours(features, (100,) * 3, batch.decoder_tokens)
        assert float((ours.decoder.output(output.decoded) - expected).abs().max()) > 1e-6


def test_sinusoidal_positions_equal_transformers():
    kept = reference(KINDS["tiny"]).model.encoder.embed_positions.weight
    torch.testing.assert_close(sinusoids(*kept.shape), kept.detach(), rtol=0, atol=1e-6)


def greedy_by_transformers(model: torch.nn.Module, features: torch.Tensor, kind: Kind, most: int) -> list[list[int]]:
    """Return greedy ids without Whisper's rules on allowed tokens."""
    start = torch.full((len(features), 1), kind.special.start)
    settings = transformers.GenerationConfig(
        max_new_tokens=most, do_sample=False, eos_token_id=kind.end, pad_token_id=kind.end, use_cache=True
    )
    result = transformers.GenerationMixin.generate(
        model, features.transpose(1, 2), generation_config=settings, decoder_input_ids=start
    )
    rows = [row[1:].tolist() for row in result]
    return [row[: row.index(kind.end)] if kind.end in row else row for row in rows]


@pytest.mark.parametrize("name", KINDS)
def test_greedy_ids_equal_transformers(name):
    kind, all_ids = KINDS[name], []
    for seed in range(5):
        model = reference(kind, seed)
        with torch.no_grad():
            model.model.decoder.embed_tokens.weight[kind.end] *= 2.5  # makes some hypotheses end
            # The project suppresses this token, transformers does not.
            model.model.decoder.embed_tokens.weight[kind.special.start] *= 0.1
        features = random_features(kind, 3, seed)
        ours = to_project_model(model, kind)
        with torch.no_grad():
            encoded, lengths = ours.encoder(features, (100,) * 3, keep_activations)
        expected = greedy_by_transformers(model, features, kind, min(ours.decoder.most_tokens, lengths[0]))
        assert BeamDecode(1, 0.0, 0.0, None, 0.0, kind.special)(ours, encoded, lengths) == expected
        all_ids += map(tuple, expected)
    assert kind.special.start not in {token for row in all_ids for token in row}
    assert len(set(all_ids)) > 8 and len(set(map(len, all_ids))) > 2


def test_hypotheses_are_limited_by_decoder_positions():
    kind = KINDS["tiny"]
    ours = to_project_model(reference(kind, positions=16), kind)
    with torch.no_grad():
        ours.decoder.norm.bias.sub_(100 * ours.decoder.embedding.weight[kind.end])
        encoded, lengths = ours.encoder(random_features(kind), (100,) * 2, keep_activations)
    for beam in (1, 3):
        result = BeamDecode(beam, 0.0, 0.0, None, 0.0, kind.special)(ours, encoded, lengths)
        assert all(len(tokens) <= 15 for tokens in result) and (beam > 1 or [*map(len, result)] == [15, 15])


def test_cached_decoding_equals_uncached_after_reorder_and_select():
    kind, generator = KINDS["tiny"], torch.Generator().manual_seed(3)
    ours, places = to_project_model(reference(kind).double(), kind), torch.arange(3)
    tokens = torch.full((3, 4, 1), kind.special.start)
    with torch.no_grad():
        encoded, lengths = ours.encoder(random_features(kind, 3).double(), (100,) * 3, keep_activations)
        cache = ours.decoder.begin(encoded, lengths, 4)
        for length in range(1, 40):
            cached = ours.decoder.step(tokens[:, :, -1], cache)
            rows = encoded[places].repeat_interleave(4, dim=0)
            vectors = ours.decoder.embedding(tokens.flatten(0, 1))
            uncached = ours.decoder(vectors, rows, keep_activations)[:, -1].view_as(cached)
            torch.testing.assert_close(cached, uncached, rtol=1e-11, atol=1e-11)
            sources = torch.randint(4, tokens.shape[:2], generator=generator)
            new = torch.randint(kind.end, tokens.shape[:2], generator=generator)
            before = tokens.gather(1, sources[:, :, None].expand_as(tokens))
            tokens = torch.cat([before, new[:, :, None]], dim=2)
            cache.reorder(sources)
            if length == 20:
                cache.select(torch.tensor([1, 2]))
                places, tokens = places[1:], tokens[1:]


def test_bf16_loss_equals_transformers_with_fp32_gradients():
    kind, features = KINDS["tiny"], random_features(KINDS["tiny"], 3)
    model, batch = reference(kind), random_batch(kind, *LENGTHS)
    ours = to_project_model(model, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = {"decoder_input_ids": batch.decoder_tokens, "labels": labels_of(batch.targets)}
        expected = model(features.transpose(1, 2), **given).loss
        actual = our_loss(ours, features, kind, RecomputePolicy("always")(1.0), CHUNK_FRAMES)
    assert actual.dtype == torch.float32 and actual.item() == pytest.approx(expected.item(), rel=0.01)
    half, full = (
        gradients_of(ours, actual),
        gradients_of(ours, our_loss(ours, features, kind, keep_activations, CHUNK_FRAMES)),
    )
    assert all(gradient.dtype == torch.float32 for gradient in half.values())
    assert 1e-4 < max_relative_difference(full, half) < 0.2
