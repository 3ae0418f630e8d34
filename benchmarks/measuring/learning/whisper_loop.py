"""A plain loop around transformers' Whisper, correctly written: what ours is held against where both begin alike.

    PYTHON benchmarks/measuring/learning/whisper_loop.py '{"base": …, "train": …, "test": …, "epochs": 20, …}'

Features are made once. Every step's loss is the mean over all labels of its batch, as the paper has it; AdamW with a
warm-up and half a cosine, gradients clipped to a norm of 1, checkpointed activations. One line of JSON at the end.
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
    """What is trained on, from which folder, how long; `batch` utterances a step."""

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
    """Features (F, T) of a window, labels behind the start token, and what is said."""

    features: torch.Tensor
    labels: list[int]
    text: str


def read_part(
    manifest: str, extractor: transformers.WhisperFeatureExtractor, tokenizer: transformers.WhisperTokenizer
) -> list[Utterance]:
    """The utterances of a manifest, at 16 kHz."""
    import torchaudio

    utterances = []
    for row in map(json.loads, Path(manifest).read_text(encoding="utf-8").splitlines()):
        samples, rate = soundfile.read(Path(manifest).parent / row["audio_filepath"], dtype="float32")
        samples = torchaudio.functional.resample(torch.from_numpy(samples), rate, 16_000).numpy()
        features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features[0]
        labels = tokenizer(row["text"]).input_ids[1:]  # without the start token, which the model puts there itself
        utterances.append(Utterance(features, labels, row["text"]))
    return utterances


def rate_at(step: int, total: int, peak: float) -> float:
    """Linear warm-up over a tenth of the run, at most 500 steps, then half a cosine to a hundredth."""
    warmup = max(1, min(500, total // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: transformers.WhisperForConditionalGeneration, part: list[Utterance], asked: CommandLine) -> float:
    """Trains in place; the seconds of all steps."""
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
            labels = torch.tensor([u.labels + [-100] * (longest - len(u.labels)) for u in batch])
            loss = model(input_features=torch.stack([u.features for u in batch]), labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(matrices, 1.0)
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
    """WER and CER by greedy generation."""
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
    """Trains, scores the test part, prints one line of JSON."""
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
