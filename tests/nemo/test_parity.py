"""Imported files hear and say what NeMo does with them: golden tensors of its 3.0, and of the features of its 1.23.

B batch, T feature frames, T' encoder frames, V tokens.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import sentencepiece
import torch

from konkanivani.decoding.decode import greedy_decode
from konkanivani.inference.nemo.imported import import_nemo
from konkanivani.inference.speech_model import SpeechModel, build_speech_model
from tests.nemo.files import FOLDER, NemoParts, changed, read_parts

NEAR = 1e-5
FILES = ("striding", "separable", "parakeet")
Golden = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Heard:
    """What a model makes of an utterance: features (T, F), encoded (T', D), log probabilities (T', V), its text."""

    features: torch.Tensor
    encoded: torch.Tensor
    log_probabilities: torch.Tensor
    tokens: list[int]
    text: str


def speech_model(path: Path) -> SpeechModel:
    return build_speech_model(import_nemo(path, None, path.parent).checkpoint, torch.device("cpu"))


def golden(name: str) -> Golden:
    return safetensors.torch.load_file(FOLDER / f"{name}.safetensors")


def sound() -> tuple[torch.Tensor, tuple[int, ...]]:
    """Two utterances of odd lengths (2, S), the second one shorter."""
    found = golden("sound")
    return found["sound"].float() / 2**15, tuple(found["samples"].tolist())


@torch.no_grad()
def hear(model: SpeechModel, waveforms: torch.Tensor, lengths: tuple[int, ...]) -> list[Heard]:
    features, frames = model.front_end(waveforms, lengths, None)
    encoded, encoded_lengths = model.encode(waveforms, lengths)
    log_probabilities = model.model.ctc_head(encoded).log_softmax(dim=-1)
    tokens = greedy_decode(model.architecture, model.tokenizer)(model.model, encoded, encoded_lengths)
    return [
        Heard(features[row, :t], encoded[row, :n], log_probabilities[row, :n], said, model.tokenizer.decode(said))
        for row, (t, n, said) in enumerate(zip(frames, encoded_lengths, tokens, strict=True))
    ]


def distances(heard: Heard, wanted: Golden, row: int) -> dict[str, float]:
    """How far each is from what NeMo has; infinitely where another number of frames is heard."""
    found = {"encoded": heard.encoded, "log_probabilities": in_their_order(heard.log_probabilities)}
    if "features" in wanted:
        found["features"] = heard.features
    counts = {"features": wanted["feature_lengths"][row], "encoded": wanted["encoded_lengths"][row]}
    counts["log_probabilities"] = counts["encoded"]
    return {
        name: float((tensor - wanted[name][row, :count]).abs().max()) if len(tensor) == count else float("inf")
        for name, tensor in found.items()
        for count in [int(counts[name])]
    }


def in_their_order(log_probabilities: torch.Tensor) -> torch.Tensor:
    """(T', V): `<unk>` and the pieces first, the blank last; start and end are never said, and not there."""
    assert float(log_probabilities[:, 2:4].max()) < -1000
    return torch.cat([log_probabilities[:, 1:2], log_probabilities[:, 4:], log_probabilities[:, :1]], dim=1)


def texts(wanted: Golden) -> list[str]:
    return bytes(wanted["texts"].tolist()).decode().split("\n")


@pytest.mark.parametrize("name", FILES)
def test_features_encoder_probabilities_and_text_are_nemos(name):
    model, wanted = speech_model(FOLDER / f"{name}.nemo"), golden(name)
    for row, heard in enumerate(hear(model, *sound())):
        assert max(distances(heard, wanted, row).values()) <= NEAR
        assert heard.text == texts(wanted)[row] and len(heard.text) > 5


@pytest.mark.parametrize("name", FILES)
def test_alone_is_as_in_its_batch(name):
    model = speech_model(FOLDER / f"{name}.nemo")
    waveforms, lengths = sound()
    for row, together in enumerate(hear(model, waveforms, lengths)):
        (alone,) = hear(model, waveforms[row : row + 1, : lengths[row]], lengths[row : row + 1])
        for part in ("features", "encoded", "log_probabilities"):
            torch.testing.assert_close(getattr(alone, part), getattr(together, part), rtol=0, atol=NEAR)
        assert alone.text == together.text


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, saved by a version before 2.5."""
    return changed(of_version("1.23.0"), tmp_path_factory.mktemp("older") / "older.nemo")


def of_version(version: str):
    def change(parts: NemoParts) -> None:
        parts.config["nemo_version"] = version

    return change


def test_what_an_older_version_saved_hears_as_that_version_does(older):
    """A batch of one, as there the edges of an utterance depend on its batch; here they do not."""
    model = speech_model(older)
    for row, heard in enumerate(hear(model, *sound())):
        wanted = golden(f"older_{row}")
        assert max(distances(heard, wanted, 0).values()) <= NEAR
        assert heard.text == texts(wanted)[0]


def test_negative_control_with_the_other_versions_edges_it_is_another_model(older):
    newer = speech_model(FOLDER / "striding.nemo")
    for row, heard in enumerate(hear(newer, *sound())):
        assert max(distances(heard, golden(f"older_{row}"), 0).values()) > 100 * NEAR
        assert heard.text != texts(golden(f"older_{row}"))[0]


@pytest.mark.parametrize(
    ("version", "edges"),
    [("1.0.0", "reflected"), ("2.4.1", "reflected"), ("2.5.0rc0", "zeros"), ("2.10.1", "zeros"), ("3.1", "zeros")],
)
def test_the_version_says_what_is_beyond_the_edges(version, edges, tmp_path):
    path = changed(of_version(version), tmp_path / "x.nemo")
    assert import_nemo(path, None, tmp_path).architecture.features.edges == edges


def test_a_batch_norm_of_other_statistics_is_another_model(tmp_path):
    """Negative control: the parity above sees the statistics."""

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
