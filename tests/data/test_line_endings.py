"""Files saved with CRLF or a byte order mark: text files load equally, binary files are rejected with the cause."""

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from konkanivani.data.manifest import read_manifest
from konkanivani.data.text import Tokenizer, train_tokenizer
from konkanivani.decoding.ngram import Ngrams, estimate_ngrams, read_arpa, write_arpa
from konkanivani.errors import CheckpointError, DataError
from konkanivani.files import conversion_hint
from konkanivani.inference.bundle import bundle_bytes, read_bundle
from konkanivani.models.model_files import header_of, read_json
from konkanivani.models.nemo.weights import import_nemo
from konkanivani.models.whisper.byte_pairs import read_byte_pairs
from tests.conftest import ROOT, WORDS
from tests.inference.test_export import SHAPE, as_checkpoint, speech_model_of_shape
from tests.nemo.files import FOLDER as NEMO_FILES
from tests.whisper.byte_vocabularies import added_token_ids, train_vocabulary, write_vocabulary_files

MARK = b"\xef\xbb\xbf"
CAUSE = "its line endings were probably converted by git"
Change = Callable[[bytes], bytes]


def with_crlf(content: bytes) -> bytes:
    """Convert the line endings to CRLF, as git does for a text file."""
    return content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


CHANGES: dict[str, Change] = {
    "crlf": with_crlf,
    "byte order mark": lambda content: MARK + content,
    "crlf and byte order mark": lambda content: MARK + with_crlf(content),
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest) -> Change:
    return CHANGES[request.param]


def rewrite_file(path: Path, change: Change) -> None:
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before


# Text files: loaded with the same contents


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(WORDS, "char", 60)


@pytest.fixture(scope="module")
def orders(tokenizer: Tokenizer) -> tuple[Ngrams, ...]:
    return estimate_ngrams([tokenizer.encode(f"{one} {other}") for one in WORDS for other in WORDS], tokenizer.size, 3)


def are_equal_ngrams(one: tuple[Ngrams, ...], other: tuple[Ngrams, ...]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.log_probabilities, b.log_probabilities)
        and np.array_equal(a.backoffs, b.backoffs)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("is_packed", [False, True])
def test_arpa_file_with_changed_line_endings_reads_equal(
    change: Change, is_packed: bool, orders, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_arpa(tmp_path / "lm.arpa", orders, tokenizer)
    before = read_arpa(tmp_path / "lm.arpa", tokenizer)
    rewrite_file(tmp_path / "lm.arpa", change)
    if is_packed:
        (tmp_path / "lm.arpa").write_bytes(gzip.compress((tmp_path / "lm.arpa").read_bytes()))
    assert are_equal_ngrams(read_arpa(tmp_path / "lm.arpa", tokenizer), before)


def test_byte_order_mark_inside_arpa_file_is_rejected(orders, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_arpa(tmp_path / "lm.arpa", orders, tokenizer)
    rewrite_file(tmp_path / "lm.arpa", lambda content: content.replace(b"\\2-grams:", MARK + b"\\2-grams:"))
    with pytest.raises(DataError, match="line "):
        read_arpa(tmp_path / "lm.arpa", tokenizer)


def test_whisper_vocabulary_with_changed_line_endings_reads_equal(change: Change, tmp_path: Path) -> None:
    vocabulary, merges = train_vocabulary(" ".join(WORDS) + " दर्\u200dयाचे", 300)
    folder = write_vocabulary_files(tmp_path / "tokens", vocabulary, merges, added_token_ids(vocabulary, ("mr",)))
    before = read_byte_pairs(folder)
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    after = read_byte_pairs(folder)
    assert after.model == before.model and after.encode("एक दोन") == before.encode("एक दोन")


def test_whisper_tokenizer_json_with_changed_line_endings_reads_equal(change: Change, tmp_path: Path) -> None:
    vocabulary, merges = train_vocabulary(" ".join(WORDS), 300)
    model = {"type": "BPE", "vocab": vocabulary, "merges": [" ".join(merge) for merge in merges]}
    whole = {"model": model, "added_tokens": [], "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
    before = read_byte_pairs(tmp_path).model
    rewrite_file(tmp_path / "tokenizer.json", change)
    assert read_byte_pairs(tmp_path).model == before


def test_whisper_config_with_changed_line_endings_reads_equal(change: Change, tmp_path: Path) -> None:
    settings = {"model_type": "whisper", "note": "दोन\r\nवळी", "sizes": [1, 2.5, None]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    rewrite_file(path, change)
    assert read_json(path) == settings


def test_manifest_with_changed_line_endings_reads_equal(change: Change, tmp_path: Path) -> None:
    rows = []
    for number, word in enumerate(WORDS):
        soundfile.write(tmp_path / f"{number}.wav", np.full(8_000, 0.1), 16_000)
        rows.append(json.dumps({"audio_filepath": f"{number}.wav", "duration": 0.5, "text": word}, ensure_ascii=False))
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    before = list(read_manifest(path))
    rewrite_file(path, change)
    after = read_manifest(path)
    assert list(after) == before and not after.broken and len(before) == len(WORDS)


def test_parakeet_folder_with_changed_line_endings_imports_equal(change: Change, tmp_path: Path) -> None:
    test_folder = pytest.importorskip("tests.nemo.test_folder", reason="transformers is not installed")
    folder = test_folder.save(test_folder.model_of(True), tmp_path / "model")
    before = import_nemo(folder, None, tmp_path)
    texts = [path for path in folder.iterdir() if path.suffix in (".json", ".txt")]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in texts}
    for path in texts:
        if change(path.read_bytes()) != path.read_bytes():  # a single line has no line ending
            rewrite_file(path, change)
    after = import_nemo(folder, None, tmp_path)
    assert after.checkpoint.tokenizer == before.checkpoint.tokenizer
    assert after.checkpoint.config == before.checkpoint.config


# Binary files: rejected with the cause


def write_checkpoint_file(folder: Path) -> Path:
    write_checkpoint(folder / "checkpoint_last.pt", as_checkpoint(speech_model_of_shape(SHAPE)))
    return folder / "checkpoint_last.pt"


def write_bundle(folder: Path) -> Path:
    (folder / "konkani.safetensors").write_bytes(bundle_bytes(speech_model_of_shape(SHAPE)))
    return folder / "konkani.safetensors"


def copy_nemo(folder: Path) -> Path:
    pytest.importorskip("yaml")
    return Path(shutil.copy(NEMO_FILES / "striding.nemo", folder))


def copy_weights(folder: Path) -> Path:
    return Path(shutil.copy(NEMO_FILES / "striding.safetensors", folder / "model.safetensors"))


def read_packed_arpa(path: Path) -> object:
    return read_arpa(path, train_tokenizer(WORDS, "char", 60))


def write_packed_arpa(folder: Path) -> Path:
    tokenizer = train_tokenizer(WORDS, "char", 60)
    sentences = [tokenizer.encode(f"{one} {other}") for one in WORDS for other in WORDS]
    write_arpa(folder / "lm.arpa.gz", estimate_ngrams(sentences, tokenizer.size, 3), tokenizer)
    return folder / "lm.arpa.gz"


BINARIES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object], type[Exception]]] = {
    "checkpoint": (write_checkpoint_file, read_checkpoint, CheckpointError),
    "bundle": (write_bundle, lambda path: read_bundle(path, torch.device("cpu")), CheckpointError),
    "nemo": (copy_nemo, lambda path: import_nemo(path, None, path.parent), CheckpointError),
    "whisper weights": (copy_weights, header_of, CheckpointError),
    "packed n-grams": (write_packed_arpa, read_packed_arpa, DataError),
}


@pytest.mark.parametrize("name", BINARIES)
def test_converted_binary_file_is_rejected_with_the_cause(name: str, change: Change, tmp_path: Path) -> None:
    write, read, error = BINARIES[name]
    path = write(tmp_path)
    read(path)
    rewrite_file(path, change)
    with pytest.raises(error) as refused:
        read(path)
    assert CAUSE in str(refused.value) and f"`*{path.suffix} -text`" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", BINARIES)
def test_truncated_binary_file_is_not_reported_as_converted(name: str, tmp_path: Path) -> None:
    write, read, error = BINARIES[name]
    path = write(tmp_path)
    rewrite_file(path, lambda content: content[: 2 * len(content) // 3])
    with pytest.raises(error) as refused:
        read(path)
    assert CAUSE not in str(refused.value)


def test_bundle_with_one_converted_line_feed_fails_its_checksum(tmp_path: Path) -> None:
    """The length stays the same, so only the checksum detects it; one change is not reported as a conversion."""
    path = write_bundle(tmp_path)
    content = path.read_bytes()
    place = content.rindex(b"\n")
    path.write_bytes(content[:place] + b"\r" + content[place + 1 :])
    with pytest.raises(CheckpointError, match="checksum does not match. Copy"):
        read_bundle(path, torch.device("cpu"))


def test_conversion_hint_is_given_only_for_binary_files(tmp_path: Path) -> None:
    cases = {
        b"a\r\n" * 20: False,  # a Windows text file instead of a model
        MARK + b"text": False,
        b"\0" + b"a\r\n" * 20: True,
        b"\0" + b"a\r\n" * 20 + b"\n": False,
        b"\0" + b"a\r\n" * 5: False,
        MARK + b"\0": True,
        b"": False,
    }
    for content, is_converted in cases.items():
        (tmp_path / "file").write_bytes(content)
        assert (CAUSE in conversion_hint(tmp_path / "file")) == is_converted, content[:20]
    assert conversion_hint(tmp_path) == conversion_hint(tmp_path / "absent") == conversion_hint(Path("a\0")) == ""


# Git


def test_git_attributes_keep_model_files_unchanged(tmp_path: Path) -> None:
    """With this repository's .gitattributes, a checkout with CRLF keeps models unchanged; without it, it does not."""
    if shutil.which("git") is None or not (ROOT / ".gitattributes").is_file():
        pytest.skip("needs git and the repository's .gitattributes")
    content = b"text without a NUL\n" * 10
    names = ("a.arpa", "a.pt", "a.safetensors", "a.nemo", "a.onnx", "train.jsonl", "run.sh", "notes.md")
    for has_attributes in (True, False):
        folder = tmp_path / str(has_attributes)
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(content)
        if has_attributes:
            shutil.copy(ROOT / ".gitattributes", folder)
        run = ["git", "-C", str(folder), "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "files"]):
            subprocess.run([*run, *words], check=True, capture_output=True)
        for name in names:
            (folder / name).unlink()
        subprocess.run([*run, "checkout", "--", "."], check=True, capture_output=True)
        kept = {name for name in names if (folder / name).read_bytes() == content}
        assert kept == ({*names} - {"notes.md"} if has_attributes else set())
