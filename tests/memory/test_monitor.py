"""Peaks per phase on a CPU and with a simulated CUDA allocator, the cost of clearing the cache, and the final table."""

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
from konkanivani.memory import devices
from konkanivani.memory import monitor as monitor_module
from konkanivani.memory.monitor import CacheClearing, MemoryMonitor, reset_peak_resident
from konkanivani.memory.monitor import peak_resident_mib as system_peak_mib
from konkanivani.recipe.final_scores import Results, allocator_retries, memory_table, summary_line
from konkanivani.training.run import TrainState
from tests.conftest import ROOT, TINY_MODEL, Corpus, read_log, run_folders, run_trainer

LARGE = 200 * MIB


@pytest.fixture
def requires_peak_reset():
    """Skip the test if the system cannot reset its peak."""
    block = bytearray(LARGE)
    before = system_peak_mib()
    del block
    reset_peak_resident()
    if system_peak_mib() > before - LARGE / MIB / 2:
        pytest.skip("this system does not begin VmHWM anew")


def monitor_after_two_phases() -> MemoryMonitor:
    """Return a monitor after a phase with a large temporary block, and one without."""
    monitor = MemoryMonitor(torch.device("cpu"), 0)
    monitor.end_phase("start")
    block = bytearray(LARGE)
    del block
    monitor.end_phase("forward")
    monitor.end_phase("update")
    return monitor


def test_each_phase_on_a_cpu_has_its_own_peak(requires_peak_reset):
    monitor = monitor_after_two_phases()
    peaks = {phase.phase: phase.peak_mib for phase in monitor.report()}
    assert peaks["forward"] > peaks["update"] + 0.9 * LARGE / MIB
    assert monitor.overall_peak_mib() == max(peaks.values())


def test_peak_only_grows_if_it_cannot_be_reset(monkeypatch):
    """This is the negative control, and the behaviour on an old kernel."""
    monkeypatch.setattr(monitor_module, "reset_peak_resident", lambda: None)
    monitor = monitor_after_two_phases()
    peaks = {phase.phase: phase.peak_mib for phase in monitor.report()}
    assert peaks["update"] >= peaks["forward"] and monitor.overall_peak_mib() == peaks["update"]


def test_forbidden_peak_reset_is_ignored(monkeypatch):
    attempts = []

    def forbidden(path, text):
        attempts.append((str(path), text))
        raise PermissionError

    monkeypatch.setattr(monitor_module.Path, "write_text", forbidden)
    reset_peak_resident()
    assert attempts == [("/proc/self/clear_refs", "5")]


def test_report_clears_step_values_and_keeps_run_values():
    monitor = monitor_after_two_phases()
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


def end_forward(monitor: MemoryMonitor, allocator: Allocator, allocated: int, peak: int, reserved: int, retries: int):
    allocator.allocated, allocator.peak, allocator.reserved, allocator.retries = allocated, peak, reserved, retries
    monitor.end_phase("forward")


def test_phase_on_cuda_has_allocator_retries_and_fragmentation(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), 0)
    end_forward(monitor, allocator, allocated=10, peak=30, reserved=80, retries=2)
    end_forward(monitor, allocator, allocated=15, peak=90, reserved=100, retries=2)
    end_forward(monitor, allocator, allocated=20, peak=40, reserved=60, retries=5)
    (step,) = monitor.report()
    assert (step.peak_mib, step.allocated_mib, step.reserved_mib, step.resident_mib) == (90, 15, 100, None)
    assert (step.allocator_retries, step.fragmentation_mib) == (5, 85)
    end_forward(monitor, allocator, allocated=10, peak=50, reserved=60, retries=6)
    (next_step,) = monitor.report()
    assert (next_step.peak_mib, next_step.allocator_retries, next_step.fragmentation_mib) == (50, 1, 50)
    (of_run,) = monitor.report_run()
    assert (of_run.peak_mib, of_run.allocator_retries, of_run.fragmentation_mib) == (90, 6, 85)
    assert allocator.resets == 4 and monitor.overall_peak_mib() == 90
    assert allocator_retries(monitor.report_run()) == 6


def test_planned_peak_is_reported_with_the_measured_peak(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), 0)
    monitor.expect({"forward": 95.5, "backward": 70.0})
    monitor.end_phase("forward")
    monitor.end_phase("update")
    assert [phase.planned_mib for phase in monitor.report()] == [95.5, None]
    monitor.expect({})
    monitor.end_phase("forward")
    assert [phase.planned_mib for phase in monitor.report()] == [None]


def test_cache_clearing_is_counted_and_timed_without_synchronization(allocator):
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
def test_cache_is_not_cleared_on_a_cpu_or_without_an_interval(allocator, device, interval):
    monitor = MemoryMonitor(torch.device(device), interval)
    for _ in range(3):
        monitor.maybe_empty_cache()
    assert allocator.calls == []
    assert monitor.report_clearing() == (None if device == "cpu" else CacheClearing())


def make_run(monitor: MemoryMonitor, splits: int = 0) -> SimpleNamespace:
    """Return the parts of a run that the table and the summary use."""
    progress = SimpleNamespace(audio_seconds_per_second=lambda: 1.0, waiting_share=lambda: 0.0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False).requires_grad_(False))
    step = SimpleNamespace(model=model)
    state = TrainState(splits=splits)
    data = SimpleNamespace(validation=None)
    logs = SimpleNamespace(progress=progress)
    return SimpleNamespace(state=state, step=step, data=data, logs=logs, monitor=monitor, topology=ALONE)


def test_final_memory_table_on_cuda(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), empty_cache_interval=1)
    monitor.expect({"forward": 1200.0})
    end_forward(monitor, allocator, allocated=1000, peak=1100, reserved=1500, retries=3)
    monitor.end_phase("update")
    monitor.report()
    monitor.maybe_empty_cache()
    lines = memory_table(make_run(monitor, splits=4)).splitlines()
    assert lines[1].split() == ["phase", "planned", "peak", "fragmentation", "allocator", "retries", "seconds", "share"]
    assert lines[2].split()[:5] == ["forward", "1200", "1100", "500", "3"]
    assert lines[3].split()[:5] == ["update", "-", "1100", "500", "0"]
    assert len({len(line) for line in lines[1:4]}) == 1, "the columns do not align"
    assert lines[4].endswith("out of memory: 4.") and lines[5] == (
        f"Cache releases: 1, in {monitor.report_clearing_of_run().seconds:.2f} s."
    )


def test_summary_has_splits_and_allocator_retries(allocator):
    monitor = MemoryMonitor(torch.device("cuda"), 0)
    end_forward(monitor, allocator, allocated=10, peak=30, reserved=80, retries=2)
    summary = json.loads(summary_line(make_run(monitor, splits=4), Results({}, {}, None), "checkpoint", "runs"))
    assert (summary["memory_splits"], summary["allocator_retries"], summary["peak_memory_mib"]) == (4, 2, 30)
    assert (summary["parameters"], summary["trained_parameters"]) == (10, 8)


def test_final_memory_table_on_a_cpu_has_no_empty_columns():
    lines = memory_table(make_run(monitor_after_two_phases())).splitlines()
    assert lines[1].split() == ["phase", "peak", "seconds", "share"] and len(lines) == 6
    assert allocator_retries(monitor_after_two_phases().report_run()) is None


def test_splits_are_summed_over_the_run_and_old_checkpoints_have_none():
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


def test_run_logs_every_phase_and_prints_the_final_table(corpus: Corpus, tmp_path):
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


def test_heap_on_a_cpu_is_trimmed_at_the_interval_of_micro_batches(monkeypatch):
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


def test_trim_shrinks_the_heap_and_mmap_threshold_avoids_fragmentation():
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", HEAPS]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    trimmed, holes_by_default, holes = map(float, done.stdout.split())
    assert trimmed > 100 and holes < 20 <= holes_by_default


def test_seconds_of_a_phase_are_summed_over_its_occurrences(monkeypatch):
    clock = iter([10.0, 11.0, 11.5, 14.5])
    monkeypatch.setattr("konkanivani.memory.monitor.time.perf_counter", lambda: next(clock))
    monitor = MemoryMonitor(torch.device("cpu"), 0)
    for phase in ("forward", "backward", "forward"):
        monitor.end_phase(phase)
    assert [monitor.seconds_of(phase) for phase in ("forward", "backward", "save")] == [4.0, 0.5, 0.0]


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Return a function that makes control groups with a limit, a use and cached files in bytes."""
    monkeypatch.setattr(devices, "CGROUPS", tmp_path)
    monkeypatch.setattr(devices, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(devices, "_system_available", lambda: 100_000)

    def make(path: str, names: tuple[str, str, str], limit: str, use: int, cached: int) -> None:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{use}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")

    return make


@pytest.mark.parametrize("version, line", [(2, "0::/job/step"), (1, "4:cpu,memory:/job/step")])
def test_available_memory_is_within_all_control_groups(cgroups, tmp_path, version, line):
    names = devices.CGROUP_FILES[2 - version]
    root = "" if version == 2 else "memory/"
    (tmp_path / "own").write_text(f"1:pids:/\n{line}\n")
    cgroups(f"{root}job/step", names, "max", 10, 0)
    assert devices.available_host_bytes() == 100_000
    cgroups(f"{root}job", names, "50000", 45_000, 30_000)
    # Files in the cache can be freed at once.
    assert devices.available_host_bytes() == 50_000 - 45_000 + 30_000
    cgroups(f"{root}job/step", names, "20000", 1_000, 0)
    assert devices.available_host_bytes() == 19_000


def test_available_memory_is_within_the_limit_of_a_container(cgroups, tmp_path):
    (tmp_path / "own").write_text("0::/path/of/the/host\n")
    cgroups("", devices.CGROUP_FILES[0], "7000", 1_000, 0)
    assert devices.available_host_bytes() == 6_000
    (tmp_path / "memory.max").write_text("unreadable")
    assert devices.available_host_bytes() == 100_000
