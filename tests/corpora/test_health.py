"""Health report of a corpus: numbers equal manual computations, findings need a defective corpus."""

import json
import math
import re
import tracemalloc
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.config import DataConfig, TextConfig, TrainConfig
from konkanivani.console import show_text
from konkanivani.corpora.findings import Diagnosis, build_tokenizer, diagnose
from konkanivani.corpora.health import CorpusPart, HealthRequest, fetch, measure_corpus, pick_evenly, robust_scores
from konkanivani.corpora.health_report import draw_page, health_lines, sparkline
from konkanivani.corpora.recordings import (
    content_key,
    extent_key,
    file_size,
    measure_epoch,
    occur_again,
    repeats_across,
    repeats_within,
    text_key,
)
from konkanivani.corpora.statistics import CharacterCount, clipped_runs, measure_levels
from konkanivani.data.audio.files import AudioSource, read_samples
from konkanivani.data.batching import EpochPlanner, Example, padded_seconds, same_size, split_into_micro_batches
from konkanivani.data.dataset import NoiseReverb
from konkanivani.data.manifest import Rejections, Utterance, read_manifest
from konkanivani.data.text import OUR_TOKENS
from konkanivani.errors import DataError
from konkanivani.files import check_own_file
from konkanivani.flags import resolve
from konkanivani.models.architecture import architecture_of
from konkanivani.recipe.run_data import build_training_speech
from konkanivani.scoring.html import PAGE_START, Histogram, build_histogram, draw_histogram, round_step, write_page
from tests.conftest import run_in_process
from tests.html_parser import PageParts

SCRIPT = "training_scripts/inspect_data.py"
RATE = 16_000
SENTENCES = ("एक दोन", "तीन चार", "पांच उदक", "घर शाळा", "बाजार आवय", "दोन घर", "उदक आवय", "शाळा एक")
WORDS = ("नदी", "रान", "गाव", "पान", "मीन", "दार", "तार", "वाट", "काम", "मान", "लोक", "वीज", "पाय", "हात")
CONFIG = resolve(TrainConfig(text=TextConfig(tokenizer_type="char")))

# Histograms


@pytest.mark.parametrize(
    "span, most, step", [(10, 5, 2), (10, 4, 2.5), (1, 3, 0.5), (23, 23, 1), (7.1, 7, 2), (0.3, 3, 0.1)]
)
def test_round_step_is_smallest_that_covers_span(span, most, step):
    assert round_step(span, most) == pytest.approx(step)


def test_histogram_counts_each_value_once_and_edges_in_upper_bin():
    histogram = build_histogram(np.array([0.5, 1.0, 1.0, 1.5, 3.0]))
    assert (histogram.start, histogram.width, histogram.amounts) == (0.0, 1.0, (1, 3, 1))
    assert (histogram.below, histogram.beyond, histogram.end) == (0, 0, 3.0)
    weighed = build_histogram(np.array([0.5, 1.0, 1.0, 1.5, 3.0]), np.array([1.0, 2, 3, 4, 5]))
    assert weighed.amounts == (1, 9, 5)


def test_histogram_counts_outliers_without_drawing_them():
    values = np.concatenate([np.linspace(1, 2, 1000), [500.0]])
    histogram = build_histogram(values)
    assert histogram.end < 3 and histogram.beyond >= 1
    assert sum(histogram.amounts) + histogram.below + histogram.beyond == 1001


@pytest.mark.parametrize("values", [[], [math.nan], [2.0], [0.0, 0.0], [-40.0] * 3, [1e-9, 1e9]])
def test_histogram_of_degenerate_values_is_drawn(values):
    histogram = build_histogram(np.array(values, dtype=float))
    assert sum(histogram.amounts) + histogram.below + histogram.beyond == np.isfinite(values).sum()
    assert len(histogram.amounts) < 100
    assert draw_histogram(histogram, "t", "x", "y").startswith("<figure>") and sparkline(histogram, "s")


@pytest.mark.parametrize(
    "amounts, labels", [([1, 1], "0 1"), ([0, 7], "0 2 4 6 8"), ([9, 1], "0 5 10"), ([0.4], "0 0.1 0.2 0.3 0.4")]
)
def test_histogram_has_round_axis_labels_and_bar_descriptions(amounts, labels):
    drawn = draw_histogram(Histogram(1.0, 0.5, tuple(map(float, amounts)), 0.0, 3.0), "Speed", "m/s", "<cars>", 1.2)
    shown = re.findall(r'text-anchor="end">([^<]*)<', drawn)
    assert shown == [*labels.split(), "m/s"] and "median 1.2; not drawn: 3 beyond" in drawn
    fullest = amounts.index(max(amounts))
    assert f"({max(amounts):g} &lt;cars&gt;) between {1 + fullest / 2:g} and {1.5 + fullest / 2:g}" in drawn
    assert drawn.count('class="bar"') == sum(amount > 0 for amount in amounts)


# Audio


def utterance(path: Path, text: str = "एक", duration: float = 1.0, **more: object) -> Utterance:
    return Utterance(path.name, str(path), duration, text, **more)


def test_measured_level_silence_and_offset_match_the_signal(tmp_path):
    time = np.arange(RATE) / RATE
    sine = 0.5 * np.sin(2 * np.pi * 500 * time)
    mono = 0.02 + np.concatenate([np.zeros(RATE // 4), sine, np.zeros(RATE // 2), sine, np.zeros(3 * RATE // 4)])
    soundfile.write(tmp_path / "a.wav", np.stack([mono, mono], axis=1), RATE, subtype="FLOAT")
    sound = measure_levels(utterance(tmp_path / "a.wav"))
    assert (sound.rate, sound.channels, sound.seconds, sound.file_seconds) == (RATE, 2, 3.5, 3.5)
    assert sound.level == pytest.approx(20 * math.log10(0.5 * math.sqrt(2 / 3.5 / 2)), abs=0.01)
    assert (sound.leading_silence, sound.trailing_silence) == pytest.approx((0.25, 0.75))
    assert sound.silence_share == pytest.approx(1.5 / 3.5)
    assert sound.offset == pytest.approx(0.02, abs=1e-4)
    assert (sound.full_scale_share, sound.clipped_runs) == (0, 0)
    part = measure_levels(utterance(tmp_path / "a.wav", duration=1.0, offset=0.25))
    assert (part.seconds, part.file_seconds, part.silence_share) == (1.0, None, 0.0)


def test_only_start_of_long_recording_is_measured_but_span_must_exist(tmp_path, monkeypatch):
    monkeypatch.setattr("konkanivani.corpora.statistics.MAX_SECONDS", 1.0)
    samples = np.where(np.arange(3 * RATE) < RATE, 0.1, 0.9) * np.sin(np.arange(3 * RATE))
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    for stated in (3.0, 0.2, 9e8):
        whole = measure_levels(utterance(tmp_path / "a.wav", duration=stated))
        assert (whole.seconds, whole.file_seconds) == (1.0, 3.0) and whole.level == pytest.approx(-23, abs=0.1)
    span = measure_levels(utterance(tmp_path / "a.wav", duration=2.0, offset=1.0))
    assert (span.seconds, span.file_seconds) == (1.0, None) and span.level == pytest.approx(-3.9, abs=0.1)
    with pytest.raises(DataError, match="it ends at 3.00 s"):
        measure_levels(utterance(tmp_path / "a.wav", duration=2.5, offset=1.0))


def test_clipping_counts_runs_of_three_full_scale_samples(tmp_path):
    assert clipped_runs(np.array([0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, -1, -1, -1, -1, 0.5, 0.5, 0.5, 0.5])) == 3
    assert clipped_runs(np.array([1.2, 1.1, 1.3])) == 1  # a float file that exceeds full scale
    assert clipped_runs(np.array([1.0])) == clipped_runs(np.zeros(9)) == clipped_runs(np.array([1, -1, 1, -1.0])) == 0
    samples = 2 * np.sin(2 * np.pi * 100 * np.arange(RATE) / RATE)
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="PCM_16")
    sound = measure_levels(utterance(tmp_path / "a.wav"))
    # |2 sin| > 1 for two thirds of each of 100 periods, in two runs.
    assert sound.clipped_runs == 200 and sound.full_scale_share == pytest.approx(2 / 3, abs=0.01)
    soundfile.write(tmp_path / "b.wav", samples / 2.1, RATE, subtype="PCM_16")
    assert measure_levels(utterance(tmp_path / "b.wav")).clipped_runs == 0


def test_zeros_are_silence_and_quiet_signal_is_not(tmp_path):
    soundfile.write(tmp_path / "zero.wav", np.zeros(RATE), RATE)
    soundfile.write(tmp_path / "quiet.wav", 0.001 * np.sin(np.arange(RATE)), RATE, subtype="FLOAT")
    zero, quiet = (measure_levels(utterance(tmp_path / name)) for name in ("zero.wav", "quiet.wav"))
    assert (zero.silence_share, zero.leading_silence, zero.trailing_silence, zero.level) == (1.0, 1.0, 0.0, -120)
    assert quiet.silence_share == 0 and quiet.level == pytest.approx(-63, abs=0.1)


# Characters


def count_characters(*texts: str) -> CharacterCount:
    from konkanivani.data.text import normalize_text

    count = CharacterCount()
    for row, text in enumerate(texts, start=1):
        count.add(text, normalize_text(text), row)
    return count


def marks_of(count: CharacterCount) -> dict[str, tuple[str, ...]]:
    return {chr(c.code): c.marks for c in count.health().inventory if c.marks}


def test_characters_are_counted_named_and_marked():
    health = count_characters("कक कक", "ककa।", "क\u200dक५").health()
    values = {chr(c.code): c for c in health.inventory}
    assert values["क"].count == 8 and values["क"].name == "DEVANAGARI LETTER KA" and values["क"].marks == ()
    assert values["a"].marks == ("foreign script", "rare") and values["a"].script == "LATIN"
    assert values["\u200d"].marks == ("joiner", "removed")
    assert values["।"].marks == ("becomes a space",)
    assert values["५"].marks == ("digit", "rare")
    assert (health.script, health.different, health.letters) == ("DEVANAGARI", 6, 3)
    assert [(w.word, w.scripts, w.row) for w in health.mixed_words] == [("ककa।", ("DEVANAGARI", "LATIN"), 2)]
    changes = health.changes
    assert (changes.texts, changes.joiners_removed, changes.to_space, changes.digits) == (2, 1, 1, 1)


def test_invisible_characters_are_marked_and_escaped():
    assert marks_of(count_characters("\u200bक\t\ue000\U000e0041")) == {
        "\u200b": ("invisible", "removed"),
        "\t": ("invisible", "becomes a space"),
        "\ue000": ("invisible", "becomes a space"),
        "\U000e0041": ("invisible", "removed"),
        "क": ("rare",),
    }
    assert show_text("\u202eक\x1b\ud800\n") == "⟨U+202E⟩क⟨U+001B⟩⟨U+D800⟩⟨U+000A⟩"
    assert show_text("क\u200dष") == "क\u200dष" and show_text("a" * 300) == "a" * 200 + "…"


@pytest.mark.parametrize("composed", ["\u0958", "é", "\u0929", "\u212b"])
def test_two_encodings_of_one_character_are_twins(composed):
    shape = unicodedata.normalize("NFC", composed)
    other = unicodedata.normalize("NFD", composed)
    (twins,) = count_characters(composed * 3, other, other + "ा").health().twins
    assert twins.shape == shape
    assert {(tuple(map(chr, s.codes)), s.count) for s in twins.spellings} == {(tuple(composed), 3), (tuple(other), 2)}
    assert count_characters(composed * 3).health().twins == count_characters(other).health().twins == ()


def test_changes_by_normalisation_are_counted():
    changes = count_characters("\u0958", "Ab, c!", "क ख").health().changes
    assert (changes.texts, changes.not_composed, changes.lowered, changes.to_space) == (2, 1, 1, 2)
    count = count_characters("कa", "a", "ख")
    assert (count.texts, count.raw["a"], count.mixed["कa"]) == (3, 2, 1)


# Repeats, outliers, the plan


def test_repeats_are_rows_with_an_earlier_key():
    keys = np.array([5, 0, 7, 5, 0, 5], dtype=np.uint64)
    assert repeats_within(keys, 9).count == 2 and repeats_within(keys, 9).pairs == ((0, 3), (0, 5))
    assert repeats_within(keys, 1).pairs == ((0, 3),)
    across = repeats_across(keys, np.array([0, 7, 8, 7], dtype=np.uint64), 9)
    assert across.count == 2 and across.pairs == ((2, 1), (2, 3))
    assert text_key("") == 0 and text_key("a") == text_key("a") != text_key("b") and text_key("\ud800")


def test_audio_identity_depends_on_bytes_and_span(tmp_path):
    for name, content in (("a", b"xyz"), ("b", b"xyw"), ("c", b"xyz"), ("d", b"longer"), ("tar", b"..xyz..xyz")):
        (tmp_path / name).write_bytes(content)
    sources = [AudioSource(str(tmp_path / name)) for name in "abcd"]
    sources += [replace(sources[0], start=1.0, seconds=2.0), replace(sources[2], start=1.0, seconds=2.0)]
    sources += [AudioSource(str(tmp_path / "tar"), at, 3) for at in (2, 7)]
    a, b, c, d, span, same_span, member, other_member = (content_key(source) for source in sources)
    assert a == c == member == other_member != b != d and span == same_span != a
    extents = np.array([extent_key(source, file_size(source)) for source in sources], dtype=np.uint64)
    same = [list(again) for again in occur_again([extents[:3], extents[3:]])]
    assert same == [[True, True, True], [False, True, True, True, True]]
    assert not occur_again([extents[3:4], extents[3:3]])[0].any()
    assert content_key(AudioSource("/nowhere")) == 0
    assert file_size(AudioSource(str(tmp_path))) is None and file_size(AudioSource("/nowhere\0")) is None


def test_outlier_scores_use_robust_spread_of_log_rate():
    rates = np.array([8.0, 10.0, 12.5] * 10 + [40.0, 0.0])
    scores = robust_scores(rates)
    spread_of_logs = math.log(1.25)
    assert scores[30] == pytest.approx(0.6745 * math.log(4) / spread_of_logs)
    assert scores[0] == pytest.approx(-0.6745) and scores[1] == 0 and scores[31] == 0
    assert not robust_scores(rates[-12:]).any()  # too few values
    assert np.abs(robust_scores(np.array([10.0] * 30 + [10.1]))).max() < 3.5  # a negligible deviation


def test_padding_share_equals_real_micro_batches():
    assert padded_seconds(np.array([3.0, 1.0, 2.0, 5.0, 4.0]), same_size(2)) == 2 * 2 + 2 * 4 + 5
    durations = np.random.default_rng(0).integers(1, 90, size=43) / 10
    planner = EpochPlanner(durations, 8, 3)
    health = measure_epoch(planner, 3)
    padded = 0
    for global_batch in planner.plan_epoch(0):
        speeches = [Example(str(i), torch.zeros(round(durations[i] * RATE)), [1], 0) for i in global_batch]
        cut = split_into_micro_batches(speeches, same_size(3), OUR_TOKENS)
        padded += cut.audio_seconds / (1 - cut.padding_share)
    assert health.padding_share == pytest.approx(1 - durations.sum() / padded)
    assert (health.steps, health.utterances, health.window_size) == (6, 43, 8)


def test_decoded_recordings_are_evenly_spaced_and_depend_on_seed():
    assert pick_evenly(3, 5, 1) == [0, 1, 2] and pick_evenly(100, 0, 1) == []
    chosen = pick_evenly(1003, 10, 1)
    assert chosen == pick_evenly(1003, 10, 1) != pick_evenly(1003, 10, 2)
    assert all(100 <= b - a <= 101 for a, b in zip(chosen, chosen[1:], strict=False)) and 0 <= chosen[0] <= 100


# A manifest of any length


@dataclass(frozen=True)
class LazyRows:
    """Rows that are created on access, like a manifest with millions of rows."""

    count: int

    def __iter__(self) -> Iterator[Utterance]:
        for row in range(self.count):
            text = f"{SENTENCES[row % 8]} {row}"
            yield Utterance("long.wav", __file__, 1 + row % 7, text, f"speaker {row % 9}", offset=row, row=row + 1)


def test_long_manifest_is_not_held_in_memory():
    assert [fetch(LazyRows(9), [7, 2])[n].row for n in (2, 7)] == [3, 8]
    request = HealthRequest(CONFIG, None, 0)
    measure_corpus([CorpusPart("warm", True, LazyRows(10), 10)], request)
    tracemalloc.start()
    health = measure_corpus([CorpusPart("long", True, LazyRows(5_000), 5_000)], request)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert health.parts[0].utterances == health.parts[0].sentences == 5_000 and health.parts[0].speakers.count == 9
    assert peak / 5_000 < 250  # bytes per row: less than one Utterance, including temporary numpy copies


# Findings


@dataclass(frozen=True)
class Row:
    """One row of a small corpus; its audio is a sine with a different frequency in each row."""

    name: str
    text: str
    speaker: str
    seconds: float = 1.0
    gain: float = 0.2
    rate: int = RATE
    stated_seconds: float | None = None


def rows_of(split: str, speakers: str, count: int) -> list[Row]:
    """Return rows without defects; their texts of three three-letter words differ between the splits."""
    half = len(WORDS) // 2
    first, second = (WORDS[:half], WORDS[half:]) if split == "train" else (WORDS[half:], WORDS[:half])
    texts = (f"{first[n % half]} {second[n // half]} {second[n % half]}" for n in range(count))
    return [Row(f"{split}{n:03d}.wav", text, speakers[n % len(speakers)]) for n, text in enumerate(texts)]


def write_part(directory: Path, split: str, rows: list[Row]) -> str:
    lines = []
    for number, row in enumerate(rows):
        time = np.arange(round(row.seconds * row.rate)) / row.rate
        pitch = 100 + 3 * number + (split == "valid")
        soundfile.write(directory / row.name, np.clip(row.gain * np.sin(2 * np.pi * pitch * time), -1, 1), row.rate)
        fields = {"audio_filepath": row.name, "duration": row.stated_seconds or row.seconds, "text": row.text}
        lines.append(json.dumps(fields | ({"speaker": row.speaker} if row.speaker else {})))
    (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return str(directory / f"{split}.jsonl")


@dataclass
class SmallCorpus:
    """Corpus of two splits whose rows or files a test may damage."""

    directory: Path
    train: list[Row] = field(default_factory=lambda: rows_of("train", "abc", 40))
    valid: list[Row] = field(default_factory=lambda: rows_of("valid", "d", 20))

    def write_manifests(self) -> tuple[str, str]:
        return write_part(self.directory, "train", self.train), write_part(self.directory, "valid", self.valid)

    def diagnosis(self, config: TrainConfig = CONFIG) -> Diagnosis:
        return diagnose(self.write_manifests(), config, 500)


@pytest.fixture
def small(tmp_path: Path) -> SmallCorpus:
    return SmallCorpus(tmp_path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return SmallCorpus(tmp_path_factory.mktemp("healthy")).diagnosis()


def sentences_of(diagnosis: Diagnosis, severity: str) -> str:
    return "\n".join(finding.sentence for finding in diagnosis.findings if finding.severity == severity)


def change(rows: list[Row], number: int, **fields: object) -> None:
    rows[number] = replace(rows[number], **fields)


Damage = Callable[[SmallCorpus], object]


def change_first(**fields: object) -> Damage:
    return lambda small: change(small.train, 0, **fields)


def change_each(split: str, count: int, **fields: object) -> Damage:
    return lambda small: [change(getattr(small, split), number, **fields) for number in range(count)]


BROKEN = r"1 row is broken \(2.5 %, more than --max_rejected 1%\): row 1, train000.wav: the transcript"
DEVIATES = (
    r"1 of 40 recordings are shorter or longer than their rows state, so training skips them \(row 1, "
    r"train000.wav: off by 0.30 s\); 2.5 % of the rows are broken, more than --max_rejected 1%"
)
ERRORS: dict[str, tuple[Damage, str]] = {
    "audio in both splits": (lambda s: s.valid.append(s.train[3]), "1 recording of valid.jsonl is also in train.jsonl"),
    "too many rejected": (change_first(text="।"), f"{BROKEN} is empty"),
    "control character": (change_first(text="\x07नदी"), rf"{BROKEN} contains the control character U\+0007"),
    "different duration": (change_first(stated_seconds=1.3), DEVIATES),
}
WARNINGS: dict[str, tuple[Damage, str]] = {
    "speaker in both splits": (
        lambda s: change(s.valid, 0, speaker="a"),
        r"1 speaker of valid.jsonl is also in .*\(a\)",
    ),
    "sentence in both splits": (
        lambda s: change(s.valid, 0, text=s.train[2].text + "।"),
        "1 of 20 utterances of valid",
    ),
    "duplicate recording": (lambda s: s.train.append(s.train[3]), "lists 1 recording more than once"),
    "unalignable": (change_first(text="एक " * 40), r"will be skipped: 1 x CTC cannot align it\."),
    "wrong transcript": (change_first(seconds=15.0), r"1 transcript may not match .*row 1"),
    "empty": (change_first(gain=0.0), "1 of 40 recordings is empty"),
    "loud": (change_each("train", 3, gain=0.9), "3 of 40 recordings are louder"),
    "different level": (change_each("valid", 20, gain=0.02), "valid.jsonl is at -37 dBFS"),
    "different sample rate": (change_each("valid", 20, rate=8000), "No recording of valid.jsonl"),
    "one speaker": (change_each("train", 40, speaker="a"), "only one speaker, a"),
    "dominant speaker": (change_each("train", 30, speaker="a"), "% of the speech is by one of 3"),
    "few sentences": (lambda s: [change(s.train, n, text=SENTENCES[n % 7]) for n in range(40)], "only 7 different"),
    "digits": (change_first(text="५५५ नदी"), "3 digits are in the transcripts"),
    "foreign script": (change_first(text="aaa नदी"), "1 character is of another script than Devanagari: a U"),
    "mixed scripts": (change_first(text="नaदी"), "1 word mixes scripts, such as नaदी"),
    "invisible": (change_first(text="न\u200bदी"), r"1 character is invisible or undefined: U\+200B ZERO WIDTH SPACE"),
    "rare": (change_first(text="ॐ"), "1 character is seen fewer than 3 times: ॐ U"),
    "unknown": (lambda s: change(s.valid, 0, text="ढढढ"), r"1 character of valid.jsonl .* ढ \(U\+0922\)"),
}
NOTES: dict[str, tuple[Damage, str]] = {
    "clipped": (change_first(gain=3.0), "1 of 40 recordings is clipped"),
    "quiet": (change_first(gain=0.005), "1 of 40 recordings is quieter than -40"),
    "no speakers": (change_each("train", 40, speaker=""), "has no speaker labels"),
    "joiners": (change_first(text="न\u200dदी"), "1 joiner is removed"),
    "twins": (change_first(text="\u0958 क\u093c"), "1 character is encoded in two ways"),
}
FINDINGS = {"error": ERRORS, "warning": WARNINGS, "note": NOTES}


@pytest.mark.parametrize("severity, name", [(kind, name) for kind, item in FINDINGS.items() for name in item])
def test_defect_is_found_and_not_reported_for_healthy_corpus(small, healthy, severity, name):
    damage, sentence = FINDINGS[severity][name]
    everything = "\n".join(finding.sentence for finding in healthy.findings)
    assert healthy.verdict.can_be_trained and not re.search(sentence, everything), everything
    damage(small)
    diagnosis = small.diagnosis()
    assert re.search(sentence, sentences_of(diagnosis, severity)), diagnosis.findings
    assert diagnosis.verdict.can_be_trained == (severity != "error")


def test_all_characters_absent_from_training_are_counted(small):
    letters = "".join(chr(code) for code in range(ord("a"), ord("z") + 1))
    change(small.valid, 0, text=letters)
    diagnosis = small.diagnosis()
    crossing = diagnosis.health.crossings[0]
    assert (crossing.unknown_character_count, len(crossing.unknown_characters)) == (26, 20)
    assert "26 characters of valid.jsonl do not occur in train.jsonl" in sentences_of(diagnosis, "warning")
    assert " and 6 more" in health_lines(diagnosis)
    change(small.valid, 0, text="ढढढ")
    assert not re.search(r" and \d+ more", health_lines(small.diagnosis()))


def test_healthy_corpus_is_warned_only_about_its_size(small):
    diagnosis = small.diagnosis()
    assert sentences_of(diagnosis, "error") == "" and "0.7 min of speech" in sentences_of(diagnosis, "warning")
    assert [f.severity for f in diagnosis.findings] == ["warning", "note"], diagnosis.findings
    train, valid = diagnosis.health.parts
    assert (train.utterances, train.usable, train.speakers.count, valid.speakers.count) == (40, 40, 3, 1)
    assert train.hours == pytest.approx(40 / 3600) and train.speakers.median_hours == pytest.approx(13 / 3600)
    assert train.speakers.largest_share == pytest.approx(14 / 40) and train.sound.decoded == 40
    assert train.epoch.steps == 5 and train.epoch.padding_share == 0
    assert train.formats[0].name == ".wav" and train.sound.rates[0].name == "16000"
    characters = [len(row.text.replace(" ", "")) for row in small.train]
    assert train.rates.median == np.median(characters) and train.words == sum(len(r.text.split()) for r in small.train)


def test_missing_or_unreadable_audio_is_an_error(small):
    paths = small.write_manifests()
    (small.directory / "train003.wav").unlink()
    missing = diagnose(paths, CONFIG, 0)
    assert "1 row is broken (2.5 %, more than --max_rejected 1%): row 4, train003.wav" in sentences_of(missing, "error")
    (small.directory / "train003.wav").write_bytes(b"no audio")
    assert diagnose(paths, CONFIG, 0).verdict.can_be_trained  # 0 recordings are decoded
    broken = diagnose(paths, CONFIG, 500)
    assert "1 of 40 sampled recordings cannot be read (row 4, train003.wav: it cannot be opened" in sentences_of(
        broken, "error"
    )


@pytest.mark.parametrize(
    "stated_seconds, is_reported", [(1.1, False), (1.12, False), (1.13, True), (0.91, False), (0.87, True)]
)
def test_deviating_duration_is_reported_if_trainer_skips_the_file(small, stated_seconds, is_reported):
    change(small.train, 4, stated_seconds=stated_seconds)
    result = small.diagnosis().health.parts[0].sound
    assert (result.deviating.count, result.left_out, result.unreadable.count) == (is_reported, is_reported, 0)
    source = read_manifest(small.directory / "train.jsonl")[4].source
    with pytest.raises(DataError, match="not .* as in its row") if is_reported else nullcontext():
        read_samples(source)


def test_all_broken_rows_count_towards_max_rejected(small):
    change(small.train, 0, text="।")
    change(small.train, 1, stated_seconds=2.0)
    paths = small.write_manifests()
    (small.directory / "train002.wav").write_bytes(b"no audio")
    for share, error in (("7.5%", ""), ("7%", "; 7.5 % of the rows are broken, more than --max_rejected 7%.")):
        diagnosis = diagnose(paths, replace(CONFIG, data=DataConfig(max_rejected=share)), 500)
        message = sentences_of(diagnosis, "error" if error else "warning")
        assert "1 of 40 sampled recordings cannot be read (row 3, train002.wav: it cannot be opened as audio" in message
        assert f"(row 2, train001.wav: off by 1.00 s){error}" in message
        assert diagnosis.verdict.can_be_trained == (not error)
        assert "1 row is broken (2.5 %): row 1, train000.wav" in sentences_of(diagnosis, "warning")


def test_broken_share_is_extrapolated_from_decoded_recordings(small):
    for number in range(20):
        change(small.train, number, stated_seconds=2.0)
    message = sentences_of(diagnose(small.write_manifests(), CONFIG, 10), "error")
    assert "5 of 10 recordings are shorter or longer" in message and "; about 50 % of the rows are broken" in message


def test_unreadable_audio_of_skipped_rows_does_not_count(small):
    for number in range(3):
        change(small.train, number, seconds=2.5)
    paths = small.write_manifests()
    (small.directory / "train000.wav").write_bytes(b"no audio")
    diagnosis = diagnose(paths, replace(CONFIG, data=DataConfig(max_duration=2.0)), 500)
    assert diagnosis.verdict.can_be_trained and "1 of 40 sampled recordings cannot be read" in sentences_of(
        diagnosis, "warning"
    )
    assert "3 utterances (7.5 %) will be skipped: 3 x longer than --max_duration 2 s." in sentences_of(
        diagnosis, "warning"
    )
    assert not diagnose(paths, CONFIG, 500).verdict.can_be_trained


def test_too_small_vocab_size_is_an_error(small):
    config = replace(CONFIG, text=TextConfig(vocab_size=9))
    diagnosis = small.diagnosis(config)
    assert not diagnosis.verdict.can_be_trained and "--vocab_size 9 is too small" in diagnosis.verdict.sentence


def test_skipped_rows_equal_those_of_trainer(small, tmp_path):
    for number, text in enumerate(("।", "नदी " * 30, "रान रान")):
        change(small.train, number, text=text)
    change(small.train, 5, seconds=2.5)
    path = small.write_manifests()[0]
    config = replace(CONFIG, data=DataConfig(train_manifest=path, max_duration=2.0))
    manifest, rejections = read_manifest(path), Rejections(tmp_path / "rejected.jsonl", most=0.5)
    rejections.begin(manifest)
    tokenizer = build_tokenizer(manifest, config)
    speech = build_training_speech(
        config, manifest, tokenizer, architecture_of(config, tokenizer.size), rejections, NoiseReverb()
    )
    listed = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    train = diagnose((path,), config, 0).health.parts[0]
    assert train.usable == len(speech.utterances) == 37
    assert [(e.row, e.detail) for e in train.rejected.examples] == [(r["row"], r["reason"]) for r in listed]
    planner = EpochPlanner(np.array([u.duration for u in speech.utterances]), config.global_batch_size, config.run.seed)
    assert train.epoch == measure_epoch(planner, config.data.batch_size)


# The script


def run_inspect(*arguments: object, encoding: str = "utf-8") -> tuple[int, str, str]:
    done = run_in_process(SCRIPT, *map(str, arguments), encoding=encoding)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_script_exits_with_0_if_trainable_and_3_otherwise(small, tmp_path):
    page = tmp_path / "report.html"
    code, out, _ = run_inspect(*small.write_manifests(), "--tokenizer_type", "char", "--html", page)
    assert code == 0 and out.splitlines()[-1].startswith("Can be trained: yes, 40 utterances (0.7 min)")
    assert page.read_text().startswith("<!doctype html>") and not list(tmp_path.glob("*.partial"))
    small.valid.append(small.train[3])
    train, valid = small.write_manifests()
    code, out, _ = run_inspect("--train_manifest", train, "--valid_manifest", valid, "--json")
    report = json.loads(out)
    assert code == 3 and out.count("\n") == 1 and not report["verdict"]["can_be_trained"]
    assert report["health"]["crossings"][0]["audio"]["count"] == 1
    code, out, _ = run_inspect(train, valid)
    assert code == 3 and out.splitlines()[-1].startswith("Can be trained: no. 1 recording of")


def test_html_overwrites_only_a_page(small, tmp_path):
    train, valid = small.write_manifests()
    before = Path(train).read_bytes()
    code, _, error = run_inspect("--html", train, valid)
    assert code == 2 and "would overwrite a file" in error and Path(train).read_bytes() == before
    page = tmp_path / "page.html"
    write_page(str(page), draw_page(small.diagnosis()))
    check_own_file(page, "--html", "page", PAGE_START)


def test_max_rejected_allows_a_share_of_broken_rows(small):
    change(small.train, 0, text="।")
    for flags, expected in ((("--max_rejected", "2.5%"), 0), (("--max_rejected", "0.024"), 3), ((), 3)):
        assert run_inspect(*small.write_manifests(), "--tokenizer_type", "char", *flags)[0] == expected


@pytest.mark.parametrize(
    "flags, code",
    [((), 2), (("--max_rejected", "many"), 2), (("--audio_utterances", "-1"), 2), (("--html", "/nowhere/a.html"), 6)],
)
def test_invalid_flags_are_rejected_before_reading(flags, code):
    manifests = ("/nowhere/train.jsonl",) if flags else ()
    assert run_inspect(*manifests, *flags)[0] == code


def hostile_corpus(directory: Path) -> tuple[str, ...]:
    """Write manifests and audio with all kinds of defects."""
    tone = 0.1 * np.sin(np.arange(RATE) / 10)
    soundfile.write(directory / "good.wav", tone, RATE)
    soundfile.write(directory / "nan.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    soundfile.write(directory / "zero.wav", np.zeros(RATE), RATE)
    (directory / "empty.wav").write_bytes(b"")
    (directory / "cut.wav").write_bytes((directory / "good.wav").read_bytes()[:5000])
    (directory / "folder.wav").mkdir()
    names = ("good", "good", "nan", "zero", "empty", "cut", "folder", "missing\u202e", "good", "good", "good")
    texts = ("<script>alert(1)</script>", "\u202eउलट\u202c", "\u0958", "क\u093c", "", "\x00\x1b[31m", "\ud800")
    rows = [
        {"audio_filepath": f"{n}.wav", "duration": 1.0, "text": t, "speaker": "<b>&\u202e"}
        for n, t in zip(names, (*texts, "नaदी", "&lt;", "\U000e0041" * 3, "एक दोन"), strict=True)
    ]
    rows += [{"audio_filepath": "good.wav", "duration": d, "text": "एक", "speaker": "\ud800"} for d in (0, 9e8, 1e-300)]
    for split in ("train", "valid"):
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "none.jsonl").write_text("\n")
    (directory / "broken.jsonl").write_bytes(b'{"audio_filepath": "good.wav"\n\xff')
    return tuple(str(directory / f"{name}.jsonl") for name in ("train", "valid", "none", "broken", "absent"))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_corpus_gives_report_without_traceback(tmp_path, encoding):
    manifests, page = hostile_corpus(tmp_path), tmp_path / "page.html"
    code, out, _ = run_inspect(*manifests, "--html", page, "--vocab_size", "60", encoding=encoding)
    assert code == 3 and out.splitlines()[-1].startswith("Can be trained: no. ")
    assert "it contains NaN or infinite samples" in out and "is empty" in out and "not a line of JSON" in out
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "&amp;lt;" in text
    assert not {"\u202e", "\x1b", "\x00", "\ud800"} & set(text + out)
    code, out, _ = run_inspect(*manifests, "--json", encoding=encoding)
    assert code == 3 and json.loads(out)["verdict"]["can_be_trained"] is False


def test_manifest_of_only_broken_rows_is_reported_by_row(tmp_path):
    manifest, page = hostile_corpus(tmp_path)[3], tmp_path / "page.html"
    code, out, _ = run_inspect(manifest, "--html", page)
    message = "broken.jsonl: 2 rows are broken (100 %, more than --max_rejected 1%): row 1: not a line of JSON"
    assert code == 3 and f"Can be trained: no. {message}" in out and "row 2 · not UTF-8" in out
    assert message in page.read_text() and "not UTF-8" in page.read_text()
    code, out, _ = run_inspect(manifest, "--max_rejected", "100%")
    assert code == 3 and "None of the 2 rows of broken.jsonl is usable: not a line of JSON" in out.splitlines()[-1]


@pytest.mark.parametrize("number", [2, 4])
def test_empty_or_missing_manifest_is_reported(tmp_path, number):
    code, out, _ = run_inspect(hostile_corpus(tmp_path)[number], "--html", tmp_path / "page.html")
    assert code == 3 and "Can be trained: no" in out
    assert "no readable manifest" in (tmp_path / "page.html").read_text()


# The page


def test_page_is_self_contained_and_pictures_have_labels(small):
    change(small.train, 0, text='<img src=x onerror="1"> नदी')
    change(small.train, 1, text="नदी" * 90)
    page = draw_page(small.diagnosis())
    parts = PageParts(page)
    assert not parts.tags & {"script", "link", "img", "iframe", "object", "a"} and "&lt;img" in page
    assert not {name for name in parts.attributes if name in ("src", "href") or name.startswith("on")}
    assert not re.search(r"https?:|//|@import|url\(", page) and parts.opened == []
    assert len(parts.pictures) == 12
    assert all(picture["role"] == "img" and " to " in picture["aria-label"] for picture in parts.pictures)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_text_report_ends_with_verdict_and_shows_empty_bins():
    assert sparkline(build_histogram(np.array([1.0, 1.0, 3.0])), "s") == "0 ·█▄ 3 s"
    lines = health_lines(diagnose(("/nowhere/a.jsonl",), CONFIG, 0)).splitlines()
    assert lines[0] == "Findings" and lines[-1].startswith("Can be trained: no")
