#!/usr/bin/env python3
"""Measure the delay of words while a person speaks, against the word times of espeak-ng.

    python3 benchmarks/latency.py --checkpoint checkpoints/checkpoint_best.pt --json
    python3 benchmarks/latency.py --measure memory --seconds 3600
    python3 benchmarks/latency.py --measure backlog --seconds 600 --pretrained whisper-tiny --language mr

The built-in corpus' test part is one recording with pauses, which arrives at real-time pace on one core. By default the
pace is simulated: audio arrives by a clock that advances with the CPU time of decoding. `--pace real` waits for the
wall clock instead. Each sentence is synthesised again, which must reproduce its samples, while espeak-ng reports the
start of each word; a word ends where the next one starts.

A word is emitted when it is fixed, or by the final text. Delays of emission are from the end of the spoken word and
count only words that are recognised as spoken. The final delay has two parts: from the end of the speech to the
decision that it has ended, and from there to the text.

`--measure memory` feeds the recording again and again, as fast as it is decoded, and reports the growth of the process
after the first sixth. `--measure backlog` feeds it without pauses at the simulated pace. Both work with any audio.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import difflib
import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from benchmarks.accuracy import check_speech, matches
from konkanivani.command_line import read_flags, run_script
from konkanivani.config import TRAINING_ONLY, DecodingConfig, PretrainedConfig
from konkanivani.corpora.builtin import SplitSizes, plan_corpus
from konkanivani.corpora.synthesis import SpeechSynthesizer, SpokenWords
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import DataError, UsageError
from konkanivani.inference.listener import Event, Final, Listener, Partial
from konkanivani.inference.live import expected_delay, for_live_speech
from konkanivani.inference.recognizer import Recognizer
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold
from konkanivani.scoring.metrics import error_rates

BLOCK_SECONDS = 0.05


@dataclass(frozen=True)
class TimedSentence:
    """Sentence with its place in the recording, in seconds, and espeak-ng's word times from there."""

    text: str
    start: float
    words: SpokenWords

    @property
    def end(self) -> float:
        """End of the speech."""
        return self.start + self.words.end


@dataclass(frozen=True)
class Recording:
    """All sentences as one recording."""

    samples: np.ndarray
    sentences: tuple[TimedSentence, ...]


@dataclass(frozen=True)
class Timed:
    """Result with the second at which its last audio was taken, and the second at which it was shown."""

    event: Event
    taken: float
    shown: float


@dataclass(frozen=True)
class ListenerRun:
    """Results of a listener on one recording, seconds of decoding, and the largest and the last backlog in seconds."""

    results: tuple[Timed, ...]
    busy: float
    max_backlog: float
    last_backlog: float


@dataclass(frozen=True)
class Quantiles:
    """Median, 90th percentile and number of values, in seconds."""

    median: float
    percentile_90: float
    count: int


@dataclass(frozen=True)
class WordStability:
    """Words whose text was replaced after it was shown."""

    rewritten_tentative: int
    fixed: int
    fixed_unlike_final: int


@dataclass(frozen=True)
class Latency:
    """Delays in seconds, load as decoding time per second of audio, and error rates in percent."""

    first_word: Quantiles
    emission: Quantiles
    final_wait: Quantiles
    final_work: Quantiles
    stability: WordStability
    load: float
    max_backlog: float
    last_backlog: float
    wer: float
    wer_of_transcribe: float


def build_recording(manifest: str, count: int, pause: float, level: float) -> Recording:
    """Return the first `count` sentences of the test part, each after a pause, and a pause at the end.

    Raises DataError if the audio differs from the speech of the installed espeak-ng.
    """
    generator = np.random.default_rng(0)
    parts: list[np.ndarray] = []
    sentences = []
    place = 0
    with SpeechSynthesizer() as synthesizer:
        rows = itertools.islice(read_manifest(manifest), count)
        for utterance, sentence in zip(rows, plan_corpus(SplitSizes()).test, strict=False):
            check_speech(utterance, sentence, synthesizer)
            silence = level * generator.standard_normal(round(pause * SAMPLE_RATE))
            samples = load_audio(utterance.source).numpy()
            start = (place + len(silence)) / SAMPLE_RATE
            sentences.append(TimedSentence(sentence.text, start, synthesizer.words(sentence.text, sentence.style)))
            parts += [silence.astype(np.float32), samples]
            place += len(silence) + len(samples)
    parts.append((level * generator.standard_normal(SAMPLE_RATE)).astype(np.float32))
    return Recording(np.concatenate(parts), tuple(sentences))


class Clock:
    """Clock of the recording: simulated, advanced by the CPU time of decoding, or the wall clock."""

    def __init__(self, pace: Literal["simulated", "real"]) -> None:
        self._is_real = pace == "real"
        self._begin = time.perf_counter()
        self._simulated = 0.0

    def now(self) -> float:
        """Return the seconds since the recording began."""
        return time.perf_counter() - self._begin if self._is_real else self._simulated

    def wait_until(self, moment: float) -> None:
        """Wait for audio."""
        if self._is_real:
            time.sleep(max(0.0, moment - self.now()))
        self._simulated = max(self._simulated, moment)

    def spend(self, seconds: float) -> None:
        """Advance the simulated clock by decoding time."""
        self._simulated += seconds


def run_listener(recognizer: Recognizer, samples: np.ndarray, clock: Clock) -> ListenerRun:
    """Feed the samples to a listener as they arrive: each block is all the audio that waits."""
    listener = Listener(recognizer, SAMPLE_RATE)
    results = []
    taken = 0
    busy = 0.0
    backlogs = [0.0]
    total = len(samples) / SAMPLE_RATE
    while taken < len(samples):
        clock.wait_until(min(total, taken / SAMPLE_RATE + BLOCK_SECONDS))
        available = min(len(samples), round(clock.now() * SAMPLE_RATE))
        started = clock.now()
        began = time.thread_time()
        events = listener.accept(samples[taken:available])
        taken = available
        if taken == len(samples):
            events += listener.finish()
        spent = time.thread_time() - began
        busy += spent
        clock.spend(spent)
        shown = clock.now()
        backlogs.append(min(shown, total) - taken / SAMPLE_RATE)
        results += [Timed(event, started, shown) for event in events]
    return ListenerRun(tuple(results), busy, max(backlogs), max(0.0, backlogs[-1]))


@dataclass
class Tally:
    """Measured values of all segments, in seconds, and counts of words."""

    first: list[float] = field(default_factory=list)
    emission: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    rewritten: int = 0
    fixed: int = 0
    unlike: int = 0

    def add(self, results: list[Timed], spoken: TimedSentence) -> None:
        """Add the results of one sentence."""
        partials = [each for each in results if isinstance(each.event, Partial)]
        displays = [f"{each.event.fixed} {each.event.tentative}".split() for each in partials]
        shown = next((each.shown for each, words in zip(partials, displays, strict=True) if words), None)
        if shown is not None:
            self.first.append(shown - spoken.start - spoken.words.words[0].start)
        for before, after in itertools.pairwise(displays):
            same = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
            )
            self.rewritten += len(before) - same
        finals = [each for each in results if isinstance(each.event, Final)]
        if len(finals) == 1:
            self._add_final(finals[0], partials, spoken)

    def _add_final(self, final: Timed, partials: list[Timed], spoken: TimedSentence) -> None:
        self.wait.append(final.taken - spoken.end)
        self.work.append(final.shown - final.taken)
        fixed = partials[-1].event.fixed.split() if partials else []
        words = final.event.words
        matcher = difflib.SequenceMatcher(None, fixed, [word.text for word in words], autojunk=False)
        # Moment at which each final word was fixed, if it was.
        moments = {id(word): final.shown for word in words}
        same = 0
        for block in matcher.get_matching_blocks():
            same += block.size
            for offset in range(block.size):
                place = block.a + offset
                fixing = (each.shown for each in partials if len(each.event.fixed.split()) > place)
                moments[id(words[block.b + offset])] = next(fixing)
        self.fixed += len(fixed)
        self.unlike += len(fixed) - same
        for word, _, end in matches(words, spoken.text, spoken.words):
            self.emission.append(moments[id(word)] - spoken.start - end)


def measure_latency(recognizer: Recognizer, recording: Recording, clock: Clock) -> Latency:
    """Return the delays of a recording."""
    recognizer.recognize_prefix(torch.from_numpy(recording.samples[: 3 * SAMPLE_RATE]))  # warm-up
    run = run_listener(recognizer, recording.samples, clock)
    tally = Tally()
    for spoken in recording.sentences:
        within = [each for each in run.results if spoken.start - 0.3 <= each.event.start < spoken.end]
        tally.add(within, spoken)
    reference = " ".join(spoken.text for spoken in recording.sentences)
    finals = " ".join(each.event.text for each in run.results if isinstance(each.event, Final))
    transcript = recognizer.transcribe(recording.samples).text
    return Latency(
        quantiles(tally.first),
        quantiles(tally.emission),
        quantiles(tally.wait),
        quantiles(tally.work),
        WordStability(tally.rewritten, tally.fixed, tally.unlike),
        round(run.busy / (len(recording.samples) / SAMPLE_RATE), 4),
        round(run.max_backlog, 3),
        round(run.last_backlog, 3),
        round(100 * error_rates([reference], [finals]).wer, 2),
        round(100 * error_rates([reference], [transcript]).wer, 2),
    )


def quantiles(values: list[float]) -> Quantiles:
    """Return the quantiles, rounded to 1 ms; raise a DataError without values."""
    if not values:
        raise DataError("Not one sentence was recognised. Give another --checkpoint.")
    ranked = sorted(values)
    highest = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    return Quantiles(round(statistics.median(ranked), 3), round(highest, 3), len(ranked))


def repeated_speech(manifest: str, count: int, pause: float, seconds: float) -> np.ndarray:
    """Return `seconds` of the first `count` utterances, again and again, each after a pause."""
    silence = np.zeros(round(pause * SAMPLE_RATE), dtype=np.float32)
    parts: list[np.ndarray] = []
    for utterance in itertools.islice(read_manifest(manifest), count):
        parts += [silence, load_audio(utterance.source).numpy()]
    spoken = np.concatenate(parts)
    total = round(seconds * SAMPLE_RATE)
    return np.tile(spoken, -(-total // len(spoken)))[:total]


def measure_memory(recognizer: Recognizer, samples: np.ndarray) -> str:
    """Return a sentence on the resident memory while the samples are decoded in blocks of a second."""
    listener = Listener(recognizer, SAMPLE_RATE)
    resident = []
    began = time.thread_time()
    for start in range(0, len(samples), SAMPLE_RATE):
        listener.accept(samples[start : start + SAMPLE_RATE])
        resident.append(resident_mib())
    listener.finish()
    load = (time.thread_time() - began) / (len(samples) / SAMPLE_RATE)
    later = resident[len(resident) // 6 :]
    return (
        f"Resident memory after {len(resident) // 6} s of {len(resident)}: {later[0]:.1f} MiB, at the end "
        f"{later[-1]:.1f}, from {min(later):.1f} to {max(later):.1f}; {len(listener.finals)} segments kept, load "
        f"{load:.3f}."
    )


def measure_backlog(recognizer: Recognizer, samples: np.ndarray, clock: Clock) -> str:
    """Return sentences on the expected delay, and on the backlog at real-time pace."""
    expected = expected_delay(recognizer)
    run = run_listener(recognizer, samples, clock)
    seconds = len(samples) / SAMPLE_RATE
    finals = [each for each in run.results if isinstance(each.event, Final)]
    return (
        f"{expected}\n{seconds:g} s: load {run.busy / seconds:.3f}, backlog at most {run.max_backlog:.3f} s, at "
        f"the end {run.last_backlog:.3f} s; {len(run.results) - len(finals)} partial and {len(finals)} final texts."
    )


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    checkpoint: str = "checkpoints/checkpoint_best.pt"
    """A checkpoint_*.pt file."""
    measure: Literal["delays", "memory", "backlog"] = "delays"
    """Delays of words, growth of memory, or backlog without pauses."""
    seconds: float = 600.0
    """Seconds of audio for memory and backlog."""
    manifest: str = "data/builtin/test.jsonl"
    """Test part of the built-in corpus; for memory and backlog, any manifest."""
    utterances: int = 140
    """Number of utterances, from the first one."""
    pause: float = 0.8
    """Seconds of pause before each utterance."""
    noise: float | None = None
    """Level of the noise in pauses in dBFS (None: digital silence, as a noise gate gives)."""
    pace: Literal["simulated", "real"] = "simulated"
    """Clock: simulated from the CPU time of decoding, or the wall clock."""
    json: bool = False
    """Print one line of JSON instead of sentences."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)


def measure(flags: Flags) -> str:
    """Return the report."""
    if flags.utterances < 1 or flags.pause < 0 or flags.seconds < 10:
        raise UsageError("--utterances must be at least 1, --pause at least 0, and --seconds at least 10.")
    from konkanivani.inference.recognizer import build_recognizer

    torch.set_num_threads(1)
    set_mmap_threshold()  # as listen and serve do
    level = 0.0 if flags.noise is None else 10 ** (flags.noise / 20)
    recognizer = for_live_speech(build_recognizer(flags.checkpoint, flags.decoding, "cpu", pretrained=flags.pretrained))
    if flags.measure == "memory":
        return measure_memory(recognizer, repeated_speech(flags.manifest, flags.utterances, flags.pause, flags.seconds))
    if flags.measure == "backlog":
        samples = repeated_speech(flags.manifest, flags.utterances, 0.0, flags.seconds)
        return measure_backlog(recognizer, samples, Clock(flags.pace))
    recording = build_recording(flags.manifest, flags.utterances, flags.pause, level)
    result = measure_latency(recognizer, recording, Clock(flags.pace))
    if flags.json:
        return json.dumps(dataclasses.asdict(result))
    stability = result.stability
    lines = [
        f"{name}: median {delay.median} s, 90 % within {delay.percentile_90} s ({delay.count})"
        for name, delay in (
            ("first word", result.first_word),
            ("emission of a word", result.emission),
            ("decision that speech has ended", result.final_wait),
            ("final text after the decision", result.final_work),
        )
    ]
    lines += [
        f"{stability.fixed_unlike_final} of {stability.fixed} fixed words differ from the final text; "
        f"{stability.rewritten_tentative} tentative words were rewritten",
        f"load {result.load}, backlog at most {result.max_backlog} s, at the end {result.last_backlog} s",
        f"WER of the final text {result.wer} %, of transcribe.py {result.wer_of_transcribe} %",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_script(lambda: measure(read_flags(Flags, sys.argv[1:], hidden=TRAINING_ONLY))))
