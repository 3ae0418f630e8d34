"""--freeze and --lora_rank: frozen weights do not change, all others do, and a model with merged LoRA is equivalent."""

import json
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import TrainConfig, TuningConfig
from konkanivani.errors import CheckpointError
from konkanivani.inference.speech_model import build_speech_model
from konkanivani.memory.devices import cpu_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.recipe.build import build_run
from konkanivani.recipe.evaluation_model import load_evaluation_model
from konkanivani.training.loop import train
from tests.conftest import TINY_MODEL, checked, run_folders, run_script, run_trainer
from tests.invariants.parts import MODEL, VOCAB_SIZE
from tests.run_setup import begin_run

CPU = torch.device("cpu")
SMALL = ("--batch_size", "4", "--gradient_accumulation_steps", "1", "--num_workers", "0")
TUNED = {
    "encoder": (("--freeze", "encoder"), "encoder."),
    "one block": (("--freeze", "1"), ("encoder.subsampling.", "encoder.blocks.0.")),
    "LoRA": (("--lora_rank", "4", "--lora_targets", "query_key_value", "expand"), ""),
}


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(path).states["model"])


@pytest.mark.parametrize("tuned", TUNED)
def test_frozen_weights_are_unchanged_after_training_and_resume(tuned, base, corpus, tmp_path):
    flags, frozen = TUNED[tuned]
    common = (*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *SMALL, "--warmup_steps", "1", *flags)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    initial = ("--init_from", str(base), "--dropout", "0.2", "--epochs", "20", "--schedule", "inverse_sqrt")
    train(build_run(begin_run([*common, *run_folders(whole), *initial, "--max_steps", "4"])))
    train(build_run(begin_run([*common, *run_folders(halves), *initial, "--max_steps", "2"])))
    train(build_run(begin_run([*run_folders(halves), "--resume", "auto", "--max_steps", "4"])))
    before, after = weights_of(base), weights_of(whole / "checkpoints" / LAST)
    resumed, kept = weights_of(halves / "checkpoints" / LAST), {name for name in before if name.startswith(frozen)}
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    assert all(torch.equal(before[name], after[name]) for name in kept) and kept
    changed = {name for name in after if name not in kept}
    assert changed and not any(torch.equal(after[name], before[name]) for name in changed & set(before))
    moments = read_checkpoint(whole / "checkpoints" / LAST).states["optimizer"]
    assert {name.rpartition("/")[0] for name in moments} == changed  # frozen weights have no optimizer state


def test_lora_starts_at_zero_and_merges_into_init_from_model(base, corpus, tmp_path):
    flags = (*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *SMALL)
    tuned = ("--lora_rank", "4", "--warmup_steps", "0", "--learning_rate", "0.05", "--max_steps", "2")
    run = build_run(begin_run([*flags, *tuned, *run_folders(tmp_path), "--init_from", str(base)]))
    model, plain = run.step.model.eval(), build_speech_model(read_checkpoint(base), CPU).model
    features, lengths = torch.randn(1, 90, 80), (90,)
    with torch.no_grad():
        assert torch.equal(model.ctc_logits(features, lengths)[0], plain.ctc_logits(features, lengths)[0])
    model.train()
    train(run)
    checkpoint = tmp_path / "checkpoints" / LAST
    adapted = load_evaluation_model(checkpoint, CPU).forward.model.eval()
    merged = build_speech_model(read_checkpoint(checkpoint), CPU).model
    assert set(merged.state_dict()) == set(plain.state_dict()) < set(adapted.state_dict())
    with torch.no_grad():
        expected, actual = adapted.ctc_logits(features, lengths)[0], merged.ctc_logits(features, lengths)[0]
        assert (expected - actual).abs().max() < 1e-5
        # Negative control: the trained change exceeds rounding.
        assert (expected - plain.ctc_logits(features, lengths)[0]).abs().max() > 1e-3
    run = build_run(begin_run([*flags, *run_folders(tmp_path / "next"), "--init_from", str(checkpoint)]))
    assert all(torch.equal(weight, merged.state_dict()[name]) for name, weight in run.step.model.state_dict().items())


def test_plan_keeps_no_activations_of_frozen_lower_layers():
    def peak(tuning: TuningConfig) -> tuple[int, int]:
        config = TrainConfig(model=MODEL, tuning=tuning)
        tracer = build_tracer(config, architecture_of(config, VOCAB_SIZE), cpu_costs())
        traced = tracer.trace(BatchShape(4, 6.0, 20), RecomputePolicy("never"))
        return traced.backward - traced.state, traced.state

    whole, one, encoder = (peak(TuningConfig(freeze=freeze)) for freeze in ("none", 1, "encoder"))
    assert encoder[0] < one[0] < whole[0] and encoder[0] < 0.6 * whole[0] and encoder[1] < one[1] < whole[1]
    adapted = peak(TuningConfig(lora_rank=2))
    assert adapted[1] < 0.4 * whole[1]


def test_scripts_report_tuning_and_reject_other_tuning_on_resume(base, corpus, tmp_path):
    flags = (*TINY_MODEL, *corpus.flags(), *SMALL, *run_folders(tmp_path), "--init_from", str(base))
    trained = run_trainer(*flags, "--freeze", "encoder", "--max_steps", "1")
    assert trained.returncode == 0 and "frozen" in trained.stdout
    checkpoint, bundle = tmp_path / "checkpoints" / LAST, str(tmp_path / "model.safetensors")
    checked(run_script("training_scripts/export_asr.py", "--checkpoint", str(checkpoint), "--bundle", bundle))
    scored = run_script(
        "training_scripts/evaluate_konkanivani_asr.py",
        *("--checkpoint", str(checkpoint), "--manifest", corpus.manifest("test"), "--output", str(tmp_path / "scores")),
        "--json",
    )
    assert scored.returncode == 0 and json.loads(scored.stdout.splitlines()[-1])
    with pytest.raises(CheckpointError, match="--freeze is none here and encoder in the checkpoint"):
        begin_run([*run_folders(tmp_path), "--resume", "auto", "--freeze", "none"])
