"""Benchmark of gradient accumulation: every split gives the project the loss of the Trainer without a split."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, run_script
from tests.timeouts import PROCESS_TIMEOUT
from tests.whisper.folders import transformers

pytestmark = pytest.mark.full
SCRIPT = "benchmarks/peers/whisper_step.py"
RUN_WITHOUT_PACKAGE = """
import importlib.util, runpy, sys
find, missing = importlib.util.find_spec, sys.argv.pop()
importlib.util.find_spec = lambda name, *given: None if name == missing else find(name, *given)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_project_loss_of_any_split_equals_unsplit_trainer_loss():
    """The Trainer's results with a split are not checked, because a later version may correct them."""
    done = run_script(SCRIPT, "accumulation", "--json")
    assert done.returncode == 0 and done.stderr == ""
    parsed = json.loads(done.stdout)
    assert [(cut["batch"], cut["accumulation"]) for cut in parsed["cuts"]] == [(4, 1), (2, 2), (1, 4)]
    for name in ("loss", "norm"):
        whole = parsed["cuts"][0][f"trainer_{name}"]
        assert [cut[f"our_{name}"] for cut in parsed["cuts"]] == pytest.approx([whole] * 3, rel=1e-5)
    assert parsed["transformers"] == transformers.__version__


def test_table_depends_on_seed_and_shows_error_of_averaged_means():
    from benchmarks.peers.whisper_step import measure_accumulation

    one, other = measure_accumulation(1, divided=True), measure_accumulation(2)
    first, second, third = one.cuts
    assert abs(first.our_loss - other.cuts[0].our_loss) > 1e-4
    assert second.trainer_loss == pytest.approx(first.our_loss, rel=1e-5)  # both halves have 24 labels
    assert abs(third.trainer_norm - third.our_norm) > 0.01
    numbers = third.trainer_loss, third.trainer_norm, third.our_loss, third.our_norm
    assert f"| 1 x 4 | {' | '.join(f'{number:.3f}' for number in numbers)} |" in one.table().splitlines()


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_missing_trainer_package_is_reported_in_one_sentence(missing):
    command = [sys.executable, "-c", RUN_WITHOUT_PACKAGE, SCRIPT, "accumulation", missing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert (
        f"needs {missing}, which cannot be imported here. Install what is missing: pip install {missing}."
        in done.stderr
    )


@pytest.mark.parametrize("flags", [("--seed", "one"), ("--minutes", "1")])
def test_invalid_flags_exit_with_code_2(flags):
    done = run_script(SCRIPT, "accumulation", *flags)
    assert done.returncode == 2 and flags[0].strip("-") in done.stderr and "Traceback" not in done.stderr
