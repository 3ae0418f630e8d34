"""A model with one head, CTC or attention, equals the model with both heads if the other loss has weight zero."""

import dataclasses
import json

import pytest
import torch

from konkanivani.config import AugmentConfig, DataConfig, LossConfig, OptimizerConfig, TrainConfig
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.flags import parse_args
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.memory.devices import cpu_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.recipe.build import build_run
from konkanivani.recipe.train import train_and_report
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.gradient import local_gradient
from konkanivani.training.step import GradientTask, StepParts, forward_and_backward
from tests.conftest import TINY_MODEL, checked, read_log, run_folders, run_script, write_corpus
from tests.invariants.parts import MODEL, VOCAB_SIZE, global_batch, speeches
from tests.run_setup import begin_run, parse_flags

WITHOUT_DROPOUT = dataclasses.replace(MODEL, dropout=0.0)
CPU = torch.device("cpu")
HEADS = {"CTC only": (0, 1.0), "attention only": (2, 0.0)}
PLANNED = "--gradient_checkpointing auto --memory_budget 1GiB --num_workers 0".split()
PLANNED += "--batch_size 2 --gradient_accumulation_steps 1".split()
FLAGS = {"CTC only": ("--decoder_layers", "0"), "attention only": ("--ctc_weight", "0")}


def config_with(decoder_layers: int, ctc_weight: float) -> TrainConfig:
    return TrainConfig(
        model=dataclasses.replace(WITHOUT_DROPOUT, decoder_layers=decoder_layers),
        data=DataConfig(concurrent_micro_batches=1),
        loss=LossConfig(ctc_weight=ctc_weight),
        augment=AugmentConfig(),
        # No clipping: a norm over more tensors may differ in its last bit.
        optimizer=OptimizerConfig(max_grad_norm=1e9),
    )


def parts_of(decoder_layers: int, ctc_weight: float) -> StepParts:
    config = config_with(decoder_layers, ctc_weight)
    return build_step_parts(config, architecture_of(config, VOCAB_SIZE), CPU, 100)


def gradients_of(parts: StepParts) -> dict[str, torch.Tensor]:
    single = [dataclasses.replace(speech, waveform=speech.waveform.float()) for speech in speeches(4)]
    local_gradient(GradientTask(parts, global_batch(single, 2), 0, forward_and_backward))
    return {name: parameter.grad for name, parameter in parts.model.named_parameters()}


@pytest.mark.parametrize("heads", HEADS)
def test_single_head_gradient_equals_both_heads_with_zero_weight(heads):
    decoder_layers, ctc_weight = HEADS[heads]
    one, both = parts_of(decoder_layers, ctc_weight), parts_of(2, ctc_weight or 1e-300)
    one.model.load_state_dict({n: w for n, w in both.model.state_dict().items() if n in one.model.state_dict()})
    actual, expected = gradients_of(one), gradients_of(both)
    assert set(actual) < set(expected) and len(one.forward.objective.terms) == 1
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    # Negative control: the gradient differs with both losses.
    other = parts_of(2, 0.5)
    other.model.load_state_dict(both.model.state_dict())
    assert not torch.equal(gradients_of(other)["encoder.norm.weight"], actual["encoder.norm.weight"])


@pytest.mark.parametrize("heads", HEADS)
def test_single_head_plan_needs_less_memory(heads):
    def peaks(decoder_layers: int, ctc_weight: float) -> tuple[int, int]:
        config = config_with(decoder_layers, ctc_weight)
        tracer = build_tracer(config, architecture_of(config, VOCAB_SIZE), cpu_costs())
        load = BatchShape(2, 3.0, 20)
        return tracer.trace(load, RecomputePolicy("never")).bytes, tracer.trace_validation(load)

    result, both = peaks(*HEADS[heads]), peaks(2, 0.3)
    assert result[0] < both[0] and min(result) > 0


@pytest.mark.parametrize("heads", HEADS)
def test_single_head_model_works_in_all_scripts(heads, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 4, "valid": 1, "test": 1}, lengths=range(2, 3))
    flags = (*TINY_MODEL, *corpus.flags(), *run_folders(tmp_path), *PLANNED, *FLAGS[heads])
    train_and_report(parse_args([*flags, "--max_steps", "1"]))
    more = ("--max_steps", "2", "--resume", "auto", "--test_manifest", corpus.manifest("test"))
    scored = json.loads(train_and_report(parse_args([*flags, *more])))
    decoder_name = "prefix" if heads == "CTC only" else "attention"
    assert scored["steps"] == 2 and scored["test_cer"] is not None and scored[f"test_cer_{decoder_name}"] is not None
    steps, (validation, *_) = read_log(tmp_path), read_log(tmp_path, "validation")
    absent = "attention_loss" if heads == "CTC only" else "ctc_loss"
    assert all(step[absent] is None for step in steps) and steps[0]["loss"] > 0
    assert (validation["blank_share"] is None) == (heads == "attention only")

    checkpoint, recording = str(tmp_path / "checkpoints" / "checkpoint_last.pt"), corpus.directory / "audio"
    path = str(next(recording.glob("test_*.flac")))
    read = [load_recognizer(checkpoint).transcribe(path)]
    bundle = str(tmp_path / "model.safetensors")
    checked(run_script("training_scripts/export_asr.py", "--checkpoint", checkpoint, "--bundle", bundle))
    read.append(load_recognizer(bundle).transcribe(path))
    assert read[0] == read[1]
    with pytest.raises(UsageError, match="use --decode greedy or " + decoder_name):
        load_recognizer(checkpoint, decode="joint")
    with pytest.raises(CheckpointError, match="decoder_layers" if heads == "CTC only" else "ctc_weight"):
        back = ("--decoder_layers", "1", "--ctc_weight", "0.5")
        build_run(begin_run([*run_folders(tmp_path), "--resume", "auto", *back]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoder_layers 0 --ctc_weight 0.5", "--ctc_weight 1, or omit it"),
        ("--decoder_layers 0 --ctc_weight 0", "--ctc_weight 1, or omit it"),
        ("--decoder_layers 0 --test_decode joint", "use auto, greedy or prefix"),
        ("--ctc_weight 0 --test_decode joint", "use auto, greedy or attention"),
        ("--ctc_weight 0 --intermediate_ctc_weight 0.3", "but --ctc_weight is 0"),
        ("--decoder_layers -1", "at least 0"),
    ],
)
def test_contradictory_flags_are_rejected(flags, message):
    with pytest.raises(UsageError, match=message):
        parse_flags(flags.split())
