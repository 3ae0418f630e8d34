"""Changed input is accepted or ends with an error of the project: no hang, no growth, no write elsewhere."""

from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.faults import fuzz
from tests.faults.fuzz import Fuzzer
from tests.faults.watched_process import CONTAINER_SECONDS, MAX_GROWTH_MIB, MAX_SECONDS

COUNTS = {"audio": 12, "media": 8, "manifests": 12, "checkpoints": 20, "flags": 8}  # --parts fuzz --full: 19,000
EXPECTED_OUTCOMES = {
    "audio": {"taken", "UnusableAudio", "DamagedAudio", "DataError"},
    "media": {"taken", "UnusableAudio", "DamagedAudio", "DataError"},
    "manifests": {"taken", "UnusableAudio", "DamagedAudio", "DataError"},
    "checkpoints": {"taken", "CheckpointError", "UsageError"},
    "flags": {"taken", "UsageError"},
}


@pytest.mark.parametrize("kind", COUNTS)
def test_changed_input_is_accepted_or_rejected(kind, small_run, tmp_path):
    if kind == "media":
        pytest.importorskip("av", reason="the extra `media` is not installed: pip install av")
    tally = fuzz.fuzz(kind, COUNTS[kind], 4, tmp_path / "work", small_run)
    assert tally.faults == [], tally.faults[-1]
    assert set(tally.outcomes) <= EXPECTED_OUTCOMES[kind], tally.outcomes
    assert sum(tally.outcomes.values()) >= COUNTS[kind] and len(tally.outcomes) > 1, tally.outcomes
    assert tally.slowest < (CONTAINER_SECONDS if kind == "media" else MAX_SECONDS) and tally.largest < MAX_GROWTH_MIB


def test_negative_control_an_unexpected_exception_is_detected(small_run, tmp_path, monkeypatch):
    def build(folder: Path, run: Path) -> Fuzzer:
        return Fuzzer(st.integers(0, 100), lambda number, inside: [0] * 50 if number < 50 else {}[number])

    monkeypatch.setitem(fuzz.FUZZERS, "flags", build)
    tally = fuzz.fuzz("flags", 20, 0, tmp_path / "work", small_run)
    assert "50: " in tally.faults[-1] and "KeyError" in tally.faults[-1] and tally.outcomes["fault"]  # shrunk
