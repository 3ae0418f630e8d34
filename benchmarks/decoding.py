#!/usr/bin/env python3
"""Measure the speed of decoding: each decoder of a preset on noise, or the transcription of a long file.

    python3 benchmarks/decoding.py speed --preset original --json
    python3 benchmarks/decoding.py long_file --checkpoint checkpoints/checkpoint_best.pt --minutes 60 --json

speed: noise of a fixed length passes through the front end, the encoder and each decoder of a model with random
weights, with and without the decoder's cache. The end token is disabled, so that every beam search runs for the number
of tokens that speech of that length has, regardless of the weights; the time of greedy CTC does not depend on its
result.

long_file: the file is joined from the utterances of a manifest, with silence between them, and transcribed in a
separate process. The growth is the difference between the resident memory of the process with its model and its peak
(VmHWM). The speed is measured without excluding other processes of the machine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import soundfile
import torch

from benchmarks.measuring.common import run_subcommand
from konkanivani.command_line import read_flags
from konkanivani.config import PRESETS, AugmentConfig, DecodingConfig, TrainConfig
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.index import Utterance
from konkanivani.data.manifest import read_manifest
from konkanivani.data.text import OUR_TOKENS
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.decoding.decode import PrefixDecode, Scorers, Weighted, beam_search
from konkanivani.decoding.scorers import AttentionScorer, CTCScorer
from konkanivani.distributed import choose_device
from konkanivani.errors import ResourceError, UsageError
from konkanivani.inference.recognizer import Recognizer
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.memory.monitor import peak_resident_mib, resident_mib
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.ops.passes import optimize

JOINT_CTC_WEIGHT = 0.3


@dataclass(frozen=True)
class DecodedSpeech:
    """Batch of `utterances` utterances, each of `seconds` seconds and `tokens_per_second` tokens per second."""

    seconds: float
    tokens_per_second: float
    utterances: int


@dataclass(frozen=True)
class DecodingTimes:
    """Decoding speeds in seconds of audio per second, front end and encoder included, and times with and without cache.

    The cached and uncached times are those for `tokens` tokens of the attention decoder.
    """

    preset: str
    threads: int
    greedy: float
    prefix: float
    attention: float
    joint: float
    tokens: int
    beam: int
    cached_seconds: float
    uncached_seconds: float
    cached_beam_seconds: float
    uncached_beam_seconds: float

    def sentences(self) -> str:
        """Return the result as text."""
        return (
            f"{self.preset} on {self.threads} threads, times faster than the speech: greedy {self.greedy:.0f}, "
            f"prefix {self.prefix:.0f}, attention {self.attention:.1f}, joint {self.joint:.1f}.\n"
            f"{self.tokens} tokens of the attention decoder: {self.cached_seconds:.3f} s with its cache, "
            f"{self.uncached_seconds:.3f} s without, {self.uncached_seconds / self.cached_seconds:.1f} times as long; "
            f"of {self.beam} hypotheses {self.cached_beam_seconds:.3f} s and {self.uncached_beam_seconds:.3f} s, "
            f"{self.uncached_beam_seconds / self.cached_beam_seconds:.1f} times as long."
        )


def measure_decoding(
    preset: str, vocab_size: int, speech: DecodedSpeech, beam: int, tokens: int, rounds: int, device: str
) -> DecodingTimes:
    """Run every decoder `rounds` times in turn after a warm-up, and return the medians."""
    where = choose_device(device)
    torch.manual_seed(0)
    architecture = architecture_of(TrainConfig(model=PRESETS[preset]), vocab_size)
    model = architecture.build().to(where).eval()
    optimize(model)
    # The end token is never chosen, so that every search runs to its limit.
    with torch.no_grad():
        model.decoder.output.bias[OUR_TOKENS.end] = -1e4
    front_end = architecture.build_front_end(AugmentConfig()).to(where)
    samples = round(speech.seconds * SAMPLE_RATE)
    waveforms = torch.randn(speech.utterances, samples) * 0.1

    @torch.no_grad()
    def encode() -> tuple[torch.Tensor, Lengths]:
        features, lengths = front_end(waveforms.to(where), (samples,) * speech.utterances, None)
        return model.encoder(features, lengths)

    limits = (max(1, round(speech.seconds * speech.tokens_per_second)),) * speech.utterances

    # Beam search with one best hypothesis; the CTC scorer takes part only if it has a weight.
    def search(ctc_weight: float) -> None:
        encoded, lengths = encode()
        full = (Weighted(AttentionScorer(model, encoded, lengths, beam), 1 - ctc_weight),)
        ctc = CTCScorer(model, encoded, lengths, beam) if ctc_weight else None
        beam_search(Scorers(full, ctc, ctc_weight, 0.0), limits, beam, 1, where)

    prefix = PrefixDecode(beam)
    # With and without cache, only the decoder is timed, on one utterance that is already encoded.
    one, one_length = encode()[0][:1], (encode()[1][0],)
    seconds = medians(
        rounds,
        where,
        lambda: greedy_ctc(model, *encode()),
        lambda: prefix(model, *encode()),
        lambda: search(0.0),
        lambda: search(JOINT_CTC_WEIGHT),
        lambda: decode_with_cache(model, one, one_length, 1, tokens),
        lambda: decode_without_cache(model, one, one_length, 1, tokens),
        lambda: decode_with_cache(model, one, one_length, beam, tokens),
        lambda: decode_without_cache(model, one, one_length, beam, tokens),
    )
    return times_of(preset, speech, beam, tokens, seconds)


def times_of(preset: str, speech: DecodedSpeech, beam: int, tokens: int, seconds: list[float]) -> DecodingTimes:
    """Return the speeds and times of the median `seconds` that `measure_decoding` measured, in its order."""
    audio = speech.seconds * speech.utterances
    greedy, by_prefix, attention, joint, cached, uncached, cached_beam, uncached_beam = seconds
    return DecodingTimes(
        preset=preset,
        threads=torch.get_num_threads(),
        greedy=audio / greedy,
        prefix=audio / by_prefix,
        attention=audio / attention,
        joint=audio / joint,
        tokens=tokens,
        beam=beam,
        cached_seconds=cached,
        uncached_seconds=uncached,
        cached_beam_seconds=cached_beam,
        uncached_beam_seconds=uncached_beam,
    )


def medians(rounds: int, device: torch.device, *actions: Callable[[], object]) -> list[float]:
    """Return the median seconds of each action over `rounds` rounds; a round runs each action once."""
    taken = [[] for _ in actions]
    for number in range(rounds + 1):
        for action, seconds in zip(actions, taken, strict=True):
            started = time.perf_counter()
            action()
            # CUDA kernels run asynchronously: without this, only their launch would be timed.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:  # round 0 is the warm-up
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in taken]


@torch.no_grad()
def decode_with_cache(
    model: KonkaniVaniASR, encoded: torch.Tensor, lengths: Lengths, hypotheses: int, tokens: int
) -> torch.Tensor:
    """Return the last logits (K, V) of K equal hypotheses of one utterance; each token is computed once."""
    cache = model.decoder.begin(encoded, lengths, hypotheses)
    last = torch.full((1, hypotheses), OUR_TOKENS.start, device=encoded.device)
    for _ in range(tokens):
        logits = model.decoder.output(model.decoder.step(last, cache))
        last = logits.argmax(dim=-1)
    return logits[0]


@torch.no_grad()
def decode_without_cache(
    model: KonkaniVaniASR, encoded: torch.Tensor, lengths: Lengths, hypotheses: int, tokens: int
) -> torch.Tensor:
    """Return the same logits, with the whole prefix recomputed for each token."""
    # `lengths` is a tuple: the product repeats it.
    rows, lengths = encoded.expand(hypotheses, -1, -1), lengths * hypotheses
    said = torch.full((hypotheses, 1), OUR_TOKENS.start, device=encoded.device)
    for _ in range(tokens):
        logits = model.decoder.output(model.decoder(said, rows, lengths)[:, -1])
        said = torch.cat([said, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return logits


@dataclass(frozen=True)
class SpeedFlags:
    """Flags of this script."""

    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    vocab_size: int = 1000
    """Tokens in the vocabulary."""
    seconds: float = 6.0
    """Length of an utterance."""
    tokens_per_second: float = 5.0
    """Tokens per second of speech: about 5 with a subword vocabulary, 12 with characters."""
    utterances: int = 1
    """Utterances per batch."""
    beam: int = 10
    """Hypotheses kept."""
    tokens: int = 100
    """Tokens of the hypothesis that is decoded with and without cache."""
    rounds: int = 3
    """Rounds after a warm-up, each running every decoder once; the median counts."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Device to measure on."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure_speed(flags: SpeedFlags) -> str:
    """Return the report."""
    sizes = flags.utterances, flags.beam, flags.tokens, flags.rounds, flags.seconds, flags.tokens_per_second
    if min(sizes) <= 0 or flags.vocab_size < 5:
        raise UsageError("Every number must be above 0, and --vocab_size at least 5.")

    speech = DecodedSpeech(flags.seconds, flags.tokens_per_second, flags.utterances)
    result = measure_decoding(
        flags.preset, flags.vocab_size, speech, flags.beam, flags.tokens, flags.rounds, flags.device
    )
    return json.dumps(dataclasses.asdict(result)) if flags.json else result.sentences()


@dataclass(frozen=True)
class Transcription:
    """Cost of transcribing a file: growth of resident memory over the process with its model, in MiB, and seconds."""

    rss_growth_mib: float
    seconds: float
    segments: int
    text: str


def transcribe(recognizer: Recognizer, path: Path) -> Transcription:
    """Transcribe a file and return the cost and the text."""
    before, started, texts = resident_mib(), time.perf_counter(), []
    for segment in recognizer.segments(path):  # only texts are kept, or the segments would count as growth
        texts.append(segment.text)
    # `segments` is a generator: the work is done in the loop.
    seconds = time.perf_counter() - started
    return Transcription(round(peak_resident_mib() - before, 1), round(seconds, 4), len(texts), " ".join(texts))


def utterances_for(manifest: str, seconds: float, gap_seconds: float) -> list[Utterance]:
    """Return the utterances of a manifest, repeated in order until they and the gaps after them last `seconds`."""
    known, found, total = list(read_manifest(manifest)), [], 0.0
    while total < seconds:
        found.append(known[len(found) % len(known)])
        total += found[-1].duration + gap_seconds
    return found


def write_long_file(path: Path, utterances: list[Utterance], gap_seconds: float) -> float:
    """Write the utterances to a FLAC file, 16 kHz mono, with zeros in the gaps; return its length in seconds."""
    gap = np.zeros(round(gap_seconds * SAMPLE_RATE), dtype=np.float32)
    with soundfile.SoundFile(path, "w", SAMPLE_RATE, 1, "PCM_16", format="FLAC") as file:
        for utterance in utterances:
            file.write(load_audio(utterance.source).numpy())
            file.write(gap)
        return file.frames / SAMPLE_RATE


@dataclass(frozen=True)
class LongFileFlags:
    """Flags of this script."""

    checkpoint: str = "checkpoints/checkpoint_best.pt"
    """A checkpoint_*.pt file."""
    manifest: str = "data/builtin/test.jsonl"
    """Utterances to join, repeatedly."""
    minutes: float = 60.0
    """Length of the file."""
    gap: float = 0.5
    """Seconds of silence after each utterance."""
    file: str | None = None
    """Transcribe this file and print the result as JSON (None: join one, and transcribe it in another process)."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


def measure_long_file(flags: LongFileFlags) -> str:
    """Return the report."""
    if not 0 < flags.minutes <= 600 or not 0 <= flags.gap <= 60:
        raise UsageError("--minutes must be above 0 and at most 600, --gap from 0 to 60.")
    from konkanivani.inference.recognizer import build_recognizer
    from konkanivani.scoring.metrics import error_rates

    if flags.file is not None:
        recognizer = build_recognizer(flags.checkpoint, flags.decoding, "cpu")
        return json.dumps(dataclasses.asdict(transcribe(recognizer, Path(flags.file))))
    utterances = utterances_for(flags.manifest, 60 * flags.minutes, flags.gap)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.flac"
        seconds = write_long_file(path, utterances, flags.gap)
        run = transcribe_in_child(flags, path)
    rates = error_rates([" ".join(utterance.text for utterance in utterances)], [run.pop("text")])
    run["times_real_time"] = round(seconds / run["seconds"], 1)
    run |= {"audio_seconds": round(seconds, 1), "utterances": len(utterances), "wer": rates.wer, "cer": rates.cer}
    if flags.json:
        return json.dumps(run)
    return (
        f"{seconds / 60:.1f} min of {len(utterances)} utterances: resident +{run['rss_growth_mib']} MiB, "
        f"{run['times_real_time']} times real time, {run['segments']} segments, "
        f"WER {rates.wer:.1%}, CER {rates.cer:.1%}"
    )


def transcribe_in_child(flags: LongFileFlags, path: Path) -> dict[str, object]:
    """Return the JSON that this script prints about the file in another process; raise ResourceError if it fails."""
    settings = dataclasses.asdict(flags.decoding) | {"checkpoint": flags.checkpoint, "file": str(path)}
    given = [part for name, value in settings.items() if value is not None for part in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, __file__, "long_file", *given], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ResourceError(f"The transcription ended with exit code {done.returncode}. Fix the error above.")
    return json.loads(done.stdout.splitlines()[-1])


SUBCOMMANDS = {
    "speed": lambda arguments: measure_speed(read_flags(SpeedFlags, arguments)),
    "long_file": lambda arguments: measure_long_file(read_flags(LongFileFlags, arguments)),
}

if __name__ == "__main__":
    sys.exit(run_subcommand(SUBCOMMANDS, sys.argv[1:]))
