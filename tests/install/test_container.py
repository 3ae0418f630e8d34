"""The Dockerfile agrees with setup.cfg and copies the files of the wheel; the image is not built."""

import re

import pytest

from konkanivani.cli.main import COMMANDS
from konkanivani.config import TrainConfig
from konkanivani.flags import config_from_text
from konkanivani.install.environment import Requirements
from tests.conftest import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINES = [line for line in TEXT.replace("\\\n", "").splitlines() if line and not line.startswith("#")]


def requirements_differ(text: str) -> bool:
    """Return whether the PyTorch requirements of the Dockerfile differ from those of setup.cfg."""
    wanted = [line for line in Requirements(ROOT).lines([]) if line.startswith("torch")]
    return re.findall(r'"(torch\w*[<>][^"]*)"', text) != wanted


def test_dockerfile_and_setup_cfg_have_equal_torch_ranges():
    assert not requirements_differ(TEXT)
    assert requirements_differ(TEXT.replace("<2.15", "<2.16"))  # negative control


def test_extras_and_commands_exist():
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", TEXT, re.MULTILINE)
    assert set(extras.split(",")) <= set(Requirements(ROOT).extras)
    (command,) = re.findall(r" konkanivani (\w+) --device", TEXT)
    assert command in COMMANDS


def test_copied_files_exist_and_are_not_ignored():
    copied = [line.split()[1:-1] for line in LINES if line.startswith("COPY") and "--from" not in line]
    names = [name for line in copied for name in line]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "konkanivani"} == set(names) == kept
    assert all((ROOT / name).exists() for name in names)


def test_entrypoint_runs_as_unprivileged_user():
    users = [line.split()[1] for line in LINES if line.startswith("USER")]
    assert users and users[-1] not in ("root", "0")
    assert LINES.index(f"USER {users[-1]}") < LINES.index('ENTRYPOINT ["konkanivani"]')
    assert "--shm-size" in TEXT


@pytest.mark.parametrize("flag", ["--train_manifest", "--valid_manifest", "--device"])
def test_flags_of_the_example_exist(flag):
    assert flag in TEXT
    value = "cpu" if flag == "--device" else "a.jsonl"
    assert isinstance(config_from_text(f"{flag} '{value}'"), TrainConfig)
