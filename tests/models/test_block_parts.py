"""Options of NeMo's Conformers and FastConformers: each against its definition, all together against Parakeet.

transformers' Parakeet is NeMo's FastConformer under other names; a random one is created, nothing is downloaded.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from konkanivani.config import FeatureConfig, ModelConfig, TrainConfig
from konkanivani.flags import config_from_text, config_to_text, contradictions
from konkanivani.lengths import SMALL_CHUNK_FRAMES, Framing, subsampled_length
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.models.attention import RelativePositions, RelativeSelfAttention, SequenceLayout
from konkanivani.models.conformer import Encoder, PaddedSubsampling, keep_activations
from konkanivani.models.fine_tuning import transfer_weights
from konkanivani.models.front_end import LogMel, normalize_features
from konkanivani.ops.chunks import ChunkedPackedRelativeSelfAttention, ChunkedPaddedSubsampling
from konkanivani.ops.packing import PackedEncoder, PackedLayout
from konkanivani.ops.passes import optimize
from konkanivani.planning.tensors import LiveBytes
from konkanivani.rules import settings_of
from tests.invariants.parts import OTHER_FEATURES, OTHER_PARTS, relative_difference
from tests.ops.test_convolutions import differences, gradients
from tests.run_setup import parse_flags

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[test]")

WIDTH, HEADS, LAYERS, KERNEL, CHANNELS, VOCABULARY = 32, 4, 3, 9, 8, 31
PARAKEET = ModelConfig(
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=0,
    attention_heads=HEADS,
    feedforward_dim=48,
    convolution_kernel=KERNEL,
    subsampling_channels=CHANNELS,
    dropout=0.0,
    attention_positions="relative",
    convolution_norm="none",
    subsampling="separable",
    scaled_input=True,
    entry_norm=False,
)
FEATURES = dataclasses.replace(OTHER_FEATURES, frame_padding="zeros")
BLOCK = {  # name in this project -> name in Parakeet; the closing norm of a block is the entry norm of the next one
    **{"first_feedforward.norm": "norm_feed_forward1", "second_feedforward.norm": "norm_feed_forward2"},
    **{"first_feedforward.expand": "feed_forward1.linear1", "first_feedforward.contract": "feed_forward1.linear2"},
    **{"second_feedforward.expand": "feed_forward2.linear1", "second_feedforward.contract": "feed_forward2.linear2"},
    **{"attention_norm": "norm_self_att", "attention.output": "self_attn.o_proj"},
    **{"attention.position": "self_attn.relative_k_proj", "convolution.norm": "norm_conv"},
    **{"convolution.gate": "conv.pointwise_conv1", "convolution.output": "conv.pointwise_conv2"},
}
STAGES = {"0.0": 0, "1.0": 2, "1.1": 3, "2.0": 5, "2.1": 6}


def parakeet(biases: bool) -> torch.nn.Module:
    """Return a random Parakeet in evaluation mode, with BatchNorm statistics as after training."""
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=48,
        attention_bias=biases,
        convolution_bias=biases,
        conv_kernel_size=KERNEL,
        subsampling_conv_channels=CHANNELS,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    settings = transformers.ParakeetCTCConfig(vocab_size=VOCABULARY, encoder_config=encoder, pad_token_id=30)
    model = transformers.ParakeetForCTC(settings).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "running_var" in name:
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point() and ("norm" in name or "bias" in name):
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


def rename_weights(theirs: dict[str, torch.Tensor], folds_norm: bool = True) -> dict[str, torch.Tensor]:
    """Rename Parakeet's weights to the project's names, with the BatchNorm folded into the preceding convolution."""
    names = {"ctc_head": "ctc_head", "encoder.subsampling.output": "encoder.subsampling.linear"}
    names |= {f"encoder.subsampling.stages.{ours}": f"encoder.subsampling.layers.{n}" for ours, n in STAGES.items()}
    values = {}
    for number in range(LAYERS):
        block, layer = f"encoder.blocks.{number}", f"encoder.layers.{number}"
        names |= {f"{block}.{ours}": f"{layer}.{name}" for ours, name in BLOCK.items()}
        closing = "encoder.norm" if number == LAYERS - 1 else f"encoder.blocks.{number + 1}.entry_norm"
        names[closing] = f"{layer}.norm_out"
        for kind in ("weight", "bias"):
            parts = [theirs.get(f"{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            if parts[0] is not None:
                values[f"{block}.attention.query_key_value.{kind}"] = torch.cat(parts)
        values[f"{block}.attention.content_bias"] = theirs[f"{layer}.self_attn.bias_u"].flatten()
        values[f"{block}.attention.position_bias"] = theirs[f"{layer}.self_attn.bias_v"].flatten()
        norm = {name: theirs[f"{layer}.conv.norm.{name}"] for name in ("weight", "bias", "running_mean", "running_var")}
        scale = norm["weight"] / (norm["running_var"] + 1e-5).sqrt() if folds_norm else torch.ones(WIDTH)
        bias = theirs.get(f"{layer}.conv.depthwise_conv.bias", torch.zeros_like(scale))
        weight = theirs[f"{layer}.conv.depthwise_conv.weight"]
        values[f"{block}.convolution.depthwise.weight"] = weight * scale[:, None, None]
        values[f"{block}.convolution.depthwise.bias"] = norm["bias"] + (bias - norm["running_mean"]) * scale
    for ours, name in names.items():
        for kind in ("weight", "bias"):
            tensor = theirs.get(f"{name}.{kind}")
            if tensor is not None:
                values[f"{ours}.{kind}"] = tensor.squeeze(-1) if tensor.dim() == 3 else tensor
    return values


def pair(biases: bool, dtype: torch.dtype, folds_norm: bool = True) -> tuple[torch.nn.Module, KonkaniVaniASR]:
    """Return a Parakeet and the project's model with the same weights."""
    theirs = parakeet(biases).to(dtype)
    ours = HybridArchitecture(dataclasses.replace(PARAKEET, biases=biases), FEATURES, VOCABULARY).build().to(dtype)
    ours.load_state_dict(rename_weights(theirs.state_dict(), folds_norm))
    optimize(ours)
    return theirs, ours.eval()


def two_utterances() -> tuple[torch.Tensor, tuple[int, int], list[torch.Tensor]]:
    """Return waveforms (2, S) padded with zeros, their odd lengths, and each waveform alone."""
    own = torch.Generator().manual_seed(3)
    alone = [0.1 * torch.randn(samples, generator=own) for samples in (30_011, 41_237)]
    return torch.nn.utils.rnn.pad_sequence(alone, batch_first=True), (30_011, 41_237), alone


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
@torch.no_grad()
def test_encoder_equals_parakeet_of_transformers(biases, dtype, packs, monkeypatch):
    """The fp64 bound is 1e-7 because Parakeet computes the sines of relative positions in fp32."""
    monkeypatch.setattr(PackedEncoder, "packs", packs)
    bound = 1e-5 if dtype == torch.float32 else 1e-7
    theirs, ours = pair(biases, dtype)
    waveforms, samples, alone = two_utterances()
    log_mel = LogMel(FEATURES)
    features, lengths = log_mel(waveforms, samples)
    mask = torch.arange(features.shape[1])[None] < torch.tensor(lengths)[:, None]
    expected = theirs.encoder(features.to(dtype), attention_mask=mask).last_hidden_state
    logits = theirs(features.to(dtype), attention_mask=mask).logits.log_softmax(-1)
    actual, encoded_lengths = ours.encoder(features.to(dtype), lengths, keep_activations)
    assert encoded_lengths == tuple(subsampled_length(n, "separable") for n in lengths) and expected.std() > 0.3
    for row, length in enumerate(encoded_lengths):
        assert float((actual[row, :length] - expected[row, :length]).abs().max()) < bound
        heads = ours.ctc_head(actual[row, :length]).log_softmax(-1)
        assert float((heads - logits[row, :length]).abs().max()) < bound
        own, own_lengths = log_mel(alone[row][None], samples[row : row + 1])
        assert float((own[0] - features[row, : lengths[row]]).abs().max()) < 1e-5  # features are computed in fp32
        alone_encoded, _ = ours.encoder(
            features[row : row + 1, : lengths[row]].to(dtype), own_lengths, keep_activations
        )
        assert float((alone_encoded[0] - actual[row, :length]).abs().max()) < bound


@torch.no_grad()
def test_negative_control_changed_part_changes_encoder_output():
    theirs, ours = pair(True, torch.float64)
    _, unfolded = pair(True, torch.float64, folds_norm=False)
    features = torch.randn(1, 133, 80, dtype=torch.float64)
    expected, mask = theirs.encoder(features).last_hidden_state, (133,)
    assert relative_difference(expected, ours.encoder(features, mask, keep_activations)[0]) < 1e-6
    assert relative_difference(expected, unfolded.encoder(features, mask, keep_activations)[0]) > 1e-2
    for change in ({"scaled_input": False}, {"entry_norm": True}, {"convolution_norm": "layer"}):
        other = Encoder(dataclasses.replace(PARAKEET, **change), 80).double().eval()
        other.load_state_dict(ours.encoder.state_dict(), strict=False)
        assert relative_difference(expected, other(features, mask, keep_activations)[0]) > 1e-3


def test_features_equal_parakeet_of_transformers():
    waveforms, samples, alone = two_utterances()
    extractor = transformers.ParakeetFeatureExtractor()
    reference = extractor([one.numpy() for one in alone], sampling_rate=16_000, return_tensors="pt")
    result, lengths = LogMel(FEATURES)(waveforms, samples)
    assert lengths == tuple(reference.attention_mask.sum(1).tolist()) == tuple(n // 160 for n in samples)
    assert float((result - reference.input_features[:, : result.shape[1]]).abs().max()) < 1e-5
    for name, value in {"preemphasis": 0.0, "window": "periodic", "mel_scale": "htk", "std_ddof": "population"}.items():
        other, _ = LogMel(dataclasses.replace(FEATURES, **{name: value}))(waveforms, samples)
        assert float((result - other).abs().max()) > 1e-3, name


@pytest.mark.parametrize("divisor", ["population", "sample"])
def test_utterance_without_frames_is_normalized_to_zeros(divisor):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 5, 4, generator=generator)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] * 5])
    frames = (~padding).sum(dim=1).float()
    normalized = normalize_features(features, padding, frames, divisor)
    assert not normalized[2].any()
    assert torch.equal(normalized[:2], normalize_features(features[:2], padding[:2], frames[:2], divisor))


def reference_features(waveform: torch.Tensor, config: FeatureConfig) -> torch.Tensor:
    """Return features (T, F) of one waveform (S,), with frames centred by torch.stft."""
    emphasised = torch.cat([waveform[:1], waveform[1:] - config.preemphasis * waveform[:-1]])
    spectrum = torch.stft(
        emphasised,
        512,
        160,
        400,
        torch.hann_window(400, periodic=False, dtype=waveform.dtype),
        center=True,
        pad_mode={"zeros": "constant", "reflected": "reflect"}[config.frame_padding],
        return_complex=True,
    )
    bands = LogMel(config).power.mel_scale.fb.to(waveform.dtype)
    frames = len(waveform) // 160 + (config.frame_padding != "zeros")
    features = (spectrum.abs().square().T @ bands + 2**-24).log()[:frames]
    return (features - features.mean(0)) / (features.std(0) + 1e-5)


@pytest.mark.parametrize("edges", ["zeros", "reflected"])
def test_edge_frames_in_a_batch_equal_frames_of_single_utterance(edges):
    config = dataclasses.replace(OTHER_FEATURES, frame_padding=edges)
    own = torch.Generator().manual_seed(1)
    alone = [torch.randn(n, generator=own, dtype=torch.float64) for n in (400, 4_801, 3_999, 4_800, 4_959, 9_000)]
    lengths = tuple(map(len, alone))
    waveforms = torch.nn.utils.rnn.pad_sequence(alone, batch_first=True)
    for row, length in zip(waveforms, lengths, strict=True):
        row[length:] = 1e3  # the padding must not affect the features
    log_mel = LogMel(config).double()
    log_mel.power.spectrogram.window = torch.hann_window(400, periodic=False, dtype=torch.float64)
    actual, frames = log_mel(waveforms, lengths)
    for row, waveform, count in zip(actual, alone, frames, strict=True):
        expected = reference_features(waveform, config)
        assert count == len(expected) == Framing(config).feature_length(len(waveform))
        assert relative_difference(expected, row[:count]) < 1e-12 and not row[count:].any()
    other = LogMel(dataclasses.replace(config, frame_padding="zeros" if edges == "reflected" else "reflected")).double()
    assert relative_difference(actual[1, 1:20], other(waveforms, lengths)[0][1, 1:20]) > 1e-3  # negative control


def test_encoded_length_equals_convolutions_for_int_array_and_tensor():
    for kind, count in (("striding", 2), ("separable", 3)):
        for edges in ("none", "zeros", "reflected"):
            framing = Framing(dataclasses.replace(OTHER_FEATURES, frame_padding=edges), kind)
            samples = list(range(0, 4_000, 7))
            encoded = [framing.encoded_length(n) for n in samples]
            assert framing.encoded_length(np.array(samples)).tolist() == encoded
            assert framing.encoded_length(torch.tensor(samples)).tolist() == encoded and min(encoded) == 0
            for n in samples:
                frames = framing.feature_length(n)
                for _ in range(count):
                    frames = (frames - 1) // 2 + 1
                assert frames == framing.encoded_length(n)
        assert framing.encoder_hop == 160 * 2**count and framing.encoder_frame_seconds(3) == 3 * 0.01 * 2**count
    assert Framing(FeatureConfig(), "striding").encoder_frame_seconds(1) == 0.04 + 256 / 16_000
    assert Framing(OTHER_FEATURES).feature_length(256) == 0 < Framing(OTHER_FEATURES).feature_length(257)


def plain_attention(
    attention: RelativeSelfAttention, x: torch.Tensor, norm: torch.nn.LayerNorm, padding: torch.Tensor
) -> torch.Tensor:
    """Return the attention of x (B, T, D), computed for one pair of frames at a time."""
    batch, length, width = x.shape
    each = width // attention.heads
    query, key, value = attention.query_key_value(norm(x)).view(batch, length, 3, attention.heads, each).unbind(2)
    u, v = (bias.view(attention.heads, each) for bias in (attention.content_bias, attention.position_bias))
    rates = torch.tensor([10_000.0 ** (-2 * (i // 2) / width) for i in range(width)], dtype=x.dtype)
    scores = x.new_full((batch, attention.heads, length, length), -math.inf)
    for i in range(length):
        for j in range(length):
            angle = (i - j) * rates
            encoding = torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos())
            encoding = (attention.position.weight @ encoding).view(attention.heads, each)
            score = ((query[:, i] + u) * key[:, j]).sum(-1) + ((query[:, i] + v) * encoding).sum(-1)
            scores[:, :, i, j] = (score / each**0.5).masked_fill(padding[:, j, None], -math.inf)
    attended = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), value)
    return attention.output(attended.flatten(2))


def random_attention(width: int = 12, heads: int = 3) -> tuple[RelativeSelfAttention, torch.nn.LayerNorm]:
    torch.manual_seed(2)
    attention = ChunkedPackedRelativeSelfAttention(width, heads).double()
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.position_bias)
    return attention, torch.nn.LayerNorm(width).double()


def layout_of(x: torch.Tensor, padding: torch.Tensor | None, **more: object) -> SequenceLayout:
    return SequenceLayout(RelativePositions(x.shape[2])(x.shape[1], x), padding, **more)


@pytest.mark.parametrize("chunk_frames", [1, 3, 4, 9, 1500])
def test_relative_attention_and_gradients_equal_definition(chunk_frames):
    attention, norm = random_attention()
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(9)[None] >= torch.tensor([9, 6])[:, None]
    parameters = [x, *attention.parameters(), *norm.parameters()]
    expected = plain_attention(attention, x, norm, padding)
    actual = attention(norm(x), layout_of(x, padding, chunk_frames=chunk_frames))
    assert differences([expected, *gradients(expected, parameters)], [actual, *gradients(actual, parameters)]) < 1e-12
    with torch.no_grad():
        assert relative_difference(expected, attention(norm(x), layout_of(x, padding))) < 1e-12
        backwards = SequenceLayout((layout_of(x, None).positions[0].flip(0),), padding)
        assert relative_difference(expected, attention(norm(x), backwards)) > 1e-3  # negative control


def test_packed_relative_attention_equals_attention_per_span():
    attention, norm = random_attention()
    lengths = (7, 1, 4)
    x = torch.randn(1, sum(lengths), 12, dtype=torch.float64, requires_grad=True)
    spans = PackedLayout(RelativePositions(12).of_spans(lengths, x), None, 3, lengths)
    actual = attention(norm(x), spans)
    expected = torch.cat([attention(norm(span), layout_of(span, None)) for span in x.split(lengths, dim=1)], dim=1)
    parameters = [x, *attention.parameters()]
    assert differences([expected, *gradients(expected, parameters)], [actual, *gradients(actual, parameters)]) < 1e-12
    assert relative_difference(expected, attention(norm(x), layout_of(x, None))) > 1e-3  # negative control


def test_relative_attention_scores_are_fp32_under_autocast(monkeypatch):
    attention, norm = (module.float() for module in random_attention())
    seen, score = [], torch.baddbmm

    def recording_baddbmm(*terms: torch.Tensor, alpha: float) -> torch.Tensor:
        seen.extend(tensor.dtype for tensor in terms)
        return score(*terms, alpha=alpha)

    monkeypatch.setattr("torch.baddbmm", recording_baddbmm)
    x = torch.randn(1, 9, 12)
    full = attention(norm(x), layout_of(x, None))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = attention(norm(x), layout_of(x, None))
    assert half.dtype == torch.bfloat16 and set(seen) == {torch.float32}
    assert 0 < relative_difference(full, half.float()) < 2e-2


def test_chunked_relative_attention_memory_grows_linearly():
    """Memory is linear: from 400 to 1600 frames, with sixteen times the pairs, it grows at most fourfold."""
    attention, norm = (module.float() for module in random_attention())

    def peak_bytes(frames: int, chunk_frames: int) -> int:
        x = torch.randn(1, frames, 12, requires_grad=True)
        layout = layout_of(x, None, chunk_frames=chunk_frames)
        with LiveBytes() as live:
            attention(norm(x), layout).sum().backward()
        return live.peak

    assert peak_bytes(1600, SMALL_CHUNK_FRAMES) < 4.2 * peak_bytes(400, SMALL_CHUNK_FRAMES) < peak_bytes(400, 400) * 2.5
    assert peak_bytes(1600, 1600) > 12 * peak_bytes(400, 400)  # negative control


def test_striding_subsampling_equals_two_conv2d():
    torch.manual_seed(0)
    ours = PaddedSubsampling(80, 4, 8, "striding").double()
    first, second = (stage[0] for stage in ours.stages)
    features = torch.randn(2, 43, 80, dtype=torch.float64, requires_grad=True)
    x = F.conv2d(features[:, None], first.weight, first.bias, stride=2, padding=1).relu()
    x = F.conv2d(x, second.weight, second.bias, stride=2, padding=1).relu()
    expected = F.linear(x.permute(0, 2, 1, 3).reshape(2, 11, 80), ours.output.weight, ours.output.bias)
    parameters = [features, *ours.parameters()]
    actual = ours(features)
    assert differences([expected, *gradients(expected, parameters)], [actual, *gradients(actual, parameters)]) < 1e-12


@pytest.mark.parametrize("kind", ["striding", "separable"])
def test_padded_subsampling_in_chunks_equals_single_utterances(kind):
    torch.manual_seed(0)
    ours = ChunkedPaddedSubsampling(80, 4, 8, kind).double()
    for stage in ours.stages:
        torch.nn.init.constant_(stage[-1].bias, 0.5)  # non-zero output for zero input
    for longest in (*range(1, 20), 33, 64):
        lengths = tuple(sorted({longest, max(1, longest - 1), max(1, longest - 2), 1 + longest // 2}))
        padding = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
        features = torch.randn(len(lengths), longest, 80, dtype=torch.float64).masked_fill(padding[:, :, None], 0.0)
        for chunk_frames in (1, 2, 3, 100):
            result = ours(features, SequenceLayout((), padding, chunk_frames))
            for row, length in enumerate(lengths):
                alone = ours(features[row : row + 1, :length])[0]
                assert len(alone) == subsampled_length(length, kind)
                assert relative_difference(alone, result[row, : len(alone)]) < 1e-12


def test_negative_control_chunks_without_context_differ():
    ours, features = (
        ChunkedPaddedSubsampling(80, 4, 8, "separable").double(),
        torch.randn(1, 64, 80, dtype=torch.float64),
    )
    pieces = torch.cat([ours(piece) for piece in features.split(16, dim=1)], dim=1)
    assert (
        relative_difference(ours(features), ours(features, SequenceLayout(chunk_frames=2)))
        < 1e-12
        < 1e-3
        < relative_difference(ours(features), pieces)
    )


def test_old_checkpoint_gets_default_parts_and_rejects_others_on_resume():
    config = TrainConfig(model=OTHER_PARTS, features=OTHER_FEATURES)
    pairs = zip(settings_of(TrainConfig()), settings_of(config), strict=True)
    changed = [one.name for one, other in pairs if one.group in ("model", "features") and one.value != other.value]
    parts = [name for name in changed if not hasattr(TrainConfig().run, name)]
    assert {"attention_positions", "biases", "frame_padding", "std_ddof"} < set(parts)
    text = config_to_text(TrainConfig())
    newer = (
        "attention_pos",
        "convolution_norm",
        "subsampling ",
        "scaled_",
        "entry_",
        "biases",
        "log_floor_",
        "preemph",
    )
    newer += ("window ", "frame_padding", "mel_scale", "std_ddof")
    older = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith(tuple("--" + n for n in newer)))
    assert older.count("\n") == text.count("\n") - 12 and config_from_text(older) == TrainConfig()
    flags = "--attention_positions relative --biases False --entry_norm False --frame_padding zeros".split()
    assert len(contradictions(TrainConfig(), parse_flags(flags))) == 4


def test_narrower_relative_attention_keeps_position_frequencies():
    wide = dataclasses.replace(PARAKEET, subsampling_channels=4)
    narrow = dataclasses.replace(wide, d_model=16)
    source, model = (KonkaniVaniASR(shape, VOCABULARY, 80).double() for shape in (wide, narrow))
    weights = {name: torch.arange(w.numel()).double().view(w.shape) for name, w in source.state_dict().items()}
    transfer = transfer_weights(model, weights, wide, is_same_vocabulary=True)
    assert not transfer.left_out
    like = torch.zeros(1, dtype=torch.float64)
    (large,), (small,) = (RelativePositions(width)(50, like) for width in (32, 16))
    attention = model.encoder.blocks[0].attention
    columns = (attention.position.weight[0] % 32).long()
    assert torch.allclose(small, large[:, columns], rtol=0, atol=1e-12)
    assert not torch.allclose(small, large[:, :16], atol=1e-2)  # the first 16 components do not
    rows = attention.query_key_value.bias[:16]
    assert torch.equal(rows, attention.content_bias) and torch.equal(rows, attention.position_bias)
    assert torch.equal(rows, attention.position.weight[:, 0] // 32)
