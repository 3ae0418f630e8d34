"""Times and memory for a manifest with millions of rows: indexing, token counts, opening and epoch plans."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from konkanivani.base.auto_defaults import resolve
from konkanivani.base.config import TextConfig, TrainConfig
from konkanivani.data.batching import Cursor, EpochPlanner, SizeLimit, padded_seconds
from konkanivani.data.checking import check_utterances, training_limits
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.loader.loading import GlobalBatchStream
from konkanivani.data.loader.workers import LoaderConfig
from konkanivani.data.manifest import iterate_texts, read_manifest
from konkanivani.data.rejections import Rejections
from konkanivani.data.synthetic.builtin_patterns import interleave_sentences, read_patterns
from konkanivani.data.text import Tokenizer, normalize_text, train_tokenizer
from konkanivani.data.token_counts import count_tokens
from konkanivani.memory.monitor import peak_resident_mib, resident_mib

SHARD_ROWS, MEMBER_BYTES = 1000, 40_960  # members of a tar file include a header of 512 bytes
MEDIAN_SECONDS, SPREAD, MIN_SECONDS, MAX_SECONDS = 5.0, 0.6, 1.0, 20.0  # lognormal durations, clipped
WORDS_PER_SECOND = 2.0
MICRO_BATCH_SECONDS = 40.0
WINDOW_SIZE, SEED = 32, 1234  # utterances of a global batch
PADDING_WINDOWS = 5000  # global batches in the sample for the share of padding

Result = TypeVar("Result")


@dataclass(frozen=True)
class Opening:
    """Cost of opening an indexed manifest: seconds, and growth of the process in MiB at the end and at its peak."""

    open_s: float
    check_s: float
    plan_s: float
    start_s: float
    middle_s: float
    resident_mib: float
    peak_mib: float
    padding_share: float


@dataclass(frozen=True)
class Scale:
    """Measurements in seconds; `opening` is measured in a separate process."""

    rows: int
    manifest_gib: float
    index_s: float
    tokens_s: float
    opening: Opening

    def sentence(self) -> str:
        """Return the result as text."""
        opening = self.opening
        return (
            f"{self.rows} rows, {self.manifest_gib:.2f} GiB: indexed in {self.index_s:.1f} s, tokens counted in "
            f"{self.tokens_s:.1f} s, both once. Then opened in {opening.open_s:.2f} s, checked in "
            f"{opening.check_s:.2f} s, an epoch planned in {opening.plan_s:.2f} s; the first window's rows after "
            f"{opening.start_s:.2f} s, from the middle of the epoch after {opening.middle_s:.2f} s; resident "
            f"+{opening.resident_mib:.0f} MiB, at most +{opening.peak_mib:.0f} MiB; padding {opening.padding_share:.1%}"
        )


def measure(rows: int, folder: Path) -> Scale:
    """Write the manifest unless it exists, and measure; the manifest and its index remain in `folder`."""
    manifest = folder / f"{rows}.jsonl"
    if not manifest.exists():
        write_rows(manifest, rows)
    index_s, found = timed(lambda: read_manifest(manifest))
    tokenizer = train_tokenizer(
        [normalize_text(text) for text in iterate_texts(found)], TextConfig().tokenizer_type, TextConfig().vocab_size
    )
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    tokens_s, _ = timed(lambda: count_tokens(found, tokenizer, "keep"))
    # A new process, whose memory does not contain the index that this one has built.
    again = subprocess.run(
        [sys.executable, "-m", "benchmarks.measuring.many_rows", str(manifest), str(folder / "tokenizer.model")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    opening = Opening(**json.loads(again.stdout.splitlines()[-1]))
    return Scale(rows, round(manifest.stat().st_size / 2**30, 2), round(index_s, 2), round(tokens_s, 2), opening)


def write_rows(manifest: Path, rows: int) -> None:
    """Write rows of empty shard files: lognormal durations of 1 to 20 s, text from the built-in sentence patterns."""
    generator = np.random.default_rng(SEED)
    seconds = np.clip(generator.lognormal(np.log(MEDIAN_SECONDS), SPREAD, rows), MIN_SECONDS, MAX_SECONDS).round(3)
    book = read_patterns()
    words = " ".join(interleave_sentences(book.seen, book.slots, 1000)).split()
    begins = generator.integers(0, len(words) - int(MAX_SECONDS * WORDS_PER_SECOND), rows)
    # Renamed at the end, so that an interrupted run leaves no truncated manifest to be reused.
    partial = manifest.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for row, (duration, begin) in enumerate(zip(seconds.tolist(), begins.tolist(), strict=True)):
            shard, member = divmod(row, SHARD_ROWS)
            if member == 0:
                (manifest.parent / f"shard_{shard:05}.tar").touch()
            text = " ".join(words[begin : begin + max(1, int(duration * WORDS_PER_SECOND))])
            file.write(
                f'{{"audio_filepath": "shard_{shard:05}.tar", "byte_offset": {512 + member * MEMBER_BYTES}, '
                f'"byte_count": {MEMBER_BYTES - 512}, "duration": {duration}, "text": "{text}", '
                f'"speaker": "s{row % 4000}"}}\n'
            )
    partial.rename(manifest)


def timed(action: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds and the result of an action."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def open_again(manifest: str, tokenizer: Tokenizer) -> Opening:
    """Open the manifest as a run does, plan an epoch, and read the first ids at its start and at its middle."""
    limits = training_limits(resolve(TrainConfig()))
    before = resident_mib()
    open_s, found = timed(lambda: read_manifest(manifest))
    check_s, (kept, _) = timed(lambda: check_utterances(found, tokenizer, limits, "keep"))
    planner = EpochPlanner(kept.durations, WINDOW_SIZE, SEED)
    plan_s, plan = timed(lambda: planner.plan_epoch(0))
    # Every n-th global batch: a sample over the whole epoch.
    share = padding_share(
        planner, [plan[number] for number in range(0, len(plan), max(1, len(plan) // PADDING_WINDOWS))]
    )
    del plan  # the stream below makes its own
    speech = TrainDataset(kept, tokenizer, (1.0,), SEED, manifest)
    loader = LoaderConfig(workers=0, timeout=60.0, pin_memory=False)
    stream = GlobalBatchStream(speech, planner, (), loader, Rejections(None, most=1.0))
    start_s, _ = timed(lambda: first_ids(stream, Cursor(0, 0)))
    middle_s, _ = timed(lambda: first_ids(stream, Cursor(0, planner.global_batches_per_epoch() // 2)))
    return Opening(
        open_s=round(open_s, 3),
        check_s=round(check_s, 3),
        plan_s=round(plan_s, 3),
        start_s=round(start_s, 3),
        middle_s=round(middle_s, 3),
        resident_mib=round(resident_mib() - before, 1),
        peak_mib=round(peak_resident_mib() - before, 1),
        padding_share=round(share, 4),
    )


def first_ids(stream: GlobalBatchStream, cursor: Cursor) -> list[str]:
    """Return the ids in the global batch at the cursor; its rows are read, its audio is not."""
    keys = next(stream.planned(cursor))
    return [stream.speech.utterances[index].id for _, index in keys]


def padding_share(planner: EpochPlanner, global_batches: list[np.ndarray]) -> float:
    """Return the share of padding in these global batches.

    Each is split into micro-batches of at most MICRO_BATCH_SECONDS, padding included.
    """
    # For each length in steps of 0.1 s: the number of utterances that fit into a micro-batch when padded to it.
    tenths = [tenth / 10 for tenth in range(10, int(10 * MAX_SECONDS) + 1)]
    limits = tuple(SizeLimit(seconds, int(MICRO_BATCH_SECONDS / seconds)) for seconds in tenths)
    seconds = [planner.durations[global_batch] for global_batch in global_batches]
    return 1 - sum(part.sum() for part in seconds) / sum(padded_seconds(part, limits) for part in seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(open_again(sys.argv[1], Tokenizer(Path(sys.argv[2]).read_bytes())))))
