#!/usr/bin/env python3
"""Measure what padding micro-batches to a grid of shapes costs, for --cuda_graphs: frames and decoder positions.

    python3 benchmarks/shape_grid.py data/builtin/train.jsonl

The shapes are chosen from some epochs of the manifest and measured on those of another seed. A token is a character.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from konkanivani.command_line import read_flags, run_script
from konkanivani.data.batching import EpochPlanner, same_size
from konkanivani.data.manifest import read_manifest
from konkanivani.data.shape_grid import choose_grid, measure_padding, micro_batch_sizes
from konkanivani.lengths import SAMPLE_RATE

GLOBAL_BATCH = 8
BATCH_SIZES = (2, 4, 8)
SPEEDS = {"no": (1.0,), "yes": (0.9, 1.0, 1.1)}
SEEDS = (1, 2)  # of the epochs that the shapes are chosen from, and of those that are measured


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    manifests: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Training manifests."""


def measure(flags: Flags) -> str:
    """Print a table with a row per manifest, micro-batch and speed perturbation."""
    print("| manifest | micro-batch | speed perturbation | shapes | frames | decoder positions | not captured |")
    print("|---|---|---|---|---|---|---|")
    for manifest in flags.manifests:
        utterances = list(read_manifest(Path(manifest)))
        durations = np.array([utterance.duration for utterance in utterances])
        tokens = np.array([len(utterance.text) for utterance in utterances])
        longest = int(durations.max() / min(SPEEDS["yes"]) * SAMPLE_RATE) + 1
        for batch_size in BATCH_SIZES:
            for is_perturbed, speeds in SPEEDS.items():
                chosen, measured = (
                    micro_batch_sizes(
                        EpochPlanner(durations, GLOBAL_BATCH, seed), tokens, same_size(batch_size), speeds
                    )
                    for seed in SEEDS
                )
                grid = choose_grid(chosen, longest)
                found = measure_padding(grid, measured)
                print(
                    f"| {manifest} | {batch_size} | {is_perturbed} | {len(grid.shapes)} | +{found.added_frames:.1%} "
                    f"| +{found.added_tokens:.0%} | {found.uncaptured:.1%} |"
                )
    return ""


if __name__ == "__main__":
    sys.exit(run_script(lambda: measure(read_flags(Flags, sys.argv[1:]))))
