#!/usr/bin/env python3
"""Measure the accuracy of word times, of 8-bit ONNX weights, and of the confidence intervals of the WER.

    python3 benchmarks/accuracy.py word_times --checkpoint checkpoints/checkpoint_best.pt --utterances 100 --json
    python3 benchmarks/accuracy.py int8 --onnx konkani.onnx --manifest data/builtin/valid.jsonl
    python3 benchmarks/accuracy.py intervals

word_times: each sentence of the built-in corpus' test part is synthesized again, which must reproduce its samples,
while espeak-ng reports the start of each word. These times are compared with those of the recognized words.

int8: several ways to store weights in 8 bits are compared by their effect on the recognized text.

intervals: how often a 95 % interval of the WER contains the true WER, by resampling unit and number of speakers. Speech
is simulated: every speaker has an error rate with a beta distribution around 20 % and standard deviation `spread`,
every utterance one around its speaker's, and every word is wrong with the probability of its utterance. The intervals
are the evaluation's own bootstrap. A good interval contains 20 % in 95 of 100 trials.
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
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.measuring.common import run_subcommand
from konkanivani.command_line import read_flags
from konkanivani.config import DecodingConfig
from konkanivani.corpora.builtin import SplitSizes, SpokenSentence, plan_corpus, spoken_waveform
from konkanivani.corpora.synthesis import SpeechSynthesizer, SpokenWords
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.index import Utterance
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import DataError, UsageError
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.word_times import Word
from konkanivani.scoring.metrics import percentiles, ratios, resample_sums


@dataclass(frozen=True)
class Differences:
    """Statistics of the absolute differences of `words` words, in milliseconds."""

    words: int
    median: float
    mean: float
    percentile_90: float


@dataclass(frozen=True)
class WordTimes:
    """Differences of word starts and ends; the true end is the start of the next word or the end of the speech.

    `spoken` counts all words of the utterances; only correctly recognised ones are compared.
    """

    utterances: int
    spoken: int
    starts: Differences
    ends: Differences


def measure_word_times(recognizer: Recognizer, manifest: str, count: int) -> WordTimes:
    """Transcribe the first `count` utterances of the test part, and compare the word times with the synthesiser's.

    Raises DataError if the audio differs from the speech of the installed espeak-ng.
    """
    utterances = list(itertools.islice(read_manifest(manifest), count))
    starts, ends, spoken_words = [], [], 0
    with SpeechSynthesizer() as synthesizer:
        for utterance, sentence in zip(utterances, plan_corpus(SplitSizes()).test, strict=False):
            check_speech(utterance, sentence, synthesizer)
            spoken = synthesizer.words(sentence.text, sentence.style)
            spoken_words += len(spoken.words)
            recognized = recognizer.transcribe(utterance.audio_path).words
            for word, start, end in matches(recognized, sentence.text, spoken):
                starts.append(1000 * abs(word.start - start))
                ends.append(1000 * abs(word.end - end))
    return WordTimes(len(utterances), spoken_words, summary(starts), summary(ends))


def check_speech(utterance: Utterance, sentence: SpokenSentence, synthesizer: SpeechSynthesizer) -> None:
    """Raise DataError unless the audio equals, sample for sample, the sentence as it is synthesised now."""
    spoken = spoken_waveform(sentence, synthesizer)
    # The corpus is stored as 16-bit integers, which float32 represents exactly.
    heard = (load_audio(utterance.source).numpy() * 32768).round().astype(np.int16)
    if utterance.text != sentence.text or not np.array_equal(heard, spoken):
        raise DataError(
            f"{utterance.audio_path} is not what {synthesizer.engine} speaks now, so its words' times are not known. "
            "Write the corpus again with prepare_builtin_corpus.py, and give its test.jsonl."
        )


def matches(recognized: tuple[Word, ...], text: str, spoken: SpokenWords) -> list[tuple[Word, float, float]]:
    """Return the correctly recognised words, each with its true start and end in seconds."""
    # The synthesiser identifies a word by the position of its first character in the text.
    words, place = text.split(), 0
    times = [word.start for word in spoken.words] + [spoken.end]
    places = {word.character: number for number, word in enumerate(spoken.words)}
    characters = []
    for word in words:
        characters.append(text.index(word, place))
        place = characters[-1] + len(word)
    # autojunk would ignore words that are frequent in a long text.
    blocks = difflib.SequenceMatcher(None, [w.text for w in recognized], words, autojunk=False).get_matching_blocks()
    found = []
    for block in blocks:
        for offset in range(block.size):
            number = places.get(characters[block.b + offset])
            if number is not None:  # None if the synthesiser joins the word to the previous one
                found.append((recognized[block.a + offset], times[number], times[number + 1]))
    return found


def summary(differences: list[float]) -> Differences:
    """Return count, median, mean and 90th percentile, rounded to 0.1 ms."""
    ranked = sorted(differences)
    if not ranked:
        raise DataError("Not one word was recognised as it was spoken. Give another --checkpoint.")
    highest = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    return Differences(
        len(ranked), *(round(x, 1) for x in (statistics.median(ranked), statistics.fmean(ranked), highest))
    )


@dataclass(frozen=True)
class WordTimesFlags:
    """Flags of this script."""

    checkpoint: str = "checkpoints/checkpoint_best.pt"
    """A checkpoint_*.pt file."""
    manifest: str = "data/builtin/test.jsonl"
    """Test part of the built-in corpus."""
    utterances: int = 100
    """Number of utterances, from the first one."""
    json: bool = False
    """Print one line of JSON instead of sentences."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


def compare_word_times(flags: WordTimesFlags) -> str:
    """Return the report."""
    if flags.utterances < 1:
        raise UsageError("--utterances must be at least 1.")
    from konkanivani.inference.recognizer import build_recognizer

    found = measure_word_times(
        build_recognizer(flags.checkpoint, flags.decoding, "cpu"), flags.manifest, flags.utterances
    )
    if flags.json:
        return json.dumps(dataclasses.asdict(found))
    lines = [f"{found.utterances} utterances, {found.starts.words} of {found.spoken} words recognised as spoken"]
    for name, differences in (("starts", found.starts), ("ends", found.ends)):
        lines.append(
            f"{name}: median {differences.median} ms, mean {differences.mean} ms, 90 % within "
            f"{differences.percentile_90} ms"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Way:
    """Method of quantisation: the operators, and the storage of their weights."""

    operators: tuple[str, ...]
    is_signed: bool
    is_by_output: bool
    bits: int = 8

    def __str__(self) -> str:
        scales = "a scale an output" if self.is_by_output else "one scale"
        return (
            f"{' and '.join(self.operators)}, {'signed' if self.is_signed else 'unsigned'} {self.bits} bits, {scales}"
        )

    def apply(self, model: bytes) -> bytes:
        """Return the quantised model; the convolutions of the front end stay in single precision."""
        # Imported late: `word_times` and `intervals` need no ONNX.
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        from konkanivani.inference.export import quietly

        graph = onnx.load_model_from_string(model)
        # In the exported graph, only the front end (STFT and mel filters) has kernels with three axes.
        kernels = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) == 3}
        front_end = [node.name for node in graph.graph.node if node.op_type == "Conv" and node.input[1] in kernels]
        with tempfile.TemporaryDirectory() as folder, quietly():
            quantize_dynamic(
                graph,
                Path(folder) / "model.onnx",
                op_types_to_quantize=list(self.operators),
                weight_type=QuantType.QInt8 if self.is_signed else QuantType.QUInt8,
                per_channel=self.is_by_output,
                reduce_range=self.bits == 7,  # against saturation of 16-bit sums on x86 without VNNI
                nodes_to_exclude=front_end,
            )
            return (Path(folder) / "model.onnx").read_bytes()


WAYS = (
    Way(("MatMul",), is_signed=True, is_by_output=True),
    Way(("MatMul",), is_signed=False, is_by_output=False),
    Way(("MatMul",), is_signed=True, is_by_output=False),
    Way(("MatMul",), is_signed=True, is_by_output=True, bits=7),
    Way(("MatMul", "Conv"), is_signed=False, is_by_output=True),
)


@dataclass(frozen=True)
class Distance:
    """Distance of a quantised model from the one in single precision, averaged over frames; `size` is in bytes."""

    way: str
    divergence: float
    """Kullback-Leibler divergence of its distribution from the one in single precision, in nats per frame."""
    other_best: float
    """Share of the frames with a different most likely token."""
    size: int

    def sentence(self) -> str:
        """Return the result as one line of text."""
        return f"{self.way}: {self.divergence:.5f} nats, {self.other_best:.2%} of the frames, {self.size / 1e6:.2f} MB"


def measure_ways(model: bytes, waveforms: Iterable[torch.Tensor]) -> list[Distance]:
    """Return the distances of the project's own quantisation and of WAYS, over waveforms (S,) one at a time."""
    from konkanivani.inference.export import quantize

    waveforms = list(waveforms)
    wanted = _log_probabilities(model, waveforms)
    made = [("ours", quantize(model)), *((str(way), way.apply(model)) for way in WAYS)]
    return [_distance(name, made_model, waveforms, wanted) for name, made_model in made]


def _distance(name: str, model: bytes, waveforms: list[torch.Tensor], wanted: torch.Tensor) -> Distance:
    found = _log_probabilities(model, waveforms)
    divergence = (wanted.exp() * (wanted - found)).sum(dim=-1).mean()
    other_best = (wanted.argmax(dim=-1) != found.argmax(dim=-1)).double().mean()
    return Distance(name, float(divergence), float(other_best), len(model))


def _log_probabilities(model: bytes, waveforms: list[torch.Tensor]) -> torch.Tensor:
    """Return the log probabilities of all waveforms, concatenated: (sum of T', V), float64."""
    from konkanivani.inference.export import read_onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model)
        read = read_onnx(path)
    pieces = []
    # One at a time: dynamic quantisation scales each activation as a whole, padding included.
    for waveform in waveforms:
        found, lengths = read.log_probabilities(waveform[None], (len(waveform),))
        pieces.append(found[0, : lengths[0]])
    return torch.cat(pieces).double()


@dataclass(frozen=True)
class Int8Flags:
    """Flags of this script."""

    onnx: str
    """ONNX file that export_asr.py --onnx wrote."""
    manifest: str
    """JSONL manifest whose first utterances are recognized."""
    utterances: int = 70
    """Number of utterances."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure_int8(flags: Int8Flags) -> str:
    """Return the report."""
    if flags.utterances < 1:
        raise UsageError("--utterances must be at least 1.")
    if not Path(flags.onnx).is_file():
        raise DataError(f"There is no ONNX file at {flags.onnx}. Write one with export_asr.py --onnx.")
    manifest = read_manifest(flags.manifest)
    from konkanivani.inference.onnx_graph import require_onnx

    require_onnx()
    chosen = range(min(flags.utterances, len(manifest)))
    distances = measure_ways(Path(flags.onnx).read_bytes(), (load_audio(manifest[place].source) for place in chosen))
    if flags.json:
        return json.dumps([dataclasses.asdict(distance) for distance in distances])
    return "\n".join(distance.sentence() for distance in distances)


TRUE_RATE = 0.2
WITHIN_SPEAKER = 4.0  # sum of the two parameters of an utterance's beta distribution


@dataclass(frozen=True)
class IntervalFlags:
    """Flags of this script."""

    trials: int = 1000
    """Test sets per cell of the table."""
    utterances: int = 160
    """Utterances of a test set, of 3 to 12 words."""
    speakers: tuple[int, ...] = (2, 4, 6, 10, 20, 40)
    """Numbers of speakers to try."""
    spreads: tuple[float, ...] = (0.0, 0.03, 0.08)
    """Standard deviations of the speakers' error rates."""


def measure_coverage(flags: IntervalFlags) -> str:
    """Return the table, one line per spread and number of speakers."""
    if flags.trials < 1 or not all(1 <= speakers <= flags.utterances for speakers in flags.speakers):
        raise UsageError("--trials must be at least 1, and --speakers between 1 and --utterances.")
    if not all(0 <= spread < 0.2 for spread in flags.spreads):
        raise UsageError("--spreads must lie between 0 and 0.2.")
    lines = ["spread  speakers  by utterance  by speaker"]
    for spread in flags.spreads:
        for speakers in flags.speakers:
            # The same seed in each cell, so that cells differ by their parameters only.
            shares = coverage(np.random.default_rng(1), flags, speakers, spread)
            lines.append(f"{spread:6.2f}  {speakers:8}  {shares[0]:11.1%}  {shares[1]:9.1%}")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def coverage(generator: np.random.Generator, flags: IntervalFlags, speakers: int, spread: float) -> np.ndarray:
    """Return the fractions (2,) of trials whose interval contains the true rate: resampled by utterance, by speaker."""
    of_speaker = np.arange(flags.utterances) % speakers
    held = np.zeros(2)
    for _ in range(flags.trials):
        sums = simulate(generator, of_speaker, speakers, spread)
        for column, blocks in enumerate((np.arange(flags.utterances), of_speaker)):
            resampled = resample_sums(sums, blocks, resamples=500, seed=int(generator.integers(2**32)))
            interval = percentiles(ratios(resampled[:, 0], resampled[:, 1]))
            held[column] += interval.low <= TRUE_RATE <= interval.high
    return held / flags.trials


def simulate(generator: np.random.Generator, of_speaker: np.ndarray, speakers: int, spread: float) -> np.ndarray:
    """Return word errors and words of each utterance, (utterances, 2)."""
    rates = np.full(speakers, TRUE_RATE)
    if spread:
        # From the variance of a beta distribution with mean m and parameter sum s: m (1 - m) / (s + 1).
        strength = TRUE_RATE * (1 - TRUE_RATE) / spread**2 - 1
        rates = generator.beta(TRUE_RATE * strength, (1 - TRUE_RATE) * strength, size=speakers)
    rates = np.clip(rates, 1e-3, 1 - 1e-3)[of_speaker]
    of_utterance = generator.beta(WITHIN_SPEAKER * rates, WITHIN_SPEAKER * (1 - rates))
    words = generator.integers(3, 13, size=len(of_speaker))
    return np.stack([generator.binomial(words, of_utterance), words], axis=1)


SUBCOMMANDS = {
    "word_times": lambda arguments: compare_word_times(read_flags(WordTimesFlags, arguments)),
    "int8": lambda arguments: measure_int8(read_flags(Int8Flags, arguments)),
    "intervals": lambda arguments: measure_coverage(read_flags(IntervalFlags, arguments)),
}

if __name__ == "__main__":
    sys.exit(run_subcommand(SUBCOMMANDS, sys.argv[1:]))
