"""The manifest index, the stored token counts and the selection by them equal a full read of every row."""

import fcntl
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.console import announced
from konkanivani.data import filtering as token_counts
from konkanivani.data import index
from konkanivani.data.batching import SizeLimit, cut_sizes, padded_seconds
from konkanivani.data.filtering import Limits, check_utterances, count_tokens, reason_to_reject
from konkanivani.data.index import MISSING, ManifestIndex, open_index
from konkanivani.data.manifest import Manifest, read_manifest
from konkanivani.data.text import Tokenizer, normalize_text, train_tokenizer
from konkanivani.files import exclusive_lock
from konkanivani.lengths import SAMPLE_RATE, ctc_frames_needed, speed_perturbed_samples
from tests.conftest import ROOT

WORDS = ("एक", "दोन", "तीन", "चार", "पांच", "सात", "आठ", "णव")


@pytest.fixture
def stored_index(monkeypatch):
    """Treat every manifest as large, with blocks of a few rows."""
    monkeypatch.setattr(index, "SMALL_BYTES", 0)
    monkeypatch.setattr(index, "BLOCK_BYTES", 700)
    monkeypatch.setattr(token_counts, "FEW_ROWS", 0)
    monkeypatch.setattr(token_counts, "BLOCK_ROWS", 7)


def write_rows(folder: Path, rows: int = 40) -> Path:
    """Write a manifest whose rows 5 and 12 are broken, with blank lines and Windows line endings."""
    generator = np.random.default_rng(0)
    lines = []
    for row in range(1, rows + 1):
        text = " ".join(generator.choice(WORDS, 1 + row % 9))
        name = "gone.flac" if row == 12 else "a.flac"
        lines.append(json.dumps({"audio_filepath": name, "duration": 1 + row / 8, "text": text}, ensure_ascii=False))
    (folder / "a.flac").touch()
    lines[4] = '{"audio_filepath": "a.flac"'
    path = folder / "train.jsonl"
    path.write_bytes("\r\n".join(lines[:20] + ["", " "] + lines[20:]).encode())
    return path


def read_without_index(path: Path) -> list[tuple[int, float, str]]:
    results = []
    for row, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip() and line.strip().endswith("}") and "gone" not in line:
            fields = json.loads(line)
            results.append((row, fields["duration"], fields["text"]))
    return results


def as_rows(manifest: Manifest) -> list[tuple[int, float, str]]:
    return [(utterance.row, utterance.duration, utterance.text) for utterance in manifest]


def test_indexed_rows_equal_rows_read_from_the_file(stored_index, tmp_path):
    path = write_rows(tmp_path)
    for manifest in (read_manifest(path), read_manifest(path)):  # created, then opened
        assert as_rows(manifest) == read_without_index(path) and len(manifest) == 38
        assert [manifest[place].row for place in (0, 4, 37, -1)] == [1, 6, 42, 42]
        assert manifest.durations.tolist() == [duration for _, duration, _ in read_without_index(path)]
        assert [(row.row, row.is_missing) for row in manifest.broken] == [(5, False), (12, True)]
        assert manifest.broken[1].reason == MISSING
    assert isinstance(manifest.durations, np.memmap)
    with pytest.raises(IndexError):
        manifest[38]


def test_manifest_opened_twice_at_once_is_indexed_once(stored_index, tmp_path, monkeypatch):
    builds = []
    write = index._write

    def slow_write(*arguments: object) -> ManifestIndex:
        builds.append(1)
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(index, "_write", slow_write)
    path = write_rows(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(open_index, [path, path])
    assert len(builds) == 1 and len(one.rows) == 38
    assert np.array_equal(one.rows, other.rows) and np.array_equal(one.starts, other.starts)


def test_in_memory_index_gives_same_rows_and_writes_no_files(tmp_path):
    path = write_rows(tmp_path)
    manifest = read_manifest(path)
    assert as_rows(manifest) == read_without_index(path) and manifest.index.folder is None
    assert sorted(os.listdir(tmp_path)) == ["a.flac", "train.jsonl"]


def test_pickled_manifest_is_small_and_gives_same_rows(stored_index, tmp_path):
    manifest = read_manifest(write_rows(tmp_path))
    there = pickle.dumps(manifest)
    assert len(there) < 1000  # the path, not the rows
    assert as_rows(pickle.loads(there)) == as_rows(manifest)  # noqa: S301


def test_changed_manifest_is_indexed_again(stored_index, tmp_path):
    path = write_rows(tmp_path)
    read_manifest(path)
    with open(path, "ab") as file:
        file.write(b'\n{"audio_filepath": "a.flac", "duration": 9, "text": "new"}\n')
    assert read_manifest(path)[-1].text == "new"


def test_index_is_reused_and_rebuilt_if_damaged(stored_index, tmp_path, monkeypatch):
    path = write_rows(tmp_path)
    before = as_rows(read_manifest(path))
    with monkeypatch.context() as patched:
        patched.setattr(index, "_scan", None)  # a new scan would call it
        assert as_rows(read_manifest(path)) == before
    for name in ("index.json", "starts", "broken.jsonl"):
        (tmp_path / "train.jsonl.index" / name).unlink()
        assert as_rows(read_manifest(path)) == before
    (tmp_path / "train.jsonl.index" / "starts").write_bytes(b"cut")
    assert as_rows(read_manifest(path)) == before


def test_missing_audio_file_is_used_once_it_exists(stored_index, tmp_path):
    path = write_rows(tmp_path)
    assert len(read_manifest(path).broken) == 2
    (tmp_path / "gone.flac").touch()
    assert [row.row for row in read_manifest(path).broken] == [5]


def test_index_is_not_stored_on_read_only_file_system(stored_index, tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    assert as_rows(read_manifest(path)) == read_without_index(path)
    assert "Read-only file system" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["a.flac", "train.jsonl"]


def test_interrupted_index_build_leaves_no_index(stored_index, tmp_path, monkeypatch):
    path = write_rows(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            open_index(path)
    assert not (tmp_path / "train.jsonl.index").exists()
    assert as_rows(read_manifest(path)) == read_without_index(path)
    assert not (tmp_path / "train.jsonl.index.partial").exists()


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(WORDS, "char", 100)


def test_token_counts_equal_encoding_and_are_stored_per_tokenizer(stored_index, tmp_path, tokenizer, monkeypatch):
    manifest = read_manifest(write_rows(tmp_path))
    encoded = [tokenizer.encode(normalize_text(utterance.text)) for utterance in manifest]
    for _ in range(2):
        counts = count_tokens(manifest, tokenizer, "keep")
        assert counts.tokens.tolist() == [len(tokens) for tokens in encoded]
        assert counts.frames_needed.tolist() == [ctc_frames_needed(tokens) for tokens in encoded]
        monkeypatch.setattr(token_counts, "_count", None)  # a new count would call it
    with pytest.raises(TypeError):
        count_tokens(manifest, train_tokenizer([*WORDS, "शून्य"], "char", 100), "keep")
    with pytest.raises(TypeError):
        count_tokens(manifest, tokenizer, "spell")


def test_selection_by_counts_equals_check_of_each_row(tmp_path, tokenizer):
    manifest, limits = read_manifest(write_rows(tmp_path)), Limits(1.3, 5.0, 20, 1.1)
    kept, left_out = check_utterances(manifest, tokenizer, limits, "keep")
    reasons = {u.row: reason_to_reject(u, tokenizer.encode(normalize_text(u.text)), limits) for u in manifest}
    assert [utterance.row for utterance in kept] == [row for row, reason in reasons.items() if reason is None]
    assert {r.row: r.reason for r in left_out} == {row: reason for row, reason in reasons.items() if reason}
    assert len(kept) > 5 and len({reason.split()[1] for reason in reasons.values() if reason}) > 1
    assert kept.durations.tolist() == [utterance.duration for utterance in kept]
    assert kept.part(np.array([2, 0]))[0].row == kept[2].row
    whole, _ = check_utterances(manifest, tokenizer, Limits(0.0, 100.0, 1000, 1.0), "keep")
    assert len(whole) == len(manifest)
    backwards = whole.part(np.arange(len(whole))[::-1])
    assert backwards.durations.tolist() == whole.durations.tolist()[::-1] == manifest.durations.tolist()[::-1]


@settings(deadline=None)
@given(st.lists(st.floats(0, 4000), min_size=1, max_size=20), st.sampled_from([0.5, 0.9, 1.0, 1.1, 1.37, 2.0]))
def test_vectorized_encoder_frames_equal_those_of_each_utterance(durations, speed):
    limits = Limits(0.0, 5000.0, 400, speed)
    samples = [speed_perturbed_samples(round(duration * SAMPLE_RATE), speed) for duration in durations]
    assert limits.encoder_frames(np.array(durations)).tolist() == [*map(limits.framing.encoded_length, samples)]
    assert [limits.encoder_frames(duration) for duration in durations] == [*map(limits.framing.encoded_length, samples)]


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 20), min_size=1, max_size=40))
def test_micro_batch_sizes_respect_limits_and_padding_is_counted(seconds):
    limits = (SizeLimit(2.0, 8), SizeLimit(5.0, 4), SizeLimit(11.0, 2))
    ordered = sorted(seconds)
    sizes, first, padded = cut_sizes(ordered, limits), 0, 0.0
    assert sum(sizes) == len(seconds)
    for size in sizes:
        longest = ordered[first + size - 1]
        allowed = next((limit.utterances for limit in limits if longest <= limit.seconds), 1)
        assert 1 <= size <= allowed
        first, padded = first + size, padded + size * longest
    assert padded_seconds(np.array(seconds), limits) == pytest.approx(padded)
    assert padded >= sum(seconds) * (1 - 1e-12)


KILLED = """
import os, sys, time
from pathlib import Path
from konkanivani.data import index

def scan(*arguments):
    os.write(1, b"scanning\\n")  # in one piece: several workers write
    time.sleep(60)

index._scan, index.SMALL_BYTES, index.BLOCK_BYTES = scan, 0, 700
index.open_index(Path(sys.argv[1]))
"""


def test_workers_of_a_killed_process_release_its_lock(tmp_path):
    path = write_rows(tmp_path)
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert killed.stdout is not None and "scanning\n" in killed.stdout  # read up to this line
    with open(path, "rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        killed.kill()
        killed.wait()
        deadline = time.monotonic() + 30
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "orphaned workers hold the lock"
                time.sleep(0.05)
    killed.stdout.close()


def test_cut_index_and_token_counts_are_made_again(stored_index, tmp_path, tokenizer):
    path = write_rows(tmp_path)
    manifest = read_manifest(path)
    expected = as_rows(manifest)
    counts = count_tokens(manifest, tokenizer, "keep").tokens.tolist()
    folder = tmp_path / "train.jsonl.index"
    (stored,) = folder.glob("tokens-*")
    stored.write_bytes(stored.read_bytes()[:-8])
    assert count_tokens(manifest, tokenizer, "keep").tokens.tolist() == counts
    durations = folder / "durations"
    durations.write_bytes(durations.read_bytes()[:-8])
    assert as_rows(read_manifest(path)) == expected


def test_failed_index_leaves_no_partial_folder(stored_index, tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path)
    monkeypatch.setattr(index.FormatCharacterCount, "to_json", lambda self: os.write(-1, b""))  # EBADF, as a full disk
    assert as_rows(read_manifest(path)) == read_without_index(path)
    assert "cannot be stored" in capsys.readouterr().out and not list(tmp_path.glob("*.index*"))


def test_waiting_for_a_lock_is_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("konkanivani.files.announced", partial(announced, delay=0.0))
    acquired = []

    def wait() -> None:
        with exclusive_lock(tmp_path):
            acquired.append(time.monotonic())

    with exclusive_lock(tmp_path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        message = ""
        while "Waiting for another process" not in message:
            message += capsys.readouterr().err
            time.sleep(0.01)
        released = time.monotonic()
    waiting.join(timeout=30)
    assert acquired[0] >= released
