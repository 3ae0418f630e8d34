#!/usr/bin/env python3
"""Time and memory of an optimizer step of a random FLAN-T5-small beside transformers with gradient checkpointing.

    python benchmarks/peers/t5_step.py --steps 5

Both sides train the same shape on the same tokens in fp32 with AdamW, 8 pairs of 196 and 384 tokens. Each side is a
process of its own that makes one step when its turn comes, so that both meet the same other load; CPU seconds are of
all threads. Peaks are of the process, above its memory before the model is built.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import argparse
import json
import resource
import statistics
import subprocess
import time
from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8
INPUT_TOKENS = 196
TARGET_TOKENS = 384
SIDES = ("ours, activations kept", "ours, blocks recomputed", "transformers, checkpointing")


def ours(recompute: str) -> Callable[[], float]:
    """Return a function that makes one step of this project and returns the loss."""
    import torch

    from konkanivani.config import DataConfig, LossConfig, MemoryConfig, OptimizerConfig, TrainConfig
    from konkanivani.data.batching import Example, same_size, split_into_micro_batches
    from konkanivani.data.text import SpecialTokens
    from konkanivani.models.t5.architecture import T5Architecture
    from konkanivani.models.t5.model import T5Shape
    from konkanivani.training.build_step import build_step_parts
    from konkanivani.training.step import train_step

    config = TrainConfig(
        data=DataConfig(concurrent_micro_batches=1),
        loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
        memory=MemoryConfig(gradient_checkpointing="always" if recompute == "always" else "never"),
        optimizer=OptimizerConfig(learning_rate=1e-4, weight_decay=0.0),
    )
    shape = T5Shape(512, 64, 6, 8, 8, 1024, 32_128)
    parts = build_step_parts(config, T5Architecture(shape), torch.device("cpu"), 100)
    inputs, targets = tokens()
    pairs = [Example(str(n), inputs[n], targets[n, :-1].tolist(), None) for n in range(BATCH)]
    cut = split_into_micro_batches(pairs, same_size(BATCH), SpecialTokens(None, None, 0, 1))

    def step() -> float:
        report = train_step(parts, cut, 1)
        assert report is not None
        return report.loss

    return step


def theirs() -> Callable[[], float]:
    """Return a function that makes one step of transformers and returns the loss."""
    import torch
    import transformers

    config = transformers.T5Config(
        vocab_size=32_128,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    config.tie_word_embeddings = False
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).train()
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) * 512**-0.5)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.0)
    inputs, targets = tokens()

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=inputs, labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def tokens():
    """Return inputs (8, 196) and targets (8, 384), whose last token is the end."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(2, 32_000, (BATCH, INPUT_TOKENS), generator=generator)
    targets = torch.randint(2, 32_000, (BATCH, TARGET_TOKENS), generator=generator)
    targets[:, -1] = 1
    return inputs, targets


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(side: str, threads: int) -> None:
    """Make one step per line on standard input, and print its seconds and the process' peak as JSON."""
    import torch

    torch.set_num_threads(threads)
    import konkanivani.training.step  # noqa: F401

    if "ours" not in side:
        import transformers  # noqa: F401
    before = peak_mib()
    step = theirs() if "ours" not in side else ours("always" if "recomputed" in side else "never")
    for _ in sys.stdin:
        started = time.perf_counter(), time.process_time()
        loss = step()
        ended = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = (end - begin for begin, end in zip(started, ended, strict=True))
        found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss, "peak": peak_mib() - before}
        print(json.dumps(found), flush=True)


def main() -> None:
    """Compare the sides in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side")
    asked = parser.parse_args()
    if asked.side:
        serve(asked.side, asked.threads)
        return
    processes = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--threads", str(asked.threads)]
        processes[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(1 + asked.steps):  # the first step allocates the optimizer's state
        for side, process in processes.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("step\n")
            process.stdin.flush()
            found[side].append(json.loads(process.stdout.readline()))
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    print(f"{'':30}{'s a step':>10}{'CPU s':>8}{'MiB':>8}{'first loss':>12}")
    for side, steps in found.items():
        seconds, cpu_seconds = (
            statistics.median(step[name] for step in steps[1:]) for name in ("seconds", "cpu_seconds")
        )
        print(f"{side:30}{seconds:10.2f}{cpu_seconds:8.2f}{steps[-1]['peak']:8.0f}{steps[0]['loss']:12.3f}")


if __name__ == "__main__":
    main()
