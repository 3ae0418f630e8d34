"""Non-finite numbers; benchmarks/faults.py --parts numbers --full has all cases."""

import math

import pytest
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST, PREVIOUS, Checkpointer
from konkanivani.data.batching import Example, check_tokens
from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.errors import DataError, NumericsError, UsageError
from konkanivani.training.logbook import Logbook
from konkanivani.training.progress import Resumed, SkipRecord, describe_skip
from tests.conftest import read_log
from tests.faults.non_finite import (
    PERMANENT_FAILURES,
    NonFiniteBatch,
    bad_label_findings,
    non_finite_batch_findings,
    permanent_failure_findings,
)
from tests.run_setup import parse_flags


@pytest.mark.parametrize(
    "batch", [NonFiniteBatch("fp32", "audio"), NonFiniteBatch("fp16", "gradient", "inf")], ids=repr
)
def test_non_finite_batch_is_skipped_reported_and_changes_nothing(bench, batch, tmp_path):
    assert non_finite_batch_findings(bench, batch, tmp_path / "run") == []


def test_permanent_failure_exits_with_5_and_leaves_a_resumable_checkpoint(bench, tmp_path):
    broken = next(broken for broken in PERMANENT_FAILURES if broken.fault[0] == "not_finite")
    assert permanent_failure_findings(bench, broken, tmp_path / "run") == []


def test_label_out_of_range_is_rejected_with_its_utterance(bench, tmp_path):
    assert bad_label_findings(bench, 30, 2, tmp_path / "run") == []


@pytest.mark.parametrize("token", [0, -1, 30, 2**40])
def test_tokens_must_be_between_the_blank_and_the_vocabulary_size(token):
    check_tokens(Example("u", torch.zeros(5), [1, 29], None), 30, OUR_TOKENS)
    with pytest.raises(DataError, match=f"of u has the token {token}, but tokens are between 1 and 29"):
        check_tokens(Example("u", torch.zeros(5), [4, token], None), 30, OUR_TOKENS)


def test_token_0_is_valid_if_there_is_no_blank():
    special = SpecialTokens(blank=None, unknown=None, start=7, end=8)
    check_tokens(Example("u", torch.zeros(5), [0, 29], None), 30, special)
    for token in (-1, 30):
        with pytest.raises(DataError, match=f"of u has the token {token}, but tokens are between 0 and 29"):
            check_tokens(Example("u", torch.zeros(5), [0, token], None), 30, special)


@pytest.mark.parametrize("flag", ["learning_rate", "max_grad_norm"])
@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
def test_learning_rate_and_max_grad_norm_must_be_positive_and_finite(flag, value):
    with pytest.raises(UsageError, match=f"--{flag}"):
        parse_flags([f"--{flag}", value])


def make_checkpoint(step: int, value: float = 1.0, moment: float = 1e38) -> Checkpoint:
    """Return a state of numbers at the fp32 limit: their squares, or their sum, are not finite."""
    states = {
        "model": {"weight": torch.tensor([value, 3e38, 3e38]), "count": torch.tensor(2**60)},
        "optimizer": {"weight/exp_avg": torch.full((4,), moment, dtype=torch.bfloat16)},
        "progress": {"step": step, "best_score": math.inf},
    }
    return Checkpoint("", b"tokens", 3, step, 0, states)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_checkpoint_is_never_saved_but_large_numbers_are(value, tmp_path):
    keeper = Checkpointer(tmp_path, keep=2)
    with pytest.raises(NumericsError, match="No checkpoint was saved before"):
        keeper.save(make_checkpoint(1, value))
    keeper.save(make_checkpoint(2))
    for spoilt in (make_checkpoint(3, value), make_checkpoint(3, moment=value)):
        with pytest.raises(NumericsError, match=f"step 3 is not finite .*{LAST}"):
            keeper.save(spoilt, epoch=1, is_best=True)
    assert [path.name for path in tmp_path.iterdir()] == [LAST]
    assert read_checkpoint(tmp_path / LAST).step == 2


def test_previous_checkpoint_is_always_of_an_earlier_step(tmp_path):
    keeper = Checkpointer(tmp_path, keep=2)
    for step in (4, 6, 6, 6):
        keeper.save(make_checkpoint(step))
    assert read_checkpoint(tmp_path / PREVIOUS).step == 4
    assert keeper.newest_before(6) == tmp_path / PREVIOUS and keeper.newest_before(7) == tmp_path / LAST
    assert keeper.newest_before(4) is None
    resumed = Checkpointer(tmp_path, keep=2, step_of_last=6)
    resumed.save(make_checkpoint(6))
    assert read_checkpoint(tmp_path / PREVIOUS).step == 4
    resumed.save(make_checkpoint(8))
    assert read_checkpoint(tmp_path / PREVIOUS).step == 6


def make_skip(number: int, in_a_row: int = 1) -> SkipRecord:
    names = tuple(f"u{place}" for place in range(10))
    return SkipRecord(7, 1, number, in_a_row, math.nan, math.nan, 1.5, math.nan, 1.0, "its loss is nan", names)


def test_skip_is_logged_once_and_only_the_first_of_a_row_is_printed(tmp_path, capsys):
    with Logbook(tmp_path / "runs" / "default") as logbook:
        logbook.log(make_skip(1))
        logbook.log(make_skip(2, in_a_row=2))
        logbook.log(make_skip(3, in_a_row=3))
    output = capsys.readouterr().out
    assert output.strip() == describe_skip(make_skip(1))
    assert "Step 8 is skipped: its loss is nan" in output and "u7 and 2 others" in output
    # Resumed from a checkpoint of step 7 that was saved after the second skip.
    Logbook(tmp_path / "runs" / "default", resumed=Resumed(step=7, skipped_steps=2)).close()
    assert [record["skipped_steps"] for record in read_log(tmp_path, "skip")] == [1, 2]
    assert read_log(tmp_path, "skip")[0]["loss"] is None and len(read_log(tmp_path, "skip")[0]["utterances"]) == 10
