"""Train a plain SpeechBrain Conformer with CTC on a folder of manifests, as a reference for this trainer.

    PYTHON speechbrain_training.py '{"folder": ..., "epochs": 15, "seed": 0, "rate": 16000, "batch": 40}'

Width and depth of --preset minimal, characters as tokens, AdamW with a linear warm-up and half a cosine, SpecAugment as
in this trainer, batches of similar lengths with at most 40 s including padding. Prints one line of JSON per epoch with
the validation error rates of greedy CTC decoding, then one with those for the test part.

B batch, T feature frames, F mel bins, T' encoder frames, V vocabulary.
"""

import json
import math
import random
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import jiwer
import soundfile
import torch
import torchaudio
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

WIDTH, LAYERS, MEL_BINS = 128, 6, 80
PEAK_RATE, WARMUP_STEPS = 1e-3, 300


@dataclass(frozen=True)
class CommandLine:
    """Settings of a run; `rate` is the sample rate in Hz, `batch` the seconds per batch with padding."""

    folder: str
    epochs: int
    seed: int
    rate: int
    batch: float
    device: str


@dataclass(frozen=True)
class Utterance:
    """Features (T, F), normalised per bin to mean 0 and variance 1, and transcript."""

    features: torch.Tensor
    text: str


class Conformer(torch.nn.Module):
    """Conformer encoder with a CTC head.

    Maps features (B, T, F) and their lengths (B,), as fractions of the longest, to log probabilities (B, T', V).
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.front = ConvolutionFrontEnd(
            (8, 10, MEL_BINS),
            num_blocks=2,
            num_layers_per_block=1,
            out_channels=(64, 32),
            kernel_sizes=(3, 3),
            strides=(2, 2),
            residuals=(False, False),
        )
        self.encoder = TransformerASR(
            tgt_vocab=vocab_size,
            input_size=640,  # 32 channels of 20 bins
            d_model=WIDTH,
            nhead=4,
            num_encoder_layers=LAYERS,
            num_decoder_layers=0,
            d_ffn=4 * WIDTH,
            dropout=0.1,
            encoder_module="conformer",
            attention_type="RoPEMHA",
            normalize_before=True,
            causal=False,
        )
        self.head = torch.nn.Linear(WIDTH, vocab_size)

    def forward(self, features: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
        features, fractions = features.to(self.head.weight.device), fractions.to(self.head.weight.device)
        return self.head(self.encoder.encode(self.front(features), fractions)).log_softmax(-1)


def read_part(manifest: Path, rate: int) -> list[Utterance]:
    """Return the utterances of a manifest with their features."""
    # STFT window of 25 ms, hop of 10 ms.
    to_mel = torchaudio.transforms.MelSpectrogram(
        rate, n_fft=512, win_length=rate // 40, hop_length=rate // 100, n_mels=MEL_BINS
    )
    utterances = []
    for row in map(json.loads, manifest.read_text(encoding="utf-8").splitlines()):
        samples, _ = soundfile.read(manifest.parent / row["audio_filepath"], dtype="float32")
        features = to_mel(torch.from_numpy(samples)).clamp_min(1e-8).log().T
        utterances.append(Utterance((features - features.mean(0)) / (features.std(0) + 1e-5), row["text"]))
    return utterances


def lay_into_batches(part: list[Utterance], seconds: float) -> list[list[Utterance]]:
    """Return batches of similar lengths, shortest first, each of at most `seconds` seconds with padding."""
    batches: list[list[Utterance]] = [[]]
    for utterance in sorted(part, key=lambda utterance: len(utterance.features)):
        # 100 frames per second; the next utterance is the longest, and the others are padded to it.
        if batches[-1] and (len(batches[-1]) + 1) * len(utterance.features) > 100 * seconds:
            batches.append([])
        batches[-1].append(utterance)
    return batches


def pad(batch: list[Utterance]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded features (B, T, F) and their lengths (B,)."""
    features = [utterance.features for utterance in batch]
    return torch.nn.utils.rnn.pad_sequence(features, batch_first=True), torch.tensor([len(f) for f in features])


def mask(features: torch.Tensor, lengths: torch.Tensor) -> None:
    """Apply SpecAugment in place: two masks of at most 15 bins and two of at most a twelfth of the utterance."""
    for row, length in enumerate(lengths.tolist()):
        for _ in range(2):
            width = random.randint(0, 15)
            first = random.randint(0, MEL_BINS - width)
            features[row, :, first : first + width] = 0
            width = random.randint(0, max(1, length // 12))
            first = random.randint(0, length - width)
            features[row, first : first + width] = 0


@torch.no_grad()
def rates(model: Conformer, part: list[Utterance], characters: list[str], seconds: float) -> tuple[float, float]:
    """Return WER and CER of greedy CTC decoding."""
    model.eval()
    references, hypotheses = [], []
    for batch in lay_into_batches(part, seconds):
        features, lengths = pad(batch)
        paths = model(features, lengths / lengths.max()).argmax(-1).cpu()
        for utterance, path, length in zip(batch, paths, lengths.tolist(), strict=True):
            # Frames of padding are dropped, then repeated tokens; token 0 is the blank.
            kept = torch.unique_consecutive(path[: math.ceil(len(path) * length / int(lengths.max()))])
            heard = "".join(characters[token - 1] for token in kept.tolist() if token)
            references.append(utterance.text)
            hypotheses.append(heard or " ")
    return jiwer.wer(references, hypotheses), jiwer.cer(references, hypotheses)


def loss_of(model: Conformer, batch: list[Utterance], ids: dict[str, int]) -> torch.Tensor:
    """Return the CTC loss per token of a batch, with SpecAugment."""
    features, lengths = pad(batch)
    mask(features, lengths)
    spoken = [torch.tensor([ids[character] for character in utterance.text]) for utterance in batch]
    tokens = torch.cat(spoken).to(model.head.weight.device)
    counts = torch.tensor([len(utterance.text) for utterance in batch])
    fractions = lengths / lengths.max()
    log_probabilities = model(features, fractions)
    frames = (fractions * log_probabilities.shape[1]).ceil().long()
    # zero_infinity: an utterance with too few frames for its labels has an infinite loss.
    summed = torch.nn.functional.ctc_loss(
        log_probabilities.transpose(0, 1), tokens, frames, counts, reduction="sum", zero_infinity=True
    )
    return summed / int(counts.sum())


def train(asked: CommandLine) -> None:
    """Train, and print the error rates after each epoch and at the end."""
    torch.backends.cudnn.enabled = False  # cuDNN's plans for each new length take most of a step on a GPU
    torch.manual_seed(asked.seed)
    random.seed(asked.seed)
    folder, started = Path(asked.folder), time.perf_counter()
    parts = {name: read_part(folder / f"{name}.jsonl", asked.rate) for name in ("train", "valid", "test")}
    # Only characters of the training part have an output.
    characters = sorted({character for utterance in parts["train"] for character in utterance.text})
    ids = {character: number for number, character in enumerate(characters, start=1)}
    model = Conformer(len(characters) + 1).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=1e-2, betas=(0.9, 0.98))
    total, step = len(lay_into_batches(parts["train"], asked.batch)) * asked.epochs, 0
    for epoch in range(1, asked.epochs + 1):
        model.train()
        batches = lay_into_batches(parts["train"], asked.batch)
        random.shuffle(batches)
        for batch in batches:
            loss = loss_of(model, batch, ids)
            for group in optimizer.param_groups:
                # The warm-up ends where it exceeds the cosine.
                cosine = 0.5 * (1 + math.cos(math.pi * step / total))
                group["lr"] = PEAK_RATE * min((step + 1) / WARMUP_STEPS, cosine)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        wer, cer = rates(model, parts["valid"], characters, asked.batch)
        seconds = time.perf_counter() - started
        print(json.dumps({"epoch": epoch, "wer": wer, "cer": cer, "seconds": seconds}), flush=True)
    wer, cer = rates(model, parts["test"], characters, asked.batch)
    print(json.dumps({"test": {"wer": wer, "cer": cer}}), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    train(CommandLine(**json.loads(sys.argv[1])))
