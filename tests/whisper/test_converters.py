"""faster-whisper's converter accepts an exported folder, and the converted model gives the same tokens."""

import shutil

import pytest
import torch

from konkanivani.config import AugmentConfig, PretrainedConfig
from konkanivani.decoding.decode import greedy_decode
from konkanivani.inference.speech_model import read_pretrained
from konkanivani.models.conformer import keep_activations
from konkanivani.models.whisper.export import write_whisper_folder
from konkanivani.models.whisper.folder import read_whisper_folder
from tests.whisper.small_model import SECONDS, write_model

ctranslate2 = pytest.importorskip(
    "ctranslate2", reason="ctranslate2, whose converter is run, is not installed: pip install -e .[test]"
)
pytest.importorskip("transformers", reason="transformers, which the converter reads with, is not installed")

# Factors of weights with which the audio affects the tokens and tokens do not repeat.
FACTORS = {"decoder.positions": 20.0, "decoder.embedding.weight": 8.0}
FACTORS |= {f"decoder.blocks.0.cross_attention.{part}.weight": 40.0 for part in ("query", "key", "value", "output")}


def test_ctranslate2_model_generates_the_same_tokens(tmp_path):
    base = read_whisper_folder(write_model(tmp_path / "base", positions=40))
    weights = {name: one * FACTORS.get(name, 4.0 if one.dim() > 1 else 1.0) for name, one in base.weights().items()}
    write_whisper_folder(base, weights, tmp_path / "exported")
    converter = ctranslate2.converters.TransformersConverter(str(tmp_path / "exported"))
    converter.convert(str(tmp_path / "converted"))
    shutil.copy(tmp_path / "exported" / "preprocessor_config.json", tmp_path / "converted")
    theirs = ctranslate2.models.Whisper(str(tmp_path / "converted"), device="cpu", compute_type="float32")

    pretrained = read_pretrained(tmp_path / "exported")
    vocabulary = pretrained.vocabulary(PretrainedConfig(language="mr"))
    architecture, model = base.architecture, base.architecture.build().eval()
    model.load_state_dict(weights)
    features, lengths = architecture.build_front_end(AugmentConfig())(
        torch.randn(4, SECONDS * 16_000), (SECONDS * 16_000,) * 4, None
    )
    with torch.no_grad():
        encoded = model.encoder(features, lengths, keep_activations)
    ours = greedy_decode(architecture, vocabulary)(model, *encoded)
    prompt = [vocabulary.special.start, *vocabulary.prefix]
    result = theirs.generate(
        ctranslate2.StorageView.from_array(features.transpose(1, 2).contiguous().numpy()),
        [prompt] * 4,
        beam_size=1,
        max_length=40,
        suppress_blank=False,
        suppress_tokens=[],
    )
    generated = [one.sequences_ids[0] for one in result]
    # CTranslate2 may stop at another length limit.
    assert generated == [mine[: len(theirs)] for mine, theirs in zip(ours, generated, strict=True)]
    assert len({tuple(tokens) for tokens in generated}) > 1 and all(len(set(tokens)) > 3 for tokens in generated)
