"""Other processes on the GPU, from a simulated driver, down to one that reports nothing."""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from konkanivani.memory import monitor as gpu
from konkanivani.memory.monitor import GIB, Card, CardProcess, read_card
from konkanivani.recipe import build as recipe
from tests.conftest import TINY_MODEL, Corpus, run_folders
from tests.starts import begin_run

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
        return self._answer("nvmlDeviceGetComputeRunningProcesses", _listed(self.compute))

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
        return self._answer("nvmlDeviceGetGraphicsRunningProcesses", _listed(self.graphics))

    # nvmlDeviceGetMPSComputeRunningProcesses: an old driver lacks it.

    def nvmlSystemGetProcessName(self, pid):  # noqa: N802
        if pid not in self.names:
            raise DriverError("not found")
        return self._answer("nvmlSystemGetProcessName", self.names[pid])


def _listed(processes: tuple[tuple[int, int | None], ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes]


def read(driver: object) -> Card | None:
    return read_card(UUID, ADDRESS, driver)


def test_says_what_is_free_and_who_holds_the_rest_the_largest_first():
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


def test_a_card_of_ones_own_is_one_sentence():
    assert read(Driver(used=GIB // 8)).sentences() == "NVIDIA GeForce GTX 980: 3.88 of 4.00 GiB free."


def test_this_process_is_left_out_and_what_it_holds_is_not_unseen():
    card = read(Driver(compute=((os.getpid(), GIB),), used=GIB))
    assert (card.processes, card.own, card.unseen) == ((), GIB, 0)


def test_a_process_on_two_lists_counts_once():
    card = read(Driver(compute=((7, GIB), (8, None)), graphics=((7, GIB), (8, 5), (9, None)), used=2 * GIB))
    assert {process.pid: process.bytes for process in card.processes} == {7: GIB, 8: 5, 9: None}
    assert len(card.processes) == 3


def test_what_the_driver_does_not_tell_is_left_unsaid():
    """As in Windows' WSL and for other users' processes."""
    card = read(Driver(compute=((7, None),), used=2 * GIB))
    assert card.processes == (CardProcess(7, "", None),)
    assert card.sentences().endswith("free. Process 7 uses an unknown amount of it.")


def test_what_is_held_outside_a_container_is_said_to_be_unseen():
    assert (
        read(Driver(used=2 * GIB))
        .sentences()
        .endswith("Another 2.00 GiB is used by processes that are not visible here.")
    )


@pytest.mark.parametrize("broken", ["nvmlDeviceGetComputeRunningProcesses", "nvmlSystemGetProcessName"])
@pytest.mark.parametrize("error", [DriverError, PermissionError, AttributeError, UnicodeDecodeError])
def test_one_list_or_name_that_cannot_be_read_costs_only_itself(broken, error):
    class Raised(error):
        def __init__(self, *_): ...

    driver = Driver(compute=((7, GIB),), graphics=((8, GIB),), names={8: "Xorg"}, broken=(broken,), error=Raised)
    pids = {process.pid: process.name for process in read(driver).processes}
    assert pids == ({8: "Xorg"} if "Compute" in broken else {7: "", 8: ""})


@pytest.mark.parametrize(
    "broken", ["nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByPciBusId"]
)
@pytest.mark.parametrize("error", [DriverError, PermissionError, AttributeError])
def test_a_driver_that_fails_is_none_and_no_error(broken, error):
    driver = Driver(broken=(broken,), error=error, prefix="" if "Pci" in broken else "GPU-")
    assert read(driver) is None and driver.running == 0


def test_a_shutdown_that_fails_costs_nothing():
    assert read(Driver(broken=("nvmlShutdown",))).total == 4 * GIB


@pytest.mark.parametrize("prefix", ["GPU-", "MIG-", "another card's"])
def test_the_card_is_found_by_its_uuid_or_else_by_its_address(prefix):
    assert read(Driver(prefix=prefix)).name == "NVIDIA GeForce GTX 980"
    assert (read_card(UUID, "00000000:02:00.0", Driver(prefix=prefix)) is None) == (prefix == "another card's")


def test_the_real_package_without_a_driver_is_none():
    assert read_card(UUID, ADDRESS) is None


@pytest.fixture
def card_of_torch(monkeypatch):
    """Simulate the GPU properties that PyTorch reports."""
    known = SimpleNamespace(name="GTX", total_memory=4 * GIB, uuid=UUID, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 4 * GIB))


@pytest.mark.parametrize("prefix", ["GPU-", "another card's"])
def test_a_run_says_it_at_its_start_on_a_card(card_of_torch, capsys, prefix):
    card = gpu.announce_card(torch.device("cuda"), Driver(compute=((7, GIB),), used=GIB, prefix=prefix))
    assert card.free == 3 * GIB
    assert capsys.readouterr().out == card.sentences() + "\n" and "Process 7" in card.sentences()


def test_without_nvml_the_free_bytes_are_pytorchs(card_of_torch, capsys):
    card = gpu.announce_card(torch.device("cuda"), Driver(broken=("nvmlInit",)))
    assert (card.free, card.processes) == (3 * GIB, ())
    assert capsys.readouterr().out == "GTX: 3.00 of 4.00 GiB free.\n"


def test_a_cpu_has_no_card(capsys):
    assert gpu.announce_card(torch.device("cpu")) is None and capsys.readouterr().out == ""


def test_every_run_begins_with_it(corpus: Corpus, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(recipe, "announce_card", asked.append)
    recipe.build_run(begin_run([*corpus.flags(), *TINY_MODEL, *run_folders(tmp_path)]))
    assert asked == [torch.device("cpu")]


def test_the_context_is_what_this_process_holds_beside_its_tensors(card_of_torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB // 4)
    here = torch.device("cpu")  # device of the product; the GPU is simulated
    assert gpu.measure_context(here, Driver(compute=((os.getpid(), GIB),))) == GIB - GIB // 4
    assert gpu.measure_context(here, Driver(compute=((os.getpid() + 1, GIB),))) is None
    assert gpu.measure_context(here, Driver(broken=("nvmlInit",))) is None
