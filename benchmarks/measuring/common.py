"""Command lines with subcommands, and time and memory of an optimizer step on a fixed batch, for benchmarks.

B batch, T feature frames, F mel bins, U tokens.
"""

import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from konkanivani.command_line import run_script
from konkanivani.config import FeatureConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.data.batching import Example, GlobalBatch, collate
from konkanivani.data.text import OUR_TOKENS
from konkanivani.distributed import choose_device
from konkanivani.errors import NumericsError, UsageError
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.memory.monitor import MemoryMonitor, peak_resident_mib, resident_mib
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import parameter_count
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, StepReport, train_step

# --------------------
# Command lines of benchmarks with several parts or subcommands, and their tables of results.


@dataclass(frozen=True)
class Effort:
    """Extent of a benchmark: `is_full` runs the counts of the tables in docs/, otherwise a few; `folder` is empty."""

    is_full: bool
    folder: Path
    seed: int

    def count(self, full: int, short: int) -> int:
        """Return `full` or `short`, the number of trials of one kind."""
        return full if self.is_full else short


@dataclass(frozen=True)
class FaultTable:
    """Results, one row per kind of fault; `failures` are sentences on unexpected outcomes."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the title, the table, the notes and the failures as Markdown."""
        lines = [f"## {self.title}", "", _row(self.columns), _row(("---",) * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        lines += ["", *self.notes]
        lines += [f"**Failed:** {failure}" for failure in self.failures]
        return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class PartsFlags:
    """Flags of a benchmark of several parts."""

    full: bool = False
    """The counts of the tables in docs/; some parts then take an hour."""
    seed: int = 0
    """Instants, bits and bytes follow from it."""
    folder: str | None = None
    """Folder for the runs (None: a temporary folder, removed at the end)."""
    json: bool = False
    """Print one line of JSON for each part instead of tables."""


def run_parts(measures: Mapping[str, Callable[[Effort], FaultTable]], parts: Sequence[str], flags: PartsFlags) -> int:
    """Run the measures of these parts, and print each table as soon as it is complete.

    Returns the exit code: that of `run_script`, or 1 if a part has failures.
    """
    failed: list[str] = []

    def run_all() -> str:
        for part in parts:
            with tempfile.TemporaryDirectory(dir=flags.folder, prefix=f"{part}_") as scratch:
                table = measures[part](Effort(flags.full, Path(scratch), flags.seed))
            print(json.dumps(asdict(table)) if flags.json else f"{table.markdown()}\n", flush=True)
            if table.failures:
                failed.append(part)
        return ""

    exit_code = run_script(run_all)
    return exit_code or int(bool(failed))


def run_subcommand(subcommands: Mapping[str, Callable[[list[str]], str]], arguments: Sequence[str]) -> int:
    """Run the subcommand that the first argument names, with the other arguments; return the exit code.

    A subcommand returns its report. `--help` without a subcommand prints the script's docstring.
    """
    name, others = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name in subcommands:
        return run_script(lambda: subcommands[name](others))
    if name in ("-h", "--help"):
        description = (sys.modules["__main__"].__doc__ or "").strip()
        return run_script(lambda: f"{description}\n\nFlags of a subcommand: give --help after its name.")

    def refuse() -> str:
        raise UsageError(f"The first argument must be a subcommand: {', '.join(subcommands)}.")

    return run_script(refuse)


# --------------------
# Time and peak memory of one optimizer step on a fixed batch, random utterances, and stolen CPU time.


MEL_BINS = FeatureConfig().mel_bins
VOCABULARY = 1000
FIRST_TOKEN = 5  # after the special tokens
FRAMES_PER_SECOND, TOKENS_PER_SECOND = 100, 4
MAX_WARM_UP_STEPS = 25
TOTAL_STEPS = 1000  # for the learning-rate schedule


@dataclass(frozen=True)
class FixedSpeech:
    """Utterances, longest first: features (B, T, F), frames (B,), tokens (B, U), token_lengths (B,), total seconds."""

    features: torch.Tensor
    frames: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class StepResult:
    """Measurements of a step; step_s is the median, memory is in MiB, the loss in nats per token."""

    peer: str
    params: int
    batch: int
    accum: int
    step_s: float
    audio_s: float
    audio_s_per_s: float
    peak_mib: int
    rss_mib: int
    rss_growth_mib: int
    loss: float
    torch: str
    preset: str
    device: str
    mixed_precision: bool
    gradient_checkpointing: str
    recomputed_blocks: int | None
    concurrent_micro_batches: int
    dropout: float
    skipped_steps: int

    def sentence(self) -> str:
        """Return the result as text."""
        return (
            f"{self.preset}, {self.params / 1e6:.1f} M parameters, {self.batch} utterances in {self.accum} "
            f"micro-batches on {self.device}: {self.step_s:.2f} s a step, {self.audio_s_per_s:.1f} audio s/s, "
            f"peak {self.peak_mib} MiB, resident +{self.rss_growth_mib} MiB"
        )


def measure(config: TrainConfig, steps: int, recomputed_blocks: int | None = None) -> StepResult:
    """Build the model of `config`, warm up, time `steps` steps, and measure the peak of one more.

    `recomputed_blocks` overrides the number of recomputed blocks.
    """
    device = choose_device(config.run.device)
    speech = build_speech(config.global_batch_size)
    global_batch = build_global_batch(speech, config.data.gradient_accumulation_steps)
    resident_before = resident_mib()
    parts = build_step_parts(config, architecture_of(config, VOCABULARY), device, TOTAL_STEPS, take_features_as_given)
    if recomputed_blocks is not None:
        parts = parts.recomputing(RecomputePolicy.first(recomputed_blocks))
    warm_up(parts, global_batch)
    times, reports = zip(*timed_steps(parts, global_batch, steps), strict=True)
    # Read before `peak_mib`, whose counter keeps an entry per tensor in host memory. On a CPU, each phase of the
    # monitor resets the system's peak, so that VmHWM alone would be too low.
    resident_peak = peak_resident_mib() if device.type == "cuda" else parts.monitor.overall_peak_mib()
    step_seconds = statistics.median(times)
    return StepResult(
        peer="konkanivani",
        params=parameter_count(parts.model),
        batch=config.global_batch_size,
        accum=config.data.gradient_accumulation_steps,
        step_s=round(step_seconds, 4),
        audio_s=round(speech.seconds, 1),
        audio_s_per_s=round(speech.seconds / step_seconds, 2),
        peak_mib=round(peak_mib(parts, global_batch)),
        rss_mib=round(resident_peak),
        rss_growth_mib=round(resident_peak - resident_before),
        loss=round(reports[-1].loss, 3),
        torch=torch.__version__,
        preset=config.run.preset,
        device=device.type,
        mixed_precision=config.memory.mixed_precision,
        gradient_checkpointing=config.memory.gradient_checkpointing,
        recomputed_blocks=recomputed_blocks,
        concurrent_micro_batches=parts.forward.concurrent_micro_batches,
        dropout=config.model.dropout,
        skipped_steps=sum(report.is_skipped for report in reports),
    )


def build_speech(utterances: int, shortest: float = 3.0, longest: float = 12.0) -> FixedSpeech:
    """Return utterances of `shortest` to `longest` seconds with random features and tokens, equal on every machine."""
    lengths = random.Random(0)
    seconds = sorted((lengths.uniform(shortest, longest) for _ in range(utterances)), reverse=True)
    frames = torch.tensor([int(length * FRAMES_PER_SECOND) for length in seconds])
    token_lengths = torch.tensor([max(2, int(length * TOKENS_PER_SECOND)) for length in seconds])
    generator = torch.Generator().manual_seed(0)  # the order of the draws is fixed: first features, then tokens
    features = torch.randn(utterances, int(frames.max()), MEL_BINS, generator=generator)
    tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (utterances, int(token_lengths.max())), generator=generator)
    return FixedSpeech(features, frames, tokens, token_lengths, sum(seconds))


def build_global_batch(speech: FixedSpeech, micro_batches: int) -> GlobalBatch:
    """Return the utterances as a global batch, with features (B, T, F) as waveforms and frames as sample lengths."""
    rows = zip(speech.features, speech.frames.tolist(), speech.tokens, speech.token_lengths.tolist(), strict=True)
    speeches = [
        Example(str(number), features[:length], tokens[:token_length].tolist(), augment_seed=None)
        for number, (features, length, tokens, token_length) in enumerate(rows)
    ]
    size = len(speeches) // micro_batches
    pieces = [speeches[start : start + size] for start in range(0, len(speeches), size)]
    batches = tuple(collate(piece, OUR_TOKENS) for piece in pieces)
    return GlobalBatch(
        micro_batches=batches,
        tokens=int(speech.token_lengths.sum()),
        utterances=len(speeches),
        audio_seconds=speech.seconds,
        padding_share=1 - int(speech.frames.sum()) * MEL_BINS / sum(batch.waveforms.numel() for batch in batches),
    )


def take_features_as_given(
    waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
) -> tuple[torch.Tensor, Lengths]:
    """Return the input: a front end for batches that contain features already."""
    return waveforms, sample_lengths


def warm_up(parts: StepParts, global_batch: GlobalBatch) -> None:
    """Train until a step has changed the weights.

    In fp16, the first steps are skipped until the loss scale is low enough. Raises NumericsError if no step succeeds.
    """
    for step in range(MAX_WARM_UP_STEPS):
        if not train_step(parts, global_batch, step).is_skipped:
            return
    raise NumericsError(
        f"The gradients of {MAX_WARM_UP_STEPS} steps in a row are not finite: nothing to measure. Try full precision."
    )


def timed_steps(parts: StepParts, global_batch: GlobalBatch, count: int) -> Iterator[tuple[float, StepReport]]:
    """Yield the wall time in seconds and the report of each of `count` steps."""
    # CUDA kernels run asynchronously: a step ends only when the device has finished.
    for step in range(1, count + 1):
        wait_for_device(parts.forward.device)
        started = time.perf_counter()
        report = train_step(parts, global_batch, step)
        wait_for_device(parts.forward.device)
        yield time.perf_counter() - started, report


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(parts: StepParts, global_batch: GlobalBatch) -> float:
    """Return the peak of one more step in MiB, with weights and optimizer state.

    On CUDA, the allocator measures it; on a CPU, it is the peak of live tensors.
    """
    if parts.forward.device.type == "cuda":
        # The monitor resets the allocator's peak at the end of each phase and keeps the largest value; a
        # new monitor does not contain the earlier steps.
        monitor = MemoryMonitor(parts.forward.device, parts.monitor.empty_cache_interval)
        torch.cuda.reset_peak_memory_stats(parts.forward.device)
        train_step(dataclasses.replace(parts, monitor=monitor), global_batch, step=0)
        return monitor.overall_peak_mib()
    # Weights and optimizer state exist before the mode is active, which only sees new tensors.
    live = LiveBytes()
    live.count(parts.state_tensors())
    with live:
        train_step(parts, global_batch, step=0)
    return live.peak / MIB


LOUDNESS = 0.1  # standard deviation of the samples


def random_example(seconds: float, vocabulary: int, generator: torch.Generator) -> Example:
    """Return `seconds` seconds of noise with tokens and a SpecAugment seed, all drawn from `generator`."""
    waveform = LOUDNESS * torch.randn(round(seconds * SAMPLE_RATE), generator=generator)
    count = max(1, round(seconds * TOKENS_PER_SECOND))
    tokens = torch.randint(FIRST_TOKEN, vocabulary, (count,), generator=generator).tolist()
    seed = int(torch.randint(2**31, (), generator=generator))
    return Example(utterance_id=f"noise {seed}", waveform=waveform, tokens=tokens, augment_seed=seed)


MAX_STOLEN = 0.02  # largest acceptable share of the cores' time; above it, a timing depends on the host


class Steal:
    """Counter of the stolen CPU time since its creation."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _stolen_seconds()

    def complaint(self) -> str:
        """Return the reason why the measurement since then is unreliable, or an empty string."""
        share = (_stolen_seconds() - self._before) / (time.perf_counter() - self._began) / os.cpu_count()
        return f"{share:.0%} of the cores went to other machines" if share > MAX_STOLEN else ""


def _stolen_seconds() -> float:
    """Return the stolen seconds of all cores since the start of the machine."""
    with open("/proc/stat", encoding="ascii") as counts:
        # First line: "cpu" and the sums over all cores in clock ticks; steal is the eighth of them.
        return int(counts.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
