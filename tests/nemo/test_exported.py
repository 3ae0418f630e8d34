"""A project model that is exported to .nemo and imported again gives the same output."""

import dataclasses
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.errors import UsageError
from konkanivani.inference.speech_model import build_speech_model
from konkanivani.models.nemo.weights import import_nemo
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from tests.conftest import TINY_MODEL, Corpus, checked, run_folders, run_script
from tests.nemo.exported import SHAPE, write_nemo
from tests.nemo.files import read_parts
from tests.nemo.goldens import recognize_batch, waveforms_and_lengths
from tests.run_setup import begin_run

TOLERANCE = 1e-5
OTHER = "--subsampling separable --biases False --frame_padding reflected --log_floor_mode floor "
OTHER += "--smallest_power 1e-10 --mel_bins 64"


def trained(folder: Path, corpus: Corpus, *shape: str) -> Path:
    """Return the checkpoint of a tiny model after a few steps."""
    flags = [*TINY_MODEL, *shape, *corpus.flags(), *run_folders(folder), "--num_workers", "0", "--max_steps", "2"]
    run = build_run(begin_run([*flags, "--learning_rate", "3e-4"]))
    run.step.model.ctc_head.bias.data[0] -= 3.0  # a model with few steps decodes only blanks otherwise
    train(run)
    return folder / "checkpoints" / LAST


def export_and_import(weights: Path, folder: Path) -> Path:
    """Write the weights as a .nemo file; return the checkpoint that import_asr.py creates from it."""
    write_nemo(folder / "first.nemo", read_checkpoint(weights))
    checked(
        run_script("training_scripts/import_asr.py", str(folder / "first.nemo"), str(folder / "imported.pt"), "--force")
    )
    return folder / "imported.pt"


@pytest.mark.parametrize("more", ["", OTHER], ids=["by 4", "by 8"])
def test_exported_model_gives_equal_output_after_import(more, corpus, tmp_path):
    weights = trained(tmp_path, corpus, *f"{SHAPE} {more}".split())
    ours, imported_checkpoint = map(read_checkpoint, (weights, export_and_import(weights, tmp_path)))
    pairs = list(zip(*(recognitions(checkpoint) for checkpoint in (ours, imported_checkpoint)), strict=True))
    for before, after in pairs:
        assert after.text == before.text and after.tokens
        torch.testing.assert_close(after.log_probabilities, before.log_probabilities, rtol=0, atol=TOLERANCE)
    norm = read_parts("first", tmp_path).tensors["encoder.layers.0.conv.batch_norm.bias"]
    assert bool(norm.any()) == bool(more)  # without convolution biases, the norm has the bias

    model = dict(ours.states["model"])  # negative control: other weights give other probabilities
    model["encoder.blocks.1.attention.content_bias"] = model["encoder.blocks.1.attention.content_bias"] + 0.1
    write_nemo(tmp_path / "other.nemo", dataclasses.replace(ours, states={"model": model}))
    other = recognitions(import_nemo(tmp_path / "other.nemo", None, tmp_path).checkpoint)[0]
    assert (other.log_probabilities - pairs[0][0].log_probabilities).abs().max() > 3 * TOLERANCE


def recognitions(checkpoint: Checkpoint) -> list:
    return recognize_batch(build_speech_model(checkpoint, torch.device("cpu")), *waveforms_and_lengths())


def test_settings_without_nemo_equivalent_are_rejected_by_name(base, tmp_path):
    with pytest.raises(UsageError) as error:
        write_nemo(tmp_path / "ours.nemo", read_checkpoint(base))
    differing = (
        "--decoder_layers 1",
        "--attention_positions rotary",
        "--convolution_norm layer",
        "--frame_padding none",
    )
    for named in differing:
        assert named in str(error.value)
    assert not (tmp_path / "ours.nemo").exists()
