"""A .nemo file of the published IndicConformer's size and shapes with random weights, written without NeMo.

17 blocks of width 512, an RNNT decoder and joint network, 22 languages with 256 pieces each: about 523 MB.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
import torch

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
    import json

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
