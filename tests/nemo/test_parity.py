"""Imported files give NeMo's output: golden tensors of NeMo 3.0, and of the features of 1.23.

B batch, T feature frames, T' encoder frames, V tokens.
"""

import dataclasses

import pytest
import sentencepiece
import torch

from konkanivani.models.nemo.weights import import_nemo
from tests.nemo.files import FOLDER, NemoParts, changed, read_parts
from tests.nemo.goldens import (
    FILES,
    NEAR,
    distances,
    distances_of,
    golden,
    hear,
    of_version,
    sound,
    speech_model,
    texts,
)


@pytest.mark.parametrize("name", FILES)
def test_features_encoder_probabilities_and_text_are_nemos(name):
    found, has_texts = distances_of(FOLDER, name)
    assert ("features" in found) == (name != "separable") and min(map(len, texts(golden(name)))) > 5
    if name == "parakeet":
        # The lowest of 128 bands are narrow: NeMo's fp32, like another processor's FFT, is 3e-5 from float64 there.
        assert found.pop("features") <= 10 * NEAR
    assert max(found.values()) <= NEAR and has_texts


@pytest.mark.parametrize("name", FILES)
def test_alone_is_as_in_its_batch(name):
    model = speech_model(FOLDER / f"{name}.nemo")
    waveforms, lengths = sound()
    for row, together in enumerate(hear(model, waveforms, lengths)):
        (alone,) = hear(model, waveforms[row : row + 1, : lengths[row]], lengths[row : row + 1])
        for part in ("features", "encoded", "log_probabilities"):
            torch.testing.assert_close(getattr(alone, part), getattr(together, part), rtol=0, atol=NEAR)
        assert alone.text == together.text


def test_what_an_older_version_saved_hears_as_that_version_does():
    found, has_texts = distances_of(FOLDER, "older")
    assert max(found.values()) <= NEAR and has_texts and "features" in found


def test_negative_control_with_the_other_versions_edges_it_is_another_model():
    newer = speech_model(FOLDER / "striding.nemo")
    for row, heard in enumerate(hear(newer, *sound())):
        assert max(distances(heard, golden(f"older_{row}"), 0).values()) > 100 * NEAR


@pytest.mark.parametrize(
    ("version", "edges"),
    [("1.0.0", "reflected"), ("2.4.1", "reflected"), ("2.5.0rc0", "zeros"), ("2.10.1", "zeros"), ("3.1", "zeros")],
)
def test_the_version_says_what_is_beyond_the_edges(version, edges, tmp_path):
    path = changed(of_version(version), tmp_path / "x.nemo")
    assert import_nemo(path, None, tmp_path).architecture.features.frame_padding == edges


def test_a_batch_norm_of_other_statistics_is_another_model(tmp_path):
    """Negative control: the parity tests detect other statistics."""

    def change(parts: NemoParts) -> None:
        parts.tensors["encoder.layers.1.conv.batch_norm.running_mean"] += 0.01

    (heard, _), wanted = hear(speech_model(changed(change, tmp_path / "x.nemo")), *sound()), golden("striding")
    found = distances(heard, wanted, 0)
    assert found["features"] <= NEAR < 10 * NEAR < found["encoded"]


def test_weights_in_half_precision_are_raised(tmp_path):
    def change(parts: NemoParts) -> None:
        parts.tensors = {n: t.half() if t.is_floating_point() else t for n, t in parts.tensors.items()}

    model = speech_model(changed(change, tmp_path / "x.nemo"))
    assert {tensor.dtype for tensor in model.model.state_dict().values()} == {torch.float32}
    heard = hear(model, *sound())[0]
    assert max(distances(heard, golden("striding"), 0).values()) < 0.05


def test_biases_that_all_blocks_share_are_apart(tmp_path):
    def change(parts: NemoParts) -> None:
        parts.config["encoder"]["untie_biases"] = False
        for name in list(parts.tensors):
            if name.endswith(("pos_bias_u", "pos_bias_v")):
                parts.tensors[name] = parts.tensors["encoder.layers.0.self_attn." + name.rpartition(".")[2]]

    found = import_nemo(changed(change, tmp_path / "x.nemo"), None, tmp_path).checkpoint.states["model"]
    biases = [tensor for name, tensor in found.items() if name.endswith("content_bias")]
    assert len({bias.data_ptr() for bias in biases}) == len(biases) == 2 and torch.equal(*biases)


def test_ids_are_the_pieces_of_the_file():
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
