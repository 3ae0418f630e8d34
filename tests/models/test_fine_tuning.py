"""Fine-tuning: trained layers, a head that is trained first, learning rates, and frozen weights in half precision."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import DataConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainConfig, TuningConfig
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.errors import CheckpointError, DataError, UsageError
from konkanivani.flags import config_from_text, config_to_text
from konkanivani.inference.speech_model import build_speech_model
from konkanivani.memory.devices import cpu_costs
from konkanivani.memory.plan import RecomputePolicy, model_state_bytes
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.architecture import architecture_of
from konkanivani.models.fine_tuning import VOCAB_DEPENDENT_PREFIXES
from konkanivani.planning.traces import build_tracer
from konkanivani.recipe.build import build_run
from konkanivani.recipe.evaluation_model import evaluate_manifest, load_evaluation_model
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.loop import train
from konkanivani.training.optimizer_state import TrainedPart, delayed_warmup_factor
from konkanivani.training.step import StepParts, train_step
from tests.conftest import TINY_MODEL, Corpus, checked, mark_full, read_log, run_folders, run_script, write_corpus
from tests.invariants.parts import global_batch, measured_peak, speeches
from tests.run_setup import begin_run, parse_flags

CPU = torch.device("cpu")
STEADY = "--epochs 20 --schedule inverse_sqrt --warmup_steps 1 --num_workers 0 --device cpu".split()
SMALL = ("--batch_size", "4", "--gradient_accumulation_steps", "1")
TWO_STEPS = ("--batch_size", "13", "--gradient_accumulation_steps", "1")  # two steps per epoch
HALF = ("--frozen_dtype", "half")
HEADS = {name for head in ("ctc_head", "decoder.output") for name in (f"{head}.weight", f"{head}.bias")}
WIDE = ModelConfig(d_model=96, encoder_layers=4, decoder_layers=1, subsampling_channels=8)
Weights = dict[str, torch.Tensor]


def weights_of(folder: Path) -> Weights:
    return dict(read_checkpoint(folder / "checkpoints" / LAST).states["model"])


def fine_tune(corpus: Corpus, base: Path, folder: Path, steps: int, *flags: str) -> Weights:
    """Train the base for `steps` steps and return the weights."""
    arguments = ("--train_manifest", corpus.manifest("train"), *run_folders(folder), *STEADY, *SMALL, *flags)
    train(build_run(begin_run([*arguments, "--init_from", str(base), "--max_steps", str(steps)])))
    return weights_of(folder)


def changed_weights(before: Weights, after: Weights) -> set[str]:
    return {name for name, weight in after.items() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_train_layers_trains_last_layers_and_everything_after(count, base, corpus, tmp_path):
    before = dict(read_checkpoint(base).states["model"])
    kept = ("encoder.subsampling.", *(f"encoder.blocks.{number}." for number in range(2 - count)))
    after = fine_tune(corpus, base, tmp_path, 1, "--train_layers", str(count))
    assert changed_weights(before, after) == {name for name in before if not name.startswith(kept)}
    moments = read_checkpoint(tmp_path / "checkpoints" / LAST).states["optimizer"]
    assert {name.rpartition("/")[0] for name in moments} == changed_weights(before, after)
    assert "encoder.norm.weight" in changed_weights(before, after)


def test_train_layers_equals_freezing_the_first_layers(base, corpus, tmp_path):
    first = fine_tune(corpus, base, tmp_path / "first", 1, "--freeze", "1")
    last = fine_tune(corpus, base, tmp_path / "last", 1, "--train_layers", "1")
    assert all(torch.equal(weight, first[name]) for name, weight in last.items())


def test_freeze_steps_trains_head_first_then_all_weights(base, corpus, tmp_path):
    before, flags = dict(read_checkpoint(base).states["model"]), ("--freeze_steps", "1")
    alone = fine_tune(corpus, base, tmp_path / "alone", 1, *flags)
    assert changed_weights(before, alone) == {name for name in before if name.startswith(VOCAB_DEPENDENT_PREFIXES)}
    moments = read_checkpoint(tmp_path / "alone" / "checkpoints" / LAST).states["optimizer"]
    assert {name.rpartition("/")[0] for name in moments} == before.keys()
    assert not any(moment.any() for name, moment in moments.items() if not name.startswith(VOCAB_DEPENDENT_PREFIXES))
    assert changed_weights(before, fine_tune(corpus, base, tmp_path / "all", 2, *flags)) == before.keys()


@pytest.mark.parametrize(
    "flags",
    [
        ("--freeze_steps", "2", "--encoder_rate_factor", "0.3"),
        *mark_full((("--train_layers", "1", "--freeze_steps", "2", "--frozen_dtype", "half"),)),
        ("--new_tokenizer", "--lora_rank", "2", "--freeze_steps", "2", "--frozen_dtype", "half"),
    ],
)
def test_resume_around_end_of_freeze_steps_is_bitwise_exact(flags, base, corpus, tmp_path):
    flags = (*flags, "--dropout", "0.2")
    whole = fine_tune(corpus, base, tmp_path / "whole", 4, *flags)
    pieces = tmp_path / "pieces"
    fine_tune(corpus, base, pieces, 1, *flags)
    for steps in ("3", "4"):
        train(build_run(begin_run([*run_folders(pieces), "--resume", "auto", "--max_steps", steps])))
    one, other = (read_checkpoint(folder / "checkpoints" / LAST) for folder in (tmp_path / "whole", pieces))
    for part in ("model", "optimizer"):
        assert all(torch.equal(tensor, other.states[part][name]) for name, tensor in one.states[part].items())
    assert one.states["progress"] == other.states["progress"]
    rates = [[record["learning_rate"] for record in read_log(folder)] for folder in (tmp_path / "whole", pieces)]
    assert rates[0] == rates[1] and len(rates[0]) == 4
    another = fine_tune(corpus, base, tmp_path / "control", 4, *flags, "--freeze_steps", "3")
    assert not all(torch.equal(weight, another[name]) for name, weight in whole.items())


def test_encoder_has_rate_factor_and_frozen_groups_have_delayed_warmup(base, corpus, tmp_path):
    flags = (*corpus.flags(), *run_folders(tmp_path), *STEADY, "--init_from", str(base))
    run = build_run(begin_run([*flags, "--freeze_steps", "5", "--encoder_rate_factor", "0.25"]))
    schedule, tuning = OptimizerConfig(warmup_steps=2), run.config.tuning
    shares = [delayed_warmup_factor(schedule, tuning, step, 100) for step in range(9)]
    assert shares == [0, 0, 0, 0, 0, 0.5, 1, 1, 1]
    names = {parameter: name for name, parameter in run.step.model.named_parameters()}
    for group in run.step.optimizer.param_groups:
        group_names = {names[parameter] for parameter in group["params"]}
        assert group["factor"] == (0.25 if all(name.startswith("encoder.") for name in group_names) else 1.0)
        assert {name.startswith(VOCAB_DEPENDENT_PREFIXES) for name in group_names} == {not group["later"]}
        assert len({parameter.dim() >= 2 for parameter in group["params"]}) == 1
    assert sum(len(group["params"]) for group in run.step.optimizer.param_groups) == len(names)


def step_parts(tuning: TuningConfig, **memory: object) -> StepParts:
    """Return step parts of a model whose blocks take more memory than its front end."""
    config = tuned_config(tuning, **memory)
    torch.manual_seed(0)
    return build_step_parts(config, architecture_of(config, 20), CPU, 100)


def tuned_config(tuning: TuningConfig, **memory: object) -> TrainConfig:
    data, optimizer = DataConfig(concurrent_micro_batches=1), OptimizerConfig(warmup_steps=1)
    return TrainConfig(model=WIDE, data=data, memory=MemoryConfig(**memory), tuning=tuning, optimizer=optimizer)


def spoken() -> list:
    return [dataclasses.replace(speech, waveform=speech.waveform.float()) for speech in speeches(4, augmented=False)]


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_freeze_steps_save_memory_and_plan_bounds_later_steps(recompute):
    tuning = TuningConfig(freeze_steps=2)
    parts, batch = step_parts(tuning, gradient_checkpointing=recompute), global_batch(spoken(), 2)
    tracer = build_tracer(tuned_config(tuning), architecture_of(tuned_config(tuning), 20), cpu_costs())
    planned = tracer.trace_global_batch(batch, RecomputePolicy(recompute)).bytes
    early = measured_peak(parts, batch)
    assert not any(parameter.grad is not None for parameter in parts.model.parameters())
    assert all(parameter.requires_grad for parameter in parts.model.parameters())
    untuned = dataclasses.replace(parts.architecture, tuning=TuningConfig())
    forward = dataclasses.replace(parts.forward, architecture=untuned)
    late = measured_peak(dataclasses.replace(parts, forward=forward), batch)
    assert early < 0.8 * late and 0.999 * late <= planned <= 1.02 * late


LORA = TuningConfig(lora_rank=2)
TOP = TuningConfig(train_layers=1)


@pytest.mark.parametrize("tuning", [LORA, TOP], ids=["LoRA", "last layer"])
def test_half_frozen_weights_take_two_bytes_and_plan_bounds_peak(tuning):
    rounded = dataclasses.replace(tuning, frozen_dtype="half")
    fp32, half = step_parts(tuning), step_parts(rounded)
    matrices = [weight for weight in half.model.parameters() if weight.dtype == torch.float16]
    numbers = sum(weight.numel() for weight in matrices)
    assert numbers > 0.6 * sum(weight.numel() for weight in half.model.parameters())
    assert not any(weight.requires_grad for weight in matrices)
    states = [model_state_bytes(parts.model, parts.optimizer.tensors) for parts in (fp32, half)]
    assert states[0] - states[1] == 2 * numbers
    batch, config = global_batch(spoken(), 2), tuned_config(rounded)
    tracer, measured = build_tracer(config, architecture_of(config, 20), cpu_costs()), measured_peak(half, batch)
    planned = tracer.trace_global_batch(batch, RecomputePolicy("never")).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured
    control = build_tracer(tuned_config(tuning), architecture_of(tuned_config(tuning), 20), cpu_costs())
    assert control.trace_global_batch(batch, RecomputePolicy("never")).state - tracer.state() == 2 * numbers


@pytest.mark.parametrize("precision", [{}, {"mixed_precision": True, "amp_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_half_frozen_weights_give_close_losses(precision):
    losses = []
    for dtype in ("fp32", "half"):
        parts = step_parts(dataclasses.replace(LORA, frozen_dtype=dtype), **precision)
        losses.append(torch.tensor([train_step(parts, global_batch(spoken(), 2), number).loss for number in range(3)]))
    assert not torch.equal(*losses) and torch.allclose(*losses, rtol=2e-3 if not precision else 1e-2)
    assert losses[1][-1] < losses[1][0]


def test_half_frozen_weights_give_equal_losses_when_offloaded():
    config, losses = tuned_config(dataclasses.replace(LORA, frozen_dtype="half")), []
    for place in (ON_CARD, Placement(offloaded_blocks=3)):
        parts = build_step_parts(config, architecture_of(config, 20), CPU, 100, layout=StateLayout(placement=place))
        losses.append([train_step(parts, global_batch(spoken(), 2), number).loss for number in range(2)])
    assert losses[0] == losses[1]


def test_weights_out_of_half_precision_range_are_rejected(base, corpus, tmp_path):
    checkpoint = read_checkpoint(base)
    checkpoint.states["model"]["encoder.blocks.0.convolution.gate.weight"][0, 0] = 1e6
    write_checkpoint(tmp_path / "large.pt", checkpoint)
    flags = [*corpus.flags(), *run_folders(tmp_path), "--init_from", str(tmp_path / "large.pt"), "--lora_rank", "2"]
    with pytest.raises(CheckpointError, match="rounded to half precision, are not finite numbers"):
        build_run(begin_run([*flags, *HALF]))
    build_run(begin_run([*flags, "--fresh"]))


def test_lora_on_half_frozen_weights_merges_and_exports(base, corpus, tmp_path):
    flags = ("--lora_rank", "4", "--frozen_dtype", "half", "--learning_rate", "0.05")
    after = fine_tune(corpus, base, tmp_path, 2, *flags)
    named = (f"encoder.blocks.0.{part}.weight" for part in ("attention.output", "convolution.gate"))
    assert all(after[name].dtype == torch.float16 for name in named)
    checkpoint, features = tmp_path / "checkpoints" / LAST, torch.randn(1, 90, 80)
    adapted = load_evaluation_model(checkpoint, CPU).forward.model.eval()
    merged = build_speech_model(read_checkpoint(checkpoint), CPU).model
    plain = build_speech_model(read_checkpoint(base), CPU).model
    with torch.no_grad():
        ours, theirs, before = (m.ctc_logits(features, (90,))[0].log_softmax(-1) for m in (adapted, merged, plain))
    assert (ours - theirs).abs().max() <= 1e-5 < (ours - before).abs().max()
    bundle = str(tmp_path / "model.safetensors")
    checked(run_script("training_scripts/export_asr.py", "--checkpoint", str(checkpoint), "--bundle", bundle))
    next_run = build_run(begin_run([*corpus.flags(), *run_folders(tmp_path / "next"), "--init_from", str(checkpoint)]))
    assert all(
        torch.equal(weight, merged.state_dict()[name]) for name, weight in next_run.step.model.state_dict().items()
    )


def corpus_with_texts(directory: Path, texts: list[str], lengths: range = range(1, 7)) -> Corpus:
    """Write a corpus with these transcripts in turn."""
    written = write_corpus(directory, {"train": 12, "valid": 3}, lengths=lengths)
    for split in ("train", "valid"):
        path = Path(written.manifest(split))
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        new_rows = [row | {"text": texts[number % len(texts)]} for number, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in new_rows), encoding="utf-8")
    return written


def test_unknown_characters_are_rejected_with_suggested_flags(base, tmp_path, capsys):
    other = corpus_with_texts(tmp_path / "digits", ["एक 2", "दोन 2 3"])
    flags = (*other.flags(), *run_folders(tmp_path), "--init_from", str(base), "--num_workers", "0")
    with pytest.raises(DataError, match="% of the tokens of") as error:
        build_run(begin_run(list(flags)))
    for part in ("2 12 times", "3 6 times", "--digits spell", "--new_tokenizer"):
        assert part in str(error.value)
    build_run(begin_run([*flags, "--digits", "spell"]))
    assert "not loaded (randomly initialised): 0 tensors" in capsys.readouterr().out
    latin = corpus_with_texts(tmp_path / "latin", ["एक zero", "दोन"])
    with pytest.raises(DataError, match="--new_tokenizer") as error:
        flags = (*latin.flags(), *run_folders(tmp_path / "control"), "--init_from", str(base), "--num_workers", "0")
        build_run(begin_run(list(flags)))
    assert "--digits" not in str(error.value)


def test_few_unknown_characters_are_reported_and_tokenizer_is_kept(base, tmp_path, capsys):
    train_texts = ["एक दोन तीन चार पांच उदक"] * 11 + ["एक दोन तीन चार पांच x"]
    written = corpus_with_texts(tmp_path / "nearly", train_texts, range(6, 7))
    flags = (*written.flags(), *run_folders(tmp_path), "--init_from", str(base), "--num_workers", "0")
    run = build_run(begin_run(list(flags)))
    assert run.data.tokenizer.model == read_checkpoint(base).tokenizer
    message = capsys.readouterr().out
    assert "x 1 times" in message and "trained as the unknown token" in message


def test_resume_rejects_transcripts_in_another_script(base, corpus, tmp_path):
    latin = Path(corpus.manifest("train")).with_name("latin.jsonl")
    rows = map(json.loads, Path(corpus.manifest("train")).read_text(encoding="utf-8").splitlines())
    latin.write_text("".join(json.dumps(row | {"text": "zero one"}) + "\n" for row in rows), encoding="utf-8")
    shutil.copy(base, tmp_path)
    flags = ("--resume", str(tmp_path / LAST), "--log_dir", str(tmp_path), "--train_manifest")
    with pytest.raises(DataError, match="Start a new run with --init_from and --new_tokenizer"):
        build_run(begin_run([*flags, str(latin)]))
    build_run(begin_run([*flags, corpus.manifest("train")]))  # negative control


def test_new_tokenizer_initialises_head_with_zeros_and_blank_bias(base, corpus, tmp_path, capsys):
    flags = [*corpus.flags(), *run_folders(tmp_path), "--init_from", str(base), "--new_tokenizer", "--num_workers", "0"]
    run = build_run(begin_run(flags))
    weights, before = run.step.model.state_dict(), dict(read_checkpoint(base).states["model"])
    assert weights["ctc_head.bias"][0] == -2 and not weights["ctc_head.bias"][1:].any()
    assert not any(weights[name].any() for name in HEADS - {"ctc_head.bias"})
    assert weights["decoder.embedding.weight"].any()
    assert all(name.startswith(VOCAB_DEPENDENT_PREFIXES) for name in changed_weights(before, weights))
    tuning, steps = run.config.tuning, run.step.total_steps
    assert tuning.encoder_factor == 0.1 and tuning.freeze_steps == min(500, steps // 10)  # equal to the warm-up
    assert "not loaded (randomly initialised): 5 tensors" in capsys.readouterr().out
    control = build_run(begin_run([*flags[:-3], "--fresh", "--num_workers", "0"]))
    assert control.config.tuning.freeze_steps == 0 and control.config.tuning.encoder_factor == 1.0
    assert torch.equal(control.step.model.ctc_head.weight, before["ctc_head.weight"])


def test_lora_is_trained_together_with_new_head(base, corpus, tmp_path):
    after = fine_tune(corpus, base, tmp_path, 4, "--new_tokenizer", "--lora_rank", "2", "--freeze_steps", "1")
    assert all(after[name].any() for name in HEADS)
    assert after["encoder.blocks.0.attention.query_key_value.low_rank.up"].any()
    before = dict(read_checkpoint(base).states["model"])
    assert torch.equal(after["encoder.norm.weight"], before["encoder.norm.weight"])


def test_flags_override_shape_and_tokenizer_of_checkpoint(base, corpus, tmp_path):
    stored = parse_flags(list(TINY_MODEL))
    flags = [*corpus.flags(), *run_folders(tmp_path), "--init_from", str(base)]
    assert begin_run(flags).config.model == stored.model and begin_run(flags).config.text.vocab_size == 30
    cut = begin_run([*flags, "--encoder_layers", "1"]).config
    assert cut.model == dataclasses.replace(stored.model, encoder_layers=1)
    preset = begin_run([*flags, "--preset", "minimal"]).config
    assert (preset.model.d_model, preset.model.encoder_layers, preset.text.vocab_size) == (128, 6, 30)
    new = begin_run([*flags, "--new_tokenizer"]).config
    assert new.model == stored.model and new.text == TrainConfig().text
    with pytest.raises(UsageError, match="--train_layers 3: the encoder has only 2 blocks"):
        begin_run([*flags, "--train_layers", "3"])


def test_planner_uses_shape_of_checkpoint(base, corpus, tmp_path):
    flags, plan_flags = ("--init_from", str(base), "--train_layers", "1"), ("--memory_budget", "310MiB", "--json")
    named = (f"--checkpoint={base}", *flags[2:], *HALF)  # the name of --init_from in other scripts
    planned = json.loads(run_script("training_scripts/plan_memory.py", *named, *plan_flags).stdout)
    arguments = (*corpus.flags(), *run_folders(tmp_path), "--fresh", *flags)
    steps = [build_run(begin_run([*arguments, *more])).step for more in ((), HALF)]
    states = [model_state_bytes(step.model, step.optimizer.tensors) for step in steps]
    assert planned["state"] == states[1] < states[0] < 2**21
    assert " ".join((*flags, *HALF)) in planned["flags"]


def test_initial_score_is_logged_with_every_validation_and_after_resume(base, corpus, tmp_path, capsys):
    flags = (*corpus.flags(), *run_folders(tmp_path), *STEADY, *TWO_STEPS, "--init_from", str(base), "--max_steps", "3")
    train(build_run(begin_run(list(flags))))
    assert "(initially " in capsys.readouterr().out
    train(build_run(begin_run([*run_folders(tmp_path), "--resume", "auto", "--max_steps", "4"])))
    first, *later = read_log(tmp_path, "validation")
    expected = evaluate_manifest(load_evaluation_model(base, CPU), corpus.manifest("valid"), greedy_ctc)
    base_scores = [0, 0, expected.rates.cer, expected.rates.wer, expected.losses.all]
    assert [first[name] for name in ("step", "epoch", "cer", "wer", "loss")] == base_scores
    assert len(later) == 2 and later[0]["epoch"] == 1
    assert {(record["initial_wer"], record["initial_cer"]) for record in (first, *later)} == {
        (expected.rates.wer, expected.rates.cer)
    }


def test_negative_control_fresh_run_has_no_initial_score(base, corpus, tmp_path):
    flags = (*STEADY, *TWO_STEPS, "--max_steps", "2")
    train(build_run(begin_run([*TINY_MODEL, *corpus.flags(), *run_folders(tmp_path / "fresh"), *flags])))
    assert [record["initial_cer"] for record in read_log(tmp_path / "fresh", "validation")] == [None]
    only = ("--train_manifest", corpus.manifest("train"), "--init_from", str(base))
    train(build_run(begin_run([*only, *run_folders(tmp_path / "blind"), *flags])))
    assert read_log(tmp_path / "blind", "validation") == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--freeze encoder", "or --init_from"),
        ("--lora_rank 4", "or --init_from"),
        ("--init_from x --freeze -1", "a number of blocks, at least 0"),
        ("--init_from x --freeze 2 --lora_rank 4", "omit --freeze and --train_layers"),
        ("--init_from x --lora_rank 4 --lora_targets query keys", "must be among"),
        ("--init_from x --lora_rank -4", "between 0 and 1024"),
        ("--init_from x --lora_rank 4 --lora_alpha nan", "finite"),
        ("--train_layers 2", "give --pretrained or --init_from"),
        ("--encoder_rate_factor 0.1", "give --pretrained or --init_from"),
        ("--freeze_steps 10", "give --init_from"),
        ("--new_tokenizer", "give --init_from"),
        ("--pretrained x --new_tokenizer", "give --init_from"),
        ("--init_from x --train_layers 2 --freeze 2", "give only one of them"),
        ("--init_from x --train_layers 2 --lora_rank 2", "omit --freeze and --train_layers"),
        ("--init_from x --lora_rank 2 --freeze_steps 5", "or give --new_tokenizer"),
        ("--init_from x --train_layers -1", "at least 0"),
        ("--init_from x --freeze_steps -1", "at least 0"),
        ("--init_from x --encoder_rate_factor 0", "above 0"),
        ("--init_from x --encoder_rate_factor nan", "finite"),
        ("--init_from x --frozen_dtype half", "give --freeze, --train_layers or --lora_rank"),
    ],
)
def test_invalid_flag_combinations_are_rejected(flags, message):
    with pytest.raises(UsageError, match=message):
        parse_flags(flags.split())


def test_conformer_setting_on_transformer_is_rejected_as_flag_only():
    stored = TrainConfig(model=ModelConfig(encoder_type="transformer", convolution_norm="none"))
    assert parse_flags(["--resume", "auto"], config_from_text(config_to_text(stored))).model == stored.model
    for given in ("--convolution_norm none", "--convolution_kernel 15", "--entry_norm False"):
        with pytest.raises(UsageError, match=f"{given.split()[0]} has no effect without --encoder_type conformer"):
            parse_flags(["--resume", "auto", *given.split()], stored)


def test_resume_rejects_changed_tuning_flags(base, corpus, tmp_path):
    fine_tune(corpus, base, tmp_path, 1, "--freeze_steps", "3", "--encoder_rate_factor", "0.2")
    for flag in "--train_layers=1 --freeze_steps=7 --encoder_rate_factor=0.5 --new_tokenizer".split():
        with pytest.raises(CheckpointError, match=f"{flag.split('=')[0]} is .* here and .* in the checkpoint"):
            begin_run([*run_folders(tmp_path), "--resume", "auto", flag])


def test_init_from_with_resume_auto_resumes_and_rejects_other_checkpoint(base, corpus, tmp_path):
    for steps, start in ((1, base), (2, base.parent / ".." / base.parent.name / base.name)):
        fine_tune(corpus, start, tmp_path / "twice", steps, "--resume", "auto")
    once, twice = fine_tune(corpus, base, tmp_path / "once", 2), weights_of(tmp_path / "twice")
    assert all(torch.equal(weight, twice[name]) for name, weight in once.items())
    path = str(tmp_path / "twice" / "checkpoints" / "checkpoint_last.pt")
    for newest in ("auto", path):
        with pytest.raises(CheckpointError, match="--init_from is other.pt here and .*in the checkpoint"):
            begin_run([*run_folders(tmp_path / "twice"), "--resume", newest, "--init_from", "other.pt"])
    assert begin_run(["--resume", path]).resumed.step == 2  # --init_from need not be repeated


def test_checkpoint_saved_during_freeze_steps_has_all_trained_weights(corpus, base, tmp_path):
    """A signal may save during a step, while only the gradients of the heads are enabled."""
    flags = (*corpus.flags(), *run_folders(tmp_path), *STEADY, "--init_from", str(base))
    run = build_run(begin_run([*flags, "--freeze_steps", "2"]))
    model = run.step.model
    part = TrainedPart(model)
    with run.step.stage(0):
        now = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert set(part.state_dict()) == {name for name, _ in model.named_parameters()}
        assert set(TrainedPart(model).state_dict()) == now != set(part.state_dict())  # negative control
    part.load_state_dict({name: weight.clone() for name, weight in part.state_dict().items()})
