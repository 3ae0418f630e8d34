"""The benchmark of long utterances measures each length for itself and says what it cannot do."""

import json

import pytest

from tests.conftest import run_script, well

MINIMAL = ("--preset", "minimal", "--tokens_per_second", "2")


@pytest.mark.full
def test_two_lengths_each_for_itself():
    done = well(run_script("benchmarks/long_audio.py", *MINIMAL, "--seconds", "4", "62", "--json"))
    found = json.loads(done.stdout.splitlines()[-1])
    short, long = found["steps"]
    assert [(step["seconds"], step["tokens"], step["splits"]) for step in (short, long)] == [(4, 8, 0), (62, 124, 0)]
    assert not short["is_skipped"] and not long["is_skipped"] and long["loss"] > 0
    state = 16 * long["params"] / 2**20
    assert 0 < long["peak_above_state_mib"] < long["rss_growth_mib"]
    # A live peak that the process never had would be a fault of the count.
    assert long["peak_above_state_mib"] + state < long["rss_growth_mib"] < 1024


@pytest.mark.parametrize("flags", [("--seconds", "0"), ("--seconds", "1e9"), ("--tokens_per_second", "0")])
def test_flags_that_cannot_work_end_with_two(flags):
    done = run_script("benchmarks/long_audio.py", *flags)
    assert done.returncode == 2 and flags[0] in done.stderr and "Traceback" not in done.stderr
