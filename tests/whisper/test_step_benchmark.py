"""The benchmark takes the same step in this project and in transformers, and rejects invalid flags."""

import json

import pytest

from tests.conftest import checked, run_script

pytest.importorskip(
    "transformers", reason="transformers, with which the step is compared, is not installed: pip install -e .[test]"
)
pytestmark = pytest.mark.full


def test_both_implementations_take_the_same_step(tmp_path):
    flags = "--size digits --rounds 1 --accum 1 --shortest 1 --longest 1 --at_once 1 --json"
    done = checked(run_script("benchmarks/peers/whisper_step.py", "compare", *flags.split(), cwd=tmp_path))
    ours, theirs = json.loads(done.stdout.splitlines()[-1])["results"]
    assert ours["parameters"] == theirs["parameters"] == 199_232
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    state = 16 * ours["parameters"] / 2**20
    assert state < ours["peak_mib"] < theirs["peak_mib"]
    assert all(
        len(side["seconds"]) == len(side["cpu_seconds"]) == 1 < 1 + side["seconds"][0] for side in (ours, theirs)
    )
    assert all(0 < side["aside"]["features"][0] < side["seconds"][0] for side in (ours, theirs))


@pytest.mark.parametrize("flags", ["--rounds 0", "--longest 31", "--shortest 9 --longest 8", "--size huge"])
def test_invalid_flags_exit_with_code_2(flags, tmp_path):
    done = run_script("benchmarks/peers/whisper_step.py", "compare", *flags.split(), cwd=tmp_path)
    assert done.returncode == 2 and flags.split()[0] in done.stderr and "Traceback" not in done.stderr
