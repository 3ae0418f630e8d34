#!/usr/bin/env python3
"""Compare imported NeMo models with NeMo itself: NeMo 3.0 recreates the golden tensors, which are compared with ours.

    python3 benchmarks/peers/nemo_import.py --output tests/nemo
    python3 benchmarks/peers/nemo_import.py --large indic_random.nemo

NeMo is installed into a separate environment (300 MB), with the front end's file of NeMo 1.23. The models are tiny and
random: x4 like IndicConformer, x8 like FastConformer, x8 with 128 bands and without biases like Parakeet. The second
command writes a file of the published IndicConformer's size with random weights, without NeMo, to time import_asr.py:
17 blocks of width 512, an RNNT decoder and joint network, 22 languages with 256 pieces each, about 523 MB.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import io
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import sentencepiece
import torch

from benchmarks.peers.processes import peer_python
from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import ResourceError

LANGUAGES = "as bn brx doi kok gu hi kn ks mai ml mni mr ne or pa sa sat sd ta te ur".split()
WIDTH, BLOCKS, PIECES, HIDDEN, CHANNELS, KERNEL, BINS = 512, 17, 256, 640, 512, 31, 80
CONSONANTS = [chr(0x915 + number) for number in range(37)]

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def linear(name: str, outputs: int, inputs: int, *kernel: int) -> Shapes:
    """Yield names and shapes of a weight (outputs, inputs, *kernel) and a bias; `tensors` drops axes of size 0."""
    yield f"{name}.weight", (outputs, inputs, *kernel)
    yield f"{name}.bias", (outputs,)


def block(name: str) -> Shapes:
    """Yield names and shapes of the tensors of a Conformer block."""
    for norm in ("feed_forward1", "self_att", "conv", "feed_forward2", "out"):
        yield from linear(f"{name}.norm_{norm}", WIDTH, 0)
    for number in (1, 2):
        yield from linear(f"{name}.feed_forward{number}.linear1", 4 * WIDTH, WIDTH)
        yield from linear(f"{name}.feed_forward{number}.linear2", WIDTH, 4 * WIDTH)
    for part in ("q", "k", "v", "out"):
        yield from linear(f"{name}.self_attn.linear_{part}", WIDTH, WIDTH)
    yield f"{name}.self_attn.linear_pos.weight", (WIDTH, WIDTH)
    for part in "uv":
        yield f"{name}.self_attn.pos_bias_{part}", (8, WIDTH // 8)
    yield from linear(f"{name}.conv.pointwise_conv1", 2 * WIDTH, WIDTH, 1)
    yield from linear(f"{name}.conv.depthwise_conv", WIDTH, 1, KERNEL)
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.conv.batch_norm.{part}", (WIDTH,)
    yield from linear(f"{name}.conv.pointwise_conv2", WIDTH, WIDTH, 1)


def shapes() -> Shapes:
    """Yield names and shapes of all tensors of the file."""
    yield from linear("encoder.pre_encode.conv.0", CHANNELS, 1, 3, 3)
    yield from linear("encoder.pre_encode.conv.2", CHANNELS, CHANNELS, 3, 3)
    # Two convolutions with stride 2 leave a quarter of the mel bins.
    yield from linear("encoder.pre_encode.out", WIDTH, CHANNELS * BINS // 4)
    for number in range(BLOCKS):
        yield from block(f"encoder.layers.{number}")
    tokens = PIECES * len(LANGUAGES)
    yield from linear("ctc_decoder.decoder_layers.0", tokens + 1, WIDTH, 1)
    yield "decoder.prediction.embed.weight", (tokens + 1, HIDDEN)
    for part in ("ih", "hh"):
        yield from linear(f"decoder.prediction.dec_rnn.lstm.{part}", 4 * HIDDEN, HIDDEN)
    yield from linear("joint.pred", HIDDEN, HIDDEN)
    yield from linear("joint.enc", HIDDEN, WIDTH)
    for language in LANGUAGES:
        yield from linear(f"joint.joint_net.2.{language}", PIECES + 1, HIDDEN)


def tensors() -> dict[str, torch.Tensor]:
    """Return random tensors, with norm weights near 1 and variances above 0."""
    generator, found = torch.Generator().manual_seed(1), {}
    for name, shape in shapes():
        shape = tuple(size for size in shape if size)
        found[name] = torch.randn(shape, generator=generator).mul_(0.02)
        # A norm weight near 0 would remove the signal; a negative variance is invalid.
        if len(shape) == 1 and name.endswith(("norm.weight", "running_var")) or ".norm_" in name and "weight" in name:
            found[name] = found[name].abs_().add_(1)
    return found


def pieces(number: int) -> bytes:
    """Return the tokenizer of one language, with the normalisation of NeMo, which is most of its bytes."""
    model = io.BytesIO()
    generator = torch.Generator().manual_seed(number)
    letters = torch.randint(len(CONSONANTS), (4000, 3), generator=generator).tolist()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(CONSONANTS[letter] for letter in word) for word in letters),
        **{"model_writer": model, "model_type": "bpe", "vocab_size": PIECES, "character_coverage": 1.0},
        **{"unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1, "num_threads": 1, "minloglevel": 2},
    )
    return model.getvalue()


def configuration(files: dict[str, str]) -> str:
    """Return the settings as JSON, which is valid YAML."""
    head = {"num_classes": PIECES * len(LANGUAGES), "multisoftmax": True, "vocabulary": []}
    return json.dumps(
        {
            # The importer reads only the last part of `target`.
            **{"target": "x.EncDecHybridRNNTCTCBPEModel", "nemo_version": "1.23.0rc0", "sample_rate": 16_000},
            "preprocessor": {"window_size": 0.025, "window_stride": 0.01, "features": BINS, "n_fft": 512, "pad_to": 16},
            "encoder": {
                **{"feat_in": BINS, "n_layers": BLOCKS, "d_model": WIDTH, "n_heads": 8, "conv_kernel_size": KERNEL},
                **{"subsampling": "striding", "subsampling_factor": 4, "subsampling_conv_channels": CHANNELS},
            },
            "decoder": {"multisoftmax": True},
            "aux_ctc": {"decoder": head},
            "tokenizer": {
                "type": "multilingual",
                "langs": {name: {"type": "bpe", "model_path": f"nemo:{file}"} for name, file in files.items()},
            },
        }
    )


def write_large(path: Path) -> None:
    """Write the .nemo file."""
    weights = io.BytesIO()
    torch.save(tensors(), weights)
    files = {language: f"{number:032x}_tokenizer.model" for number, language in enumerate(LANGUAGES)}
    with tarfile.open(path, "w") as archive:
        members = {file: pieces(number) for number, file in enumerate(files.values())}
        members |= {"model_config.yaml": configuration(files).encode(), "model_weights.ckpt": weights.getbuffer()}
        for name, data in members.items():
            header = tarfile.TarInfo(f"./{name}")
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))


NEMO, OLDER = "nemo_toolkit[asr]==3.0.0", "nemo_toolkit==1.23.0"
OLDER_FEATURES = "nemo/collections/asr/parts/preprocessing/features.py"


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    output: str | None = None
    """Folder for NeMo's files and golden tensors (None: compare and delete them)."""
    large: str | None = None
    """Only write a .nemo file of 523 MB of random weights to this path."""
    nemo: str | None = None
    """Python interpreter with NeMo 3.0 (None: an environment in --folder, created if missing)."""
    folder: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of NeMo."""


def compare(flags: Flags) -> str:
    """Return the largest difference of each tensor, one line per file."""

    if flags.large:
        write_large(Path(flags.large))
        return f"{flags.large}: {Path(flags.large).stat().st_size / 1e6:.0f} MB."
    python = Path(flags.nemo) if flags.nemo else peer_python(Path(flags.folder).expanduser(), (NEMO,))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(flags.output or scratch)
        out.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).resolve().parent.parent.parent / "tests/nemo/build_goldens.py"
        run([str(python), str(script), str(out), str(older_features(python, Path(scratch)))])
        return "\n".join(measured(out))


def older_features(python: Path, scratch: Path) -> Path:
    """Extract the front end's file of NeMo 1.23 from its wheel."""
    run([str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), OLDER])
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(OLDER_FEATURES, scratch))


def run(command: list[str]) -> None:
    """Run a command of the other environment; print its output only on failure."""
    # Offline, so that NeMo does not look for models or tokenizers on the Hugging Face hub.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ResourceError(f"The command {' '.join(command)} failed: {last}. Check that PyPI can be reached.")


def measured(folder: Path) -> list[str]:
    """Return the differences from the golden tensors, one line per file."""
    from tests.nemo.goldens import FILES, file_distances

    lines = []
    for name in (*FILES, "older"):
        found, has_texts = file_distances(folder, name)
        words = ", ".join(f"{part} {distance:.1e}" for part, distance in found.items())
        lines.append(f"{name}: {words}; the same greedy texts: {'yes' if has_texts else 'no'}")
    return lines


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
