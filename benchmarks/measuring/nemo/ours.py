"""Run a step of NeMo's Conformer in this trainer for each line of stdin; print its seconds and peak as JSON.

For the line "count", live tensor bytes are counted during the step.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "training_scripts")]
import bootstrap

from konkanivani.base.auto_defaults import resolve
from konkanivani.base.config import DataConfig, LossConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainConfig
from konkanivani.data.batch import Batch, GlobalBatch
from konkanivani.model.architecture import architecture_of
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import train_step
from tests.invariants.parts import OTHER_PARTS, features_of

TOKENS = 120
MODEL = dataclasses.replace(
    OTHER_PARTS,
    d_model=512,
    encoder_layers=17,
    decoder_layers=0,
    attention_heads=8,
    convolution_kernel=31,
    subsampling_channels=512,
    biases=True,
    dropout=ModelConfig().dropout,
)


def main(seconds: float, threads: int, checkpointing: str, optimizer: str) -> None:
    bootstrap.set_malloc_options(os.environ)  # as in every training script
    torch.set_num_threads(threads)
    config = resolve(
        TrainConfig(
            model=MODEL,
            features=features_of(MODEL),
            data=DataConfig(concurrent_micro_batches=1),
            loss=LossConfig(ctc_weight=1.0),  # no decoder
            optimizer=OptimizerConfig(optimizer=optimizer),
            memory=MemoryConfig(gradient_checkpointing=checkpointing),
        )
    )
    parts = build_step_parts(config, architecture_of(config, 260), torch.device("cpu"), 1000)
    tokens, samples = torch.randint(4, 260, (1, TOKENS)), int(16_000 * seconds)
    # The decoder's inputs and targets; a model with only a CTC head does not use them.
    empty = torch.zeros(1, TOKENS + 1, dtype=torch.long)
    batch = Batch(("a",), 0.1 * torch.randn(1, samples), (samples,), tokens, (TOKENS,), empty, empty, (1,))
    global_batch, step = GlobalBatch((batch,), TOKENS, 1, seconds, 0.0), 0
    live = LiveBytes()
    live.count(parts.state_tensors())
    for line in sys.stdin:
        live.restart_peak()
        started = time.perf_counter()
        with live if line == "count\n" else contextlib.nullcontext():
            train_step(parts, global_batch, step)
        step += 1
        print(json.dumps({"seconds": time.perf_counter() - started, "peak_mib": live.peak / 2**20}), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
