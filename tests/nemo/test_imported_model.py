"""An imported checkpoint can be scored, transcribed with, exported and trained like any other."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

from konkanivani.checkpoints.averaging import NamedCheckpoint, average_checkpoints
from konkanivani.checkpoints.checkpoint import PROVENANCE_STATE, provenance_of, read_checkpoint, read_provenance
from konkanivani.flags import config_from_text
from konkanivani.inference.bundle import read_bundle
from konkanivani.inference.export import build_onnx, read_onnx
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.inference.speech_model import build_speech_model
from konkanivani.inference.write_exports import check_signal
from konkanivani.rules import settings_of
from tests.conftest import TRAINER, Corpus, checked, run_folders, run_script, write_corpus
from tests.nemo.files import FOLDER
from tests.nemo.goldens import recognize_batch, waveforms_and_lengths

CPU = torch.device("cpu")
FILES = ("striding", "parakeet")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 6, "valid": 2, "test": 3})


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of each file."""
    folder = tmp_path_factory.mktemp("imported")
    for name in FILES:
        done = run_script("training_scripts/import_asr.py", str(FOLDER / f"{name}.nemo"), str(folder / f"{name}.pt"))
        assert done.returncode == 0, done.stderr
        assert "Imported: 2 blocks" in done.stdout and f"Source: {name}.nemo, SHA-256" in done.stdout
        assert ("Not imported: an RNNT decoder" in done.stdout) == (name == "striding")
        assert (
            all(script in done.stdout for script in ("evaluate_", "transcribe.py", "--init_from")) and not done.stderr
        )
    return folder


def run(script: str, *words: str) -> str:
    done = checked(run_script(f"training_scripts/{script}.py", *words))
    return done.stdout


@pytest.mark.parametrize("name", FILES)
def test_evaluation_and_transcription_give_equal_texts(name, imported, corpus, tmp_path):
    checkpoint, recognition = str(imported / f"{name}.pt"), tmp_path / "heard.jsonl"
    words = ("--checkpoint", checkpoint, "--manifest", corpus.manifest("test"), "--output", str(recognition), "--json")
    report = json.loads(run("evaluate_konkanivani_asr", *words, "--device", "cpu"))
    assert report["wer"] > 0.5  # the model is untrained
    rows = [json.loads(line) for line in recognition.read_text(encoding="utf-8").splitlines()]
    recognizer = load_recognizer(checkpoint, device="cpu")
    hypotheses = [
        recognizer.transcribe(corpus.directory / "audio" / f"test_{n:03d}.flac").text for n in range(len(rows))
    ]
    assert hypotheses == [row["hypothesis"] for row in rows] and all(hypotheses)
    audio = str(corpus.directory / "audio" / "test_001.flac")
    assert run("transcribe", audio, "--checkpoint", checkpoint, "--device", "cpu").strip() == hypotheses[1]


@pytest.mark.parametrize("name", FILES)
def test_bundle_gives_equal_output_and_keeps_provenance(name, imported, tmp_path):
    checkpoint, bundle = imported / f"{name}.pt", tmp_path / "a.safetensors"
    run("export_asr", "--checkpoint", str(checkpoint), "--bundle", str(bundle))
    model, signal = build_speech_model(read_checkpoint(checkpoint), CPU), waveforms_and_lengths()
    expected, read = recognize_batch(model, *signal), read_bundle(bundle, CPU)
    for mine, theirs in zip(recognize_batch(read, *signal), expected, strict=True):
        assert torch.equal(mine.log_probabilities, theirs.log_probabilities) and mine.text == theirs.text
    provenance = read_provenance(read_checkpoint(checkpoint))
    assert provenance.file == f"{name}.nemo" and len(provenance.sha256) == 64 and provenance.saved_by == "NeMo 3.0.0"
    assert read.provenance == model.provenance == provenance
    with safetensors.safe_open(bundle, "pt") as file:
        assert json.loads(file.metadata()["konkanivani"])["provenance"] == provenance.state_dict()


@pytest.mark.full
def test_onnx_file_gives_equal_output(imported, tmp_path):
    model = build_speech_model(read_checkpoint(imported / "parakeet.pt"), CPU)  # other kind: test_block_options.py
    (tmp_path / "a.onnx").write_bytes(build_onnx(model))
    onnx_model = read_onnx(tmp_path / "a.onnx")
    assert onnx_model.recognize(*waveforms_and_lengths()) == [
        recognition.text for recognition in recognize_batch(model, *waveforms_and_lengths())
    ]
    for waveforms, lengths in (waveforms_and_lengths(), check_signal()):
        result, found_lengths = onnx_model.log_probabilities(waveforms, lengths)
        for row, recognition in enumerate(recognize_batch(model, waveforms, lengths)):
            probabilities = torch.as_tensor(result[row, : found_lengths[row]])
            torch.testing.assert_close(probabilities, recognition.log_probabilities, rtol=0, atol=TOLERANCE)


def test_prefix_beam_search_uses_language_model(imported, corpus, tmp_path):
    checkpoint, arpa = str(imported / "striding.pt"), str(tmp_path / "lm.arpa")
    run("train_language_model", "--checkpoint", checkpoint, "--manifest", corpus.manifest("train"), "--output", arpa)
    audio = str(corpus.directory / "audio" / "test_001.flac")
    words = (audio, "--checkpoint", checkpoint, "--device", "cpu", "--decode", "prefix")
    assert run("transcribe", *words) != run("transcribe", *words, "--language_model", arpa)


def test_long_audio_is_transcribed_in_pieces(imported):
    """Three minutes are split into pieces within the limit of the model."""
    recognizer = load_recognizer(imported / "parakeet.pt", device="cpu")
    waveforms, lengths = waveforms_and_lengths()
    words = recognizer.transcribe(np.tile(waveforms[0, : lengths[0]].numpy(), 180)).words
    assert words[-1].end > 170 and len(words) > 180


def test_init_from_copies_all_weights_and_keeps_provenance(imported, corpus, tmp_path):
    initial = read_checkpoint(imported / "striding.pt")
    shape = [s for s in settings_of(config_from_text(initial.config)) if s.group in ("model", "features")]
    flags = [word for s in shape if s.name != "scaled_input" for word in (f"--{s.name}", str(s.value))]
    flags += ["--scaled_input", "--tokenizer_type", "bpe", "--vocab_size", str(initial.vocab_size)]
    words = [*corpus.flags(), *run_folders(tmp_path), "--max_steps", "2", "--device", "cpu", "--num_workers", "0"]
    done = checked(run_script(TRAINER, *words, *flags, "--init_from", str(imported / "striding.pt")))
    assert f"loaded: {len(initial.states['model'])} tensors" in done.stdout
    last = tmp_path / "checkpoints" / "checkpoint_last.pt"
    resume_flags = ("--checkpoint_dir", str(last.parent), "--resume", "auto", "--max_steps", "4", "--log_dir", words[7])
    done = checked(run_script(TRAINER, *resume_flags))
    trained = read_checkpoint(last)
    assert trained.step == 4 and trained.tokenizer == initial.tokenizer
    averaged = average_checkpoints([NamedCheckpoint("a", trained)])
    assert read_provenance(trained) == read_provenance(averaged) == read_provenance(initial)
    # Tokens that the head of the file lacks are never predicted, whatever is learnt.
    before, bias = (checkpoint.states["model"]["ctc_head.bias"] for checkpoint in (initial, trained))
    assert torch.equal(bias[2:4], torch.full((2,), -1e4)) and not torch.equal(bias[4:], before[4:])


def test_invalid_provenance_records_are_rejected(imported):
    words = read_checkpoint(imported / "striding.pt").states[PROVENANCE_STATE]
    assert provenance_of(dict(words)) and provenance_of(None) is None
    for wrong in ([], {}, {**words, "more": "x"}, {**words, "file": 3}):
        with pytest.raises(ValueError, match="record has unknown fields"):
            provenance_of(wrong)


def test_resume_rejects_checkpoint_of_other_provenance(imported):
    result = read_provenance(read_checkpoint(imported / "striding.pt"))
    result.load_state_dict(result.state_dict())
    with pytest.raises(Exception, match="started from another model"):
        dataclasses.replace(result, sha256="0" * 64).load_state_dict(result.state_dict())
