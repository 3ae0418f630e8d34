"""The logbook: exact numbers, each step once, and disk errors that do not stop training."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator

from konkanivani import files as appended_file
from konkanivani.memory.monitor import PLANNED, RESERVED, VALIDATION, PhaseMemory
from konkanivani.training import logbook as logbook_module
from konkanivani.training.logbook import (
    BIN_HEIGHT,
    ROW_HEIGHT,
    RULER_HEIGHT,
    Logbook,
    colour,
    draw_utterance,
    hypotheses_table,
    most_active_tokens,
    tagged_numbers,
)
from konkanivani.training.progress import (
    CURVES,
    INITIAL,
    HypothesisPair,
    Resumed,
    SpectrogramRecord,
    StepRecord,
    ValidationRecord,
)
from tests.fork_server import fork_server

LOSSES = {"2 loss/all", "2 loss/attention", "2 loss/ctc"}


def make_step(step: int, loss: float | None = 0.1) -> StepRecord:
    """Return a step whose numbers have no short decimal representation."""
    return StepRecord(
        step=step,
        epoch=1,
        loss=loss,
        ctc_loss=1 / 3,
        attention_loss=math.pi,
        learning_rate=1e-4 / 3,
        gradient_norm=2**0.5,
        scale=65536.0,
        skipped_steps=2,
        skipped=False,
        audio_seconds_per_second=123.456789012345678,
        padding_share=0.07,
        tokens=4321,
        utterances=16,
        seconds=0.73,
        splits=1,
        cache_clearings=2,
        cache_clearing_seconds=0.0123,
        memory=(PhaseMemory("forward", 1.5, 2.5, 3.5, 4.5, 5.5, 1.0, 3), PhaseMemory("backward", None, None, 7.5, 8.5)),
    )


def make_validation(step: int) -> ValidationRecord:
    pairs = tuple(HypothesisPair(f"हांव गोंयांत रावतां {n}", f"हांव गोंयात <unk> | {n}", f"u{n}") for n in range(8))
    memory = PhaseMemory("validation", None, None, None, 99.25)
    return ValidationRecord(step, 3, 1.2341, 1.5, 0.9, 0.345, 0.121, 40, 2.5, pairs, memory)


def make_spectrogram(step: int) -> SpectrogramRecord:
    seconds = 2
    posteriors = torch.rand(seconds * 25, 40).softmax(-1)
    return SpectrogramRecord(step, "u1", torch.randn(seconds * 16000), torch.randn(seconds * 100, 80), posteriors)


def log_all(folder: Path, *records: StepRecord | ValidationRecord | SpectrogramRecord, **options: object) -> None:
    with Logbook(folder, **options) as logbook:
        for record in records:
            logbook.log(record)


def lines_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def events_of(directory: Path) -> EventAccumulator:
    everything = {"scalars": 0, "images": 0, "audio": 0, "tensors": 0}
    accumulator = EventAccumulator(str(directory), everything)
    accumulator.Reload()
    return accumulator


def single_value(events: list, step: int) -> float:
    (event,) = events
    assert event.step == step
    return event.value


def steps_of(accumulator: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in accumulator.Scalars(tag)]


def shown_tensors(directory: Path, tag: str) -> list:
    """Return the tensors as TensorBoard's server reads them.

    Unlike EventAccumulator, it also purges text at a restart.
    """
    accumulator = PluginEventAccumulator(str(directory), {"tensors": 0})
    accumulator.Reload()
    return accumulator.Tensors(tag)


@pytest.fixture
def reported_warnings() -> list[str]:
    return []


# Round trip


def test_step_and_validation_round_trip_through_jsonl_exactly(tmp_path):
    log_all(tmp_path, make_step(1), make_validation(1))
    step, validation = lines_of(tmp_path)
    # Normalise through JSON, which has lists only; the floats are still compared bit for bit.
    assert step == {"kind": "step"} | json.loads(json.dumps(asdict(make_step(1))))
    assert validation == {"kind": "validation"} | json.loads(json.dumps(asdict(make_validation(1))))
    assert step["attention_loss"].hex() == math.pi.hex()


def test_every_tagged_number_is_read_back_from_tensorboard(tmp_path):
    validation = replace(make_validation(7), initial_wer=0.5, initial_cer=0.25)
    log_all(tmp_path, make_step(7), validation)
    drawn = {}
    for curve in CURVES:
        expected = [*tagged_numbers(make_step(7), curve), *tagged_numbers(validation, curve)]
        events = events_of(tmp_path / curve)
        drawn[curve] = {tag: single_value(events.Scalars(tag), 7) for tag in events.Tags()["scalars"]}
        assert drawn[curve] == {tag: pytest.approx(number, rel=1e-6) for tag, number in expected}
    assert drawn[VALIDATION].keys() == {"1 error rates/CER", "1 error rates/WER"} | LOSSES
    assert drawn[PLANNED] == {"4 memory/forward_mib": 5.5} and drawn[RESERVED] == {"4 memory/forward_mib": 2.5}
    assert drawn[INITIAL] == {"1 error rates/WER": 0.5, "1 error rates/CER": 0.25}  # next to the validation values
    training = drawn[""]
    assert LOSSES < training.keys() and training["4 memory/backward_mib"] == 7.5
    assert [training[f"8 allocator/{name}"] for name in ("fragmentation_forward_mib", "retries_forward")] == [1.0, 3]
    assert training["8 allocator/cache_clearings"] == 2
    assert "8 allocator/retries_backward" not in training  # None is not logged


def test_charts_begin_with_error_rates_and_none_is_empty_on_a_cpu(tmp_path):
    """TensorBoard sorts its groups and opens the first two."""
    phases = [PhaseMemory(phase, None, None, 7.5, 8.5) for phase in ("data", "forward", "backward", "update", "log")]
    on_a_cpu = replace(make_step(1), cache_clearings=None, cache_clearing_seconds=None, memory=tuple(phases))
    log_all(tmp_path, on_a_cpu, make_validation(1))
    events = events_of(tmp_path), events_of(tmp_path / VALIDATION)
    tags = sorted({tag for some in events for tag in some.Tags()["scalars"]})
    groups = list(dict.fromkeys(tag.split("/")[0] for tag in tags))
    assert groups == ["1 error rates", "2 loss", "3 speed", "4 memory", "5 optimizer", "6 data"]
    memory = [tag for tag in tags if tag.startswith("4 memory")]
    assert memory == [f"4 memory/{name}" for name in ("backward_mib", "forward_mib", "splits", "update_mib")]
    assert not any((tmp_path / curve).exists() for curve in (PLANNED, RESERVED))
    assert "custom_scalars__config__" not in events[0].Tags()["tensors"]


def test_non_finite_number_is_null_in_jsonl_and_kept_in_tensorboard(tmp_path, reported_warnings):
    with Logbook(tmp_path, warn=reported_warnings.append) as logbook:
        for step, loss in enumerate((math.nan, math.inf, -math.inf, 1e300, None), 1):
            logbook.log(make_step(step, loss))
    assert [line["loss"] for line in lines_of(tmp_path)] == [None, None, None, 1e300, None]
    assert "NaN" not in (tmp_path / "log.jsonl").read_text() and "Infinity" not in (tmp_path / "log.jsonl").read_text()
    values = [event.value for event in events_of(tmp_path).Scalars("2 loss/all")]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf, math.inf]
    assert reported_warnings == []


def test_each_record_is_on_disk_when_log_returns(tmp_path):
    """A process killed right after log() keeps every record, so nothing may wait for close()."""
    program = (
        "import os\n"
        "from tests.training.test_logbook import make_step, Logbook\n"
        f"book = Logbook({str(tmp_path)!r})\n"
        "[book.log(make_step(step)) for step in range(1, 6)]\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert fork_server().run_program(program).returncode == -9
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert steps_of(events_of(tmp_path), "2 loss/all") == [1, 2, 3, 4, 5]


# Resume


def test_lines_after_the_resumed_step_and_torn_lines_are_removed(tmp_path):
    with Logbook(tmp_path) as logbook:
        for step in range(1, 7):
            logbook.log(make_step(step))
            if step % 2 == 0:
                logbook.log(make_validation(step))
    log = tmp_path / "log.jsonl"
    kept = log.read_bytes().splitlines(keepends=True)[:6]
    assert json.loads(kept[-1]) == json.loads(json.dumps({"kind": "validation"} | asdict(make_validation(4))))
    log.write_bytes(b"\0\0\n[1]\nnull\n{}\n\xff\n" + log.read_bytes() + b'{"kind": "step", "step": 3, "lo')
    Logbook(tmp_path, resumed=Resumed(step=4, epochs_finished=3)).close()
    assert log.read_bytes() == b"".join(kept)
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_validation_missing_in_the_checkpoint_is_logged_again(tmp_path):
    """The process was killed after it logged the validation of its third epoch and before it saved."""
    log_all(tmp_path, make_step(6), replace(make_validation(6), epoch=2), make_validation(6))
    log_all(tmp_path, make_validation(6), resumed=Resumed(step=6, epochs_finished=2))
    assert [(line["kind"], line["epoch"]) for line in lines_of(tmp_path)][1:] == [("validation", 2), ("validation", 3)]


def test_complete_last_line_without_newline_is_kept(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "step", "step": 1}')
    log_all(tmp_path, make_step(2), resumed=Resumed(step=1))
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_validation_of_initial_weights_is_kept_when_resumed_before_the_first_step(tmp_path):
    initial = replace(make_validation(0), epoch=0)
    log_all(tmp_path, initial)
    log_all(tmp_path, make_step(1), resumed=Resumed(has_initial_scores=True))
    assert [line["kind"] for line in lines_of(tmp_path)] == ["validation", "step"]
    tag = "1 error rates/CER"
    events = events_of(tmp_path / "validation")
    assert [event.step for event in events.Scalars(tag)] == [0]
    # Negative control: a new run in the same folder starts an empty log.
    log_all(tmp_path, make_step(1))
    assert [line["kind"] for line in lines_of(tmp_path)] == ["step"]


def test_resuming_at_step_0_starts_an_empty_log(tmp_path):
    for _ in range(2):
        with Logbook(tmp_path) as logbook:
            logbook.log_settings("--seed 1")
            logbook.log(make_validation(0))  # of untrained weights
            logbook.log(make_step(1))
    assert [(line["kind"], line["step"]) for line in lines_of(tmp_path)] == [("validation", 0), ("step", 1)]
    events = events_of(tmp_path)
    assert steps_of(events, "2 loss/all") == [1] and steps_of(
        events_of(tmp_path / VALIDATION), "1 error rates/WER"
    ) == [0]
    assert [event.step for event in shown_tensors(tmp_path, "settings/text_summary")] == [0]


def test_each_step_is_in_the_curves_once_after_kills_and_resumes(tmp_path):
    """Three processes start within one second, the second one from an older checkpoint."""
    for resumed, last in ((0, 9), (6, 12), (4, 10)):
        logbook = Logbook(tmp_path, resumed=Resumed(step=resumed, epochs_finished=3))  # never closed: killed
        for step in range(resumed + 1, last + 1):
            logbook.log(make_step(step, loss=step + resumed / 100))
            if step % 3 == 0:
                logbook.log(make_validation(step))
    events = events_of(tmp_path)
    assert steps_of(events, "2 loss/all") == list(range(1, 11))
    assert steps_of(events_of(tmp_path / VALIDATION), "1 error rates/WER") == [3, 6, 9]
    assert [event.step for event in shown_tensors(tmp_path / VALIDATION, "hypotheses/text_summary")] == [3, 6, 9]
    assert [round(event.value, 2) for event in events.Scalars("2 loss/all")][3:6] == [4.0, 5.04, 6.04]
    assert [line["step"] for line in lines_of(tmp_path) if line["kind"] == "step"] == list(range(1, 11))
    names = sorted(path.name for path in tmp_path.glob("events.*"))
    assert len(names) == 3, "a process wrote into another's file"


# Failing sinks


def log_all_kinds(logbook: Logbook, step: int) -> None:
    logbook.log(make_step(step))
    logbook.log(make_validation(step))
    logbook.log(make_spectrogram(step))
    logbook.log_settings("--epochs 3")
    logbook.flush()


def test_log_folder_that_is_a_file_gives_one_warning_per_sink(tmp_path, reported_warnings):
    folder = tmp_path / "run"
    folder.write_text("in the way")
    with Logbook(folder, warn=reported_warnings.append) as logbook:
        for step in range(1, 6):
            log_all_kinds(logbook, step)
        assert (
            len([text for text in reported_warnings if "log.jsonl" in text]) <= 2
        )  # creating the file, then reading it
        assert len([text for text in reported_warnings if "TensorBoard" in text]) <= 2
        before = len(reported_warnings)
        log_all_kinds(logbook, 6)
        assert len(reported_warnings) == before
        folder.unlink()  # the path is usable again
        log_all_kinds(logbook, 7)
    assert [line["step"] for line in lines_of(folder)] == [7, 7]
    assert steps_of(events_of(folder), "2 loss/all") == [7]
    assert any("12 records were lost" in text for text in reported_warnings)


def test_log_folder_removed_during_training_is_created_again(tmp_path, reported_warnings):
    folder = tmp_path / "run"
    with Logbook(folder, warn=reported_warnings.append) as logbook:
        logbook.log(make_step(1))
        shutil.rmtree(folder)
        for step in (2, 3, 4, 5):
            logbook.log(make_step(step))
    assert [line["step"] for line in lines_of(folder)] == [2, 3, 4, 5]
    # TensorBoard's writer notices only when its thread writes, so it may lose one record: which one depends on timing.
    assert len(set(steps_of(events_of(folder), "2 loss/all")) & {2, 3, 4, 5}) >= 3
    assert len(reported_warnings) == 2 and "TensorBoard" in reported_warnings[0] and "1 records" in reported_warnings[1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_full_disk_for_jsonl_does_not_affect_tensorboard(tmp_path, reported_warnings):
    with Logbook(tmp_path, warn=reported_warnings.append) as logbook:
        (tmp_path / "log.jsonl").symlink_to("/dev/full")
        for step in range(1, 6):
            logbook.log(make_step(step))
        assert len(reported_warnings) == 1 and "No space left" in reported_warnings[0]
    assert "5 records were lost" in reported_warnings[-1] and len(reported_warnings) == 2
    assert steps_of(events_of(tmp_path), "2 loss/all") == [1, 2, 3, 4, 5]


def test_error_in_tensorboard_does_not_affect_jsonl(tmp_path, monkeypatch, reported_warnings):
    from tensorboard.summary.writer import record_writer

    with Logbook(tmp_path, warn=reported_warnings.append) as logbook:
        with monkeypatch.context() as broken:
            broken.setattr(record_writer.RecordWriter, "write", lambda *_: 1 / 0)
            for step in (1, 2, 3):
                logbook.log(make_step(step))
        logbook.log(make_step(4))
        assert len(reported_warnings) == 1 and "ZeroDivisionError" in reported_warnings[0]
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    assert steps_of(events_of(tmp_path), "2 loss/all") == [4]


def test_closed_terminal_and_failing_warning_are_ignored(tmp_path, monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr(logbook_module.tqdm, "write", broken)
    log_all(tmp_path, make_validation(1), warn=broken)
    assert len(lines_of(tmp_path)) == 1


def mount_small_disk(folder: Path) -> None:
    folder.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    mount_small_disk(folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_has_only_whole_records_and_is_used_again_when_free(small_disk, reported_warnings):
    ballast = small_disk / "ballast"
    with Logbook(small_disk, warn=reported_warnings.append) as logbook:
        logbook.log(make_step(1))
        ballast.write_bytes(b"x" * 40_000)
        for step in range(2, 200):
            logbook.log(make_step(step))
        assert 1 <= len(reported_warnings) <= 2 and all("No space left" in text for text in reported_warnings)
        in_full = [line["step"] for line in lines_of(small_disk)]  # raises an error for a truncated line
        assert in_full == list(range(1, len(in_full) + 1)) and len(in_full) < 199
        assert len([*small_disk.glob("events.*")]) == 1, "failed attempts left empty files"
        ballast.unlink()
        time.sleep(1.1)  # TensorBoard orders files by the second of their creation
        logbook.log(make_step(200))
        logbook.flush()
    assert lines_of(small_disk)[-1]["step"] == 200
    curve = steps_of(events_of(small_disk), "2 loss/all")  # a truncated event would end the curve here
    assert curve[0] == 1 and curve[-1] == 200 and len(curve) == len(set(curve))


def test_read_only_disk_delays_the_removal_of_resumed_lines(small_disk, reported_warnings):
    log_all(small_disk, *map(make_step, (1, 2, 3)))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with Logbook(small_disk, resumed=Resumed(step=2), warn=reported_warnings.append) as logbook:
        logbook.log(make_step(3, loss=7.0))
        logbook.flush()
        assert len(reported_warnings) == 2 and all("Read-only" in text for text in reported_warnings)
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        logbook.log(make_step(4))
    # Step 3 of the first process must not return, although step 3 of the second was lost.
    assert [line["step"] for line in lines_of(small_disk)] == [1, 2, 4]
    assert steps_of(events_of(small_disk), "2 loss/all") == [1, 2, 4]


def test_interrupted_write_is_rolled_back(tmp_path, monkeypatch):
    class Interrupting(io.FileIO):
        def write(self, data):
            super().write(data[:10])
            raise KeyboardInterrupt

    path = tmp_path / "log"
    appended_file.atomic_append(path, b"whole\n")
    monkeypatch.setattr(appended_file, "open", lambda path, mode, buffering: Interrupting(path, mode), raising=False)
    with pytest.raises(KeyboardInterrupt):
        appended_file.atomic_append(path, b"a record that is cut short\n")
    assert path.read_bytes() == b"whole\n"


def test_no_file_stays_open_between_records_and_no_thread_remains(tmp_path):
    threads = threading.active_count()
    with Logbook(tmp_path) as logbook:
        log_all_kinds(logbook, 1)
        if os.path.isdir("/proc/self/fd"):
            targets = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
            assert not [target for target in targets if target.startswith(str(tmp_path))]
    assert threading.active_count() == threads


def test_failed_write_prints_no_traceback_but_other_threads_do(tmp_path, reported_warnings, capsys):
    def fail():
        raise ZeroDivisionError("of another thread")

    previous = threading.excepthook
    try:
        with Logbook(tmp_path, warn=reported_warnings.append) as logbook:
            logbook.log(make_step(1))
            shutil.rmtree(tmp_path / PLANNED)
            logbook.log(make_step(2))
            assert "Traceback" not in capsys.readouterr().err and len(reported_warnings) == 1
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            assert "of another thread" in capsys.readouterr().err
    finally:
        threading.excepthook = previous


def test_object_that_is_not_a_record_is_rejected(tmp_path):
    with Logbook(tmp_path) as logbook, pytest.raises(TypeError):
        logbook.log({"loss": 1.0})


# Presentation


def test_validation_prints_one_line_and_five_hypothesis_pairs(tmp_path, capsys):
    log_all(tmp_path, replace(make_validation(480), epoch=3), make_step(481))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 3 · step 480 · valid loss 1.234 · WER 34.5 % · CER 12.1 %"
    assert len(lines) == 11 and lines[1].split(maxsplit=1) == ["reference", "हांव गोंयांत रावतां 0"]


def test_warnings_go_to_standard_error(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    Logbook(tmp_path / "run").close()
    assert "Training continues" in capsys.readouterr().err


def test_hypotheses_table_escapes_markup(tmp_path):
    table = hypotheses_table((HypothesisPair("a|b\nc d", "<unk> *x* d", "u_1"),)).splitlines()
    assert table[2] == (
        "| u&#95;1 | <strong>a&#124;b</strong> <strong>c</strong> d "
        "| <strong>&#60;unk&#62;</strong> <strong>&#42;x&#42;</strong> d |"
    )
    log_all(tmp_path, make_validation(5))
    (event,) = events_of(tmp_path / VALIDATION).Tensors("hypotheses/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("Epoch 3, WER 34.5 %, CER 12.1 %. Words that differ are bold.\n\n| utterance |")
    assert text.count("\n") == 11 and "हांव <strong>गोंयांत</strong> <strong>रावतां</strong> 7 |" in text


@pytest.mark.parametrize("reference, hypothesis", [("a b", ""), ("", "a b"), ("", ""), ("a", "a"), ("a", "b c a d")])
def test_any_pair_of_texts_is_one_table_row(reference, hypothesis):
    (row,) = hypotheses_table((HypothesisPair(reference, hypothesis, "u"),)).splitlines()[2:]
    shown = [" ".join(re.sub("</?strong>", "", cell).split()) for cell in row.split("|")[1:-1]]
    assert shown == ["u", reference, hypothesis]
    assert ("<strong>" in row) == (reference != hypothesis)


def test_picture_shows_a_certain_token_bright_only_at_its_frames():
    posteriors = torch.zeros(50, 30)
    posteriors[:, 4] = 1.0  # blank: most of the probability
    posteriors[20:30, 4], posteriors[20:30, 17] = 0.0, 1.0
    picture = draw_utterance(torch.randn(200, 80), posteriors, seconds=2.0)
    assert picture.dtype == torch.uint8
    top = 80 * BIN_HEIGHT + RULER_HEIGHT
    assert picture.shape == (top + 24 * ROW_HEIGHT, 900, 3)
    rows = most_active_tokens(posteriors).tolist()
    assert rows[0] == 4 and len(rows) == len(set(rows)) == 24
    blank, certain = picture[top + 2], picture[top + rows.index(17) * ROW_HEIGHT + 2]
    assert (certain[360:540] == 255).all() and (certain[:360] == 0).all() and (certain[540:] == 0).all()
    assert (blank[360:540] == 0).all() and (blank[:360] == 255).all()


def test_picture_has_low_frequencies_at_the_bottom_and_starts_left():
    features = torch.zeros(100, 80)
    features[:50, 0] = 10.0
    picture = draw_utterance(features, torch.rand(25, 5), seconds=1.0).int().sum(-1)
    assert (picture[80 * BIN_HEIGHT - 1, :450] == 765).all() and (picture[80 * BIN_HEIGHT - 1, 450:] == 0).all()
    assert (picture[0] == 0).all()


def test_token_rows_are_ordered_by_the_time_of_their_peak():
    posteriors = torch.full((40, 60), 0.001)
    for place, token in enumerate((50, 3, 41, 8)):
        posteriors[place * 10, token] = 0.9
    posteriors[:, 0] = 0.5
    rows = [token for token in most_active_tokens(posteriors).tolist() if token in (50, 3, 41, 8)]
    assert rows == [50, 3, 41, 8]


def test_colour_map_brightens_monotonically_from_black_to_white():
    colours = colour(torch.linspace(0, 1, 101)).float()
    brightness = colours @ torch.tensor([0.30, 0.59, 0.11])
    assert colours[0].tolist() == [0, 0, 0] and colours[-1].tolist() == [255, 255, 255]
    assert (brightness.diff() > 0).all()


@pytest.mark.parametrize("frames", [1, 7, 2000])
def test_any_length_and_nan_values_can_be_drawn(frames):
    features = torch.full((frames * 4, 80), math.nan)
    posteriors = torch.full((frames, 3), math.nan)
    assert draw_utterance(features, posteriors, seconds=frames / 25).shape[1:] == (max(900, frames), 3)


def test_spectrogram_record_is_one_image_and_one_audio_clip(tmp_path, capsys):
    log_all(tmp_path, make_spectrogram(3))
    events = events_of(tmp_path / VALIDATION)
    (picture,), (sound,) = events.Images("7 picture/u1"), events.Audio("audio/u1")
    assert (picture.width, picture.step) == (900, 3)
    assert (sound.sample_rate, sound.length_frames) == (16000.0, 32000)
    assert (tmp_path / "log.jsonl").exists() is False
    assert capsys.readouterr().out == ""
