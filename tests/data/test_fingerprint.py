"""Corpus fingerprints recognise a moved, extended or shortened corpus and distinguish another one."""

import json
from pathlib import Path

import numpy as np
import pytest

from konkanivani.data import index
from konkanivani.data.manifest import OLD_SKETCHED, Fingerprint, make_fingerprint, read_fingerprint, read_manifest
from konkanivani.errors import CheckpointError

MANY = 3000


def fingerprint(path: Path, numbers: range, seed: int = 0) -> Fingerprint:
    """Return the fingerprint of a manifest with these row numbers, determined by the seed; all rows share one file."""
    path.mkdir(parents=True, exist_ok=True)
    seconds = np.random.default_rng(seed).uniform(1, 9, 4 * MANY).round(2)
    rows = [
        {"audio_filepath": "a.wav", "offset": number, "duration": seconds[number], "text": "x"} for number in numbers
    ]
    (path / "a.wav").touch()
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_fingerprint(read_manifest(path / "train.jsonl"))


def test_corpus_is_recognised_when_moved_extended_or_shortened(tmp_path):
    whole = fingerprint(tmp_path / "a", range(MANY))
    assert whole.shared(whole) == 1 and whole.is_unchanged(whole)
    moved = fingerprint(tmp_path / "b", range(MANY))
    assert whole.is_unchanged(moved) and whole.manifest != moved.manifest
    for numbers in (range(3 * MANY), range(MANY // 4), range(50)):
        other = fingerprint(tmp_path / "c", numbers)
        assert whole.shared(other) == other.shared(whole) == 1 and not whole.is_unchanged(other)


@pytest.mark.parametrize("beyond", [MANY // 4, MANY // 2, 3 * MANY // 4])
def test_shared_fraction_is_estimated_within_a_tenth(beyond, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "SKETCHED", OLD_SKETCHED)
    one = fingerprint(tmp_path / "a", range(MANY))
    other = fingerprint(tmp_path / "b", range(beyond, MANY + beyond))
    assert one.shared(other) == pytest.approx(1 - beyond / MANY, abs=0.1)


def test_different_corpus_with_equal_offsets_shares_almost_nothing(tmp_path):
    one, other = (fingerprint(tmp_path / str(seed), range(MANY), seed) for seed in (0, 1))
    assert one.shared(other) < 0.02
    small = fingerprint(tmp_path / "small", range(20), seed=2)
    assert small.shared(one) < 0.1 and small.shared(small) == 1


def test_sketch_is_equal_for_block_reads_and_stored_index(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "SKETCHED", 1000)
    expected = fingerprint(tmp_path, range(MANY))
    monkeypatch.setattr(index, "SMALL_BYTES", 0)
    monkeypatch.setattr(index, "BLOCK_BYTES", 20_000)
    for _ in range(2):  # written the first time, read the second time
        assert make_fingerprint(read_manifest(tmp_path / "train.jsonl")) == expected
    assert len(expected.sketch) == 1000


def test_checkpoint_fingerprint_reads_back_and_invalid_is_rejected(tmp_path):
    result = fingerprint(tmp_path, range(5))
    assert read_fingerprint(result.state_dict()) == result
    for invalid in ({"sketch": ("a",)}, {"hours": "1"}, {"utterances": True}, {"manifest": None}):
        with pytest.raises(CheckpointError, match="record of its training corpus"):
            read_fingerprint(result.state_dict() | invalid)
