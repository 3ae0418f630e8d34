"""A bad .nemo file ends its import with one sentence; nothing is run, written or unpacked."""

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
from konkanivani.models.nemo.weights import import_nemo
from tests.conftest import checked, run_script
from tests.faults.test_error_texts import complaint
from tests.faults.untrusted_input import Calls
from tests.faults.watching import watch
from tests.nemo.files import CONFIG, FOLDER, WEIGHTS, NemoParts, changed, pieces, read_parts, write_members

SCRIPT, MOST_MIB = "training_scripts/import_asr.py", 100
Write = Callable[[Path], object]  # writes a file at the path


def parts(change: Callable[[NemoParts], object], name: str = "striding") -> Write:
    return lambda path: changed(change, path, name)


def setting(section: str, key: str, value: object) -> Write:
    """Return a change of one setting in the configuration."""

    def change(found: NemoParts) -> None:
        (found.config if section == "" else found.config[section])[key] = value

    return parts(change)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Write:
    return parts(lambda found: change(found.tensors))


def members(change: Callable[[dict[str, bytes]], object], is_packed: bool = False) -> Write:
    """Return a change of the members of the tar file."""

    def write(path: Path) -> None:
        found = read_parts().members()
        change(found)
        write_members(path, found, is_packed)

    return write


def with_header(name: str, kind: bytes, size: int = 0, **fields: object) -> Write:
    """Return a change that adds a member of this kind with this claimed size."""
    header = tarfile.TarInfo(name)
    header.type, header.size = kind, size
    for field, value in fields.items():
        setattr(header, field, value)
    return members(lambda found: found.update({name: header}))


def configured(change: Callable[[bytes], bytes]) -> Write:
    """Return a change of the text of the configuration."""
    return members(lambda found: found.update({f"./{CONFIG}": change(found[f"./{CONFIG}"])}))


def weighted(make: Callable[[bytes], bytes]) -> Write:
    """Return a change of the bytes of the weights."""
    return members(lambda found: found.update({f"./{WEIGHTS}": make(found[f"./{WEIGHTS}"])}))


def saved(value: object, **settings: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data, **settings)
    return data.getvalue()


def compressed(weights: bytes) -> bytes:
    """Return the records compressed, one of them a gigabyte of zeros."""
    data = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(weights)) as old, zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return data.getvalue()


def bombed(path: Path) -> None:
    """Write a member of a gigabyte compressed into a megabyte."""
    header = tarfile.TarInfo(f"./{WEIGHTS}")
    header.size = 2**30
    path.write_bytes(gzip.compress(header.tobuf()) + 256 * gzip.compress(bytes(2**22)))


def noted(path: Path) -> None:
    """Write a PAX header that renames the following member."""
    header = tarfile.TarInfo("./x")
    header.pax_headers = {"path": "../x", "size": "7"}
    write_members(path, {"./x": header} | read_parts().members())


def twice(path: Path) -> None:
    found = read_parts().members()
    write_members(path, found | {f"elsewhere/{WEIGHTS}": found[f"./{WEIGHTS}"]})


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
    "no tar": (lambda path: path.write_bytes(b"konkani" * 1000), "is truncated, or not a tar"),
    "a zip": (lambda path: path.write_bytes(saved({})), "is truncated, or not a tar"),
    "no configuration": (members(lambda found: found.pop(f"./{CONFIG}")), "contains no model_config.yaml"),
    "no weights": (members(lambda found: found.pop(f"./{WEIGHTS}")), "contains no model_weights.ckpt"),
    "a symbolic link": (with_header("./x", tarfile.SYMTYPE, linkname="/etc/passwd"), "a link or a device"),
    "a link": (with_header(f"./x/{CONFIG}", tarfile.LNKTYPE, linkname=f"./{CONFIG}"), "a link or a device"),
    "a device": (with_header("./x", tarfile.CHRTYPE, devmajor=1), "a link or a device"),
    "a sparse file": (with_header("./x", tarfile.GNUTYPE_SPARSE), "a link or a device"),
    "above": (with_header("../x", tarfile.REGTYPE), r"'\.\./x' has a path outside"),
    "absolute": (with_header("/x", tarfile.REGTYPE), "'/x' has a path outside"),
    "noted otherwise": (noted, "changes the name or size"),
    "twice": (twice, "is duplicated"),
    "8 GiB": (with_header("./x", tarfile.REGTYPE, 2**33 + 1), "changes the name or size"),
    "a bomb": (bombed, "states 1073741824 bytes"),
    "a configuration of 2 MiB": (configured(lambda text: text + b"#" * 2**21), "more than the limit"),
    "aliases": (configured(lambda text: text + ALIASES), "has an alias"),
    "a python tag": (configured(lambda text: text + EXPLODE), "not plain YAML"),
    "deep": (configured(lambda text: text + b"\nx: " + b"[" * 10_000 + b"]" * 10_000), "nested deeper|nesting depth"),
    "a large number": (configured(lambda text: text + b"\nx: " + b"9" * 10_000), "not plain YAML"),
    "no YAML": (configured(lambda text: b"{"), "not plain YAML"),
    "no mapping": (configured(lambda text: b"- 1"), "has no configuration"),
    "code": (weighted(lambda _: saved({"x": Calls(exec, "open('exploded', 'w')")})), "its pickle needs"),
    "code without a zip": (
        weighted(lambda _: saved({"x": torch.zeros(3)}, _use_new_zipfile_serialization=False)),
        "does not end like a torch.save archive",
    ),
    "compressed": (weighted(compressed), "is compressed"),
    "a flipped bit": (weighted(lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:]), "the CRC"),
    "no tensors": (weighted(lambda _: saved([torch.zeros(3)])), "no named tensors"),
    "more than tensors": (weighted(lambda _: saved({"x": [torch.zeros(3)]})), "other objects than named tensors"),
    "strides of 0": (weighted(lambda _: saved({"x": torch.zeros(1).expand(2**30)})), "need 4294967296 bytes"),
    "a tensor less": (tensors(lambda found: found.pop(QUERY)), f"no tensor {QUERY}"),
    "a tensor more": (
        tensors(lambda found: found.update({"encoder.x": torch.zeros(3)})),
        "'encoder.x' that its configuration does not use",
    ),
    "another shape": (tensors(lambda found: found.update({QUERY: torch.zeros(32, 33)})), r"is \(32, 33\) of float32"),
    "integers": (tensors(lambda found: found.update({HEAD: torch.zeros(61).int()})), r"is \(61,\) of int32"),
    "NaN": (tensors(lambda found: found[QUERY][3].fill_(torch.nan)), f"{QUERY} .* are not finite"),
    "no variance": (tensors(lambda found: found[f"{NORM}.running_var"].fill_(-1)), "depthwise.* are not finite"),
    "other bands": (tensors(lambda found: found["preprocessor.featurizer.fb"].mul_(2)), "featurizer.fb does not match"),
    "RNNT alone": (setting("", "target", RNNT), "target is 'EncDecRNNTBPEModel'"),
    "no version": (setting("", "nemo_version", None), "nemo_version is 'None'"),
    "version 4": (setting("", "nemo_version", "4.0.0"), "nemo_version is '4.0.0'"),
    "local attention": (setting("encoder", "self_attention_model", "rel_pos_local_attn"), "is 'rel_pos_local_attn'"),
    "absolute positions": (setting("encoder", "self_attention_model", "abs_pos"), "self_attention_model is 'abs_pos'"),
    "causal": (setting("encoder", "causal_downsampling", True), "causal_downsampling is True, but only False"),
    "causal convolution": (setting("encoder", "conv_context_size", "causal"), "conv_context_size is 'causal'"),
    "streaming": (setting("encoder", "att_context_style", "chunked_limited"), "att_context_style is 'chunked_limited'"),
    "a context": (setting("encoder", "att_context_size", [70, 13]), r"att_context_size is \[70, 13\]"),
    "vggnet": (
        setting("encoder", "subsampling", "vggnet"),
        "'vggnet by 4', but only striding by 4 or dw_striding by 8",
    ),
    "striding by 8": (setting("encoder", "subsampling_factor", 8), "'striding by 8'"),
    "a norm of groups": (setting("encoder", "conv_norm_type", "group_norm4"), "conv_norm_type is 'group_norm4'"),
    "reduced": (setting("encoder", "reduction", "pooling"), "reduction is 'pooling'"),
    "unknown": (setting("encoder", "adapters", {"x": 1}), "encoder.adapters is {'x': 1}, which this version does not"),
    "many blocks": (setting("encoder", "n_layers", 300), "dimensions are out of range"),
    "heads": (setting("encoder", "n_heads", 5), "configuration is invalid. .*--attention_heads 5"),
    "words for numbers": (setting("encoder", "d_model", "32"), "d_model is '32', but only a number"),
    "other audio": (setting("preprocessor", "sample_rate", 8000), "sample_rate is 8000, but only 16000"),
    "all bands together": (setting("preprocessor", "normalize", "all_features"), "normalize is 'all_features'"),
    "no logarithm": (setting("preprocessor", "log", False), "preprocessor.log is False"),
    "words of BERT": (setting("tokenizer", "type", "wpe"), "tokenizer.type is 'wpe'"),
    "no tokenizer": (setting("tokenizer", "model_path", "nemo:other.model"), "contains no other.model"),
    "a tokenizer of noise": (
        parts(lambda found: found.others.update({name: b"x" * 99 for name in found.others if name.endswith("model")})),
        "not a SentencePiece model",
    ),
    "other ids": (
        parts(
            lambda found: found.others.update(
                {n: pieces(list("abcdefgh"), 20, unk_id=2, pad_id=0, bos_id=1) for n in found.others if "model" in n}
            )
        ),
        r"has the ids \(2, 1, -1, 0\)",
    ),
}


def run_import(path: Path) -> None:
    import_nemo(path, None, path.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_ends_with_its_sentence(name, tmp_path, monkeypatch):
    write, said = FILES[name]
    path = tmp_path / "x.nemo"
    write(path)
    monkeypatch.chdir(tmp_path)
    verdict = watch(lambda: run_import(path), tmp_path)
    assert verdict.fault is None, verdict.fault
    assert verdict.outcome == "CheckpointError", verdict
    assert re.search(said, verdict.message), verdict.message
    assert complaint(re.sub(r"/\S+", "X", verdict.message)) is None and "\n" not in verdict.message
    assert list(tmp_path.iterdir()) == [path]
    assert verdict.growth_mib < MOST_MIB


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_file_that_is_cut_anywhere_is_refused(is_packed, tmp_path):
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


def test_what_the_script_says_and_leaves(tmp_path):
    """Each kind of error gives one sentence and its exit code; an existing checkpoint stays unchanged."""
    sound, out = FOLDER / "striding.nemo", tmp_path / "out.pt"
    bad = tmp_path / "bad.nemo"
    FILES["vggnet"][0](bad)
    done = checked(run_script(SCRIPT, str(sound), str(out)))
    before = out.read_bytes()
    read_checkpoint(out)
    for words, code, said in (
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
        assert re.search(said, line) and not done.stdout
        assert out.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["bad.nemo", "out.pt"]
    done = run_script(SCRIPT, str(FOLDER / "parakeet.nemo"), str(out), "--force")  # negative control
    assert done.returncode == 0 and out.read_bytes() != before, done.stderr


def test_without_pyyaml_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verdict = watch(lambda: run_import(FOLDER / "striding.nemo"), tmp_path)
    assert verdict.outcome == "ResourceError" and "pip install PyYAML" in verdict.message
