"""A bad .nemo file is rejected with one sentence; nothing is executed, written or unpacked."""

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.models.nemo.weights import FILTER_BANK, import_nemo
from tests.conftest import checked, run_script
from tests.faults.test_error_texts import message_defect
from tests.faults.untrusted_input import CallOnUnpickle
from tests.faults.watched_process import watch
from tests.nemo.files import (
    CONFIG,
    FOLDER,
    WEIGHTS,
    NemoParts,
    read_parts,
    train_sentencepiece,
    write_changed,
    write_members,
)

SCRIPT, MAX_GROWTH_MIB = "training_scripts/import_asr.py", 100
Write = Callable[[Path], object]  # writes a file at the path


def parts(change: Callable[[NemoParts], object], name: str = "striding") -> Write:
    return lambda path: write_changed(change, path, name)


def setting(section: str, key: str, value: object) -> Write:
    """Return a change of one setting in the configuration."""

    def change(nemo_parts: NemoParts) -> None:
        (nemo_parts.config if section == "" else nemo_parts.config[section])[key] = value

    return parts(change)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Write:
    return parts(lambda result: change(result.tensors))


def members(change: Callable[[dict[str, bytes]], object], is_packed: bool = False) -> Write:
    """Return a change of the members of the tar file."""

    def write(path: Path) -> None:
        result = read_parts().members()
        change(result)
        write_members(path, result, is_packed)

    return write


def with_header(name: str, kind: bytes, size: int = 0, **fields: object) -> Write:
    """Return a change that adds a member of this kind with this claimed size."""
    header = tarfile.TarInfo(name)
    header.type, header.size = kind, size
    for field, value in fields.items():
        setattr(header, field, value)
    return members(lambda result: result.update({name: header}))


def change_configuration(change: Callable[[bytes], bytes]) -> Write:
    """Return a change of the text of the configuration."""
    return members(lambda result: result.update({f"./{CONFIG}": change(result[f"./{CONFIG}"])}))


def change_weights(make: Callable[[bytes], bytes]) -> Write:
    """Return a change of the bytes of the weights."""
    return members(lambda result: result.update({f"./{WEIGHTS}": make(result[f"./{WEIGHTS}"])}))


def saved_bytes(value: object, **settings: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data, **settings)
    return data.getvalue()


def compress_records(weights: bytes) -> bytes:
    """Return the same archive with compressed records."""
    data = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(weights)) as old, zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return data.getvalue()


def write_gzip_bomb(path: Path) -> None:
    """Write a member of a gigabyte compressed into a megabyte."""
    header = tarfile.TarInfo(f"./{WEIGHTS}")
    header.size = 2**30
    path.write_bytes(gzip.compress(header.tobuf()) + 256 * gzip.compress(bytes(2**22)))


def write_renaming_pax_header(path: Path) -> None:
    """Write a PAX header that renames the following member."""
    header = tarfile.TarInfo("./x")
    header.pax_headers = {"path": "../x", "size": "7"}
    write_members(path, {"./x": header} | read_parts().members())


def write_duplicate_member(path: Path) -> None:
    result = read_parts().members()
    write_members(path, result | {f"elsewhere/{WEIGHTS}": result[f"./{WEIGHTS}"]})


ALIASES = (
    b"\n"
    + b"a0: &a0 [x]\n"
    + b"".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n".encode() for n in range(1, 12))
)
EXPLODE = b"\nx: !!python/object/apply:os.system ['touch exploded']\n"
HEAD, NORM = "ctc_decoder.decoder_layers.0.bias", "encoder.layers.1.conv.batch_norm"
QUERY = "encoder.layers.0.self_attn.linear_q.weight"
RNNT = "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel"

FILES: dict[str, tuple[Write, str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is truncated, or not a tar"),
    "not a tar": (lambda path: path.write_bytes(b"konkani" * 1000), "is truncated, or not a tar"),
    "zip file": (lambda path: path.write_bytes(saved_bytes({})), "is truncated, or not a tar"),
    "no configuration": (members(lambda tensors: tensors.pop(f"./{CONFIG}")), "contains no model_config.yaml"),
    "no weights": (members(lambda tensors: tensors.pop(f"./{WEIGHTS}")), "contains no model_weights.ckpt"),
    "symbolic link": (with_header("./x", tarfile.SYMTYPE, linkname="/etc/passwd"), "a link or a device"),
    "hard link": (with_header(f"./x/{CONFIG}", tarfile.LNKTYPE, linkname=f"./{CONFIG}"), "a link or a device"),
    "device": (with_header("./x", tarfile.CHRTYPE, devmajor=1), "a link or a device"),
    "sparse file": (with_header("./x", tarfile.GNUTYPE_SPARSE), "a link or a device"),
    "path outside": (with_header("../x", tarfile.REGTYPE), r"'\.\./x' has a path outside"),
    "absolute path": (with_header("/x", tarfile.REGTYPE), "'/x' has a path outside"),
    "renamed by PAX header": (write_renaming_pax_header, "changes the name or size"),
    "duplicate member": (write_duplicate_member, "is duplicated"),
    "size above 8 GiB": (with_header("./x", tarfile.REGTYPE, 2**33 + 1), "changes the name or size"),
    "gzip bomb": (write_gzip_bomb, "states 1073741824 bytes"),
    "large configuration": (change_configuration(lambda text: text + b"#" * 2**21), "more than the limit"),
    "aliases": (change_configuration(lambda text: text + ALIASES), "has an alias"),
    "python tag": (change_configuration(lambda text: text + EXPLODE), "not plain YAML"),
    "deep nesting": (
        change_configuration(lambda text: text + b"\nx: " + b"[" * 10_000 + b"]" * 10_000),
        "nested deeper|nesting depth",
    ),
    "large number": (change_configuration(lambda text: text + b"\nx: " + b"9" * 10_000), "not plain YAML"),
    "not YAML": (change_configuration(lambda text: b"{"), "not plain YAML"),
    "not a mapping": (change_configuration(lambda text: b"- 1"), "has no configuration"),
    "code": (
        change_weights(lambda _: saved_bytes({"x": CallOnUnpickle(exec, "open('exploded', 'w')")})),
        "its pickle needs",
    ),
    "code without a zip": (
        change_weights(lambda _: saved_bytes({"x": torch.zeros(3)}, _use_new_zipfile_serialization=False)),
        "does not end like a torch.save archive",
    ),
    "compressed": (change_weights(compress_records), "is compressed"),
    "flipped bit": (change_weights(lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:]), "the CRC"),
    "not tensors": (change_weights(lambda _: saved_bytes([torch.zeros(3)])), "no named tensors"),
    "other objects": (
        change_weights(lambda _: saved_bytes({"x": [torch.zeros(3)]})),
        "other objects than named tensors",
    ),
    "zero strides": (
        change_weights(lambda _: saved_bytes({"x": torch.zeros(1).expand(2**30)})),
        "need 4294967296 bytes",
    ),
    "missing tensor": (tensors(lambda tensors: tensors.pop(QUERY)), f"no tensor {QUERY}"),
    "extra tensor": (
        tensors(lambda tensors: tensors.update({"encoder.x": torch.zeros(3)})),
        "'encoder.x' that its configuration does not use",
    ),
    "another shape": (
        tensors(lambda tensors: tensors.update({QUERY: torch.zeros(32, 33)})),
        r"is \(32, 33\) of float32",
    ),
    "integer tensor": (tensors(lambda tensors: tensors.update({HEAD: torch.zeros(61).int()})), r"is \(61,\) of int32"),
    "NaN": (tensors(lambda tensors: tensors[QUERY][3].fill_(torch.nan)), f"{QUERY} .* are not finite"),
    "negative variance": (
        tensors(lambda tensors: tensors[f"{NORM}.running_var"].fill_(-1)),
        "depthwise.* are not finite",
    ),
    "other filter bank": (
        tensors(lambda tensors: tensors["preprocessor.featurizer.fb"].mul_(2)),
        "featurizer.fb does not match",
    ),
    "empty filter bank": (
        tensors(lambda t: t.update({FILTER_BANK: t[FILTER_BANK][:0]})),
        "featurizer.fb does not match",
    ),
    "several filter banks": (
        tensors(lambda t: t.update({FILTER_BANK: torch.cat([t[FILTER_BANK], t[FILTER_BANK]])})),
        "featurizer.fb does not match",
    ),
    "filter bank without axes": (
        tensors(lambda t: t.update({FILTER_BANK: torch.tensor(1.0)})),
        "featurizer.fb does not match",
    ),
    "RNNT only": (setting("", "target", RNNT), "target is 'EncDecRNNTBPEModel'"),
    "no version": (setting("", "nemo_version", None), "nemo_version is 'None'"),
    "version 4": (setting("", "nemo_version", "4.0.0"), "nemo_version is '4.0.0'"),
    "local attention": (setting("encoder", "self_attention_model", "rel_pos_local_attn"), "is 'rel_pos_local_attn'"),
    "absolute positions": (setting("encoder", "self_attention_model", "abs_pos"), "self_attention_model is 'abs_pos'"),
    "causal": (setting("encoder", "causal_downsampling", True), "causal_downsampling is True, but only False"),
    "causal convolution": (setting("encoder", "conv_context_size", "causal"), "conv_context_size is 'causal'"),
    "streaming": (setting("encoder", "att_context_style", "chunked_limited"), "att_context_style is 'chunked_limited'"),
    "limited context": (setting("encoder", "att_context_size", [70, 13]), r"att_context_size is \[70, 13\]"),
    "vggnet": (
        setting("encoder", "subsampling", "vggnet"),
        "'vggnet by 4', but only striding by 4 or dw_striding by 8",
    ),
    "striding by 8": (setting("encoder", "subsampling_factor", 8), "'striding by 8'"),
    "group norm": (setting("encoder", "conv_norm_type", "group_norm4"), "conv_norm_type is 'group_norm4'"),
    "reduction": (setting("encoder", "reduction", "pooling"), "reduction is 'pooling'"),
    "unknown setting": (
        setting("encoder", "adapters", {"x": 1}),
        "encoder.adapters is {'x': 1}, which this version does not",
    ),
    "too many blocks": (setting("encoder", "n_layers", 300), "dimensions are out of range"),
    "indivisible heads": (setting("encoder", "n_heads", 5), "configuration is invalid. .*--attention_heads 5"),
    "text as number": (setting("encoder", "d_model", "32"), "d_model is '32', but only a number"),
    "other sample rate": (setting("preprocessor", "sample_rate", 8000), "sample_rate is 8000, but only 16000"),
    "normalization over all bands": (
        setting("preprocessor", "normalize", "all_features"),
        "normalize is 'all_features'",
    ),
    "linear features": (setting("preprocessor", "log", False), "preprocessor.log is False"),
    "WordPiece tokenizer": (setting("tokenizer", "type", "wpe"), "tokenizer.type is 'wpe'"),
    "no tokenizer": (setting("tokenizer", "model_path", "nemo:other.model"), "contains no other.model"),
    "random bytes as tokenizer": (
        parts(
            lambda tensors: tensors.others.update(
                {name: b"x" * 99 for name in tensors.others if name.endswith("model")}
            )
        ),
        "not a SentencePiece model",
    ),
    "other special ids": (
        parts(
            lambda tensors: tensors.others.update(
                {
                    n: train_sentencepiece(list("abcdefgh"), 20, unk_id=2, pad_id=0, bos_id=1)
                    for n in tensors.others
                    if "model" in n
                }
            )
        ),
        r"has the ids \(2, 1, -1, 0\)",
    ),
}


def run_import(path: Path) -> None:
    import_nemo(path, None, path.parent)


@pytest.mark.parametrize("name", FILES)
def test_bad_file_is_rejected_with_one_sentence(name, tmp_path, monkeypatch):
    write, pattern = FILES[name]
    path = tmp_path / "x.nemo"
    write(path)
    monkeypatch.chdir(tmp_path)
    verdict = watch(lambda: run_import(path), tmp_path)
    assert verdict.fault is None, verdict.fault
    assert verdict.outcome == "CheckpointError", verdict
    assert re.search(pattern, verdict.message), verdict.message
    assert message_defect(re.sub(r"/\S+", "X", verdict.message)) is None and "\n" not in verdict.message
    assert list(tmp_path.iterdir()) == [path]
    assert verdict.growth_mib < MAX_GROWTH_MIB


@pytest.mark.parametrize("is_packed", [False, True])
def test_truncated_file_is_rejected(is_packed, tmp_path):
    whole = (FOLDER / "striding.nemo").read_bytes()
    whole = gzip.compress(whole) if is_packed else whole
    path = tmp_path / "x.nemo"
    for part in range(10):
        path.write_bytes(whole[: len(whole) * part // 10])
        verdict = watch(lambda: run_import(path), tmp_path)
        assert verdict.outcome == "CheckpointError", (part, verdict)
        assert re.search("is truncated|is damaged", verdict.message), verdict.message
    path.write_bytes(whole)  # negative control
    assert watch(lambda: run_import(path), tmp_path).outcome == "taken"


def test_script_errors_have_one_sentence_and_exit_code(tmp_path):
    """Each kind of error gives one sentence and its exit code, and leaves an existing checkpoint unchanged."""
    sound, out = FOLDER / "striding.nemo", tmp_path / "out.pt"
    bad = tmp_path / "bad.nemo"
    FILES["vggnet"][0](bad)
    done = checked(run_script(SCRIPT, str(sound), str(out)))
    before = out.read_bytes()
    read_checkpoint(out)
    for words, code, pattern in (
        ((sound, out), 2, "out.pt already exists. .* --force"),
        ((bad, out, "--force"), 4, "vggnet"),
        ((tmp_path / "none.nemo", out, "--force"), 4, "There is no model at .*Give the path"),
        ((tmp_path, out, "--force"), 4, "has no config.json"),
        ((sound, out, "--language", "kok", "--force"), 2, "Omit it"),
        ((sound, sound), 2, "Choose different names"),
        ((sound, tmp_path / "checkpoint_last.pt"), 2, "reserved for checkpoints of a run"),
        ((sound, tmp_path / "none" / "out.pt"), 6, "cannot be written"),
    ):
        done = run_script(SCRIPT, *map(str, words))
        assert done.returncode == code, done
        (line,) = done.stderr.splitlines()
        assert re.search(pattern, line) and not done.stdout
        assert out.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["bad.nemo", "out.pt"]
    done = run_script(SCRIPT, str(FOLDER / "parakeet.nemo"), str(out), "--force")  # negative control
    assert done.returncode == 0 and out.read_bytes() != before, done.stderr


def test_missing_pyyaml_is_reported_with_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verdict = watch(lambda: run_import(FOLDER / "striding.nemo"), tmp_path)
    assert verdict.outcome == "ResourceError" and "pip install PyYAML" in verdict.message
