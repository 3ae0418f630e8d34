"""Peaks per phase on the CPU and with a simulated CUDA allocator, the cost of clearing, and the final table."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from konkanivani.console import MIB
from konkanivani.distributed import ALONE
from konkanivani.errors import CheckpointError
from konkanivani.memory import monitor as monitor_module
from konkanivani.memory.monitor import CacheClearing, MemoryMonitor, reset_peak_resident
from konkanivani.memory.monitor import peak_resident_mib as system_peak_mib
from konkanivani.recipe.final_scores import Results, allocator_retries, memory_table, summary_line
from konkanivani.training.run import TrainState
from tests.conftest import ROOT, TINY_MODEL, Corpus, read_log, run_folders, run_trainer

LARGE = 200 * MIB


@pytest.fixture
def resettable():
    """Skip the test if the system cannot reset its peak."""
    block = bytearray(LARGE)
    before = system_peak_mib()
    del block
    reset_peak_resident()
    if system_peak_mib() > before - LARGE / MIB / 2:
        pytest.skip("this system does not begin VmHWM anew")


def phases_of_two_blocks() -> MemoryMonitor:
    """Return a monitor after a phase with a large temporary block, and one without."""
    monitor = MemoryMonitor(torch.device("cpu"), 0)
    monitor.end_phase("start")
    block = bytearray(LARGE)
    del block
    monitor.end_phase("forward")
    monitor.end_phase("update")
    return monitor


def test_on_a_cpu_each_phase_has_a_peak_of_its_own(resettable):
    monitor = phases_of_two_blocks()
    peaks = {phase.phase: phase.peak_mib for phase in monitor.report()}
    assert peaks["forward"] > peaks["update"] + 0.9 * LARGE / MIB
    assert monitor.overall_peak_mib() == max(peaks.values())


def test_where_the_peak_cannot_begin_anew_it_only_grows(monkeypatch):
    """The negative control, and the result on an old kernel."""
    monkeypatch.setattr(monitor_module, "reset_peak_resident", lambda: None)
    monitor = phases_of_two_blocks()
    peaks = {phase.phase: phase.peak_mib for phase in monitor.report()}
    assert peaks["update"] >= peaks["forward"] and monitor.overall_peak_mib() == peaks["update"]


def test_a_system_that_forbids_the_reset_costs_nothing(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(monitor_module.Path, "write_text", forbidden)
    reset_peak_resident()


def test_what_is_reported_begins_anew_and_what_is_of_the_run_stays():
    monitor = phases_of_two_blocks()
    first = monitor.report()
    assert monitor.report() == ()
    monitor.end_phase("forward")
    (later,) = monitor.report()
    assert later.phase == "forward" and later.peak_mib <= first[1].peak_mib
    assert {phase.phase: phase.peak_mib for phase in monitor.report_run()} == {p.phase: p.peak_mib for p in first}
    assert first[0].allocator_retries is None and first[0].fragmentation_mib is None


class Allocator:
    """Simulated caching allocator of torch.cuda; tests set values in MiB."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.retries = self.resets = 0
        self.calls: list[str] = []

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.current": self.allocated * MIB,
            "allocated_bytes.all.peak": self.peak * MIB,
            "reserved_bytes.all.current": self.reserved * MIB,
            "num_alloc_retries": self.retries,
        }

    def reset_peak_memory_stats(self, device):
        self.resets += 1

    def synchronize(self, device):
        self.calls.append("synchronize")
        time.sleep(0.2)

    def empty_cache(self):
        self.calls.append("empty_cache")
        time.sleep(0.02)


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    played = Allocator()
    for name in ("memory_stats", "reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    return played


def forward_with(monitor: MemoryMonitor, allocator: Allocator, allocated: int, peak: int, reserved: int, retries: int):
    allocator.allocated, allocator.peak, allocator.reserved, allocator.retries = allocated, peak, reserved, retries
    monitor.end_phase("forward")


def test_on_a_card_a_phase_has_its_retries_and_its_fragmentation(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), 0)
    forward_with(monitor, allocator, allocated=10, peak=30, reserved=80, retries=2)
    forward_with(monitor, allocator, allocated=15, peak=90, reserved=100, retries=2)
    forward_with(monitor, allocator, allocated=20, peak=40, reserved=60, retries=5)
    (step,) = monitor.report()
    assert (step.peak_mib, step.allocated_mib, step.reserved_mib, step.resident_mib) == (90, 15, 100, None)
    assert (step.allocator_retries, step.fragmentation_mib) == (5, 85)
    forward_with(monitor, allocator, allocated=10, peak=50, reserved=60, retries=6)
    (next_step,) = monitor.report()
    assert (next_step.peak_mib, next_step.allocator_retries, next_step.fragmentation_mib) == (50, 1, 50)
    (of_run,) = monitor.report_run()
    assert (of_run.peak_mib, of_run.allocator_retries, of_run.fragmentation_mib) == (90, 6, 85)
    assert allocator.resets == 4 and monitor.overall_peak_mib() == 90
    assert allocator_retries(monitor.report_run()) == 6


def test_what_is_planned_stands_beside_what_is_measured(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), 0)
    monitor.expect({"forward": 95.5, "backward": 70.0})
    monitor.end_phase("forward")
    monitor.end_phase("update")
    assert [phase.planned_mib for phase in monitor.report()] == [95.5, None]
    monitor.expect({})
    monitor.end_phase("forward")
    assert [phase.planned_mib for phase in monitor.report()] == [None]


def test_clearing_the_cache_is_counted_and_timed_without_what_was_waited_for_anyway(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), empty_cache_interval=3)
    for _ in range(2):
        monitor.maybe_empty_cache()
    assert allocator.calls == [] and monitor.report_clearing() == CacheClearing(0, 0.0)
    for _ in range(5):
        monitor.maybe_empty_cache()
    assert allocator.calls == ["synchronize", "empty_cache"] * 2
    cost = monitor.report_clearing()
    assert cost.count == 2 and 0.04 <= cost.seconds < 0.2, "the wait before it was counted"
    assert monitor.report_clearing() == CacheClearing(0, 0.0)
    assert monitor.report_clearing_of_run() == cost


@pytest.mark.parametrize(("device", "interval"), [("cpu", 1), ("cuda", 0)])
def test_nothing_is_cleared_or_waited_for_on_a_cpu_or_without_an_interval(allocator, device, interval):
    monitor = MemoryMonitor(torch.device(device), interval)
    for _ in range(3):
        monitor.maybe_empty_cache()
    assert allocator.calls == []
    assert monitor.report_clearing() == (None if device == "cpu" else CacheClearing())


def run_with(monitor: MemoryMonitor, splits: int = 0) -> SimpleNamespace:
    """Return the parts of a run that the table and the summary use."""
    progress = SimpleNamespace(audio_seconds_per_second=lambda: 1.0, waiting_share=lambda: 0.0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False).requires_grad_(False))
    step = SimpleNamespace(model=model)
    state = TrainState(splits=splits)
    data = SimpleNamespace(validation=None)
    logs = SimpleNamespace(progress=progress)
    return SimpleNamespace(state=state, step=step, data=data, logs=logs, monitor=monitor, topology=ALONE)


def test_the_table_at_the_end_on_a_card(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), empty_cache_interval=1)
    monitor.expect({"forward": 1200.0})
    forward_with(monitor, allocator, allocated=1000, peak=1100, reserved=1500, retries=3)
    monitor.end_phase("update")
    monitor.report()
    monitor.maybe_empty_cache()
    lines = memory_table(run_with(monitor, splits=4)).splitlines()
    assert lines[1].split() == ["phase", "planned", "peak", "fragmentation", "allocator", "retries", "seconds", "share"]
    assert lines[2].split()[:5] == ["forward", "1200", "1100", "500", "3"]
    assert lines[3].split()[:5] == ["update", "-", "1100", "500", "0"]
    assert len({len(line) for line in lines[1:4]}) == 1, "the columns do not align"
    assert lines[4].endswith("out of memory: 4.") and lines[5] == (
        f"Cache releases: 1, in {monitor.report_clearing_of_run().seconds:.2f} s."
    )


def test_the_summary_has_the_splits_and_the_retries(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), 0)
    forward_with(monitor, allocator, allocated=10, peak=30, reserved=80, retries=2)
    summary = json.loads(summary_line(run_with(monitor, splits=4), Results({}, {}, None), "checkpoint", "runs"))
    assert (summary["memory_splits"], summary["allocator_retries"], summary["peak_memory_mib"]) == (4, 2, 30)
    assert (summary["parameters"], summary["trained_parameters"]) == (10, 8)


def test_the_table_at_the_end_on_a_cpu_has_no_empty_columns():
    lines = memory_table(run_with(phases_of_two_blocks())).splitlines()
    assert lines[1].split() == ["phase", "peak", "seconds", "share"] and len(lines) == 6
    assert allocator_retries(phases_of_two_blocks().report_run()) is None


def test_splits_are_counted_over_the_run_and_an_older_checkpoint_has_none():
    state = TrainState()
    for splits in (0, 2, 1):
        state.advance(state.cursor, 1.0, is_skipped=splits == 1, splits=splits)
    assert state.splits == 3
    older = state.state_dict()
    del older["splits"]
    state.load_state_dict(older)
    assert (state.splits, state.step) == (0, 2)
    del older["step"]
    with pytest.raises(CheckpointError, match="step"):
        state.load_state_dict(older)


STEP_PHASES = ("data", "forward", "backward", "update")


def test_a_run_logs_every_phase_and_ends_with_the_table(corpus: Corpus, tmp_path):
    done = run_trainer(*corpus.flags(), *TINY_MODEL, *run_folders(tmp_path), "--max_steps", "4", "--save_steps", "2")
    assert done.returncode == 0, done.stderr
    steps = read_log(tmp_path)
    assert [phase["phase"] for phase in steps[0]["memory"]] == ["start", *STEP_PHASES]
    assert [phase["phase"] for phase in steps[2]["memory"]] == ["log", "save", *STEP_PHASES]
    assert steps[0]["cache_clearings"] is None and steps[0]["cache_clearing_seconds"] is None
    lines = done.stdout.splitlines()
    summary = json.loads(lines[-1])
    assert (summary["memory_splits"], summary["allocator_retries"]) == (0, None)
    table = lines[lines.index("Peak memory (MiB) and time per phase:") :]
    peaks = {line.split()[0]: float(line.split()[1]) for line in table[2:8]}
    assert list(peaks) == ["start", *STEP_PHASES, "log"]
    logged = {phase["phase"]: phase["peak_mib"] for step in steps for phase in step["memory"]}
    assert set(peaks) <= set(logged) and summary["peak_memory_mib"] >= round(max(logged.values()), 4)


def test_on_a_cpu_the_heaps_free_pages_go_back_every_so_many_micro_batches(monkeypatch):
    trims = []
    monkeypatch.setattr("konkanivani.memory.monitor.trim_heap", lambda: trims.append(1))
    for interval, count in ((3, 2), (0, 0)):
        trims.clear()
        watched = MemoryMonitor(torch.device("cpu"), interval)
        for _ in range(8):
            watched.maybe_empty_cache()
        assert len(trims) == count


HEAPS = """
import os
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold, trim_heap

def trimmed():
    pieces = [bytearray(50_000) for _ in range(4_000)]
    kept = pieces[::8]
    del pieces
    before = resident_mib()
    trim_heap()
    return before - resident_mib()

def holes():
    bytearray(30 << 20)  # malloc has seen a large block freed, as in every training
    before = resident_mib()
    pieces = [bytearray(300_000 + 997 * n) for n in range(400)]
    apart = pieces[::20]
    del pieces
    return resident_mib() - before

for measure in (trimmed, holes, lambda: set_mmap_threshold() or holes()):
    if not os.fork():  # a heap as the imports left it
        print(measure(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_trimmed_heap_is_smaller_and_a_run_that_keeps_to_its_plan_leaves_no_holes():
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", HEAPS]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    trimmed, holes_by_default, holes = map(float, done.stdout.split())
    assert trimmed > 100 and holes < 20 <= holes_by_default


def test_a_phase_has_the_seconds_between_its_moments_and_those_before(monkeypatch):
    clock = iter([10.0, 11.0, 11.5, 14.5])
    monkeypatch.setattr("konkanivani.memory.monitor.time.perf_counter", lambda: next(clock))
    monitor = MemoryMonitor(torch.device("cpu"), 0)
    for phase in ("forward", "backward", "forward"):
        monitor.end_phase(phase)
    assert [monitor.seconds_of(phase) for phase in ("forward", "backward", "save")] == [4.0, 0.5, 0.0]
