"""Commands with a T5 folder: training from text-to-text manifests, resuming, export, and bad input."""

import dataclasses
import gc
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE, read_checkpoint
from konkanivani.cli import evaluate, export
from konkanivani.errors import KonkaniVaniError
from konkanivani.flags import parse_args
from konkanivani.inference.speech_model import build_speech_model, settings_of_weights
from konkanivani.memory.plan import MemoryPlan
from konkanivani.memory.weights import ON_CARD, OffloadedWeights
from konkanivani.models.t5.folder import read_t5_folder
from konkanivani.recipe.build import build_run, validation_within
from konkanivani.recipe.dry_run import dry_run
from konkanivani.recipe.final_scores import evaluation_device
from konkanivani.recipe.startup import resolve_start
from konkanivani.recipe.train import train_and_report
from konkanivani.training.loop import train
from tests.conftest import mark_full
from tests.t5.parts import LINES, write_folder, write_pairs

TEXTS = [(line.strip().lower(), line.strip()) for line in LINES[:9]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a read-only folder of a random model."""
    return write_folder(tmp_path_factory.mktemp("t5") / "base")


def run_flags(base: Path, folder: Path, *more: object) -> list[str]:
    """Return the flags of a run of one epoch on 18 pairs."""
    train, valid = folder / "train.jsonl", folder / "valid.jsonl"
    if not train.exists():
        write_pairs(train, 2 * TEXTS)
        write_pairs(valid, [(one + " x", two) for one, two in TEXTS[:3]])
    flags = ["--pretrained", base, "--train_manifest", train, "--valid_manifest", valid, "--device", "cpu"]
    flags += ["--num_workers", 0, "--epochs", 1, "--batch_size", 3, "--gradient_accumulation_steps", 2]
    flags += ["--checkpoint_dir", folder / "checkpoints", "--log_dir", folder / "runs", "--max_target_tokens", 40]
    return list(map(str, (*flags, *more)))


def run(*flags: str) -> dict[str, object]:
    return json.loads(train_and_report(parse_args(list(flags))))


def log_records(folder: Path) -> list[dict[str, object]]:
    (log,) = (folder / "runs").rglob("log.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def checkpoint_weights(folder: Path, name: str = "checkpoint_last.pt") -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints" / name).states["model"]


@pytest.mark.parametrize("tuning", [(), ("--lora_rank", 2), *mark_full((("--freeze", "encoder"),))])
def test_run_trains_validates_resumes_and_exports(tuning, base, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    result = run(*run_flags(base, whole, *tuning, "--epochs", 2, "--test_manifest", whole / "valid.jsonl"))
    assert result["steps"] == 6 and result["test_wer"] > 0 and result["test_wer_attention"] > 0
    interrupted = build_run(resolve_start(parse_args(run_flags(base, resumed, *tuning, "--epochs", 2))))
    with interrupted.logs.logbook:
        train(interrupted, last_step=2)
    del interrupted
    gc.collect()  # releases the locks of the folders
    run("--resume", "auto", "--checkpoint_dir", str(resumed / "checkpoints"))
    one, other = checkpoint_weights(whole), checkpoint_weights(resumed)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    printed = capsys.readouterr().out
    assert "tokens" in printed and "0 h" not in printed and " s)" not in printed
    steps = [record for record in log_records(whole) if "tokens" in record and record.get("utterances") == 6]
    assert len(steps) == 6 and steps[0]["padding_share"] < 0.7
    checkpoint = str(whole / "checkpoints" / "checkpoint_last.pt")
    export.main(
        ["--checkpoint", checkpoint, "--folder", str(tmp_path / "out"), "--manifest", str(whole / "valid.jsonl")]
    )
    before, after = read_t5_folder(base), read_t5_folder(tmp_path / "out")
    changed = {name for name, weight in after.weights().items() if not torch.equal(weight, before.weights()[name])}
    trained = {name for name in before.weights() if not tuning} or changed
    assert changed == trained and ("encoder.blocks.0.self_attention.query.weight" in changed) == (
        tuning != ("--freeze", "encoder")
    )
    assert "decoder.blocks.1.self_attention.value.weight" in changed
    assert (tmp_path / "out" / "spiece.model").read_bytes() == (base / "spiece.model").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_run_with_the_vocabulary_of_mt5_is_loaded_and_resumed(tmp_path):
    base = write_folder(tmp_path / "base", is_bytes=True, width=8, size=250_112)
    run(*run_flags(base, tmp_path, "--max_steps", 1))
    path = tmp_path / "checkpoints" / "checkpoint_last.pt"
    checkpoint = read_checkpoint(path)
    assert settings_of_weights(checkpoint).pretrained.pretrained == str(base)
    assert build_speech_model(checkpoint, torch.device("cpu")).architecture.vocab_size == 250_112
    assert run("--resume", str(path), "--max_steps", "2")["steps"] == 2
    hostile = checkpoint.states[PRETRAINED_STATE] | {"vocab_size": 2**20 + 1}
    with pytest.raises(KonkaniVaniError, match="invalid dimensions") as refused:
        settings_of_weights(dataclasses.replace(checkpoint, states=checkpoint.states | {PRETRAINED_STATE: hostile}))
    assert refused.value.exit_code == 4


def test_dry_run_of_byt5_with_auto_batch_size_and_worker(tmp_path, capsys):
    base = write_folder(tmp_path / "byt5", is_bytes=True, variant="1.0")
    flags = run_flags(base, tmp_path, "--max_input_tokens", 24)
    at = flags.index("--batch_size")
    flags[at : at + 4] = ["--batch_size", "auto", "--effective_batch_size", "6", "--memory_budget", "900MiB"]
    config = parse_args([*flags, "--gradient_checkpointing", "auto", "--num_workers", "1", "--dry_run"])
    parsed = json.loads(dry_run(config))
    assert parsed["resumed_difference"] == 0 and parsed["steps"] == 3
    printed = capsys.readouterr()
    assert "up to 24 tokens: micro-batch of" in printed.out and "longer texts" not in printed.out
    assert "Cut to --max_input_tokens or --max_target_tokens: the texts of 16 rows" in printed.out
    assert not (tmp_path / "checkpoints").exists()


def test_manifest_fields_are_configurable_and_long_rows_skipped(base, tmp_path, capsys):
    for name in ("train.jsonl", "valid.jsonl"):
        write_pairs(tmp_path / name, TEXTS, ("hypothesis", "reference"))
    fields = ("--input_field", "hypothesis", "--target_field", "reference")
    run(*run_flags(base, tmp_path, *fields, "--max_input_tokens", 30, "--long_texts", "skip"))
    printed = capsys.readouterr().out
    reasons = [json.loads(line)["reason"] for line in next(tmp_path.rglob("rejected.jsonl")).read_text().splitlines()]
    assert reasons and all("tokens are more than --max_input_tokens 30" in reason for reason in reasons)
    assert "x more than --max_input_tokens" in printed


def test_transformers_loads_exported_folder_without_key_mismatch(tmp_path):
    from tests.t5.folders import KINDS, transformers, write_reference_folder

    for name in ("1.0", "flan"):
        folder = tmp_path / name
        kind = dataclasses.replace(KINDS[name], vocab_size=330)
        base = write_reference_folder(kind, folder / "base", dtype=torch.bfloat16)
        run(*run_flags(base, folder, "--learning_rate", 0.05, "--max_steps", 1))
        checkpoint = str(folder / "checkpoints" / "checkpoint_last.pt")
        export.main(["--checkpoint", checkpoint, "--folder", str(folder / "out")])
        model, loading_info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            folder / "out", output_loading_info=True
        )
        assert not any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        trained = checkpoint_weights(folder)
        result = model.decoder.block[1].layer[2].DenseReluDense.wo.weight
        assert torch.equal(result, trained["decoder.blocks.1.feedforward.contract.weight"].bfloat16())
        assert read_t5_folder(folder / "out").shape == read_t5_folder(base).shape


def test_peft_loads_exported_adapter(base, tmp_path):
    peft = pytest.importorskip("peft")
    from tests.t5.folders import transformers

    run(*run_flags(base, tmp_path, "--lora_rank", 2, "--learning_rate", 0.1))
    checkpoint = str(tmp_path / "checkpoints" / "checkpoint_last.pt")
    export.main(["--checkpoint", checkpoint, "--adapter", str(tmp_path / "adapter")])
    export.main(["--checkpoint", checkpoint, "--folder", str(tmp_path / "whole")])
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForSeq2SeqLM.from_pretrained(base), tmp_path / "adapter"
    ).merge_and_unload()
    merged = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole")
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
    pairs = list(zip(adapted.state_dict().items(), merged.state_dict().values(), strict=True))
    assert all(torch.allclose(one, other, atol=1e-6) for (_, one), other in pairs)
    assert any(not torch.allclose(one, plain.state_dict()[name], atol=1e-4) for (name, one), _ in pairs)


FolderChange = Callable[[Path], object]


def edit_json(name: str, **values: object) -> FolderChange:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


FOLDERS: dict[str, tuple[FolderChange, int, str]] = {
    "another model type": (edit_json("config.json", model_type="bart"), 4, "of a model of type 'bart'"),
    "umT5": (edit_json("config.json", model_type="umt5"), 4, "of a model of type 'umt5'"),
    "pickle": (lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"), 4, "is pickle, .* convert it"),
    "no tokenizer": (lambda at: (at / "spiece.model").unlink(), 4, "it has no spiece.model. Copy that file"),
    "not a SentencePiece model": (lambda at: (at / "spiece.model").write_bytes(b"no"), 4, "not a SentencePiece model"),
    "smaller vocabulary": (edit_json("config.json", vocab_size=50), 4, r"has the shape \(200, 16\), but \(50, 16\)"),
    "larger vocabulary": (edit_json("config.json", vocab_size=900), 4, r"has the shape \(200, 16\), but \(900, 16\)"),
    "too many layers": (edit_json("config.json", num_layers=10**6), 4, "must be a number from 1 to 256"),
    "unsupported activation": (
        edit_json("config.json", feed_forward_proj="gated-silu"),
        4,
        "must be relu or gated-gelu",
    ),
    "list as activation": (
        edit_json("config.json", feed_forward_proj=["relu"]),
        4,
        r"feed_forward_proj in its config.json is \['relu'\] but must be relu or gated-gelu",
    ),
    "object as activation": (edit_json("config.json", feed_forward_proj={}), 4, "is {} but must be relu or gated-gelu"),
    "null as number of layers": (
        edit_json("config.json", num_layers=None, num_decoder_layers=None),
        4,
        "num_layers in its config.json is None but must be a number",
    ),
    "end token out of range": (edit_json("config.json", eos_token_id=200), 4, "eos_token_id in its config.json is 200"),
    "no config": (lambda at: (at / "config.json").unlink(), 4, "it has no config.json"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), 4, "it has no model.safetensors"),
    "no folder": (shutil.rmtree, 2, "There is no folder"),
    "missing decoder layer": (edit_json("config.json", num_decoder_layers=3), 4, "it has no tensor decoder.block.2"),
}


def check_failure(flags: list[str], code: int, message: str) -> None:
    """Check that training raises one error with this exit code and message."""
    with pytest.raises(KonkaniVaniError, match=message) as result:
        run(*flags)
    assert result.value.exit_code == code and str(result.value).endswith(".") and "\n\n" not in str(result.value)


def test_evaluate_scores_text_model_and_its_inputs(base, tmp_path):
    result = run(*run_flags(base, tmp_path, "--test_manifest", tmp_path / "valid.jsonl"))
    common = ["--checkpoint", str(tmp_path / "checkpoints" / "checkpoint_best.pt"), "--device", "cpu"]
    common += ["--manifest", str(tmp_path / "valid.jsonl"), "--output", str(tmp_path / "hypotheses.jsonl")]
    parsed = json.loads(evaluate.main([*common, "--json"]))
    assert parsed["utterances"] == 3 and parsed["wer"] == pytest.approx(result["test_wer"], abs=1e-4)
    output = evaluate.main(common)
    assert "the inputs" in output and "of speech" not in output
    rows = [json.loads(line) for line in (tmp_path / "hypotheses.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["reference"] for row in rows] == [two for _, two in TEXTS[:3]]  # with case and punctuation
    with pytest.raises(KonkaniVaniError, match="a model of text") as refused:
        evaluate.main([*common, "--conditions"])
    assert refused.value.exit_code == 2


def test_validation_uses_loss_alone_if_offloaded_decoder_does_not_fit(base, tmp_path, monkeypatch, capsys):
    offloaded = ("--weights", "host", "--gradient_checkpointing", "auto")
    run_here = build_run(resolve_start(parse_args(run_flags(base, tmp_path, *offloaded))))
    plan, validation = run_here.plan, run_here.data.validation
    assert plan.has_memory_for_search and "only the loss" not in capsys.readouterr().out
    searched = run_here.evaluate(validation)
    smaller = dataclasses.replace(plan, budget=plan.validation + plan.context - 1)
    assert not smaller.has_memory_for_search and "validation" not in smaller.planned_peaks(0)
    assert dataclasses.replace(smaller, placement=ON_CARD).has_memory_for_search  # nothing has to be fetched
    monkeypatch.setattr(OffloadedWeights, "at_hand", lambda *_: pytest.fail("the whole decoder was fetched"))
    alone = run_here.evaluate(validation_within(smaller, validation))
    assert alone.losses == searched.losses and alone.utterances == len(searched.scored) == 3
    assert not alone.scored and math.isnan(alone.rates.cer)
    with pytest.raises(pytest.fail.Exception):  # negative control
        run_here.evaluate(validation)
    # The test set needs all weights at once, which are scored on the CPU if they do not fit.
    weights = 4 * sum(parameter.numel() for parameter in run_here.step.model.parameters())
    needed = plan.validation + plan.context + weights
    capsys.readouterr()
    for budget, is_too_small in ((needed, False), (needed - 1, True)):
        planned = dataclasses.replace(run_here, plan=dataclasses.replace(plan, budget=budget))
        assert evaluation_device(planned) == torch.device("cpu")
        assert ("Scoring on the CPU" in capsys.readouterr().out) == is_too_small
    del run_here, planned
    gc.collect()
    monkeypatch.setattr(MemoryPlan, "has_memory_for_search", False)
    result = run(*run_flags(base, tmp_path, *offloaded))
    validated = [record for record in log_records(tmp_path) if record["kind"] == "validation"]
    assert result["best_valid_score"] == round(validated[-1]["loss"], 4) and validated[-1]["cer"] is None
    output = capsys.readouterr().out
    assert "only the loss" in output and "nan" not in output


@pytest.mark.parametrize("case", FOLDERS)
def test_bad_folder_is_rejected_with_one_sentence(case, base, tmp_path):
    damage, code, message = FOLDERS[case]
    flags = run_flags(tmp_path / "copy", tmp_path)
    shutil.copytree(base, tmp_path / "copy")
    damage(tmp_path / "copy")
    check_failure(flags, code, message)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "runs").exists()


def test_null_as_number_of_decoder_layers_means_that_of_the_encoder(base, tmp_path):
    shutil.copytree(base, tmp_path / "copy")
    edit_json("config.json", num_decoder_layers=None)(tmp_path / "copy")
    assert read_t5_folder(tmp_path / "copy").shape == read_t5_folder(base).shape


def test_unreadable_tokenizer_is_rejected_with_one_sentence(base, tmp_path, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    path = base / "spiece.model"
    check_failure(
        run_flags(base, tmp_path), 6, f"^{path} cannot be read: Permission denied. Fix that and start again.$"
    )


def test_advice_for_a_checkpoint_of_a_text_model_names_its_export_flag(base, tmp_path):
    run(*run_flags(base, tmp_path, "--max_steps", 1))
    path = tmp_path / "checkpoints" / "checkpoint_last.pt"
    native = [str(tmp_path / name) for name in ("train.jsonl", "new", "logs")]
    flags = ("--train_manifest", "--checkpoint_dir", "--log_dir")
    arguments = [word for pair in zip(flags, native, strict=True) for word in pair]
    check_failure(["--init_from", str(path), *arguments], 2, "konkanivani export --folder, and give that folder")
    check_failure(["--resume", str(path), "--max_input_tokens", "9"], 4, "konkanivani export --folder writes")


ROWS = {
    "no target": ({"input": "a"}, "text must be a string with a text, not None"),
    "no input": ({"text": "a"}, "input must be a string with a text, not None"),
    "empty input": ({"input": " ", "text": "a"}, "input is empty"),
    "empty target": ({"input": "a", "text": ""}, "text is empty"),
    "number as input": ({"input": 3, "text": "a"}, "input must be a string with a text, not 3"),
    "control character": ({"input": "a\x00", "text": "a"}, r"input contains the control character U\+0000"),
    "speech row": (
        {"audio_filepath": "a.wav", "duration": 1.0, "text": "a"},
        "input must .* the row is of speech, for another model",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_row_is_rejected_with_its_number(case, base, tmp_path):
    row, message = ROWS[case]
    flags = run_flags(base, tmp_path)
    with open(tmp_path / "train.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    check_failure(flags, 3, f"(?s)1 of the 19 rows .* row 19.*: {message}")
    assert not list(tmp_path.rglob("*.pt"))


def test_run_is_rejected_if_all_rows_are_too_long_and_skipped(base, tmp_path):
    flags = run_flags(base, tmp_path, "--max_input_tokens", 3, "--long_texts", "skip")
    check_failure(flags, 3, "None of the 18 utterances .* more than --max_input_tokens 3")


def test_speech_and_text_flags_are_rejected_for_the_other_model(base, tmp_path):
    for flag, value in (("--language", "mr"), ("--gain", "3"), ("--max_duration", "9"), ("--timestamp_share", "0.5")):
        check_failure(run_flags(base, tmp_path, flag, value), 2, f"model is text, and {flag} is for models of speech")
    for flag, value in (("--ctc_weight", "0.3"), ("--preset", "minimal"), ("--vocab_size", "100")):
        check_failure(run_flags(base, tmp_path, flag, value), 2, f"and {flag} would change it")
    check_failure(run_flags(base, tmp_path, "--max_input_tokens", "1"), 2, "must be between 2 and 65535")
    check_failure(
        ["--train_manifest", str(tmp_path / "train.jsonl"), "--max_input_tokens", "9"], 2, "without --pretrained"
    )
    native = ["--train_manifest", str(tmp_path / "train.jsonl"), "--checkpoint_dir", str(tmp_path / "checkpoints")]
    check_failure([*native, "--log_dir", str(tmp_path / "runs")], 3, "the row is of text, for a T5 model")


def test_run_is_rejected_if_tokenizer_lacks_text_characters(base, tmp_path):
    write_pairs(tmp_path / "valid.jsonl", TEXTS)
    write_pairs(tmp_path / "train.jsonl", [("ಕನ್ನಡ", "ಕನ್ನಡ")] * 4)
    check_failure(run_flags(base, tmp_path), 3, "unknown to the pretrained model's tokenizer")
    assert not list(tmp_path.rglob("*.pt"))
