"""Imported files give the outputs of NeMo 3.0, and of the features of NeMo 1.23.

B batch, T feature frames, T' encoder frames, V tokens.
"""

import dataclasses

import pytest
import sentencepiece
import torch

from konkanivani.models.nemo.weights import import_nemo
from tests.nemo.files import FOLDER, NemoParts, read_parts, write_changed
from tests.nemo.goldens import (
    FILES,
    NEAR,
    distances,
    file_distances,
    golden,
    recognize_batch,
    speech_model,
    texts,
    waveforms_and_lengths,
    with_version,
)


@pytest.mark.parametrize("name", FILES)
def test_features_encoder_probabilities_and_text_equal_nemo(name):
    result, has_texts = file_distances(FOLDER, name)
    assert ("features" in result) == (name != "separable") and min(map(len, texts(golden(name)))) > 5
    if name == "parakeet":
        # The lowest of 128 bands are narrow: fp32 in NeMo, as on another processor, differs by 3e-5 from float64 there.
        assert result.pop("features") <= 10 * NEAR
    assert max(result.values()) <= NEAR and has_texts


@pytest.mark.parametrize("name", FILES)
def test_results_are_equal_alone_and_in_a_batch(name):
    model = speech_model(FOLDER / f"{name}.nemo")
    waveforms, lengths = waveforms_and_lengths()
    for row, together in enumerate(recognize_batch(model, waveforms, lengths)):
        (alone,) = recognize_batch(model, waveforms[row : row + 1, : lengths[row]], lengths[row : row + 1])
        for part in ("features", "encoded", "log_probabilities"):
            torch.testing.assert_close(getattr(alone, part), getattr(together, part), rtol=0, atol=NEAR)
        assert alone.text == together.text


def test_file_of_older_version_equals_that_version():
    result, has_texts = file_distances(FOLDER, "older")
    assert max(result.values()) <= NEAR and has_texts and "features" in result


def test_negative_control_edge_padding_of_other_version_differs():
    newer = speech_model(FOLDER / "striding.nemo")
    for row, recognition in enumerate(recognize_batch(newer, *waveforms_and_lengths())):
        assert max(distances(recognition, golden(f"older_{row}"), 0).values()) > 100 * NEAR


@pytest.mark.parametrize(
    ("version", "edges"),
    [("1.0.0", "reflected"), ("2.4.1", "reflected"), ("2.5.0rc0", "zeros"), ("2.10.1", "zeros"), ("3.1", "zeros")],
)
def test_frame_padding_depends_on_nemo_version(version, edges, tmp_path):
    path = write_changed(with_version(version), tmp_path / "x.nemo")
    assert import_nemo(path, None, tmp_path).architecture.features.frame_padding == edges


def test_negative_control_changed_batch_norm_statistics_are_detected(tmp_path):
    """Shift one running mean by 0.01."""

    def change(parts: NemoParts) -> None:
        parts.tensors["encoder.layers.1.conv.batch_norm.running_mean"] += 0.01

    (recognition, _), expected = (
        recognize_batch(speech_model(write_changed(change, tmp_path / "x.nemo")), *waveforms_and_lengths()),
        golden("striding"),
    )
    actual = distances(recognition, expected, 0)
    assert actual["features"] <= NEAR < 10 * NEAR < actual["encoded"]


def test_half_precision_weights_are_converted_to_fp32(tmp_path):
    def change(parts: NemoParts) -> None:
        parts.tensors = {n: t.half() if t.is_floating_point() else t for n, t in parts.tensors.items()}

    model = speech_model(write_changed(change, tmp_path / "x.nemo"))
    assert {tensor.dtype for tensor in model.model.state_dict().values()} == {torch.float32}
    recognition = recognize_batch(model, *waveforms_and_lengths())[0]
    assert max(distances(recognition, golden("striding"), 0).values()) < 0.05


def test_shared_position_biases_are_copied_per_block(tmp_path):
    def change(parts: NemoParts) -> None:
        parts.config["encoder"]["untie_biases"] = False
        for name in list(parts.tensors):
            if name.endswith(("pos_bias_u", "pos_bias_v")):
                parts.tensors[name] = parts.tensors["encoder.layers.0.self_attn." + name.rpartition(".")[2]]

    result = import_nemo(write_changed(change, tmp_path / "x.nemo"), None, tmp_path).checkpoint.states["model"]
    biases = [tensor for name, tensor in result.items() if name.endswith("content_bias")]
    assert len({bias.data_ptr() for bias in biases}) == len(biases) == 2 and torch.equal(*biases)


def test_token_ids_follow_the_tokenizer_of_the_file():
    parts = read_parts()
    (model,) = (data for name, data in parts.others.items() if name.endswith(".model"))
    theirs, ours = (
        sentencepiece.SentencePieceProcessor(model_proto=model),
        speech_model(FOLDER / "striding.nemo").tokenizer,
    )
    assert ours.size == theirs.get_piece_size() + 3 and dataclasses.astuple(ours.special) == (0, 1, 2, 3)
    for text in ("उदक घरांत", "दोन तीन चार", "", "शाळा xyz 12"):
        old = theirs.encode(text)
        assert ours.encode(text) == [1 if token == 0 else token + 3 for token in old]
        assert ours.decode(ours.encode(text)) == theirs.decode([token for token in old if token]).strip()
