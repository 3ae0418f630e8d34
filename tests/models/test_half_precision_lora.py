"""LoRA parameters are trained in fp32 next to weights of any number format, under fp16 and bf16 autocast.

Adapters created in fp16 make a loss scaler fail with "Attempting to unscale FP16 gradients" (huggingface/peft#1336).
"""

import dataclasses
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.recipe.build import build_run
from konkanivani.training import build_step
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from tests.conftest import Corpus, parameter_grid, read_log, run_folders
from tests.run_setup import begin_run
from tests.whisper.small_model import write_model

STEPS = 6
COMMON = (
    *("--epochs", "9", "--max_steps", str(STEPS), "--warmup_steps", "1", "--learning_rate", "0.01", "--device", "cpu"),
    *("--batch_size", "4", "--gradient_accumulation_steps", "1", "--num_workers", "0", "--mixed_precision"),
)
LORA = ("--lora_rank", "2")
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def write_base(path: Path, base: Path, dtype: torch.dtype) -> Path:
    """Write the checkpoint `base` with all weights in this number format."""
    checkpoint = read_checkpoint(base)
    model = {name: weight.to(dtype) for name, weight in checkpoint.states["model"].items()}
    write_checkpoint(path, dataclasses.replace(checkpoint, states=checkpoint.states | {"model": model}))
    return path


def build(corpus: Corpus, folder: Path, *flags: str) -> Run:
    return build_run(begin_run(["--train_manifest", corpus.manifest("train"), *run_folders(folder), *COMMON, *flags]))


def train_recording_dtypes(run: Run, monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Train the run to its end; return the number formats of the gradients that the optimizer applied."""
    result: set[torch.dtype] = set()
    step = run.step.optimizer.step

    def recording_step() -> None:
        trained = [parameter for parameter in run.step.model.parameters() if parameter.requires_grad]
        assert trained and all(parameter.grad.isfinite().all() for parameter in trained)
        result.update(parameter.grad.dtype for parameter in trained)
        step()

    monkeypatch.setattr(run.step.optimizer, "step", recording_step)
    train(run)
    return result


def check_trained(run: Run, folder: Path, gradients: set[torch.dtype]) -> None:
    """Check number formats, losses and that every LoRA parameter has changed from its first value."""
    adapters = {name: weight for name, weight in run.step.model.named_parameters() if "low_rank" in name}
    assert adapters and {weight.dtype for weight in adapters.values()} == {torch.float32}
    assert gradients == {torch.float32}
    assert all(weight.isfinite().all() for weight in run.step.model.parameters())
    assert all(weight.any() for name, weight in adapters.items() if name.endswith("up")), "B is still zero"
    records = read_log(folder)
    assert len(records) == STEPS and all(torch.tensor(record["loss"]).isfinite() for record in records)
    stored = read_checkpoint(folder / "checkpoints" / LAST).states["model"]
    assert {weight.dtype for name, weight in stored.items() if "low_rank" in name} == {torch.float32}


@pytest.fixture(params=AUTOCAST)
def autocast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Enable autocast in this format on the CPU, with the loss scaler for fp16, as on a GPU."""
    monkeypatch.setattr(build_step, "choose_precision", lambda config, device: AUTOCAST[request.param])
    return request.param


@pytest.mark.parametrize(("stored", "frozen"), parameter_grid(STORED, ["fp32", "half"]))
def test_lora_trains_in_fp32_from_a_checkpoint_of_any_format(
    base, corpus, tmp_path, autocast, stored, frozen, monkeypatch
):
    initial = write_base(tmp_path / "base.pt", base, STORED[stored])
    run = build(corpus, tmp_path, "--init_from", str(initial), *LORA, "--frozen_dtype", frozen)
    assert run.step.scaler.is_enabled() == (autocast == "fp16")
    check_trained(run, tmp_path, train_recording_dtypes(run, monkeypatch))
    has_halved = any(weight.dtype == torch.float16 for weight in run.step.model.parameters())
    assert has_halved == (frozen == "half")


@pytest.mark.parametrize("frozen", ["fp32", "half"])
def test_lora_trains_in_fp32_from_a_whisper_folder_in_half_precision(corpus, tmp_path, autocast, frozen, monkeypatch):
    folder = write_model(tmp_path / "whisper", positions=64, dtype=AUTOCAST[autocast])
    run = build(corpus, tmp_path, "--pretrained", str(folder), "--language", "mr", *LORA, "--frozen_dtype", frozen)
    check_trained(run, tmp_path, train_recording_dtypes(run, monkeypatch))


def test_negative_control_fp16_adapter_is_rejected_by_loss_scaler(base, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(build_step, "choose_precision", lambda config, device: torch.float16)
    run = build(corpus, tmp_path, "--init_from", str(base), *LORA)
    for name, module in run.step.model.named_modules():
        if name.endswith("low_rank"):
            module.half()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        train(run)
