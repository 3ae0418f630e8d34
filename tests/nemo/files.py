"""Tiny .nemo files, NeMo's outputs for them (benchmarks/peers/nemo_import.py recreates both), and changed copies."""

import copy
import functools
import gzip
import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch
import yaml

FOLDER, DUMPER = Path(__file__).parent, getattr(yaml, "CSafeDumper", yaml.SafeDumper)
CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
WORDS = "उदक घरांत आसा आनी शाळा बाजारा लागीं एक दोन तीन चार पांच आवय घरा वता कोण खंय सकाळ रात फूल".split()

Settings = dict[str, object]
Tensors = dict[str, torch.Tensor]


@dataclass
class NemoParts:
    """Content of a .nemo file that a test can change: configuration, tensors, and other members by name."""

    config: Settings
    tensors: Tensors
    others: dict[str, bytes]

    def members(self) -> dict[str, bytes]:
        """Return the bytes of each member."""
        weights = io.BytesIO()
        torch.save(self.tensors, weights)
        return {
            **{f"./{name}": data for name, data in self.others.items()},
            f"./{CONFIG}": yaml.dump(self.config, Dumper=DUMPER, allow_unicode=True, sort_keys=False).encode(),
            f"./{WEIGHTS}": weights.getvalue(),
        }

    def write(self, path: Path) -> Path:
        """Write the file in the format of NeMo."""
        return write_members(path, self.members())


def read_parts(name: str = "striding", folder: Path = FOLDER) -> NemoParts:
    """Return a copy of the content of a file written by NeMo."""
    return copy.deepcopy(_read_parts(name, folder))


@functools.cache
def _read_parts(name: str, folder: Path) -> NemoParts:
    with tarfile.open(folder / f"{name}.nemo", "r:*") as archive:
        read = {m.name.removeprefix("./"): archive.extractfile(m).read() for m in archive if m.isfile()}
    tensors = torch.load(io.BytesIO(read.pop(WEIGHTS)), weights_only=True)  # noqa: TID251
    return NemoParts(yaml.safe_load(read.pop(CONFIG)), tensors, read)


def write_members(path: Path, members: Mapping[str, bytes | tarfile.TarInfo], is_packed: bool = False) -> Path:
    """Write a tar file of these members; a member given by its header has no bytes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in members.items():
            header = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                header.size = len(content)
            archive.addfile(header, io.BytesIO(content) if isinstance(content, bytes) else None)
    path.write_bytes(gzip.compress(data.getvalue(), 1) if is_packed else data.getvalue())
    return path


def write_changed(
    change: Callable[[NemoParts], object], path: Path, name: str = "striding", folder: Path = FOLDER
) -> Path:
    """Write a changed version of a file written by NeMo."""
    parts = read_parts(name, folder)
    change(parts)
    return parts.write(path)


def train_sentencepiece(words: list[str], size: int, **settings: object) -> bytes:
    """Return a SentencePiece model as trained by NeMo's scripts: `<unk>` first and no other special token."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{first} {second}" for first in words for second in words]),
        model_writer=model,
        vocab_size=size,
        **{"model_type": "bpe", "unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1, "num_threads": 1} | settings,
        character_coverage=1.0,
        minloglevel=2,
    )
    return model.getvalue()


def multilingual(sizes: Mapping[str, int]) -> Callable[[NemoParts], None]:
    """Return a change to the format of AI4Bharat's fork: a tokenizer and rows of the CTC head per language.

    The languages of the joint network are in another order than the tokenizers, as is possible in published files.
    """

    def change(parts: NemoParts) -> None:
        for name in [name for name in parts.others if "tokenizer" in name or "vocab" in name]:
            del parts.others[name]
        languages, vocabulary = {}, []
        for number, (language, size) in enumerate(sizes.items()):
            model, file = train_sentencepiece(WORDS[number : number + 9], size), f"{number:032x}_tokenizer.model"
            parts.others[file] = model
            languages[language] = {"dir": "/x", "type": "bpe", "model_path": f"nemo:{file}"}
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            vocabulary += map(processor.id_to_piece, range(processor.get_piece_size()))
        parts.config["nemo_version"] = "1.23.0rc0"
        parts.config["tokenizer"] = {"type": "multilingual", "dir": None, "langs": languages}
        parts.config["decoder"]["multisoftmax"] = True
        parts.config["joint"] |= {"multilingual": True, "language_keys": sorted(sizes, reverse=True)}
        parts.config["aux_ctc"]["decoder"] |= {
            **{"vocabulary": vocabulary, "num_classes": len(vocabulary), "multisoftmax": True}
        }
        generator = torch.Generator().manual_seed(5)
        width = parts.config["encoder"]["d_model"]
        head = {"weight": (len(vocabulary) + 1, width, 1), "bias": (len(vocabulary) + 1,)}
        for leaf, shape in head.items():
            parts.tensors[f"ctc_decoder.decoder_layers.0.{leaf}"] = 0.3 * torch.randn(shape, generator=generator)

    return change
