"""Report of other processes on the GPU, with simulated drivers, including one that reports nothing."""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from konkanivani.memory import monitor as gpu
from konkanivani.memory.monitor import GIB, Card, CardProcess, read_card
from konkanivani.recipe import build as recipe
from tests.conftest import TINY_MODEL, Corpus, run_folders
from tests.run_setup import begin_run

UUID, ADDRESS = "5b2f6a1c-0000-1111-2222-333344445555", "00000000:01:00.0"


class DriverError(Exception):
    """Replacement of pynvml.NVMLError."""


@dataclass
class Driver:
    """Replacement of the module pynvml with one GPU; functions named in `broken` raise, by default as NVML does."""

    compute: tuple[tuple[int, int | None], ...] = ()
    graphics: tuple[tuple[int, int | None], ...] = ()
    names: dict[int, str | bytes] = field(default_factory=dict)
    used: int = 0
    prefix: str = "GPU-"
    broken: tuple[str, ...] = ()
    error: type[Exception] = DriverError
    running: int = 0
    NVMLError = DriverError

    def _answer(self, name: str, value: object) -> object:
        if name in self.broken:
            raise self.error(name)
        return value

    def nvmlInit(self):  # noqa: N802 - NVML's names
        self._answer("nvmlInit", None)
        self.running += 1

    def nvmlShutdown(self):  # noqa: N802
        self.running -= 1
        self._answer("nvmlShutdown", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != self.prefix + UUID:
            raise DriverError("not found")
        return self._answer("nvmlDeviceGetHandleByUUID", "card")

    def nvmlDeviceGetHandleByPciBusId(self, address):  # noqa: N802
        if address != ADDRESS:
            raise DriverError("not found")
        return self._answer("nvmlDeviceGetHandleByPciBusId", "card")

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        assert handle == "card"
        return self._answer("nvmlDeviceGetName", "NVIDIA GeForce GTX 980")

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        assert handle == "card"
        return self._answer("nvmlDeviceGetMemoryInfo", SimpleNamespace(total=4 * GIB, free=4 * GIB - self.used))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return self._answer("nvmlDeviceGetComputeRunningProcesses", _process_list(self.compute))

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
        return self._answer("nvmlDeviceGetGraphicsRunningProcesses", _process_list(self.graphics))

    # nvmlDeviceGetMPSComputeRunningProcesses: an old driver lacks it.

    def nvmlSystemGetProcessName(self, pid):  # noqa: N802
        if pid not in self.names:
            raise DriverError("not found")
        return self._answer("nvmlSystemGetProcessName", self.names[pid])


def _process_list(processes: tuple[tuple[int, int | None], ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes]


def read(driver: object) -> Card | None:
    return read_card(UUID, ADDRESS, driver)


def test_report_has_free_memory_and_other_processes_largest_first():
    driver = Driver(
        compute=((75955, GIB + GIB // 2),),
        graphics=((812, GIB // 4),),
        names={75955: "/usr/bin/python3 train.py --flag /x/y", 812: b"/usr/lib/xorg/Xorg"},
        used=7 * GIB // 4,
    )
    card = read(driver)
    others = (CardProcess(75955, "python3", 3 * GIB // 2), CardProcess(812, "Xorg", GIB // 4))
    assert card == Card("NVIDIA GeForce GTX 980", 4 * GIB, 9 * GIB // 4, others, own=0)
    assert card.sentences() == (
        "NVIDIA GeForce GTX 980: 2.25 of 4.00 GiB free. Process 75955 (python3) uses 1.50 GiB of it. "
        "Process 812 (Xorg) uses 0.25 GiB of it."
    )
    assert driver.running == 0, "NVML was left open"


def test_gpu_without_other_processes_is_reported_in_one_sentence():
    assert read(Driver(used=GIB // 8)).sentences() == "NVIDIA GeForce GTX 980: 3.88 of 4.00 GiB free."


def test_own_process_is_not_listed_and_its_memory_is_accounted_for():
    card = read(Driver(compute=((os.getpid(), GIB),), used=GIB))
    assert (card.processes, card.own, card.unseen) == ((), GIB, 0)


def test_process_on_two_lists_is_counted_once():
    card = read(Driver(compute=((7, GIB), (8, None)), graphics=((7, GIB), (8, 5), (9, None)), used=2 * GIB))
    assert {process.pid: process.bytes for process in card.processes} == {7: GIB, 8: 5, 9: None}
    assert len(card.processes) == 3


def test_process_memory_unknown_to_the_driver_is_reported_as_unknown():
    """NVML does so under WSL and for processes of other users."""
    card = read(Driver(compute=((7, None),), used=2 * GIB))
    assert card.processes == (CardProcess(7, "", None),)
    assert card.sentences().endswith("free. Process 7 uses an unknown amount of it.")


def test_memory_of_processes_outside_a_container_is_reported():
    assert (
        read(Driver(used=2 * GIB))
        .sentences()
        .endswith("Another 2.00 GiB is used by processes that are not visible here.")
    )


@pytest.mark.parametrize("broken", ["nvmlDeviceGetComputeRunningProcesses", "nvmlSystemGetProcessName"])
@pytest.mark.parametrize("error", [DriverError, PermissionError, AttributeError, UnicodeDecodeError])
def test_unreadable_process_list_or_name_affects_nothing_else(broken, error):
    class Raised(error):
        def __init__(self, *_): ...

    driver = Driver(compute=((7, GIB),), graphics=((8, GIB),), names={8: "Xorg"}, broken=(broken,), error=Raised)
    pids = {process.pid: process.name for process in read(driver).processes}
    assert pids == ({8: "Xorg"} if "Compute" in broken else {7: "", 8: ""})


@pytest.mark.parametrize(
    "broken", ["nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByPciBusId"]
)
@pytest.mark.parametrize("error", [DriverError, PermissionError, AttributeError])
def test_failing_driver_gives_none_and_no_error(broken, error):
    driver = Driver(broken=(broken,), error=error, prefix="" if "Pci" in broken else "GPU-")
    assert read(driver) is None and driver.running == 0


def test_failing_nvml_shutdown_is_ignored():
    assert read(Driver(broken=("nvmlShutdown",))).total == 4 * GIB


@pytest.mark.parametrize("prefix", ["GPU-", "MIG-", "another GPU's"])
def test_gpu_is_found_by_uuid_or_else_by_pci_address(prefix):
    assert read(Driver(prefix=prefix)).name == "NVIDIA GeForce GTX 980"
    assert (read_card(UUID, "00000000:02:00.0", Driver(prefix=prefix)) is None) == (prefix == "another GPU's")


def test_real_pynvml_without_a_driver_gives_none():
    assert read_card(UUID, ADDRESS) is None


@pytest.fixture
def torch_gpu(monkeypatch):
    """Simulate the GPU properties that PyTorch reports."""
    known = SimpleNamespace(name="GTX", total_memory=4 * GIB, uuid=UUID, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 4 * GIB))


@pytest.mark.parametrize("prefix", ["GPU-", "another GPU's"])
def test_gpu_report_is_printed_by_announce_card(torch_gpu, capsys, prefix):
    card = gpu.announce_card(torch.device("cuda"), Driver(compute=((7, GIB),), used=GIB, prefix=prefix))
    assert card.free == 3 * GIB
    assert capsys.readouterr().out == card.sentences() + "\n" and "Process 7" in card.sentences()


def test_free_memory_comes_from_pytorch_without_nvml(torch_gpu, capsys):
    card = gpu.announce_card(torch.device("cuda"), Driver(broken=("nvmlInit",)))
    assert (card.free, card.processes) == (3 * GIB, ())
    assert capsys.readouterr().out == "GTX: 3.00 of 4.00 GiB free.\n"


def test_cpu_device_has_no_gpu_report(capsys):
    assert gpu.announce_card(torch.device("cpu")) is None and capsys.readouterr().out == ""


def test_every_run_calls_announce_card_at_startup(corpus: Corpus, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(recipe, "announce_card", asked.append)
    recipe.build_run(begin_run([*corpus.flags(), *TINY_MODEL, *run_folders(tmp_path)]))
    assert asked == [torch.device("cpu")]


def test_context_is_the_memory_of_this_process_without_its_tensors(torch_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB // 4)
    here = torch.device("cpu")  # device of the product; the GPU is simulated
    assert gpu.measure_context(here, Driver(compute=((os.getpid(), GIB),))) == GIB - GIB // 4
    assert gpu.measure_context(here, Driver(compute=((os.getpid() + 1, GIB),))) is None
    assert gpu.measure_context(here, Driver(broken=("nvmlInit",))) is None
