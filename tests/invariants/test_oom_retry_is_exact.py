"""Invariant 5: a step that runs out of memory and is retried in smaller pieces is the same step (1e-9, float64)."""

import dataclasses
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence

import pytest
import torch

from konkanivani.config import ModelConfig
from konkanivani.data.batching import Example
from konkanivani.data.index import Utterance
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.errors import ResourceError
from konkanivani.lengths import SMALL_CHUNK_FRAMES
from konkanivani.memory import recovery
from konkanivani.ops import chunks as ctc
from konkanivani.training.optimizer_state import OptimizerState
from konkanivani.training.step import StepParts, StepReport, train_step
from konkanivani.training.validation import Evaluation, join_portions, recognize_all
from tests.conftest import ROOT, checked, mark_full_except, parameter_grid
from tests.invariants.failing import ERRORS, fail_above, fail_at, failing_backward, failing_chunks, failing_forward
from tests.invariants.parts import MODEL as TWO_LAYER_MODEL
from tests.invariants.parts import (
    double_parts,
    global_batch,
    long_speeches,
    relative_difference,
    speeches,
    with_dropout,
)
from tests.timeouts import PROCESS_TIMEOUT

BOUND = 1e-9
MODEL = dataclasses.replace(TWO_LAYER_MODEL, encoder_layers=1, decoder_layers=1)
FAILING = {"forward": failing_forward, "backward": failing_backward}
SPOKEN = speeches(6)
LONG = long_speeches()


def parts_of(model: ModelConfig = MODEL, recompute: str = "never") -> StepParts:
    return double_parts(model, recompute)


def state_of(parts: StepParts) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer moments; after one step, the first moments stand for the gradients."""
    return {**dict(parts.model.named_parameters()), **OptimizerState(parts.model, parts.optimizer).state_dict()}


def largest_difference(one: StepParts, other: StepParts) -> float:
    first, second = state_of(one), state_of(other)
    return max(relative_difference(first[name], second[name]) for name in first)


@functools.cache
def reference_step(batch_size: int, is_long: bool) -> tuple[StepParts, StepReport]:
    """Return the step without any failure."""
    parts = parts_of()
    report = train_step(parts, global_batch(LONG if is_long else SPOKEN, batch_size), step=3)
    assert report.splits == 0
    return parts, report


def assert_same_step(parts: StepParts, report: StepReport, batch_size: int, is_long: bool = False) -> None:
    """Assert that the weights and the report equal those from a step without any failure."""
    reference, expected = reference_step(batch_size, is_long)
    assert not report.is_skipped
    for name in ("loss", "ctc_loss", "attention_loss", "gradient_norm", "learning_rate", "scale"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=BOUND, abs=0), name
    assert largest_difference(reference, parts) < BOUND
    assert all(p.grad is None for p in parts.model.parameters())


@pytest.mark.parametrize("place, error", parameter_grid(itertools.product(FAILING, [0, 1, 2]), ERRORS))
def test_split_after_out_of_memory_in_any_micro_batch_equals_full_step(place, error):
    where, micro_batch = place
    parts = FAILING[where](parts_of(), fail_at(micro_batch), ERRORS[error])
    report = train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert report.splits == 1
    assert_same_step(parts, report, 2)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_out_of_memory_in_gradient_clipping_is_retried(monkeypatch, is_scaled):
    parts = parts_of()
    if is_scaled:
        parts = dataclasses.replace(parts, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise ERRORS["cuda"]
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", fail_once)
    report = train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert report.splits == 1 and report.scale == (1024.0 if is_scaled else 1.0)
    assert_same_step(parts, dataclasses.replace(report, scale=1.0), 2)


def test_retry_before_first_use_keeps_the_loss_scale():
    plain = dataclasses.replace(parts_of(), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    parts = failing_forward(plain, fail_at(0), ERRORS["cuda"])
    report = train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert (report.splits, report.scale) == (1, 1024.0)
    assert_same_step(parts, dataclasses.replace(report, scale=1.0), 2)


@pytest.mark.parametrize("where", FAILING)
def test_micro_batch_is_halved_twice_and_size_is_remembered(where):
    parts = FAILING[where](parts_of(), fail_above(1), ERRORS["cuda"])
    report = train_step(parts, global_batch(SPOKEN, 4), step=3)
    assert report.splits == 2
    assert_same_step(parts, report, 4)
    # The failed size is remembered: the next step starts with the size that fitted.
    again = train_step(parts, global_batch(SPOKEN, 4), step=4)
    assert again.splits == 0


def test_single_utterance_out_of_memory_enables_recomputation(capsys):
    parts = failing_backward(parts_of(), fail_above(0), ERRORS["cpu"])
    report = train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert report.splits == 2
    assert_same_step(parts, report, 2)
    output_text = capsys.readouterr().out.splitlines()
    assert (
        len(output_text) == 2
        and "micro-batches of at most 1" in output_text[0]
        and "all blocks recomputed" in output_text[1]
    )
    assert train_step(parts, global_batch(SPOKEN, 2), step=4).splits == 0
    assert capsys.readouterr().out == ""


def test_utterance_that_never_fits_is_named_and_state_is_unchanged():
    parts, untouched = parts_of(), parts_of()
    failing = failing_forward(parts, fail_above(0), ERRORS["cuda"])
    with pytest.raises(ResourceError) as caught:
        train_step(failing, global_batch(SPOKEN, 2), step=3)
    longest = max(SPOKEN, key=lambda speech: len(speech.waveform))
    for part in (longest.utterance_id, f"{len(longest.waveform) / 16_000:.1f} s", "CUDA out of memory", "--max_dur"):
        assert part in str(caught.value)
    assert caught.value.exit_code == 6 and caught.value.__context__ is None
    assert failing.forward.front_end.sizes == [2, 1, 1, 1]
    assert all(torch.equal(state_of(parts)[name], tensor) for name, tensor in state_of(untouched).items())
    assert all(p.grad is None for p in parts.model.parameters())


def test_measures_in_use_are_not_retried():
    parts = failing_forward(parts_of(recompute="always"), fail_above(0), ERRORS["cuda"])
    parts = dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, chunk_frames=SMALL_CHUNK_FRAMES))
    with pytest.raises(ResourceError):
        train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert parts.forward.front_end.sizes == [2, 1]


CHUNKED_OPERATIONS = [f"{what} {where}" for what in ("subsampling", "ctc", "attention") for where in FAILING]


@pytest.mark.parametrize("where", mark_full_except(CHUNKED_OPERATIONS, ("subsampling forward", "ctc backward")))
def test_out_of_memory_with_recomputation_enables_small_chunks(where, capsys):
    parts = failing_chunks(parts_of(), where, SMALL_CHUNK_FRAMES, ERRORS["cpu"])
    report = train_step(parts, global_batch(LONG, 2), step=3)
    assert report.splits == 3
    assert_same_step(parts, report, 2, is_long=True)
    output_text = capsys.readouterr().out.splitlines()
    assert len(output_text) == 3 and "all blocks recomputed" in output_text[1]
    assert "subsampling, logits and CTC in chunks of 100 frames" in output_text[2]
    assert train_step(parts, global_batch(LONG, 2), step=4).splits == 0
    assert capsys.readouterr().out == ""


def test_small_chunks_with_dropout_equal_full_step():
    model = with_dropout(MODEL, 0.3)
    whole = train_step(parts_of(model, "always"), global_batch(LONG, 1), step=3)
    parts = failing_chunks(parts_of(model, "always"), "ctc backward", SMALL_CHUNK_FRAMES, ERRORS["cuda"])
    chunked = train_step(parts, global_batch(LONG, 1), step=3)
    assert (whole.splits, chunked.splits) == (0, 1)
    assert chunked.loss == pytest.approx(whole.loss, rel=BOUND)
    assert chunked.gradient_norm == pytest.approx(whole.gradient_norm, rel=BOUND)


def test_negative_control_chunks_without_carried_state_differ(monkeypatch):
    parts = parts_of()
    through_chunk = ctc._advance_chunk
    monkeypatch.setattr(
        ctc, "_advance_chunk", lambda *inputs: through_chunk(*inputs[:4], inputs[4].detach(), *inputs[5:])
    )
    train_step(failing_chunks(parts, "ctc forward", SMALL_CHUNK_FRAMES, ERRORS["cpu"]), global_batch(LONG, 2), step=3)
    assert largest_difference(reference_step(2, is_long=True)[0], parts) > 1e-3


@pytest.mark.parametrize("where", FAILING)
def test_other_errors_are_raised_unchanged(where):
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    parts = FAILING[where](parts_of(), fail_at(1), error)
    with pytest.raises(RuntimeError) as caught:
        train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert caught.value is error


def live_tensors_at_retry(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the living block outputs at each release of memory, after a failure in the last block."""
    parts, outputs, alive = parts_of(), [], []

    def run_block(block, *inputs):
        output = block(*inputs)
        outputs.append(weakref.ref(output))
        if len(outputs) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return output

    def wrap_block(_number, block):
        return functools.partial(run_block, block)

    def release_memory():
        gc.collect()
        alive.append(sum(output() is not None for output in outputs))

    monkeypatch.setattr("konkanivani.memory.recovery.release_memory", release_memory)
    parts = dataclasses.replace(
        parts, forward=dataclasses.replace(parts.forward, recompute=lambda _seconds: wrap_block)
    )
    assert train_step(parts, global_batch(SPOKEN, 2), step=3).splits == 1
    return alive


def test_tensors_of_failed_attempt_are_freed_before_retry(monkeypatch):
    assert live_tensors_at_retry(monkeypatch) == [0]


def test_negative_control_stored_traceback_keeps_tensors_alive(monkeypatch):
    kept, check = [], recovery.is_out_of_memory
    monkeypatch.setattr(recovery, "is_out_of_memory", lambda error: kept.append(error.__traceback__) or check(error))
    (alive,) = live_tensors_at_retry(monkeypatch)
    assert alive > 0


def test_split_with_dropout_equals_step_in_smaller_micro_batches():
    model = with_dropout(MODEL, 0.3)
    whole = train_step(parts_of(model), global_batch(SPOKEN, 2), step=3)
    parts = failing_forward(parts_of(model), fail_at(1), ERRORS["cuda"])
    split = train_step(parts, global_batch(SPOKEN, 2), step=3)
    assert (split.splits, split.is_skipped, split.learning_rate) == (1, False, whole.learning_rate)
    assert split.loss == pytest.approx(whole.loss, rel=0.2) and split.loss != whole.loss
    # The retry is seeded again, so it equals a step with the smaller micro-batches from the start.
    assert train_step(parts_of(model), global_batch(SPOKEN, 1), step=3).loss == pytest.approx(split.loss, rel=BOUND)


def test_negative_control_gradients_of_failed_attempt_change_result(monkeypatch):
    parts = parts_of()
    monkeypatch.setattr(parts.optimizer, "zero_grad", lambda: None)
    failing = failing_forward(parts, fail_at(2), ERRORS["cuda"])
    assert train_step(failing, global_batch(SPOKEN, 2), step=3).splits == 1
    assert largest_difference(reference_step(2, is_long=False)[0], parts) > 1e-3


def test_negative_control_wrong_loss_counts_change_result():
    parts, batch = parts_of(), global_batch(SPOKEN, 2)
    train_step(parts, dataclasses.replace(batch, tokens=batch.tokens // 2, utterances=batch.utterances // 2), step=3)
    assert largest_difference(reference_step(2, is_long=False)[0], parts) > 1e-3


class NumberTokenizer:
    """Tokenizer that decodes a hypothesis into its token ids."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def evaluate(parts: StepParts, spoken: Sequence[Example] = tuple(speeches(7, augmented=False))) -> Evaluation:
    parts.model.ctc_head.bias.data[0] -= 3.0  # an untrained model decodes only blanks otherwise
    spoken = sorted(spoken, key=lambda speech: -len(speech.waveform))
    batches = []
    for some in filter(None, (spoken[:5], spoken[5:])):
        batch = global_batch(some, len(some)).micro_batches[0]
        batches.append((batch, [Utterance(name, name, 1.0, "words") for name in batch.utterance_ids]))
    portion = recognize_all(parts.forward, batches, NumberTokenizer(), greedy_ctc)
    return join_portions([portion], parts.forward.objective, seconds=0.0)


@functools.cache
def reference_validation() -> Evaluation:
    return evaluate(parts_of())


@pytest.mark.parametrize("error, when", parameter_grid(ERRORS, [fail_at(0), fail_at(1), fail_above(2), fail_above(1)]))
def test_split_validation_equals_full_validation(error, when):
    expected = reference_validation()
    failing = failing_forward(parts_of(), when, ERRORS[error])
    actual = evaluate(failing)
    assert len(failing.forward.front_end.sizes) > 2
    assert vars(actual.losses) == pytest.approx(vars(expected.losses), rel=BOUND, abs=0)
    assert actual.scored == expected.scored and actual.rates == expected.rates
    assert any(scored.hypothesis for scored in expected.scored)


@pytest.mark.parametrize("where", ["subsampling forward", "attention forward"])
def test_validation_in_small_chunks_equals_full_validation(where, capsys):
    spoken = [dataclasses.replace(speech, augment_seed=None) for speech in LONG]
    expected = evaluate(parts_of(), spoken)
    actual = evaluate(failing_chunks(parts_of(), where, SMALL_CHUNK_FRAMES, ERRORS["cuda"]), spoken)
    assert "in chunks of 100 frames" in capsys.readouterr().out
    assert vars(actual.losses) == pytest.approx(vars(expected.losses), rel=BOUND, abs=0)
    assert actual.scored == expected.scored and any(scored.hypothesis for scored in expected.scored)


def test_validation_error_names_utterance_that_does_not_fit():
    with pytest.raises(ResourceError, match=r"u\d of \d\.\d s .*--max_validation_duration"):
        evaluate(failing_forward(parts_of(), fail_above(0), ERRORS["cpu"]))


def test_other_errors_in_validation_are_raised_unchanged():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught:
        evaluate(failing_forward(parts_of(), fail_above(0), error))
    assert caught.value is error


@pytest.fixture(scope="module")
def short_of_memory() -> tuple[dict[str, dict], str]:
    """Return the results and the output of steps whose data segment is too small for a whole micro-batch."""
    # glibc uses mmap for blocks of at least this size, so that freeing one returns its memory to the system.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.invariants.out_of_memory_steps"]
    done = checked(
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT)
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.parametrize("recompute, fails_in_backward", [("never", False), ("always", True)])
def test_step_after_real_out_of_memory_equals_full_step(recompute, fails_in_backward, short_of_memory):
    result, output_text = short_of_memory[0][recompute], short_of_memory[1]
    assert result["undisturbed_splits"] == 0 and result["splits"] >= 1
    assert result["failed_in_backward"] == fails_in_backward
    assert result["loss_difference"] < BOUND and result["weight_difference"] < BOUND
    assert output_text.count("Out of memory at 4 x 5.0 s") == 2
