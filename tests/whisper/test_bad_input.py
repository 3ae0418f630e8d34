"""Invalid input of --pretrained runs is rejected with one sentence and an exit code, before files are created."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch

from konkanivani.checkpoints.checkpoint import check_is_there
from konkanivani.errors import CheckpointError
from tests.conftest import (
    TINY_MODEL,
    Corpus,
    checked,
    mark_full_except,
    run_folders,
    run_script,
    run_trainer,
    write_corpus,
)
from tests.faults.test_error_texts import message_defect
from tests.whisper.folder_changes import (
    EMBEDDING,
    INDEX,
    WEIGHTS,
    FolderChange,
    change_json,
    change_tensors,
    change_weight_bytes,
    write_or_remove,
)
from tests.whisper.small_model import write_model

CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"
BIAS = "model.decoder.layer_norm.bias"
SHORT = "--device cpu --batch_size 2 --gradient_accumulation_steps 1 --max_steps 1 --epochs 1 --num_workers 0".split()
LANGUAGE = ("--language", "mr")
KINDS = {"full": (), "frozen": ("--freeze", "encoder"), "lora": ("--lora_rank", "2")}


@dataclass(frozen=True)
class Models:
    """Read-only model folders, a corpus, and one checkpoint per kind of run."""

    root: Path
    corpus: Corpus

    def folder(self, name: str = "base") -> str:
        return str(self.root / name)

    def checkpoint(self, kind: str) -> str:
        return str(self.root / kind / "checkpoints" / "checkpoint_last.pt")

    def fill(self, words: tuple[str, ...], out: Path) -> list[str]:
        """Return command-line arguments with the placeholders in braces replaced."""
        places = {name: self.folder(name) for name in ("base", "wide", "other", "english", "no_translate")}
        places |= {kind: self.checkpoint(kind) for kind in (*KINDS, "ours")}
        return [word.format(out=out, **places) for word in words]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    root = tmp_path_factory.mktemp("bad_input")
    result = Models(root, write_corpus(root / "corpus", {"train": 6, "valid": 2}, lengths=range(1, 3)))
    others = {"wide": {"width": 32}, "other": {"seed": 1}, "english": {"languages": ()}}
    for name, changes in ({"base": {}, "no_translate": {}} | others).items():
        # An untrained model decodes until the last position.
        write_model(root / name, positions=64, **changes)
    added = root / "no_translate" / "added_tokens.json"
    added.write_text(added.read_text().replace("<|translate|>", "<|nothing|>"))
    for kind, flags in KINDS.items():
        flags = ("--pretrained", result.folder(), *LANGUAGE, *flags)
        checked(run_trainer(*result.corpus.flags(), *SHORT, *run_folders(root / kind), *flags))
    checked(run_trainer(*TINY_MODEL, *result.corpus.flags(), *SHORT, *run_folders(root / "ours")))
    return result


def check_rejected(done, code: int, message: str) -> None:
    """Check the exit code, and that stderr is one sentence with advice."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert re.search(message, line), line
    assert message_defect(re.sub(r"^/\S+", "X", line)) is None, line  # it may start with a path


def train(models: Models, out: Path, *flags: str):
    out.mkdir(exist_ok=True)
    return run_trainer(*models.corpus.flags(), *SHORT, *run_folders(out), *flags, cwd=out)


def index_outside_folder(at: Path) -> None:
    names = safetensors.torch.load((at / WEIGHTS).read_bytes())
    (at / WEIGHTS).rename(at / "shard.safetensors")
    (at / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "../x")}))


HEADS = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
FOLDERS: dict[str, tuple[FolderChange, int, str]] = {
    "no folder": (shutil.rmtree, 2, "There is no folder .*Use the folder"),
    "no config": (write_or_remove(CONFIG, None), 4, r"has no config\.json"),
    "not JSON": (write_or_remove(CONFIG, "{"), 4, r"config\.json is not JSON"),
    "another model": (change_json(CONFIG, model_type="wav2vec2"), 4, "of type 'wav2vec2'"),
    "negative width": (change_json(CONFIG, d_model=-4), 4, "d_model in its config.json is -4"),
    "width of 2^40": (change_json(CONFIG, d_model=2**40), 4, "must be a number from 1 to 16384"),
    "heads do not divide width": (change_json(CONFIG, **HEADS), 4, "divides a dimension of 16 into 3 heads"),
    "untied": (change_json(CONFIG, tie_word_embeddings=False), 4, "tie_word_embeddings in its config.json is False"),
    "output layer differs": (
        change_tensors(lambda t: t.update({"proj_out.weight": t[EMBEDDING] + 1})),
        4,
        "differs from its model.decoder.embed_tokens.weight, to which",
    ),
    "pickle": (lambda at: (at / WEIGHTS).rename(at / "pytorch_model.bin"), 4, "is pickle, .* convert it"),
    "truncated weights": (change_weight_bytes(lambda data: data[:-100]), 4, r"model\.safetensors is damaged"),
    "header of 2^60": (
        change_weight_bytes(lambda data: (2**60).to_bytes(8, "little") + data[8:]),
        4,
        "its header states",
    ),
    "missing tensor": (change_tensors(lambda t: t.pop(EMBEDDING)), 4, f"it has no tensor {EMBEDDING}"),
    "tensor of another shape": (
        change_tensors(lambda t: t.update({BIAS: torch.zeros(1, 16)})),
        4,
        r"has the shape \(1, 16\)",
    ),
    "integer tensor": (
        change_tensors(lambda t: t.update({BIAS: torch.zeros(16, dtype=torch.int32)})),
        4,
        "is of type I32 but must be",
    ),
    "NaN": (change_tensors(lambda t: t[EMBEDDING][3].fill_(torch.nan)), 4, "contains values that are not finite"),
    "weight file outside folder": (index_outside_folder, 4, r"lists '\.\./x', which is not a weight file"),
    "one token too many": (
        change_json("added_tokens.json", more=1812),
        3,
        "folder has 1813 tokens, but its model has 1812",
    ),
    "no special tokens": (
        write_or_remove("added_tokens.json", None),
        3,
        r"folder has no token <\|startoftranscript\|>",
    ),
    "no vocabulary": (write_or_remove("vocab.json", None), 3, r"folder/vocab\.json could not be read"),
    "broken vocabulary": (write_or_remove("vocab.json", "{"), 3, r"folder/vocab\.json is not JSON"),
    "128 mel bins": (change_json(PREPROCESSOR, feature_size=128), 4, "is 128, but its network needs 80"),
    "suppressed token out of range": (change_json(GENERATION, suppress_tokens=[1812]), 4, "contains the token 1812"),
    "time index is not a number": (
        change_json(GENERATION, max_initial_timestamp_index="x"),
        4,
        "is 'x' but must be a number",
    ),
}


# tests/whisper/test_folder.py and test_byte_pairs.py run the other cases without a process.
QUICK_FOLDERS = (
    "no folder",
    "no config",
    "truncated weights",
    "NaN",
    "one token too many",
    "broken vocabulary",
    "time index is not a number",
)


@pytest.mark.parametrize("case", mark_full_except(FOLDERS, QUICK_FOLDERS))
def test_bad_folder_is_rejected_before_files_are_created(case, models, tmp_path):
    change, code, message = FOLDERS[case]
    folder, out = tmp_path / "folder", tmp_path / "out"
    shutil.copytree(models.folder(), folder)
    change(folder)
    check_rejected(train(models, out, "--pretrained", str(folder), *LANGUAGE), code, message)
    assert list(out.iterdir()) == []


def test_folder_without_generation_config_trains(models, tmp_path):
    """Negative control of the table above: generation_config.json is optional."""
    shutil.copytree(models.folder(), tmp_path / "folder")
    write_or_remove(GENERATION, None)(tmp_path / "folder")
    done = train(models, tmp_path / "out", "--pretrained", str(tmp_path / "folder"), *LANGUAGE)
    assert done.returncode == 0 and (tmp_path / "out/checkpoints/checkpoint_last.pt").exists(), done.stderr


P = ("--pretrained", "{base}")
B = (*P, *LANGUAGE)
FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "no folder": (("--pretrained", "no_such_model", *LANGUAGE), "or a name on the hub such as openai/whisper-small"),
    "Konkani": ((*P, "--language", "kok"), "Use the closest language, mr or hi; available: en, hi, mr"),
    "unknown language": ((*P, "--language", "MR"), "has no token for it. Use one of en, hi, mr"),
    "no language": (P, "give --language with one of en, hi, mr"),
    "language of English-only model": (
        ("--pretrained", "{english}", *LANGUAGE),
        "--language is not supported by an English-only model",
    ),
    "task of English-only model": (
        ("--pretrained", "{english}", "--task", "translate"),
        "--task translate is not supported by an English-only model",
    ),
    "missing task": (
        ("--pretrained", "{no_translate}", *LANGUAGE, "--task", "translate"),
        "--task translate: the model has",
    ),
    "preset": ((*B, "--preset", "minimal"), "--preset would change it: omit it"),
    "width": ((*B, "--d_model", "64", "--vocab_size", "99"), "--d_model, --vocab_size would change it: omit them"),
    "CTC": ((*B, "--ctc_weight", "0.3"), "--ctc_weight would change it"),
    "inner CTC": ((*B, "--intermediate_ctc_weight", "0.3"), "--intermediate_ctc_weight would change it"),
    "init_from and pretrained": ((*B, "--init_from", "{full}"), "--init_from would change it"),
    "mel bins": ((*B, "--mel_bins", "80"), "--mel_bins would change it"),
    "joint decoding": ((*B, "--test_decode", "joint"), "needs CTC, but a --pretrained model has no CTC head: use"),
    "language without pretrained": (LANGUAGE, "--language has no effect without --pretrained"),
    "task without pretrained": (("--task", "translate"), "--task has no effect without --pretrained"),
    "freeze": ((*B, "--freeze", "99"), "--freeze 99: the encoder has only 2 blocks"),
    "unknown LoRA targets": (
        (*B, "--lora_rank", "2", "--lora_targets", "gate"),
        "matches no layer of this model: choose from",
    ),
    "targets without rank": ((*B, "--lora_targets", "query"), "--lora_targets has no effect without --lora_rank"),
    "init_from": (("--init_from", "{full}"), "is a checkpoint of a run with --pretrained. Export its model"),
}


SIMILAR_FLAGS = {
    "CTC",
    "inner CTC",
    "init_from and pretrained",
    "mel bins",
    "unknown language",
    "task without pretrained",
    "targets without rank",
}


@pytest.mark.parametrize("case", mark_full_except(FLAGS, FLAGS.keys() - SIMILAR_FLAGS))
def test_invalid_flags_are_rejected_before_files_are_created(case, models, tmp_path):
    flags, message = FLAGS[case]
    check_rejected(train(models, tmp_path / "out", *models.fill(flags, tmp_path)), 2, message)
    assert list((tmp_path / "out").iterdir()) == []


def test_unknown_task_is_rejected(models, tmp_path):
    done = train(models, tmp_path / "out", *models.fill((*B, "--task", "sing"), tmp_path))
    assert done.returncode == 2 and "sing" in done.stderr and "translate" in done.stderr


def resume(models: Models, out: Path, kind: str, *flags: str):
    """Resume a copy of a run of this kind for one more step."""
    if not out.exists():
        shutil.copytree(models.root / kind, out)
    return train(models, out, "--resume", "auto", "--max_steps", "2", *models.fill(flags, out))


RESUMED = {
    "another shape": ("full", ("--pretrained", "{wide}"), 4, "started from another model: .*Use the folder"),
    "other frozen weights": ("frozen", ("--pretrained", "{other}"), 4, "has other frozen weights"),
    "another base": ("lora", ("--pretrained", "{other}"), 4, "has other frozen weights"),
    "missing folder": ("frozen", ("--pretrained", "{out}/nowhere"), 2, "There is no folder"),
    "preset": ("full", ("--preset", "minimal"), 2, "--preset would change it"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resume_with_another_model_is_rejected(case, models, tmp_path):
    kind, flags, code, message = RESUMED[case]
    check_rejected(resume(models, tmp_path / "out", kind, *flags), code, message)
    kept = tmp_path / "out/checkpoints/checkpoint_last.pt"
    assert kept.read_bytes() == Path(models.checkpoint(kind)).read_bytes()


def test_resume_with_another_language_is_rejected(models, tmp_path):
    done = resume(models, tmp_path / "out", "full", "--pretrained", "{base}", "--language", "hi")
    assert done.returncode == 4 and "--language is hi here and mr in the checkpoint" in done.stderr, done.stderr
    assert "training_scripts/export_asr.py" in done.stderr and "--init_from" not in done.stderr


def remove_base_path(out: Path) -> None:
    """Replace the path of the base model in the checkpoint of a copied run by a missing folder."""
    tamper(
        out / "checkpoints/checkpoint_last.pt",
        lambda saved: saved.update(config=with_missing_base_path(saved["config"], out)),
    )


def with_missing_base_path(config: str, out: Path) -> str:
    return re.sub(r"--pretrained .*", lambda _: f"--pretrained {str(out / 'gone')!r}", config)


def tamper(path: Path, change: Callable[[dict], object]) -> Path:
    saved = torch.load(path, weights_only=True)  # noqa: TID251
    change(saved)
    torch.save(saved, path)
    return path


def test_resume_without_base_folder_needs_a_complete_checkpoint(models, tmp_path):
    for kind in KINDS:
        shutil.copytree(models.root / kind, tmp_path / kind)
        remove_base_path(tmp_path / kind)
    assert resume(models, tmp_path / "full", "full").returncode == 0
    for kind in ("frozen", "lora"):
        check_rejected(
            resume(models, tmp_path / kind, kind), 4, "does not exist. Put it there, or give its path with --pretrained"
        )
    assert resume(models, tmp_path / "frozen", "frozen", "--pretrained", "{base}").returncode == 0


HUGE = {"d_model": 2**14, "feedforward_dim": 2**16, "encoder_layers": 256, "decoder_layers": 256}
TAMPERED: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "2^40": ("full", lambda state: state.update(d_model=2**40), "invalid dimensions"),
    "huge": ("full", lambda state: state.update(HUGE), "weights do not match its model dimensions"),
    "huge and frozen": ("lora", lambda state: state.update(HUGE), "does not match its settings"),
    "heads do not divide width": (
        "full",
        lambda state: state.update(attention_heads=3),
        "attention heads does not divide",
    ),
    "other width": ("full", lambda state: state.update(d_model=32), "does not match its settings"),
    "other kind": ("full", lambda state: state.update(kind="x"), "has an unknown model type"),
    "no width": ("lora", lambda state: state.pop("d_model"), "invalid dimensions"),
    "no digest": ("full", lambda state: state.pop("frozen"), "does not record the weights that it omits"),
    "empty": ("full", lambda state: state.clear(), "has an unknown model type"),
}


QUICK_TAMPERED = ("2^40", "huge", "huge and frozen", "other width", "no width", "no digest")


@pytest.mark.parametrize("case", mark_full_except(TAMPERED, QUICK_TAMPERED))
def test_tampered_checkpoint_is_rejected_by_every_command(case, models, tmp_path):
    kind, change, message = TAMPERED[case]
    shutil.copytree(models.root / kind, tmp_path / "out")
    path = tamper(tmp_path / "out/checkpoints/checkpoint_last.pt", lambda saved: change(saved["states"]["pretrained"]))
    check_rejected(resume(models, tmp_path / "out", kind), 4, message)
    audio, whisper = str(models.corpus.directory / "audio/valid_000.flac"), str(tmp_path / "whisper")
    checkpoint = ("--checkpoint", str(path))
    check_rejected(run_script("training_scripts/export_asr.py", *checkpoint, "--whisper", whisper), 4, message)
    if case == "2^40":
        check_rejected(run_script("training_scripts/transcribe.py", audio, *checkpoint, "--device", "cpu"), 4, message)
        manifest = ("--manifest", models.corpus.manifest("valid"), "--device", "cpu")
        check_rejected(run_script("training_scripts/evaluate_konkanivani_asr.py", *checkpoint, *manifest), 4, message)
    assert not os.path.exists(whisper)


EXPORTS = {
    "not empty": (("{full}", "--whisper", "{out}"), 2, "already exists"),
    "native checkpoint": (("{ours}", "--whisper", "{out}/new"), 2, "was trained without --pretrained"),
    "native checkpoint with --pretrained": (
        ("{ours}", "--bundle", "{out}/new", *P),
        2,
        "--pretrained is for --pretrained models",
    ),
    "bundle": (("{full}", "--bundle", "{out}/new"), 2, "used --pretrained: export it with --whisper"),
    "ONNX": (("{lora}", "--onnx", "{out}/new"), 2, "used --pretrained: export it with --whisper"),
    "bundle and whisper": (("{full}", "--bundle", "{out}/new", "--whisper", "{out}/more"), 2, "give only one kind"),
    "nested outputs": (("{lora}", "--adapter", "{out}/new/in", "--whisper", "{out}/new"), 2, "must be different files"),
    "output inside the base": (
        ("{full}", "--whisper", "{base}/new"),
        2,
        "is inside the folder that the run was started from",
    ),
    "adapter without LoRA": (("{full}", "--adapter", "{out}/new"), 2, "use --whisper"),
    "another shape": (("{full}", "--whisper", "{out}/new", "--pretrained", "{wide}"), 4, "dimensions or tokens"),
    "English-only base": (("{full}", "--whisper", "{out}/new", "--pretrained", "{english}"), 4, "dimensions or tokens"),
    "another base": (
        ("{frozen}", "--whisper", "{out}/new", "--pretrained", "{other}"),
        4,
        "Restore the original folder",
    ),
    "missing base": (
        ("{lora}", "--adapter", "{out}/new", "--pretrained", "{out}/gone"),
        4,
        "does not exist. Put it there",
    ),
}


@pytest.mark.parametrize(
    "case", mark_full_except(EXPORTS, EXPORTS.keys() - {"ONNX", "English-only base", "missing base"})
)
def test_rejected_export_writes_nothing(case, models, tmp_path):
    flags, code, message = EXPORTS[case]
    (tmp_path / "mine.txt").write_text("mine")
    before = sorted(models.root.rglob("*"))
    done = run_script("training_scripts/export_asr.py", "--checkpoint", *models.fill(flags, tmp_path))
    check_rejected(done, code, message)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"] and sorted(models.root.rglob("*")) == before


def test_export_without_base_folder_is_rejected_with_advice(models, tmp_path):
    shutil.copytree(models.root / "full", tmp_path / "out")
    remove_base_path(tmp_path / "out")
    path = str(tmp_path / "out/checkpoints/checkpoint_last.pt")
    done = run_script("training_scripts/export_asr.py", "--checkpoint", path, "--whisper", str(tmp_path / "new"))
    check_rejected(done, 4, "does not exist, .* Give its current path with --pretrained")


PLANS: dict[str, tuple[tuple[str, ...], FolderChange, int, str]] = {
    "width": (("--d_model", "64"), lambda at: None, 2, "--d_model would change it"),
    "freeze": (("--freeze", "99"), lambda at: None, 2, "the encoder has only 2 blocks"),
    "2^40": ((), change_json(CONFIG, d_model=2**40), 4, "must be a number from 1 to 16384"),
    "no config": ((), write_or_remove(CONFIG, None), 4, r"has no config\.json"),
}


@pytest.mark.parametrize("case", PLANS)
def test_invalid_plan_is_rejected_before_tracing(case, models, tmp_path):
    flags, change, code, message = PLANS[case]
    shutil.copy(Path(models.folder()) / CONFIG, tmp_path)  # planning needs no other file
    change(tmp_path)
    arguments = ("--gpu", "GTX 980", "--pretrained", str(tmp_path), *flags)
    check_rejected(run_script("training_scripts/plan_memory.py", *arguments), code, message)


def test_model_folder_given_as_checkpoint_is_rejected_with_advice(models):
    with pytest.raises(CheckpointError, match="use --pretrained .* for a Whisper model"):
        check_is_there(Path(models.folder()))


def test_too_long_utterances_are_skipped_with_row_and_reason(models, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 8}, lengths=range(1, 3))
    path = Path(corpus.manifest("train"))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, seconds in ((1, 3.01), (3, 2.8)):  # a window of 3 s fits 2.7 s at speed 0.9
        name = f"audio/long_{row}.flac"
        soundfile.write(corpus.directory / name, np.zeros(round(16_000 * seconds)), 16_000)
        rows[row] = {"audio_filepath": name, "duration": seconds, "text": "एक"}
    rows[5]["text"] = "q w " * 40
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    flags = models.fill(("--train_manifest", str(path), "--speed_perturbation", "0.9", "1.0", *B), tmp_path)
    done = run_trainer(*SHORT[:-6], *run_folders(tmp_path), *flags, "--epochs", "1", "--num_workers", "0")
    assert done.returncode == 0, done.stderr  # a whole epoch: the model rejects longer input
    listed = [json.loads(line) for line in (tmp_path / "runs/default/rejected.jsonl").read_text().splitlines()]
    assert [item["row"] for item in listed] == [2, 4, 6]
    for item, message in zip(listed, ("model's window at speed 0.9, 2.7 s",) * 2 + ("the decoder's 63",), strict=True):
        assert item["reason"].endswith(message), item
