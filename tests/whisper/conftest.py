"""Fixtures: folders of random Whisper models, written once per session."""

from pathlib import Path

import pytest

from tests.invariants.conftest import two_threads

__all__ = ["two_threads", "whisper_folders"]


@pytest.fixture(scope="session")
def whisper_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a read-only folder for each kind of model, by name."""
    from tests.whisper.folders import KINDS, write_folder

    root = tmp_path_factory.mktemp("whisper")
    return {name: write_folder(kind, root / name) for name, kind in KINDS.items()}
