"""Import of one language of a multilingual file of AI4Bharat: its tokenizer and its rows of the CTC head."""

from pathlib import Path

import pytest
import sentencepiece
import torch

from konkanivani.errors import CheckpointError, UsageError
from konkanivani.inference.speech_model import build_speech_model
from konkanivani.models.nemo.weights import NemoImport, import_nemo
from tests.nemo.files import NemoParts, multilingual, read_parts, train_sentencepiece, write_changed
from tests.nemo.goldens import NEAR, golden, in_nemo_order, waveforms_and_lengths

SIZES = {"hi": 40, "kok": 50, "mr": 44}  # different sizes, so that a wrong selection has another shape
HEAD = "ctc_decoder.decoder_layers.0"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_changed(multilingual(SIZES), tmp_path_factory.mktemp("languages") / "three.nemo")


@pytest.fixture(scope="module")
def parts() -> NemoParts:
    result = read_parts()
    multilingual(SIZES)(result)
    return result


def rows_of(parts: NemoParts, language: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the head that the fork's mask selects, language and blank: (V + 1, D) and (V + 1,)."""
    mask = torch.zeros(sum(SIZES.values()) + 1, dtype=torch.bool)
    before = sum(size for name, size in SIZES.items() if list(SIZES).index(name) < list(SIZES).index(language))
    mask[before : before + SIZES[language]] = mask[-1] = True
    weight, bias = (parts.tensors[f"{HEAD}.{leaf}"] for leaf in ("weight", "bias"))
    return weight[mask, :, 0], bias[mask]


@pytest.mark.parametrize("language", SIZES)
def test_softmax_is_over_the_tokens_of_the_language(language, path, parts):
    imported = import_nemo(path, language, path.parent)
    model = build_speech_model(imported.checkpoint, torch.device("cpu"))
    weight, bias = rows_of(parts, language)
    assert len(weight) == SIZES[language] + 1
    waveforms, lengths = waveforms_and_lengths()
    with torch.no_grad():
        encoded, encoded_lengths = model.encode(waveforms, lengths)
        actual = model.model.ctc_head(encoded).log_softmax(dim=-1)
        expected = torch.nn.functional.linear(encoded, weight, bias).log_softmax(dim=-1)
    for row, count in enumerate(encoded_lengths):
        assert (in_nemo_order(actual[row, :count]) - expected[row, :count]).abs().max() <= NEAR
    assert imported.provenance.language == language and f"tokens of {language}" in imported.sentences()


def test_encoder_equals_nemo(path):
    """Features are those of the NeMo version that saved the file."""
    model = build_speech_model(import_nemo(path, "kok", path.parent).checkpoint, torch.device("cpu"))
    waveforms, lengths = waveforms_and_lengths()
    encoded, encoded_lengths = model.encode(waveforms, lengths)
    for row, count in enumerate(encoded_lengths):
        assert (encoded[row, :count] - golden(f"older_{row}")["encoded"][0]).abs().max() <= NEAR


def test_tokenizer_equals_tokenizer_of_the_language(path, parts):
    model = parts.others[parts.config["tokenizer"]["langs"]["kok"]["model_path"].removeprefix("nemo:")]
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = build_speech_model(import_nemo(path, "kok", path.parent).checkpoint, torch.device("cpu")).tokenizer
    assert [tokenizer.piece(token) for token in range(4, tokenizer.size)] == [
        theirs.id_to_piece(token) for token in range(1, SIZES["kok"])
    ]


@pytest.mark.parametrize(
    ("language", "message"),
    [
        (None, "has several languages. Use --language with one of hi, kok, mr"),
        ("gom", "--language gom is not a language of .*three.nemo. Use one of hi, kok, mr"),
        ("", "--language  is not a language"),
    ],
)
def test_unknown_language_is_rejected_with_list_of_languages(language, message, path):
    with pytest.raises(UsageError, match=message):
        import_nemo(path, language, path.parent)


def test_language_flag_for_monolingual_file_is_rejected(tmp_path):
    path = read_parts().write(tmp_path / "one.nemo")
    with pytest.raises(UsageError, match="has one tokenizer for all languages. Omit it"):
        import_nemo(path, "kok", tmp_path)


def test_single_language_needs_no_flag(tmp_path):
    path = write_changed(multilingual({"kok": 50}), tmp_path / "one.nemo")
    assert import_nemo(path, None, tmp_path).provenance.language == "kok"


def swap_tokenizers(parts: NemoParts) -> None:
    """Negative control: tokenizers in another order than the head's rows."""
    multilingual(SIZES)(parts)
    parts.config["tokenizer"]["langs"] = dict(sorted(parts.config["tokenizer"]["langs"].items(), reverse=True))


def disable_multisoftmax(parts: NemoParts) -> None:
    multilingual(SIZES)(parts)
    parts.config["decoder"]["multisoftmax"] = parts.config["aux_ctc"]["decoder"]["multisoftmax"] = False


def add_row(parts: NemoParts) -> None:
    multilingual(SIZES)(parts)
    parts.config["aux_ctc"]["decoder"]["vocabulary"] = []
    parts.tensors[f"{HEAD}.bias"] = torch.zeros(sum(SIZES.values()) + 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_tokenizers, "vocabulary of its output head differs from its tokenizers"),
        (disable_multisoftmax, "only one softmax per language is supported"),
        (add_row, r"ctc_decoder.decoder_layers.0.bias is \(136,\) .* requires \(135,\)"),
    ],
)
def test_contradictory_configuration_is_rejected(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        import_nemo(write_changed(change, tmp_path / "x.nemo"), "kok", tmp_path)


def test_tokenizer_with_start_and_end_tokens_keeps_their_rows(tmp_path):
    """Published tokenizers have the special ids (0, none, none, none); this one needs only the blank added."""

    def change(parts: NemoParts) -> None:
        file = parts.config["tokenizer"]["model_path"].removeprefix("nemo:")
        model = train_sentencepiece("उदक घर शाळा बाजार एक दोन तीन चार".split(), 30, bos_id=1, eos_id=2)
        parts.others[file], processor = model, sentencepiece.SentencePieceProcessor(model_proto=model)
        parts.config["aux_ctc"]["decoder"]["vocabulary"] = [processor.id_to_piece(number) for number in range(30)]
        for leaf in ("weight", "bias"):
            parts.tensors[f"{HEAD}.{leaf}"] = parts.tensors[f"{HEAD}.{leaf}"][:31].clone()

    imported: NemoImport = import_nemo(write_changed(change, tmp_path / "x.nemo"), None, tmp_path)
    old, new = read_parts().tensors[f"{HEAD}.bias"][:31], imported.checkpoint.states["model"]["ctc_head.bias"]
    assert imported.checkpoint.vocab_size == 31 and torch.equal(new, torch.cat([old[30:], old[:30]]))
