"""A bad --pretrained run ends with one sentence and its exit code, and creates nothing."""

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
from tests.faults.test_error_texts import complaint
from tests.whisper.small_model import write_model

WEIGHTS, INDEX, EMBEDDING = "model.safetensors", "model.safetensors.index.json", "model.decoder.embed_tokens.weight"
CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"
BIAS = "model.decoder.layer_norm.bias"
SHORT = "--device cpu --batch_size 2 --gradient_accumulation_steps 1 --max_steps 1 --epochs 1 --num_workers 0".split()
LANGUAGE = ("--language", "mr")
KINDS = {"full": (), "frozen": ("--freeze", "encoder"), "lora": ("--lora_rank", "2")}
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Models:
    """Read-only folders of models, a corpus, and a checkpoint of each kind of run."""

    root: Path
    corpus: Corpus

    def folder(self, name: str = "base") -> str:
        return str(self.root / name)

    def checkpoint(self, kind: str) -> str:
        return str(self.root / kind / "checkpoints" / "checkpoint_last.pt")

    def fill(self, words: tuple[str, ...], out: Path) -> list[str]:
        """Return the words of a command line with the placeholders in braces replaced."""
        places = {name: self.folder(name) for name in ("base", "wide", "other", "english", "no_translate")}
        places |= {kind: self.checkpoint(kind) for kind in (*KINDS, "ours")}
        return [word.format(out=out, **places) for word in words]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    root = tmp_path_factory.mktemp("bad_input")
    found = Models(root, write_corpus(root / "corpus", {"train": 6, "valid": 2}, lengths=range(1, 3)))
    others = {"wide": {"width": 32}, "other": {"seed": 1}, "english": {"languages": ()}}
    for name, changes in ({"base": {}, "no_translate": {}} | others).items():
        write_model(root / name, positions=64, **changes)  # an untrained model decodes the maximum number of tokens
    added = root / "no_translate" / "added_tokens.json"
    added.write_text(added.read_text().replace("<|translate|>", "<|nothing|>"))
    for kind, flags in KINDS.items():
        flags = ("--pretrained", found.folder(), *LANGUAGE, *flags)
        checked(run_trainer(*found.corpus.flags(), *SHORT, *run_folders(root / kind), *flags))
    checked(run_trainer(*TINY_MODEL, *found.corpus.flags(), *SHORT, *run_folders(root / "ours")))
    return found


def check_refusal(done, code: int, said: str) -> None:
    """Check that stderr is one sentence with a remedy."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert re.search(said, line), line
    assert complaint(re.sub(r"^/\S+", "X", line)) is None, line  # it may start with a path


def train(models: Models, out: Path, *flags: str):
    out.mkdir(exist_ok=True)
    return run_trainer(*models.corpus.flags(), *SHORT, *run_folders(out), *flags, cwd=out)


def settings(name: str, **changes: object) -> Change:
    """Return a change to a JSON file."""
    return lambda at: (at / name).write_text(json.dumps(json.loads((at / name).read_text()) | changes))


def written(name: str, data: str | None) -> Change:
    """Return a change that writes this content to a file, or removes the file."""
    return lambda at: (at / name).unlink() if data is None else (at / name).write_text(data)


def damaged(change: Callable[[bytes], bytes]) -> Change:
    return lambda at: (at / WEIGHTS).write_bytes(change((at / WEIGHTS).read_bytes()))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Return a change to the dictionary of tensors."""

    def on_disk(at: Path) -> None:
        found = safetensors.torch.load((at / WEIGHTS).read_bytes())
        change(found)
        safetensors.torch.save_file(found, at / WEIGHTS)

    return on_disk


def indexed(at: Path) -> None:
    names = safetensors.torch.load((at / WEIGHTS).read_bytes())
    (at / WEIGHTS).rename(at / "shard.safetensors")
    (at / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "../x")}))


HEADS = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
FOLDERS: dict[str, tuple[Change, int, str]] = {
    "no folder": (shutil.rmtree, 2, "There is no folder .*Use the folder"),
    "no config": (written(CONFIG, None), 4, r"has no config\.json"),
    "no JSON": (written(CONFIG, "{"), 4, r"config\.json is not JSON"),
    "another model": (settings(CONFIG, model_type="wav2vec2"), 4, "of type 'wav2vec2'"),
    "negative": (settings(CONFIG, d_model=-4), 4, "d_model in its config.json is -4"),
    "2^40": (settings(CONFIG, d_model=2**40), 4, "must be a number from 1 to 16384"),
    "heads": (settings(CONFIG, **HEADS), 4, "divides a dimension of 16 into 3 heads"),
    "untied": (settings(CONFIG, tie_word_embeddings=False), 4, "tie_word_embeddings in its config.json is False"),
    "another head": (
        tensors(lambda t: t.update({"proj_out.weight": t[EMBEDDING] + 1})),
        4,
        "differs from its model.decoder.embed_tokens.weight, to which",
    ),
    "pickle": (lambda at: (at / WEIGHTS).rename(at / "pytorch_model.bin"), 4, "is pickle, .* convert it"),
    "cut": (damaged(lambda data: data[:-100]), 4, r"model\.safetensors is damaged"),
    "header of 2^60": (damaged(lambda data: (2**60).to_bytes(8, "little") + data[8:]), 4, "its header states"),
    "a tensor less": (tensors(lambda t: t.pop(EMBEDDING)), 4, f"it has no tensor {EMBEDDING}"),
    "another shape": (tensors(lambda t: t.update({BIAS: torch.zeros(1, 16)})), 4, r"has the shape \(1, 16\)"),
    "integers": (
        tensors(lambda t: t.update({BIAS: torch.zeros(16, dtype=torch.int32)})),
        4,
        "is of type I32 but must be",
    ),
    "NaN": (tensors(lambda t: t[EMBEDDING][3].fill_(torch.nan)), 4, "contains values that are not finite"),
    "above the folder": (indexed, 4, r"lists '\.\./x', which is not a weight file"),
    "a token more": (settings("added_tokens.json", more=1812), 3, "folder has 1813 tokens, but its model has 1812"),
    "no names": (written("added_tokens.json", None), 3, r"folder has no token <\|startoftranscript\|>"),
    "no vocabulary": (written("vocab.json", None), 3, r"folder/vocab\.json could not be read"),
    "broken vocabulary": (written("vocab.json", "{"), 3, r"folder/vocab\.json is not JSON"),
    "128 bands": (settings(PREPROCESSOR, feature_size=128), 4, "is 128, but its network needs 80"),
    "a token that is not": (settings(GENERATION, suppress_tokens=[1812]), 4, "contains the token 1812"),
    "a time that is none": (settings(GENERATION, max_initial_timestamp_index="x"), 4, "is 'x' but must be a number"),
}


# The other cases run without a process: tests/whisper/test_folder.py, test_byte_pairs.py.
TRIED = ("no folder", "no config", "cut", "NaN", "a token more", "broken vocabulary", "a time that is none")


@pytest.mark.parametrize("case", mark_full_except(FOLDERS, TRIED))
def test_a_bad_folder_is_refused_before_anything_is_made(case, models, tmp_path):
    change, code, said = FOLDERS[case]
    folder, out = tmp_path / "folder", tmp_path / "out"
    shutil.copytree(models.folder(), folder)
    change(folder)
    check_refusal(train(models, out, "--pretrained", str(folder), *LANGUAGE), code, said)
    assert list(out.iterdir()) == []


def test_a_folder_without_generation_config_trains(models, tmp_path):
    """Negative control of the table above: optional files may be absent."""
    shutil.copytree(models.folder(), tmp_path / "folder")
    written(GENERATION, None)(tmp_path / "folder")
    done = train(models, tmp_path / "out", "--pretrained", str(tmp_path / "folder"), *LANGUAGE)
    assert done.returncode == 0 and (tmp_path / "out/checkpoints/checkpoint_last.pt").exists(), done.stderr


P = ("--pretrained", "{base}")
B = (*P, *LANGUAGE)
FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "no folder": (("--pretrained", "no_such_model", *LANGUAGE), "or a name on the hub such as openai/whisper-small"),
    "Konkani": ((*P, "--language", "kok"), "Use the closest language, mr or hi; available: en, hi, mr"),
    "unknown": ((*P, "--language", "MR"), "has no token for it. Use one of en, hi, mr"),
    "no language": (P, "give --language with one of en, hi, mr"),
    "English": (("--pretrained", "{english}", *LANGUAGE), "--language is not supported by an English-only model"),
    "English task": (
        ("--pretrained", "{english}", "--task", "translate"),
        "--task translate is not supported by an English-only model",
    ),
    "no task": (
        ("--pretrained", "{no_translate}", *LANGUAGE, "--task", "translate"),
        "--task translate: the model has",
    ),
    "preset": ((*B, "--preset", "minimal"), "--preset would change it: omit it"),
    "width": ((*B, "--d_model", "64", "--vocab_size", "99"), "--d_model, --vocab_size would change it: omit them"),
    "CTC": ((*B, "--ctc_weight", "0.3"), "--ctc_weight would change it"),
    "inner CTC": ((*B, "--intermediate_ctc_weight", "0.3"), "--intermediate_ctc_weight would change it"),
    "two beginnings": ((*B, "--init_from", "{full}"), "--init_from would change it"),
    "bands": ((*B, "--mel_bins", "80"), "--mel_bins would change it"),
    "joint": ((*B, "--test_decode", "joint"), "needs CTC, but a --pretrained model has no CTC head: use"),
    "language alone": (LANGUAGE, "--language has no effect without --pretrained"),
    "task alone": (("--task", "translate"), "--task has no effect without --pretrained"),
    "freeze": ((*B, "--freeze", "99"), "--freeze 99: the encoder has only 2 blocks"),
    "targets": ((*B, "--lora_rank", "2", "--lora_targets", "gate"), "matches no layer of this model: choose from"),
    "targets alone": ((*B, "--lora_targets", "query"), "--lora_targets has no effect without --lora_rank"),
    "init_from": (("--init_from", "{full}"), "is a checkpoint of a run with --pretrained. Export its model"),
}


ALIKE = {"CTC", "inner CTC", "two beginnings", "bands", "unknown", "task alone", "targets alone"}


@pytest.mark.parametrize("case", mark_full_except(FLAGS, FLAGS.keys() - ALIKE))
def test_flags_that_cannot_work_are_refused_before_anything_is_made(case, models, tmp_path):
    flags, said = FLAGS[case]
    check_refusal(train(models, tmp_path / "out", *models.fill(flags, tmp_path)), 2, said)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_task_that_is_none_is_refused(models, tmp_path):
    done = train(models, tmp_path / "out", *models.fill((*B, "--task", "sing"), tmp_path))
    assert done.returncode == 2 and "sing" in done.stderr and "translate" in done.stderr


def resume(models: Models, out: Path, kind: str, *flags: str):
    """Resume a copy of the run."""
    if not out.exists():
        shutil.copytree(models.root / kind, out)
    return train(models, out, "--resume", "auto", "--max_steps", "2", *models.fill(flags, out))


RESUMED = {
    "another shape": ("full", ("--pretrained", "{wide}"), 4, "started from another model: .*Use the folder"),
    "other frozen weights": ("frozen", ("--pretrained", "{other}"), 4, "has other frozen weights"),
    "another base": ("lora", ("--pretrained", "{other}"), 4, "has other frozen weights"),
    "another folder": ("frozen", ("--pretrained", "{out}/nowhere"), 2, "There is no folder"),
    "preset": ("full", ("--preset", "minimal"), 2, "--preset would change it"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_with_its_own_model_alone(case, models, tmp_path):
    kind, flags, code, said = RESUMED[case]
    check_refusal(resume(models, tmp_path / "out", kind, *flags), code, said)
    kept = tmp_path / "out/checkpoints/checkpoint_last.pt"
    assert kept.read_bytes() == Path(models.checkpoint(kind)).read_bytes()


def test_another_language_contradicts_the_checkpoint(models, tmp_path):
    done = resume(models, tmp_path / "out", "full", "--pretrained", "{base}", "--language", "hi")
    assert done.returncode == 4 and "--language is hi here and mr in the checkpoint" in done.stderr, done.stderr
    assert "export_asr.py" in done.stderr and "--init_from" not in done.stderr


def without_folder(out: Path) -> None:
    """Change the path of the base model in a copied run to a missing folder."""
    tamper(out / "checkpoints/checkpoint_last.pt", lambda saved: saved.update(config=moved(saved["config"], out)))


def moved(config: str, out: Path) -> str:
    return re.sub(r"--pretrained .*", lambda _: f"--pretrained {str(out / 'gone')!r}", config)


def tamper(path: Path, change: Callable[[dict], object]) -> Path:
    saved = torch.load(path, weights_only=True)  # noqa: TID251
    change(saved)
    torch.save(saved, path)
    return path


def test_a_run_whose_folder_is_gone_goes_on_where_its_checkpoint_holds_all(models, tmp_path):
    for kind in KINDS:
        shutil.copytree(models.root / kind, tmp_path / kind)
        without_folder(tmp_path / kind)
    assert resume(models, tmp_path / "full", "full").returncode == 0
    for kind in ("frozen", "lora"):
        check_refusal(
            resume(models, tmp_path / kind, kind), 4, "does not exist. Put it there, or give its path with --pretrained"
        )
    assert resume(models, tmp_path / "frozen", "frozen", "--pretrained", "{base}").returncode == 0


HUGE = {"d_model": 2**14, "feedforward_dim": 2**16, "encoder_layers": 256, "decoder_layers": 256}
TAMPERED: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "2^40": ("full", lambda state: state.update(d_model=2**40), "invalid dimensions"),
    "huge": ("full", lambda state: state.update(HUGE), "weights do not match its model dimensions"),
    "heads": ("full", lambda state: state.update(attention_heads=3), "attention heads does not divide"),
    "wider": ("full", lambda state: state.update(d_model=32), "does not match its settings"),
    "other kind": ("full", lambda state: state.update(kind="x"), "has an unknown model type"),
    "no width": ("lora", lambda state: state.pop("d_model"), "invalid dimensions"),
    "no digest": ("full", lambda state: state.pop("frozen"), "does not record the weights that it omits"),
    "empty": ("full", lambda state: state.clear(), "has an unknown model type"),
}


SHOWN = ("2^40", "huge", "wider", "no width", "no digest")


@pytest.mark.parametrize("case", mark_full_except(TAMPERED, SHOWN))
def test_a_checkpoint_that_was_tampered_with_is_refused_by_all_that_read_it(case, models, tmp_path):
    kind, change, said = TAMPERED[case]
    shutil.copytree(models.root / kind, tmp_path / "out")
    path = tamper(tmp_path / "out/checkpoints/checkpoint_last.pt", lambda saved: change(saved["states"]["pretrained"]))
    check_refusal(resume(models, tmp_path / "out", kind), 4, said)
    heard, whisper = str(models.corpus.directory / "audio/valid_000.flac"), str(tmp_path / "whisper")
    checkpoint = ("--checkpoint", str(path))
    check_refusal(run_script("training_scripts/export_asr.py", *checkpoint, "--whisper", whisper), 4, said)
    if case == "2^40":
        check_refusal(run_script("training_scripts/transcribe.py", heard, *checkpoint, "--device", "cpu"), 4, said)
        manifest = ("--manifest", models.corpus.manifest("valid"), "--device", "cpu")
        check_refusal(run_script("training_scripts/evaluate_konkanivani_asr.py", *checkpoint, *manifest), 4, said)
    assert not os.path.exists(whisper)


EXPORTS = {
    "not empty": (("{full}", "--whisper", "{out}"), 2, "already exists"),
    "ours": (("{ours}", "--whisper", "{out}/new"), 2, "was trained without --pretrained"),
    "ours with a folder": (("{ours}", "--bundle", "{out}/new", *P), 2, "--pretrained is for --pretrained models"),
    "bundle": (("{full}", "--bundle", "{out}/new"), 2, "used --pretrained: export it with --whisper"),
    "ONNX": (("{lora}", "--onnx", "{out}/new"), 2, "used --pretrained: export it with --whisper"),
    "both": (("{full}", "--bundle", "{out}/new", "--whisper", "{out}/more"), 2, "give only one kind"),
    "in each other": (("{lora}", "--adapter", "{out}/new/in", "--whisper", "{out}/new"), 2, "must be different files"),
    "in the base": (("{full}", "--whisper", "{base}/new"), 2, "is inside the folder that the run was started from"),
    "no products": (("{full}", "--adapter", "{out}/new"), 2, "use --whisper"),
    "another shape": (("{full}", "--whisper", "{out}/new", "--pretrained", "{wide}"), 4, "dimensions or tokens"),
    "English": (("{full}", "--whisper", "{out}/new", "--pretrained", "{english}"), 4, "dimensions or tokens"),
    "another base": (
        ("{frozen}", "--whisper", "{out}/new", "--pretrained", "{other}"),
        4,
        "Restore the original folder",
    ),
    "no base": (("{lora}", "--adapter", "{out}/new", "--pretrained", "{out}/gone"), 4, "does not exist. Put it there"),
}


@pytest.mark.parametrize("case", mark_full_except(EXPORTS, EXPORTS.keys() - {"ONNX", "English", "no base"}))
def test_an_export_that_cannot_be_writes_nothing(case, models, tmp_path):
    flags, code, said = EXPORTS[case]
    (tmp_path / "mine.txt").write_text("mine")
    before = sorted(models.root.rglob("*"))
    done = run_script("training_scripts/export_asr.py", "--checkpoint", *models.fill(flags, tmp_path))
    check_refusal(done, code, said)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"] and sorted(models.root.rglob("*")) == before


def test_a_base_that_is_gone_is_asked_for(models, tmp_path):
    shutil.copytree(models.root / "full", tmp_path / "out")
    without_folder(tmp_path / "out")
    path = str(tmp_path / "out/checkpoints/checkpoint_last.pt")
    done = run_script("training_scripts/export_asr.py", "--checkpoint", path, "--whisper", str(tmp_path / "new"))
    check_refusal(done, 4, "does not exist, .* Give its current path with --pretrained")


PLANS: dict[str, tuple[tuple[str, ...], Change, int, str]] = {
    "width": (("--d_model", "64"), lambda at: None, 2, "--d_model would change it"),
    "freeze": (("--freeze", "99"), lambda at: None, 2, "the encoder has only 2 blocks"),
    "2^40": ((), settings(CONFIG, d_model=2**40), 4, "must be a number from 1 to 16384"),
    "no config": ((), written(CONFIG, None), 4, r"has no config\.json"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_traced(case, models, tmp_path):
    flags, change, code, said = PLANS[case]
    shutil.copy(Path(models.folder()) / CONFIG, tmp_path)  # a plan needs no other file
    change(tmp_path)
    asked = ("--gpu", "GTX 980", "--pretrained", str(tmp_path), *flags)
    check_refusal(run_script("training_scripts/plan_memory.py", *asked), code, said)


def test_a_models_folder_in_a_checkpoints_place_is_told_where_it_belongs(models):
    with pytest.raises(CheckpointError, match="use --pretrained .* for a Whisper model"):
        check_is_there(Path(models.folder()))


def test_what_the_model_cannot_hear_or_say_is_left_out_with_row_and_reason(models, tmp_path):
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
    assert [found["row"] for found in listed] == [2, 4, 6]
    for found, said in zip(listed, ("model's window at speed 0.9, 2.7 s",) * 2 + ("the decoder's 63",), strict=True):
        assert found["reason"].endswith(said), found
