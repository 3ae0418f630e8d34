"""Commands on half-precision Whisper folders: the exported weights are the trained ones, rounded."""

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.errors import NumericsError
from konkanivani.models.whisper import export
from konkanivani.models.whisper.export import read_pretrained_whisper
from tests.conftest import Corpus, checked, parameter_grid, run_folders, run_in_process, run_trainer, write_corpus
from tests.whisper.small_model import write_model

EXPORT = "training_scripts/export_asr.py"
WEIGHTS = "model.safetensors"
FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
MODES = {
    "whole": (),
    "frozen encoder": ("--freeze", "encoder"),
    "LoRA": ("--lora_rank", "2", "--lora_targets", "query", "value", "expand"),
    "LoRA, frozen in fp16": ("--lora_rank", "2", "--frozen_dtype", "half"),
}
# Weight matrices that `--frozen_dtype half` keeps in fp16, in which a bf16 value below 2^-14 loses bits.
HALVED = re.compile(r"model\.(encoder|decoder)\.layers\..*(_proj|fc1|fc2)\.weight")
LORA_SCALE = 2.0  # the default alpha is twice the rank
SHORT = "--device cpu --batch_size 2 --gradient_accumulation_steps 1 --max_steps 3 --epochs 1 --num_workers 0".split()
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", {"train": 6, "valid": 2}, lengths=range(1, 3))


def train(root: Path, corpus: Corpus, number_format: str, mode: str) -> Path:
    """Train three steps with a learning rate that changes bf16 weights, and return the base folder."""
    base = write_model(root / "base", positions=64, dtype=FORMATS[number_format])
    flags = ("--pretrained", str(base), "--language", "mr", "--learning_rate", "0.02", "--warmup_steps", "1")
    checked(run_trainer(*corpus.flags(), *SHORT, *run_folders(root), *flags, *MODES[mode]))
    return base


def expected_tensors(base: Path, checkpoint: Path, is_halved: bool) -> tuple[Tensors, set[str]]:
    """Return the fp32 weights after training, by their names in the file, and the names of the trained ones."""
    original = safetensors.torch.load_file(base / WEIGHTS)
    if is_halved:
        original = {name: tensor.half() if HALVED.fullmatch(name) else tensor for name, tensor in original.items()}
    names = {ours: theirs for theirs, ours in read_pretrained_whisper(base).folder.our_names().items()}
    state = read_checkpoint(checkpoint).states["model"]
    expected = {name: tensor.float() for name, tensor in original.items()}
    trained = set()
    for ours, tensor in state.items():
        layer, _, part = ours.partition(".low_rank.")
        if not part:
            expected[names[ours]] = tensor
            trained.add(names[ours])
        elif part == "up":
            weight = names[f"{layer}.weight"]
            expected[weight] = expected[weight] + LORA_SCALE * tensor @ state[f"{layer}.low_rank.down"]
            trained.add(weight)
    return expected, trained


@pytest.mark.parametrize(("number_format", "mode"), parameter_grid(FORMATS, MODES))
def test_exported_weights_equal_rounded_trained_weights(corpus, number_format, mode, tmp_path):
    base = train(tmp_path, corpus, number_format, mode)
    checkpoint, out = tmp_path / "checkpoints" / "checkpoint_last.pt", tmp_path / "out"
    checked(run_in_process(EXPORT, "--checkpoint", str(checkpoint), "--whisper", str(out)))
    before = safetensors.torch.load_file(base / WEIGHTS)
    after = safetensors.torch.load_file(out / WEIGHTS)
    is_halved = "half" in MODES[mode]
    expected, trained = expected_tensors(base, checkpoint, is_halved)
    assert after.keys() == before.keys()
    changed = set()
    for name, tensor in expected.items():
        assert after[name].dtype == FORMATS[number_format]
        assert torch.equal(after[name].view(torch.int16), tensor.to(after[name].dtype).view(torch.int16)), name
        if not torch.equal(after[name], before[name]):
            changed.add(name)
    # If no bits had changed, the comparison above would also accept an export of the base.
    assert len(changed & trained) > 0.8 * len(trained)
    untrained = changed - trained
    assert all(is_halved and number_format == "bf16" and HALVED.fullmatch(name) for name in untrained)
    assert (mode == "whole") == (changed >= {name for name in before if "encoder.layers.0.fc1" in name})


@pytest.mark.parametrize("number_format", FORMATS)
def test_negative_control_export_detects_one_flipped_bit(corpus, number_format, tmp_path, monkeypatch):
    train(tmp_path, corpus, number_format, "frozen encoder")
    checkpoint, out = tmp_path / "checkpoints" / "checkpoint_last.pt", tmp_path / "out"
    save_file = safetensors.torch.save_file

    def save_with_flipped_bit(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
        save_file(tensors, path, metadata)
        content = bytearray(Path(path).read_bytes())
        content[-2] ^= 1  # the lowest mantissa bit of the last value, little-endian
        Path(path).write_bytes(content)

    monkeypatch.setattr(export.safetensors.torch, "save_file", save_with_flipped_bit)
    before = sorted(tmp_path.iterdir())
    done = run_in_process(EXPORT, "--checkpoint", str(checkpoint), "--whisper", str(out))
    assert done.returncode == NumericsError.exit_code, done.stdout + done.stderr
    assert "read back, differs from the trained weight rounded to" in done.stderr
    assert "Traceback" not in done.stderr and sorted(tmp_path.iterdir()) == before
