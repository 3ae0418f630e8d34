#!/usr/bin/env python3
"""Time one optimizer step of this trainer and of other toolkits in turn: seconds, peak memory, and their ratios.

    python3 benchmarks/compare_peers.py --rounds 7
    python3 benchmarks/compare_peers.py --device cuda --mixed_precision --utterances 64 --markdown docs/performance.md

Workload: one global batch of utterances of 3 to 12 s (features given, 62.6 s in all for 8), a Conformer of about 25 M
parameters (12 + 6 layers, width 256, vocabulary 1000), CTC and attention losses, backward pass, clipping, AdamW. Each
toolkit runs in its own process; a round is one step of each, sequentially. The others are installed into a separate
environment. Peak is the number of live tensor bytes counted at dispatch (CUDA: the allocator's); growth is VmHWM minus
the resident memory of the process before its model. A claim needs both.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError

Toolkit = Literal["konkanivani", "speechbrain", "espnet"]


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    rounds: int = 5
    """Steps of each toolkit after a warm-up; the median counts."""
    utterances: int = 8
    """Utterances of the global batch."""
    shortest: float = 3.0
    """Seconds of the shortest utterance."""
    longest: float = 12.0
    """Seconds of the longest utterance."""
    width: int = 256
    """Width of every model."""
    cuts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of micro-batches to measure for every toolkit."""
    within: tuple[str, ...] = ()
    """Also measure this trainer within a memory limit, as CUT:MIB (such as 2:619), with the fewest recomputed blocks
    that fit."""
    concurrent_micro_batches: tuple[int, ...] = (1, 2)
    """Numbers of concurrent micro-batches of this trainer to measure (CPU only)."""
    contestants: tuple[Toolkit, ...] = get_args(Toolkit)
    """Toolkits to compare."""
    dropout: float = 0.1
    """Dropout of the residual branches; the other toolkits also drop attention probabilities."""
    without_dropout: bool = True
    """Also time every toolkit's fastest number of micro-batches without dropout."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    mixed_precision: bool = False
    """fp16 with loss scaling on CUDA, bf16 on a CPU."""
    folder: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of the other toolkits."""
    markdown: str | None = None
    """Write the tables to this file as well."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def compare(flags: Flags) -> str:
    """Return the report."""
    if flags.rounds < 1 or any(cut < 1 or flags.utterances % cut for cut in flags.cuts) or not flags.cuts:
        raise UsageError("--rounds must be at least 1, and each of --cuts must divide --utterances.")
    if flags.width < 8 or flags.width % 8:
        raise UsageError("--width must be a multiple of 8: four heads of an even width.")
    if not 0.2 <= flags.shortest <= flags.longest:
        raise UsageError("--shortest must be at least 0.2, and --longest no less.")
    if not flags.concurrent_micro_batches or min(flags.concurrent_micro_batches) < 1:
        raise UsageError("--concurrent_micro_batches must be at least 1.")
    limits = [re.fullmatch(r"([1-9]\d*):([1-9]\d*)", limit) for limit in flags.within]
    if any(limit is None or flags.utterances % int(limit[1]) for limit in limits):
        raise UsageError("--within is not CUT:MIB. Give it as 2:619, where CUT divides --utterances.")
    from benchmarks.measuring.peers.comparison import compare_all, entries_of
    from benchmarks.measuring.peers.contest import Terms

    terms = Terms(
        flags.utterances, flags.shortest, flags.longest, flags.width, flags.dropout, flags.device, flags.mixed_precision
    )
    folder = Path(flags.folder).expanduser()
    # Micro-batches run concurrently on a CPU only.
    concurrent_micro_batches = flags.concurrent_micro_batches if flags.device == "cpu" else (1,)
    limits = [(int(limit[1]), int(limit[2])) for limit in limits]
    entries = entries_of(flags.contestants, flags.cuts, limits, concurrent_micro_batches)
    comparison = compare_all(terms, entries, flags.rounds, folder, flags.without_dropout)
    if flags.markdown:
        Path(flags.markdown).write_text(comparison.markdown() + "\n", encoding="utf-8")
    return json.dumps(comparison.as_json()) if flags.json else comparison.markdown()


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
