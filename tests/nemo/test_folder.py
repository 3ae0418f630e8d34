"""Import of a Parakeet folder of transformers, compared with transformers."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.errors import CheckpointError, UsageError
from konkanivani.inference.speech_model import SpeechModel, build_speech_model
from konkanivani.models.nemo.weights import import_nemo
from tests.conftest import checked, run_script
from tests.nemo.files import read_parts
from tests.nemo.goldens import NEAR, in_nemo_order, recognize_batch, waveforms_and_lengths

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[test]")
PIECES = 60


def model_of(has_biases: bool) -> "transformers.ParakeetForCTC":
    """Return a random model with statistics, norms and biases away from their initial values."""
    encoder = {
        **{"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"conv_kernel_size": 9, "subsampling_conv_channels": 8, "num_mel_bins": 80, "scale_input": has_biases},
        **{"attention_bias": has_biases, "convolution_bias": has_biases},
    }
    torch.manual_seed(int(has_biases))
    config = transformers.ParakeetCTCConfig(vocab_size=PIECES + 1, pad_token_id=PIECES, encoder_config=encoder)
    model = transformers.ParakeetForCTC(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape)
            if name.endswith("running_var"):
                tensor.copy_(0.2 + noise.square())
            elif name.endswith(("running_mean", "bias", "bias_u", "bias_v")):
                tensor.copy_(0.3 * noise)
            elif "subsampling" in name:
                tensor.copy_(3 * noise / tensor[0].numel() ** 0.5)
            elif name == "ctc_head.weight":
                tensor.copy_(0.2 * noise)
    return model


def save(model: "transformers.ParakeetForCTC", folder: Path) -> Path:
    """Save the model with a tokenizer that transformers converts from a SentencePiece model."""
    from transformers.convert_slow_tokenizer import ParakeetConverter

    folder.mkdir()
    model.save_pretrained(folder)
    (data,) = (data for name, data in read_parts("parakeet").others.items() if name.endswith("tokenizer.model"))
    (folder.parent / "x.model").write_bytes(data)
    tokens = transformers.ParakeetTokenizer(
        tokenizer_object=ParakeetConverter(str(folder.parent / "x.model")).converted()
    )
    tokens.add_special_tokens({"unk_token": "<unk>", "pad_token": "<pad>"})
    tokens.save_pretrained(folder)
    transformers.ParakeetFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model_of(True), tmp_path_factory.mktemp("parakeet") / "model")


def import_folder(folder: Path) -> SpeechModel:
    return build_speech_model(import_nemo(folder, None, folder.parent).checkpoint, torch.device("cpu"))


@pytest.mark.parametrize("has_biases", [True, False])
def test_imported_folder_equals_parakeet_of_transformers(has_biases, tmp_path):
    folder = save(model_of(has_biases), tmp_path / "model")
    theirs = transformers.ParakeetForCTC.from_pretrained(folder).eval()
    extract = transformers.ParakeetFeatureExtractor.from_pretrained(folder)
    waveforms, lengths = waveforms_and_lengths()
    batch = [row[:length].numpy() for row, length in zip(waveforms, lengths, strict=True)]
    features = extract(batch, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**features).logits.log_softmax(dim=-1)
    for row, recognition in enumerate(recognize_batch(import_folder(folder), waveforms, lengths)):
        actual, count = in_nemo_order(recognition.log_probabilities), len(recognition.log_probabilities)
        assert (recognition.features - features["input_features"][row, : len(recognition.features)]).abs().max() <= NEAR
        assert (actual - expected[row, :count]).abs().max() <= NEAR
        assert len(set(actual.argmax(dim=-1).tolist())) > 2


def test_tokenizer_equals_that_of_transformers(folder):
    ours, theirs = import_folder(folder).tokenizer, transformers.AutoTokenizer.from_pretrained(folder)
    words = "उदक घरांत आसा शाळा बाजारा लागीं एक दोन तीन चार पांच आवय घरा वता रसा लाचागीं".split()
    texts = [" ".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)]
    for text in [*texts, "xyz उदक"]:
        assert ours.encode(text) == [1 if token == 0 else token + 3 for token in theirs.encode(text)], text


def test_script_imports_folder_and_reports_source(folder, tmp_path):
    done = checked(run_script("training_scripts/import_asr.py", str(folder), str(tmp_path / "out.pt")))
    assert "Not imported: nothing" in done.stdout and f"saved by transformers {transformers.__version__}" in done.stdout
    assert "80 ms per frame" in done.stdout


def setting(name: str, *keys: str, value: object):
    def change(folder: Path) -> None:
        whole = part = json.loads((folder / name).read_text())
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value
        (folder / name).write_text(json.dumps(whole))

    return change


def remove_tensor(folder: Path) -> None:
    tensors = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    del tensors["ctc_head.bias"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def truncate_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


BAD = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "not JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read as JSON"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "several files of weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"),
        "its weights are in several files, and a Parakeet model is read from a single model.safetensors. Load it with",
    ),
    "truncated weights": (truncate_weights, "model.safetensors cannot be read"),
    "header too long": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99), "header is too long"),
    "missing tensor": (remove_tensor, "no tensor decoder.decoder_layers.0.bias"),
    "another model": (setting("config.json", "model_type", value="wav2vec2"), "model_type is 'wav2vec2'"),
    "other subsampling": (
        setting("config.json", "encoder_config", "subsampling_factor", value=4),
        "subsampling_factor is 4",
    ),
    "unknown setting": (setting("config.json", "encoder_config", "gate", value=1), "encoder_config.gate is 1"),
    "unigram tokenizer": (setting("tokenizer.json", "model", "type", value="Unigram"), "not byte-pair encoding"),
    "vocabulary not a mapping": (setting("tokenizer.json", "model", "vocab", value=[1]), "not byte-pair encoding"),
    "gaps in token ids": (setting("tokenizer.json", "model", "vocab", "एक", value=900), "has gaps between its tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folder_is_rejected_with_one_sentence(name, folder, tmp_path):
    change, message = BAD[name]
    shutil.copytree(folder, tmp_path / "bad")
    change(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=message) as error:
        import_nemo(tmp_path / "bad", None, tmp_path)
    assert "\n" not in str(error.value)


def test_language_flag_is_rejected(folder):
    with pytest.raises(UsageError, match="Omit it"):
        import_nemo(folder, "kok", folder.parent)
