"""T5 models given by a hub name: only the needed files are downloaded, and the cache works offline."""

from pathlib import Path

import pytest

from konkanivani.config import PretrainedConfig, TrainConfig
from konkanivani.inference.speech_model import read_pretrained
from konkanivani.models.hub import locate_model
from konkanivani.planning.sizes import planned_architecture
from tests.hub.conftest import cache, hub, whisper_files
from tests.hub.server import Hub, Repository
from tests.t5.parts import write_folder

__all__ = ["cache", "hub", "whisper_files"]
NAME = "google/flan-t5-small"


@pytest.mark.parametrize("is_bytes", [False, True])
def test_needed_files_are_downloaded_once_and_used_offline(is_bytes, hub: Hub, cache: Path, tmp_path):
    base = write_folder(tmp_path / "base", is_bytes)
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    hub.repositories[NAME] = Repository(files | {"pytorch_model.bin": b"pickle", "flax_model.msgpack": b"flax"})
    assert planned_architecture(TrainConfig(pretrained=PretrainedConfig(NAME))).vocab_size in (200, 384)
    assert hub.downloads() == ["config.json"]
    located = locate_model(NAME, None, "whisper")
    assert {path.name: path.read_bytes() for path in located.path.iterdir()} == files
    read_pretrained(NAME).check_weights()
    hub.stop()
    assert locate_model(NAME, None, "whisper") == located
    (located.path / ("tokenizer_config.json" if is_bytes else "spiece.model")).unlink()
    if not is_bytes:
        # As T5's own repositories have it, beside the pieces.
        (located.path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(Exception, match="refused"):  # negative control: incomplete cache
        locate_model(NAME, None, "whisper")
