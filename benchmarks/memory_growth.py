#!/usr/bin/env python3
"""Measure how the memory of training grows with the duration of an utterance, the steps, or a manifest's rows.

    python3 benchmarks/memory_growth.py duration --seconds 60 600 --tokens_per_second 4 --json
    python3 benchmarks/memory_growth.py steps --steps 2000 --preset minimal
    python3 benchmarks/memory_growth.py rows --rows 1000 6600000

The first two use the trainer's own `train_step`; the exit code does not depend on the result, since this is a
measurement.

duration: a step on a random waveform, after a step on a short one, in a process per duration. The live peak counts
tensors beyond weights, gradients and optimizer state. The growth is the peak of the resident memory (VmHWM) minus its
value before the model is built. The time of attention grows with the square of the duration: a step on ten minutes of
audio takes minutes.

steps: many steps on utterances of mixed durations, with the front end and SpecAugment, on noise that is generated on
demand. All tensors that are alive between two steps are counted, from the first step to the last, and must not grow by
a byte; the resident memory may grow by 5 % from step 200 on.

rows: starts of the trainer on text-to-text manifests of about 100 bytes per row, with a small random T5, up to the
first global batch: the first start, which indexes the rows, and the median of three later ones. The time is that of the
process, imports included; the memory is its peak (VmHWM), mapped files included.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from benchmarks.measuring.common import FIRST_TOKEN, VOCABULARY, random_example, run_subcommand
from konkanivani.command_line import read_flags
from konkanivani.config import PRESETS, DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.distributed import choose_device
from konkanivani.errors import ResourceError, UsageError
from konkanivani.flags import parse_args
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import peak_resident_mib, resident_mib, set_mmap_threshold
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import parameter_count
from konkanivani.planning.tensors import LiveBytes
from konkanivani.randomness import derive_seed
from konkanivani.recipe.build import build_run
from konkanivani.recipe.startup import resolve_start
from konkanivani.rules import check_config
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, StepReport, train_step

WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class LongStep:
    """Measurements of the step: memory in MiB, loss in nats per token, `splits` retries with less memory."""

    seconds: float
    tokens: int
    params: int
    peak_above_state_mib: int
    rss_growth_mib: int
    loss: float
    is_skipped: bool
    splits: int


def measure_long_step(config: TrainConfig, seconds: float, tokens_per_second: float) -> LongStep:
    """Build the model of `config` and train one step on an utterance of `seconds` seconds, on the CPU."""
    set_mmap_threshold()  # as in a run with a memory budget
    resident_before, cpu = resident_mib(), torch.device("cpu")
    parts = build_step_parts(config, architecture_of(config, VOCABULARY), cpu, 100)
    # The first step allocates the optimizer state, which `state_tensors` then includes.
    train_step(parts, long_global_batch(WARM_UP_SECONDS, tokens_per_second), step=0)
    global_batch = long_global_batch(seconds, tokens_per_second)
    live = LiveBytes()
    live.count(parts.state_tensors())
    with live:
        report = train_step(parts, global_batch, step=1)
    params = parameter_count(parts.model)
    return LongStep(
        seconds=seconds,
        tokens=global_batch.tokens,
        params=params,
        # The state is weights, gradients and two moments, 16 bytes per parameter.
        peak_above_state_mib=round((live.peak - STATE_BYTES * params) / MIB),
        rss_growth_mib=round(parts.monitor.overall_peak_mib() - resident_before),
        loss=round(report.loss, 3),
        is_skipped=report.is_skipped,
        splits=report.splits,
    )


def long_global_batch(seconds: float, tokens_per_second: float) -> GlobalBatch:
    """Return a global batch of one utterance of noise with random tokens, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(seconds * tokens_per_second))
    speech = Example(
        utterance_id="noise",
        waveform=0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=generator),
        tokens=torch.randint(FIRST_TOKEN, VOCABULARY, (count,), generator=generator).tolist(),
        augment_seed=0,
    )
    return split_into_micro_batches([speech], same_size(1), OUR_TOKENS)


MIN_DURATION, MAX_DURATION = 1.0, 7200.0


@dataclass(frozen=True)
class DurationFlags:
    """Flags of this script."""

    seconds: tuple[float, ...] = (60.0, 600.0)
    """Durations of the utterance."""
    tokens_per_second: float = 4.0
    """Tokens of its transcript per second; at most 15, the rate of read speech in characters."""
    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    gradient_checkpointing: Literal["always", "never"] = "always"
    """Recompute every block's activations in the backward pass."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure_durations(flags: DurationFlags) -> str:
    """Return the report."""
    if not flags.seconds or not all(MIN_DURATION <= seconds <= MAX_DURATION for seconds in flags.seconds):
        raise UsageError(f"--seconds must be one or more lengths from {MIN_DURATION:g} to {MAX_DURATION:g}.")
    if not 0 < flags.tokens_per_second <= 15:
        raise UsageError("--tokens_per_second must be above 0 and at most 15.")
    # VmHWM never decreases, so each duration needs its own process.
    if len(flags.seconds) > 1:
        steps = [measure_in_child(flags, seconds) for seconds in flags.seconds]
    else:
        steps = [measure_here(flags)]
    ratio = round(steps[-1]["peak_above_state_mib"] / steps[0]["peak_above_state_mib"], 2)
    if flags.json:
        return json.dumps({"preset": flags.preset, "steps": steps, "ratio": ratio})
    lines = [
        f"{step['seconds']:g} s, {step['tokens']} tokens: live peak {step['peak_above_state_mib']} MiB above the "
        f"state, resident +{step['rss_growth_mib']} MiB"
        for step in steps
    ]
    return "\n".join([*lines, f"last over first: {ratio}"])


def measure_here(flags: DurationFlags) -> dict[str, float]:
    """Measure the only duration of these flags in this process."""
    config = dataclasses.replace(
        TrainConfig(),
        run=RunConfig(preset=flags.preset, device="cpu"),
        model=PRESETS[flags.preset],
        memory=MemoryConfig(gradient_checkpointing=flags.gradient_checkpointing),
    )
    return dataclasses.asdict(measure_long_step(config, flags.seconds[0], flags.tokens_per_second))


def measure_in_child(flags: DurationFlags, seconds: float) -> dict[str, float]:
    """Measure this duration with this script in another process; raise ResourceError if it fails."""
    given = ("--seconds", str(seconds), "--tokens_per_second", str(flags.tokens_per_second), "--preset", flags.preset)
    given += ("--gradient_checkpointing", flags.gradient_checkpointing, "--json")
    command = [sys.executable, __file__, "duration", *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ResourceError(f"The step on {seconds:g} s ended with exit code {done.returncode}. Give fewer --seconds.")
    return json.loads(done.stdout.splitlines()[-1])["steps"][0]


GROWTH_PERCENT = 5.0  # limit of the growth of resident memory after SETTLED_STEP
SETTLED_STEP = 200
SAMPLES = 50  # steps per median of resident memory: complete cycles of trimming the heap
PROGRESS_STEPS = 100  # steps between two lines of progress


@dataclass(frozen=True)
class Moment:
    """State after a step, with its global batch freed: bytes of live tensors, resident MiB, and the step's report."""

    live: int
    resident_mib: float
    seconds: float
    audio_seconds: float
    report: StepReport


@dataclass(frozen=True)
class Drift:
    """Memory growth over a run. Live bytes are of all tensors between two steps; resident memory is in MiB.

    `settled_mib` is the median over SAMPLES steps from `settled_step`, `end_mib` and `step_s` over the last ones; on a
    CPU, `step_s` includes counting the live bytes. `growth_mib_per_step` is the growth from `settled_mib` to `end_mib`,
    `late_growth_mib_per_step` the growth since the middle. A cache of bounded size raises only the former.
    """

    preset: str
    params: int
    steps: int
    skipped_steps: int
    splits: int
    audio_seconds: float
    live_first: int
    live_last: int
    live_most: int
    settled_step: int
    settled_mib: float
    end_mib: float
    largest_mib: float
    growth_percent: float
    growth_mib_per_step: float
    late_growth_mib_per_step: float
    step_s: float
    loss: float
    is_within: bool

    def sentence(self) -> str:
        """Return the result as text."""
        return (
            f"{self.preset}, {self.steps} steps on {self.audio_seconds:.0f} s of audio: live bytes between steps "
            f"{self.live_first} at first, {self.live_last} at last, {self.live_most} at most; resident "
            f" {self.settled_mib:.0f} MiB after step {self.settled_step}, "
            f"{self.end_mib:.0f} MiB at the end ({self.growth_percent:+.1f} %, {self.growth_mib_per_step:+.3f} MiB "
            f"a step, {self.late_growth_mib_per_step:+.3f} in the second half), {self.step_s:.2f} s a step then: "
            f"{'within' if self.is_within else 'OUTSIDE'} the bars."
        )


class GlobalBatches(Protocol):
    """Sequence of global batches, indexed by step."""

    def __getitem__(self, number: int) -> GlobalBatch: ...


@dataclass(frozen=True)
class RandomGlobalBatches:
    """Endless random global batches of `size` utterances of `shortest` to `longest` seconds.

    Each is a function of (seed, number). With `distinct`, the sequence repeats after that number of global batches.
    """

    seed: int
    size: int
    batch_size: int
    shortest: float
    longest: float
    distinct: int | None = None

    def __getitem__(self, number: int) -> GlobalBatch:
        seed = derive_seed(self.seed, "drift", number % self.distinct if self.distinct else number)
        lengths, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        speeches = [
            random_example(lengths.uniform(self.shortest, self.longest), VOCABULARY, generator)
            for _ in range(self.size)
        ]
        return split_into_micro_batches(speeches, same_size(self.batch_size), OUR_TOKENS)


def measure_steps(config: TrainConfig, steps: int, shortest: float, longest: float, distinct: int | None) -> Drift:
    """Build the model of `config`, train it for `steps` steps on noise, and return its memory growth."""
    device = choose_device(config.run.device)
    set_mmap_threshold()  # as in a run with a memory budget
    parts = build_step_parts(config, architecture_of(config, VOCABULARY), device, steps)
    global_batches = RandomGlobalBatches(
        config.run.seed, config.global_batch_size, config.data.batch_size, shortest, longest, distinct
    )
    return summarize(config.run.preset, parameter_count(parts.model), follow_steps(parts, global_batches, steps))


def follow_steps(parts: StepParts, global_batches: GlobalBatches, steps: int) -> list[Moment]:
    """Train on the first `steps` global batches and return the memory after each step.

    LiveBytes follows storages from allocation to release, so tensors that wait for the garbage collector count as live.
    """
    live, device = LiveBytes(), parts.forward.device
    live.count(parts.state_tensors())
    moments = []
    # One uninterrupted count: a tensor that outlives its step is seen only if it was created during the count.
    with nullcontext() if device.type == "cuda" else live:
        for step in range(steps):
            # The global batch is generated before the clock starts.
            global_batch, began = global_batches[step], time.perf_counter()
            report, audio_seconds = train_step(parts, global_batch, step), global_batch.audio_seconds
            seconds = time.perf_counter() - began
            del global_batch  # its tensors are not part of the memory between two steps
            moments.append(Moment(live_now(device, live), resident_mib(), seconds, audio_seconds, report))
            if not (step + 1) % PROGRESS_STEPS:
                print(f"{step + 1} steps, {resident_mib():.0f} MiB resident", file=sys.stderr, flush=True)
    return moments


def live_now(device: torch.device, live: LiveBytes) -> int:
    """Return the bytes of live tensors; on CUDA, those in use according to the allocator."""
    # LiveBytes is off on CUDA, where the allocator counts at no cost.
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live.live


def summarize(preset: str, params: int, moments: Sequence[Moment]) -> Drift:
    """Return the memory growth over `moments`, one per step of a run from its first step."""
    # In a short run, the first half is the time to settle.
    settled = min(SETTLED_STEP, len(moments) // 2)
    last = max(len(moments) - SAMPLES, settled)
    middle = (settled + last) // 2
    settled_mib, middle_mib, end_mib = (median_mib(moments, first) for first in (settled, middle, last))
    growth, most = 100 * (end_mib / settled_mib - 1), max(moment.live for moment in moments)
    return Drift(
        preset=preset,
        params=params,
        steps=len(moments),
        skipped_steps=sum(moment.report.is_skipped for moment in moments),
        splits=sum(moment.report.splits for moment in moments),
        audio_seconds=round(sum(moment.audio_seconds for moment in moments), 1),
        live_first=moments[0].live,
        live_last=moments[-1].live,
        live_most=most,
        settled_step=settled,
        settled_mib=round(settled_mib, 1),
        end_mib=round(end_mib, 1),
        largest_mib=round(max(moment.resident_mib for moment in moments), 1),
        growth_percent=round(growth, 2),
        growth_mib_per_step=round((end_mib - settled_mib) / max(1, last - settled), 4),
        late_growth_mib_per_step=round((end_mib - middle_mib) / max(1, last - middle), 4),
        step_s=round(statistics.median(moment.seconds for moment in moments[-SAMPLES:]), 3),
        loss=round(moments[-1].report.loss, 3),
        # Between two steps only the state is alive: not a byte more than after the first step is acceptable.
        is_within=most <= moments[0].live and growth <= GROWTH_PERCENT,
    )


def median_mib(moments: Sequence[Moment], first: int) -> float:
    """Return the median resident memory in MiB over `SAMPLES` steps from `first`."""
    return statistics.median(moment.resident_mib for moment in moments[first : first + SAMPLES])


MIN_SECONDS, MAX_SECONDS = 0.5, 60.0


@dataclass(frozen=True)
class StepsFlags:
    """Flags of this script."""

    steps: int = 2000
    """Optimizer steps."""
    preset: Literal["original", "optimized", "minimal"] = "minimal"
    """Model shape; single flags override it."""
    batch_size: int = 1
    """Utterances in one micro-batch."""
    gradient_accumulation_steps: int = 2
    """Micro-batches in one optimizer step."""
    shortest: float = 1.0
    """Duration of the shortest utterances in seconds."""
    longest: float = 12.0
    """Duration of the longest utterances in seconds."""
    distinct: int | None = None
    """Number of different global batches, which are then repeated (None: every one is different)."""
    gradient_checkpointing: Literal["always", "never"] = "never"
    """Recompute every block's activations in the backward pass."""
    mixed_precision: bool = False
    """Autocast: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Device to measure on."""
    seed: int = 1234
    """Seed of all random numbers."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""
    model: ModelConfig = field(default_factory=ModelConfig)


def read_steps_flags(arguments: list[str]) -> StepsFlags:
    """Return the flags of the command line; single model flags override the preset's shape."""
    first = read_flags(StepsFlags, arguments, StepsFlags())
    # Parsed twice: the first pass only finds the preset, which gives the defaults of the second.
    return read_flags(StepsFlags, arguments, StepsFlags(model=PRESETS[first.preset]))


def measure_drift(flags: StepsFlags) -> str:
    """Return the report."""
    config = config_of(flags)
    drift = measure_steps(config, flags.steps, flags.shortest, flags.longest, flags.distinct)
    return json.dumps(dataclasses.asdict(drift)) if flags.json else drift.sentence()


def config_of(flags: StepsFlags) -> TrainConfig:
    """Return the trainer's settings for these flags; raise UsageError if they are invalid."""
    if flags.steps < 2:
        raise UsageError("--steps must be at least 2.")
    if flags.distinct is not None and flags.distinct < 1:
        raise UsageError("--distinct must be at least 1.")
    if not MIN_SECONDS <= flags.shortest <= flags.longest <= MAX_SECONDS:
        raise UsageError(f"--shortest and --longest must be from {MIN_SECONDS:g} to {MAX_SECONDS:g}, in that order.")
    memory = MemoryConfig(mixed_precision=flags.mixed_precision, gradient_checkpointing=flags.gradient_checkpointing)
    config = dataclasses.replace(
        TrainConfig(),
        run=RunConfig(preset=flags.preset, device=flags.device, seed=flags.seed),
        data=DataConfig(batch_size=flags.batch_size, gradient_accumulation_steps=flags.gradient_accumulation_steps),
        model=flags.model,
        memory=memory,
    )
    check_config(config)
    return config


START = "start"  # subcommand of the process of a start
WORDS = "quick brown fox jumps over lazy dogs tabs spaces around".split()  # of letters that the test's tokenizer has


@dataclass(frozen=True)
class RowsFlags:
    """Flags of the subcommand `rows`."""

    rows: tuple[int, ...] = (1_000, 100_000)
    """Rows of each manifest."""
    later_starts: int = 3
    """Starts after the first one, of which the medians are printed."""
    folder: str | None = None
    """Folder for the manifests, which are removed at the end (None: a temporary folder)."""


def measure_rows(flags: RowsFlags) -> str:
    """Return one line of JSON per manifest; sizes and memory in MiB."""
    if not flags.rows or min(flags.rows) < 1:
        raise UsageError("--rows must be one or more numbers above 0.")
    if flags.later_starts < 1:
        raise UsageError("--later_starts must be at least 1.")
    found = []
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="rows_") as scratch:
        from tests.t5.parts import write_folder  # late: the tests need packages that no other measurement needs

        base = write_folder(Path(scratch) / "base")
        for rows in flags.rows:
            manifest = write_rows(Path(scratch) / f"{rows}.jsonl", rows)
            starts = [start_in_child(base, manifest) for _ in range(1 + flags.later_starts)]
            later = {name: statistics.median(start[name] for start in starts[1:]) for name in starts[0]}
            found.append({"rows": rows, "size": manifest.stat().st_size / MIB, "first_start": starts[0]} | later)
            shutil.rmtree(manifest.with_name(f"{manifest.name}.index"), ignore_errors=True)
            manifest.unlink()
    return "\n".join(map(json.dumps, found))


def write_rows(path: Path, rows: int) -> Path:
    """Write a text-to-text manifest of about 100 bytes per row, all different."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            text = " ".join(WORDS[int(digit)] for digit in str(number))
            file.write(f'{{"input": "{text}", "text": "{text}!"}}\n')
    return path


def start_in_child(base: Path, manifest: Path) -> dict[str, float]:
    """Start the trainer in another process and return its measurements; raise ResourceError if it fails."""
    started = time.perf_counter()
    command = [sys.executable, __file__, START, str(base), str(manifest)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise ResourceError(f"The start on {manifest} ended with exit code {done.returncode}. Free memory or disk.")
    return {"seconds": seconds} | json.loads(done.stdout.splitlines()[-1])


def start_here(base: str, manifest: str) -> str:
    """Start a run in this process up to its first global batch and return the measurements as JSON."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        flags = f"--pretrained {base} --train_manifest {manifest} --checkpoint_dir {scratch}/c --log_dir {scratch}/l"
        run = build_run(resolve_start(parse_args([*flags.split(), "--device", "cpu"])))
        with closing(run.data.global_batches.from_cursor(run.state.cursor)) as batches:
            next(batches)
        found = {"seconds_after_imports": time.perf_counter() - started, "peak": peak_resident_mib()}
    return json.dumps(found)


SUBCOMMANDS = {
    "rows": lambda arguments: measure_rows(read_flags(RowsFlags, arguments)),
    START: lambda arguments: start_here(*arguments),
    "duration": lambda arguments: measure_durations(read_flags(DurationFlags, arguments)),
    "steps": lambda arguments: measure_drift(read_steps_flags(arguments)),
}

if __name__ == "__main__":
    sys.exit(run_subcommand(SUBCOMMANDS, sys.argv[1:]))
