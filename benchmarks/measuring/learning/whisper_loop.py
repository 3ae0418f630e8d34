"""Train a Whisper model in a plain, correct loop around transformers, as a reference with equal initial weights.

    PYTHON benchmarks/measuring/learning/whisper_loop.py '{"base": …, "train": …, "test": …, "epochs": 20, …}'

Features are computed once. The loss of a step is the mean over all labels of its batch, as in the paper; AdamW with a
linear warm-up and half a cosine, gradients clipped to a norm of 1, activation checkpointing. Prints one line of JSON.
"""

import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jiwer
import soundfile
import torch
import transformers


@dataclass(frozen=True)
class CommandLine:
    """Settings of a run; `batch` is the number of utterances per step."""

    base: str
    train: str
    test: str
    epochs: int
    seed: int
    rate: float
    batch: int
    language: str


@dataclass(frozen=True)
class Utterance:
    """Features (F, T) of Whisper's window, labels after the start token, and transcript."""

    features: torch.Tensor
    labels: list[int]
    text: str


def read_part(
    manifest: str, extractor: transformers.WhisperFeatureExtractor, tokenizer: transformers.WhisperTokenizer
) -> list[Utterance]:
    """Return the utterances of a manifest, resampled to 16 kHz."""
    import torchaudio

    utterances = []
    for row in map(json.loads, Path(manifest).read_text(encoding="utf-8").splitlines()):
        samples, rate = soundfile.read(Path(manifest).parent / row["audio_filepath"], dtype="float32")
        samples = torchaudio.functional.resample(torch.from_numpy(samples), rate, 16_000).numpy()
        features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features[0]
        labels = tokenizer(row["text"]).input_ids[1:]  # without the start token, which the model adds itself
        utterances.append(Utterance(features, labels, row["text"]))
    return utterances


def rate_at(step: int, total: int, peak: float) -> float:
    """Return the learning rate: linear warm-up over 10 % of the run, at most 500 steps, then half a cosine to 1 %."""
    warmup = max(1, min(500, total // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: transformers.WhisperForConditionalGeneration, part: list[Utterance], asked: CommandLine) -> float:
    """Train the model in place and return the seconds of all steps."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    matrices = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(matrices, lr=asked.rate, weight_decay=0.0, fused=True)
    total, step, started = asked.epochs * math.ceil(len(part) / asked.batch), 0, time.perf_counter()
    for _ in range(asked.epochs):
        order = random.sample(part, len(part))
        for first in range(0, len(order), asked.batch):
            batch = order[first : first + asked.batch]
            longest = max(len(utterance.labels) for utterance in batch)
            # -100 is ignored by the loss; the mean is over the labels, not over the padding.
            labels = torch.tensor([u.labels + [-100] * (longest - len(u.labels)) for u in batch])
            loss = model(input_features=torch.stack([u.features for u in batch]), labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(matrices, 1.0)
            # The rate is set after the backward pass, but before the update that it applies to.
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, total, asked.rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 100 == 0:
                print(f"step {step} of {total}, loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return time.perf_counter() - started


@torch.no_grad()
def rates(
    model: transformers.WhisperForConditionalGeneration,
    tokenizer: transformers.WhisperTokenizer,
    part: list[Utterance],
    language: str,
) -> tuple[float, float]:
    """Return WER and CER of greedy decoding."""
    model.eval()
    model.gradient_checkpointing_disable()
    heard = []
    for first in range(0, len(part), 32):
        features = torch.stack([utterance.features for utterance in part[first : first + 32]])
        tokens = model.generate(features, language=language, task="transcribe", return_timestamps=False)
        heard += [text.strip() or " " for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    said = [utterance.text for utterance in part]
    return jiwer.wer(said, heard), jiwer.cer(said, heard)


def main(asked: CommandLine) -> None:
    """Train, score the test part and print one line of JSON."""
    random.seed(asked.seed)
    torch.manual_seed(asked.seed)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(asked.base)
    tokenizer = transformers.WhisperTokenizer.from_pretrained(asked.base, language=asked.language, task="transcribe")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(asked.base, dtype=torch.float32)
    seconds = train(model, read_part(asked.train, extractor, tokenizer), asked)
    wer, cer = rates(model, tokenizer, read_part(asked.test, extractor, tokenizer), asked.language)
    print(json.dumps({"wer": wer, "cer": cer, "seconds": seconds}))


if __name__ == "__main__":
    main(CommandLine(**json.loads(sys.argv[1])))
