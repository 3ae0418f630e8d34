"""Out-of-memory recovery: halved batches, recorded sizes, and a complete run."""

import dataclasses
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.command_line import is_out_of_memory
from konkanivani.data.batching import Batch, split_batch
from konkanivani.errors import CheckpointError, ResourceError
from konkanivani.lengths import CHUNK_FRAMES, SMALL_CHUNK_FRAMES
from konkanivani.memory.recovery import MicroBatchPlan, OomHistory, OomRetry
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from tests.conftest import TINY_MODEL, Corpus, read_log, run_folders, write_corpus
from tests.invariants.failing import ERRORS, FailCondition, fail_above, failing_forward
from tests.invariants.parts import global_batch, speeches
from tests.run_setup import begin_run


def batch_of(seconds: list[float]) -> Batch:
    spoken = [
        dataclasses.replace(speech, waveform=torch.zeros(int(16_000 * length)))
        for speech, length in zip(speeches(len(seconds)), seconds, strict=True)
    ]
    return global_batch(spoken, len(seconds)).micro_batches[0]


def plan_of(seconds: list[float]) -> MicroBatchPlan:
    """Return the batch unsplit, with nothing recomputed."""
    return MicroBatchPlan((batch_of(seconds),), recomputes_all=False)


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_halves_of_a_batch_equal_collated_batches(size, augmented):
    spoken = speeches(size, augmented=augmented)
    whole = global_batch(spoken, size).micro_batches[0]
    collated = global_batch(spoken, (size + 1) // 2).micro_batches
    for half, expected in zip(split_batch(whole), collated, strict=True):
        for field in dataclasses.fields(Batch):
            mine, theirs = getattr(half, field.name), getattr(expected, field.name)
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, field.name
        assert half.waveforms.untyped_storage().data_ptr() == whole.waveforms.untyped_storage().data_ptr()


def test_single_utterance_cannot_be_split():
    with pytest.raises(ValueError):
        split_batch(batch_of([1.0]))


def test_plan_shrinks_to_single_utterances_recomputation_small_chunks():
    cuts, cut = [], MicroBatchPlan((batch_of([1, 2, 3]), batch_of([4])), recomputes_all=False)
    while cut is not None:
        cuts.append(cut)
        cut = cut.smaller()
    sizes = [[batch.size for batch in cut.micro_batches] for cut in cuts]
    assert sizes == [[3, 1], [2, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert [cut.recomputes_all for cut in cuts] == [False] * 3 + [True] * 2
    assert [cut.chunk_frames for cut in cuts] == [CHUNK_FRAMES] * 4 + [SMALL_CHUNK_FRAMES]


def test_rank_without_utterances_that_runs_out_of_memory_gives_a_resource_error():
    empty = MicroBatchPlan((), recomputes_all=False)
    assert empty.smaller() is None
    attempts = OomRetry(empty, OomHistory(0), undo=lambda: None)
    with pytest.raises(ResourceError, match="Out of memory on a rank without utterances"):
        for attempt in attempts:
            with attempt:
                raise MemoryError


def test_chunks_that_are_already_smaller_are_kept():
    assert MicroBatchPlan((batch_of([1]),), recomputes_all=True, chunk_frames=7).smaller() is None
    assert MicroBatchPlan((batch_of([1]),), recomputes_all=True, chunk_frames=7).in_small_chunks().chunk_frames == 7


def test_batch_at_least_as_large_as_a_failed_one_is_too_large():
    splits = OomHistory(conditions=0)
    assert splits.remember(plan_of([5.2, 5.9, 6.7, 6.9]))
    assert splits.is_too_large(batch_of([6.1] * 4)) and splits.is_too_large(batch_of([9.0] * 5))
    assert not splits.is_too_large(batch_of([5.9] * 4)) and not splits.is_too_large(batch_of([9.0] * 3))
    assert not splits.remember(plan_of([7.5] * 4)) and splits.remember(plan_of([6.5] * 2))
    cut = splits.fit_to_memory(MicroBatchPlan((batch_of([5.0] * 4), batch_of([6.5] * 4)), recomputes_all=False))
    assert [batch.size for batch in cut.micro_batches] == [4, 1, 1, 1, 1] and not cut.recomputes_all
    splits.remember(plan_of([20.0]))
    assert splits.fit_to_memory(
        MicroBatchPlan((batch_of([3.0]), batch_of([21.0])), recomputes_all=False)
    ).recomputes_all


def test_utterance_that_failed_with_recomputation_uses_small_chunks():
    splits = OomHistory(conditions=0)
    assert splits.remember(plan_of([20.0])) and not splits.remember(plan_of([20.0]))
    assert splits.fit_to_memory(plan_of([20.0])).chunk_frames == CHUNK_FRAMES
    # A failure of several utterances implies nothing about one alone.
    assert splits.remember(dataclasses.replace(plan_of([8.0] * 3), recomputes_all=True))
    assert not splits.fit_to_memory(plan_of([8.0])).recomputes_all

    recomputed = dataclasses.replace(plan_of([20.0]), recomputes_all=True)
    assert splits.remember(recomputed) and not splits.remember(recomputed)
    fitting = splits.fit_to_memory(plan_of([3.0, 20.5]))
    assert fitting.recomputes_all and fitting.chunk_frames == SMALL_CHUNK_FRAMES
    assert splits.fit_to_memory(plan_of([19.5])).chunk_frames == CHUNK_FRAMES
    loaded = OomHistory(conditions=0)
    loaded.load_state_dict(splits.state_dict())
    assert loaded.state_dict() == splits.state_dict() and all(type(n) is int for n in splits.state_dict().values())
    assert loaded.needs_small_chunks(batch_of([20.0])) and not loaded.needs_small_chunks(batch_of([19.5]))


def test_oom_sizes_of_a_checkpoint_without_chunks_keep_their_meaning():
    splits = OomHistory(conditions=7)
    splits.load_state_dict({"conditions": 7, "6": 4, "20": 1})
    assert splits.is_too_large(batch_of([6.5] * 4)) and splits.is_too_large(batch_of([20.0]))
    assert not splits.needs_small_chunks(batch_of([30.0]))


def test_oom_sizes_are_restored_only_under_the_same_conditions():
    splits, same, other = (OomHistory(conditions) for conditions in (7, 7, 8))
    splits.remember(plan_of([6.5] * 4))
    for loaded in (same, other):
        loaded.load_state_dict(splits.state_dict())
    assert same.is_too_large(batch_of([6.5] * 4)) and same.state_dict() == splits.state_dict()
    assert not other.is_too_large(batch_of([6.5] * 4)) and other.conditions == 8
    for broken in ({"6": "four"}, {"six": 4}, {"6": -1}, {"6": True}, {"6": 4.0}, {"-6": 4}):
        with pytest.raises(CheckpointError, match="OOM limit"):
            same.load_state_dict({"conditions": 7} | broken)


@pytest.mark.parametrize("error", [*ERRORS.values(), RuntimeError("std::bad_alloc")], ids=repr)
def test_out_of_memory_errors_are_recognized(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "message", ["CUDA error: an illegal memory access was encountered", "stack expects each tensor"]
)
def test_other_errors_are_not_taken_for_out_of_memory(message):
    assert not is_out_of_memory(RuntimeError(message))


def build_tiny_run(corpus: Corpus, directory: Path, *more: str) -> Run:
    cut = ("--batch_size", "4", "--gradient_accumulation_steps", "1", "--concurrent_micro_batches", "1")
    # At one speed, sizes repeat from epoch to epoch.
    flags = (*TINY_MODEL, *corpus.flags(), *cut, *run_folders(directory), "--num_workers", "0", *more)
    return build_run(begin_run([*flags, "--speed_perturbation", "1.0"]))


def with_failing_forward(run: Run, when: FailCondition) -> Run:
    return dataclasses.replace(run, step=failing_forward(run.step, when, ERRORS["cuda"]))


def test_run_with_splits_has_the_cursor_counts_and_steps_of_one_without(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus", {"train": 10, "valid": 3})  # three steps per epoch, the last one ragged
    train(build_tiny_run(corpus, tmp_path / "whole", "--max_steps", "4"))
    train(with_failing_forward(build_tiny_run(corpus, tmp_path / "split", "--max_steps", "4"), fail_above(2)))
    whole, split = read_log(tmp_path / "whole"), read_log(tmp_path / "split")
    for name in ("step", "epoch", "tokens", "utterances", "learning_rate", "padding_share"):
        assert [record[name] for record in whole] == [record[name] for record in split], name
    assert all(record["splits"] == 0 for record in whole)
    assert {record["splits"] for record in split} == {0, 1}, "a size that is known was not cut beforehand"
    states = [read_checkpoint(tmp_path / name / "checkpoints" / LAST).states for name in ("whole", "split")]
    for name in ("step", "epoch", "window", "audio_seconds", "skipped_steps"):
        assert states[0]["progress"][name] == states[1]["progress"][name]
    counted = [state["progress"]["splits"] for state in states]
    assert counted == [0, sum(record["splits"] for record in split)]
    messages = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Out of memory at 4 x")]
    # One line per retried step, and for the validation, which has its own memory of sizes.
    assert sum(record["splits"] for record in split) <= len(messages) <= len(states[1]["splits"]) + 3

    resumed = with_failing_forward(
        build_tiny_run(corpus, tmp_path / "split", "--resume", "auto", "--max_steps", "6"), fail_above(2)
    )
    assert resumed.step.oom_history.state_dict() == states[1]["splits"]
    train(resumed)
    assert [record["splits"] for record in read_log(tmp_path / "split")][4:] == [0, 0]


def test_old_checkpoint_without_splits_can_be_resumed(copy):
    path = copy / "checkpoints" / LAST
    checkpoint = read_checkpoint(path)
    states = {name: state for name, state in checkpoint.states.items() if name != "splits"}
    write_checkpoint(path, dataclasses.replace(checkpoint, states=states))
    run = build_run(begin_run([*run_folders(copy), "--resume", "auto", "--max_steps", "4"]))
    train(run)
    assert run.state.step == 4


def test_steps_before_an_utterance_that_does_not_fit_are_saved(corpus, tmp_path):
    run = build_tiny_run(corpus, tmp_path, "--max_steps", "9", "--save_steps", "0", "--save_minutes", "0")
    calls = []
    with pytest.raises(ResourceError, match="Out of memory with a micro-batch of one"):
        train(with_failing_forward(run, lambda _number, size: calls.append(size) or run.state.step >= 2))
    assert read_checkpoint(tmp_path / "checkpoints" / LAST).states["progress"]["window"] == 2
    assert calls[2:] == [4, 2, 1, 1, 1]
