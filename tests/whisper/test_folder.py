"""Whisper model folders are read completely or rejected with one sentence, and only changed files are rewritten."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.models.model_files import whole_folder
from konkanivani.models.whisper import export
from konkanivani.models.whisper.export import write_whisper_folder
from konkanivani.models.whisper.folder import name_in_file, read_whisper_folder
from tests.whisper.folder_changes import (
    EMBEDDING,
    INDEX,
    WEIGHTS,
    change_json,
    change_tensors,
    change_weight_bytes,
    write_or_remove,
)
from tests.whisper.folders import KINDS, read_reference, write_folder


def file_contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", KINDS)
def test_dimensions_are_read_from_the_folder(name, whisper_folders):
    folder, kind = read_whisper_folder(whisper_folders[name]), KINDS[name]
    shape = folder.shape
    assert (shape.mel_bins, shape.vocab_size, shape.window_seconds) == (kind.mel_bins, kind.vocab_size, 1.0)
    assert (shape.encoder_layers, shape.decoder_layers) == kind.layers and shape.target_positions == 64
    assert (len(folder.files) > 1) == (name == "turbo") and folder.generation["suppress_tokens"] == [1, 2, 7]
    assert folder.architecture.most_tokens == 63 and folder.architecture.longest_seconds == 1.0


def test_weight_names_are_mapped_in_both_directions(whisper_folders):
    folder = read_whisper_folder(whisper_folders["tiny"])
    names = folder.our_names()
    assert names.keys() == safetensors.torch.load_file(folder.path / WEIGHTS).keys() and len(set(names.values())) == 89
    assert all(name_in_file(ours) == theirs for theirs, ours in names.items())


@pytest.mark.parametrize("name", KINDS)
def test_unchanged_model_is_written_byte_for_byte(name, whisper_folders, tmp_path):
    base = read_whisper_folder(whisper_folders[name])
    written = write_whisper_folder(base, base.weights(), tmp_path / "out")
    assert file_contents(tmp_path / "out") == file_contents(base.path) and not written.rewritten and not written.in_full


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("changed", ["decoder.norm.bias", "everything"])
def test_transformers_loads_changed_weights_without_key_mismatch(name, changed, whisper_folders, tmp_path):
    base = read_whisper_folder(whisper_folders[name])
    weights = base.weights()
    for key in weights if changed == "everything" else [changed]:
        weights[key] = weights[key] + 0.25
    written = write_whisper_folder(base, weights, tmp_path / "deep" / "out")
    loaded = read_reference(tmp_path / "deep" / "out").state_dict()
    assert all(torch.equal(loaded[name_in_file(key)], tensor) for key, tensor in weights.items())
    before, after = file_contents(base.path), file_contents(tmp_path / "deep" / "out")
    assert before.keys() == after.keys()
    assert {file for file in before if before[file] != after[file]} == set(written.rewritten) <= set(base.files)
    assert changed == "everything" or len(written.rewritten) == 1
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_unless_weights_overflow(dtype, tmp_path):
    base = read_whisper_folder(write_folder(KINDS["turbo"], tmp_path / "base", dtype=dtype))
    weights = base.weights()
    weights["decoder.norm.bias"] = weights["decoder.norm.bias"] + 1 / 3
    assert not write_whisper_folder(base, weights, tmp_path / "half").in_full
    kept = {k: t for file in base.files for k, t in safetensors.torch.load_file(tmp_path / "half" / file).items()}
    assert {tensor.dtype for tensor in kept.values()} == {dtype}
    weights["decoder.norm.bias"] = weights["decoder.norm.bias"] + 1e5
    assert write_whisper_folder(base, weights, tmp_path / "full").in_full == (dtype == torch.float16)
    loaded = read_reference(tmp_path / "full").model.decoder.layer_norm.bias
    assert float(loaded.detach().max()) > 9e4
    if dtype == torch.float16:
        assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"
        assert torch.equal(loaded, weights["decoder.norm.bias"])
        total = json.loads((tmp_path / "full" / INDEX).read_text())["metadata"]["total_size"]
        assert total == sum(tensor.nbytes for tensor in weights.values())


def test_other_formats_of_old_weights_are_not_copied(whisper_folders, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(whisper_folders["tiny"], base)
    (base / "pytorch_model.bin").write_bytes(b"old")
    (base / "onnx").mkdir()
    (base / "onnx" / "model.onnx").write_bytes(b"old")
    (base / "onnx" / "notes.txt").write_bytes(b"words")
    folder = read_whisper_folder(base)
    written = write_whisper_folder(folder, folder.weights(), tmp_path / "out")
    assert set(written.left_out) == {"pytorch_model.bin", "onnx/model.onnx"}
    assert (tmp_path / "out" / "onnx" / "notes.txt").read_bytes() == b"words"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_rejected_or_failed_write_leaves_no_files(whisper_folders, tmp_path, monkeypatch):
    base = read_whisper_folder(whisper_folders["tiny"])
    weights = base.weights()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    write_whisper_folder(base, weights, tmp_path / "empty")
    with pytest.raises(UsageError, match="already exists"):
        write_whisper_folder(base, weights, tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"decoder\.norm\.bias of the model are not finite"):
        write_whisper_folder(base, weights | {"decoder.norm.bias": torch.full((32,), torch.nan)}, tmp_path / "out")
    with pytest.raises(CheckpointError, match="do not match the shape"):
        write_whisper_folder(base, weights | {"decoder.norm.bias": torch.zeros(31)}, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="Free disk space"):
        patch.setattr(export.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
        write_whisper_folder(base, weights, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="could not be written: No space"):
        patch.setattr(export.shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        write_whisper_folder(base, weights, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]


def test_unreadable_file_of_the_base_folder_is_named(whisper_folders, tmp_path):
    shutil.copytree(whisper_folders["tiny"], tmp_path / "base")
    link = tmp_path / "base" / "notes.txt"
    link.symlink_to("missing.txt")
    base = read_whisper_folder(tmp_path / "base")
    message = f"^{link} cannot be read: No such file or directory. Fix that and start again.$"
    with pytest.raises(ResourceError, match=message):
        write_whisper_folder(base, base.weights(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def run_in_child(action: Callable[[], None]) -> int:
    """Run the action in a forked child, whose signals do not reach threads of earlier tests; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            action()
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_while_a_folder_is_written_leaves_no_files(number, tmp_path):
    def write() -> None:
        signal.signal(number, signal.SIG_DFL)
        with whole_folder(tmp_path / "out") as partial:
            (partial / "half").write_bytes(b"x")
            os.kill(os.getpid(), number)

    assert run_in_child(write) == 128 + number
    assert not list(tmp_path.iterdir())


def test_handlers_of_signals_are_kept_while_a_folder_is_written(tmp_path):
    def write() -> None:
        received = []
        signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
        with whole_folder(tmp_path / "out") as partial:
            (partial / "whole").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]

    assert run_in_child(write) == 0
    assert (tmp_path / "out" / "whole").read_bytes() == b"x"


def index_tensor_in(file: object) -> Callable[[Path], None]:
    """Return a function that adds an index in which `file` holds the embedding."""

    def change(folder: Path) -> None:
        names = safetensors.torch.load_file(folder / WEIGHTS).keys()
        (folder / WEIGHTS).rename(folder / "shard.safetensors")
        (folder / INDEX).write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "shard.safetensors") | {EMBEDDING: file}})
        )

    return change


def rename_to_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def misplace_tensor(folder: Path) -> None:
    """Add an index that places the embedding in a file that does not contain it."""
    index_tensor_in("other.safetensors")(folder)
    safetensors.torch.save_file({"something": torch.zeros(1)}, folder / "other.safetensors")


CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"
BAD_FOLDERS = {
    "no config": (write_or_remove(CONFIG, None), r"it has no config\.json"),
    "not JSON": (write_or_remove(CONFIG, "{"), r"config\.json is not JSON"),
    "not UTF-8": (write_or_remove(CONFIG, b"\xff\xfe{}"), r"config\.json is not JSON"),
    "nested JSON": (write_or_remove(CONFIG, "[" * 100_000), r"config\.json is not JSON"),
    "JSON list": (write_or_remove(CONFIG, "[]"), r"config\.json is not a JSON object"),
    "huge JSON": (write_or_remove(CONFIG, " " * (2**22 + 1)), "more than 4194304 bytes"),
    "another model": (change_json(CONFIG, model_type="wav2vec2"), "of type 'wav2vec2'"),
    "no model type": (change_json(CONFIG, model_type=...), "of type None"),
    "negative width": (change_json(CONFIG, d_model=-64), "d_model in its config.json is -64"),
    "width of 2^40": (change_json(CONFIG, d_model=2**40), "d_model in its config.json is 1099511627776"),
    "2^40 layers": (change_json(CONFIG, encoder_layers=2**40), "encoder_layers in its config.json is 1099511627776"),
    "2^40 tokens": (change_json(CONFIG, vocab_size=2**40), "vocab_size in its config.json is 1099511627776"),
    "boolean layers": (change_json(CONFIG, decoder_layers=True), "decoder_layers in its config.json is True"),
    "fractional width": (change_json(CONFIG, d_model=32.5), "d_model in its config.json is 32.5"),
    "no width": (change_json(CONFIG, d_model=...), "d_model in its config.json is None"),
    "heads do not divide width": (
        change_json(CONFIG, encoder_attention_heads=5, decoder_attention_heads=5),
        "a dimension of 32 into 5 heads",
    ),
    "different numbers of heads": (
        change_json(CONFIG, decoder_attention_heads=8),
        "decoder_attention_heads in its config.json is 8",
    ),
    "missing layer": (change_json(CONFIG, encoder_layers=3), r"it has no tensor model\.encoder\.layers\.2\."),
    "unexpected layer": (
        change_json(CONFIG, encoder_layers=1),
        r"its tensor model\.encoder\.layers\.1\.\S+ is not part of",
    ),
    "another width": (change_json(CONFIG, encoder_ffn_dim=64, decoder_ffn_dim=64), r"has the shape \(96,?.* \(64"),
    "untied": (change_json(CONFIG, tie_word_embeddings=False), "tie_word_embeddings in its config.json is False"),
    "another activation": (
        change_json(CONFIG, activation_function="relu"),
        "activation_function in its config.json is 'relu'",
    ),
    "no preprocessor": (write_or_remove(PREPROCESSOR, None), r"it has no preprocessor_config\.json"),
    "128 mel bins": (
        change_json(PREPROCESSOR, feature_size=128),
        "feature_size in its preprocessor_config.json is 128, .* 80",
    ),
    "another window": (
        change_json(PREPROCESSOR, chunk_length=30),
        "chunk_length in its preprocessor_config.json is 30",
    ),
    "another rate": (
        change_json(PREPROCESSOR, sampling_rate=8000),
        "sampling_rate in its preprocessor_config.json is 8000",
    ),
    "generation_config is not JSON": (write_or_remove(GENERATION, "nothing"), r"generation_config\.json is not JSON"),
    "suppressed token out of range": (
        change_json(GENERATION, suppress_tokens=[1_865]),
        "suppress_tokens in .* contains the token 1865",
    ),
    "default list among other suppressed tokens": (
        change_json(GENERATION, suppress_tokens=[-1, 5]),
        "suppress_tokens in .* contains the token -1",
    ),
    "negative language token": (
        change_json(GENERATION, lang_to_id={"<|xx|>": -1}),
        "lang_to_id in .* contains the token -1",
    ),
    "alignment head out of range": (
        change_json(GENERATION, alignment_heads=[[0, 4]]),
        "alignment_heads in its generation_config.json",
    ),
    "alignment heads are not pairs": (
        change_json(GENERATION, alignment_heads=[3]),
        "alignment_heads in its generation_config.json",
    ),
    "no weights": (write_or_remove(WEIGHTS, None), r"it has no model\.safetensors"),
    "pickle": (rename_to_pickle, r"its pytorch_model\.bin is pickle, .* convert it .*save_pretrained"),
    "truncated weights": (change_weight_bytes(lambda data: data[:-100]), r"its model\.safetensors is damaged"),
    "truncated header": (change_weight_bytes(lambda data: data[:5_000]), r"its model\.safetensors is damaged"),
    "empty": (change_weight_bytes(lambda data: b""), r"its model\.safetensors is damaged"),
    "header of 2^60": (
        change_weight_bytes(lambda data: (2**60).to_bytes(8, "little") + data[8:]),
        r"its header states 1152921504606846976 bytes",
    ),
    "wrong offsets": (
        change_weight_bytes(lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1)),
        r"its model\.safetensors is damaged",
    ),
    "missing tensor": (change_tensors(lambda tensors: tensors.pop(EMBEDDING)), f"it has no tensor {EMBEDDING}"),
    "unexpected tensor": (
        change_tensors(lambda tensors: tensors.update(more=torch.zeros(1))),
        "its tensor more is not part of Whisper",
    ),
    "tensor of another shape": (
        change_tensors(lambda tensors: tensors.update({"model.decoder.layer_norm.bias": torch.zeros(1, 32)})),
        r"model\.decoder\.layer_norm\.bias has the shape \(1, 32\)",
    ),
    "integer tensor": (
        change_tensors(
            lambda tensors: tensors.update({"model.decoder.layer_norm.bias": torch.zeros(32, dtype=torch.int32)})
        ),
        r"model\.decoder\.layer_norm\.bias is of type I32",
    ),
    "NaN": (
        change_tensors(lambda tensors: tensors[EMBEDDING][7].fill_(torch.nan)),
        f"its {EMBEDDING} contains values that are not finite",
    ),
    "output layer differs": (
        change_tensors(lambda tensors: tensors.update({"proj_out.weight": tensors[EMBEDDING] + 1})),
        r"its proj_out\.weight differs from its model\.decoder\.embed_tokens\.weight, to which",
    ),
    "weight file outside folder": (
        index_tensor_in("../x.safetensors"),
        r"lists '\.\./x\.safetensors', which is not a weight file",
    ),
    "absolute path": (index_tensor_in("/etc/passwd"), "lists '/etc/passwd', which is not a weight file"),
    "number as file name": (index_tensor_in(7), "lists 7, which is not a weight file"),
    "missing shard": (index_tensor_in("absent.safetensors"), r"it has no absent\.safetensors"),
    "tensor in another file": (misplace_tensor, "the tensors in its .* differ from its model.safetensors.index.json"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder_is_rejected_with_one_sentence(case, whisper_folders, tmp_path):
    change, words = BAD_FOLDERS[case]
    folder = tmp_path / "folder"
    shutil.copytree(whisper_folders["tiny"], folder)
    change(folder)
    with pytest.raises(CheckpointError, match=words) as result:
        read_whisper_folder(folder).build()
    assert str(folder) in str(result.value) and "\n" not in str(result.value) and result.value.exit_code == 4
    assert str(result.value).endswith(".") and len(str(result.value)) < 420 + len(str(folder))


def test_valid_folder_is_accepted(whisper_folders, tmp_path):
    """Negative control of the table: optional files may be missing, and an equal output layer is accepted."""
    folder = tmp_path / "folder"
    shutil.copytree(whisper_folders["tiny"], folder)
    change_tensors(lambda result: result.update({"proj_out.weight": result[EMBEDDING].clone()}))(folder)
    change_json(GENERATION, suppress_tokens=[-1], begin_suppress_tokens=[-1])(folder)
    assert read_whisper_folder(folder).generation["suppress_tokens"] == [-1]
    write_or_remove(GENERATION, None)(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"feature_extractor": json.loads((folder / PREPROCESSOR).read_text())})
    )
    write_or_remove(PREPROCESSOR, None)(folder)
    base = read_whisper_folder(folder)
    assert base.build().decoder.embedding.weight.isfinite().all() and base.generation == {}
    weights = base.weights()
    weights["decoder.embedding.weight"] = weights["decoder.embedding.weight"] + 1
    write_whisper_folder(base, weights, tmp_path / "out")
    rewritten = safetensors.torch.load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(rewritten["proj_out.weight"], weights["decoder.embedding.weight"])


@pytest.mark.parametrize(
    "name, words",
    [
        ("no_such_folder", "or a name on the hub such as openai/whisper-small"),
        ("/nowhere/at/all", "There is no folder /nowhere/at/all"),
        (__file__, "is a file"),
    ],
)
def test_path_that_is_not_a_folder_raises_usage_error(name, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        read_whisper_folder(Path(name))


def test_unreadable_file_raises_resource_error(whisper_folders, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ResourceError, match="permission denied"):
        read_whisper_folder(whisper_folders["tiny"])


def test_random_bytes_in_header_raise_only_project_errors(whisper_folders, tmp_path):
    folder, generator = tmp_path / "folder", torch.Generator().manual_seed(0)
    shutil.copytree(whisper_folders["tiny"], folder)
    data, refused = bytearray((folder / WEIGHTS).read_bytes()), 0
    for _ in range(60):
        hurt = data.copy()
        for place in torch.randint(9_000, (3,), generator=generator).tolist():
            hurt[place] = int(torch.randint(256, (), generator=generator))
        (folder / WEIGHTS).write_bytes(hurt)
        try:
            read_whisper_folder(folder).build()
        except KonkaniVaniError as error:
            refused += "\n" not in str(error)
    assert refused > 50
