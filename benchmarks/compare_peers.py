#!/usr/bin/env python3
"""Times one optimizer step of this trainer and of others in turn, in one run: seconds, peak memory, and their ratios.

    python3 benchmarks/compare_peers.py --rounds 7
    python3 benchmarks/compare_peers.py --device cuda --mixed_precision --utterances 64 --markdown docs/performance.md

The work: one effective batch of utterances of 3 to 12 s (features given, 62.6 s in all for 8), a Conformer of about
25 M parameters (12 + 6 layers, width 256, vocabulary 1000), CTC and attention losses, backward pass, clipping, AdamW.
Each contestant has a process of its own; a round is one step of each, one after another. The others are installed into
an environment of their own. Peak is live tensor bytes counted at dispatch (CUDA: the allocator's), growth is VmHWM over
the process before its model. A claim needs both.
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
    """What is compared."""

    rounds: int = 5
    """Steps of each contestant after a warm-up; the median counts."""
    utterances: int = 8
    """Effective batch."""
    shortest: float = 3.0
    """Seconds of the shortest utterance."""
    longest: float = 12.0
    """Seconds of the longest utterance."""
    width: int = 256
    """Width of every model."""
    cuts: tuple[int, ...] = (1, 2, 4, 8)
    """Micro-batches into which the effective batch is cut: every toolkit in each of these ways."""
    within: tuple[str, ...] = ()
    """Ours within a limit too, by CUT:MIB (such as 2:619): as few blocks recomputed as that takes."""
    concurrent_micro_batches: tuple[int, ...] = (1, 2)
    """Ours with so many micro-batches side by side, each of these ways (on a card it is one after another)."""
    contestants: tuple[Toolkit, ...] = get_args(Toolkit)
    """Toolkits that take part."""
    dropout: float = 0.1
    """On the residual branches; the others drop attention probabilities too."""
    without_dropout: bool = True
    """Everyone's time at dropout 0 as well, of its fastest cut."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where."""
    mixed_precision: bool = False
    """fp16 with loss scaling on CUDA, bf16 on a CPU."""
    folder: str = "~/.cache/konkanivani/peers"
    """Where the others' environment is made."""
    markdown: str | None = None
    """Write the tables to this file as well."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def compare(flags: Flags) -> str:
    """Races, and returns what is to be printed."""
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
