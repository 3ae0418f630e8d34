"""Health check of manifests before training: findings, each with a remedy, and a verdict.

An error is refused by the trainer or makes its result worthless; a warning should be checked; a note is information.
"""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from konkanivani.config import TrainConfig
from konkanivani.console import count, duration_words, is_or_are, parse_share, short_name
from konkanivani.corpora.health import CorpusHealth, CorpusPart, HealthRequest, PartHealth, PartOverlap, measure_corpus
from konkanivani.corpora.recordings import LOUD, MAX_SILENCE, QUIET, SoundHealth
from konkanivani.corpora.statistics import RARE, CharacterHealth, Listed
from konkanivani.data.manifest import Manifest, iterate_texts, measure_corpus_size, no_text, read_manifest
from konkanivani.data.text import Tokenizer, normalize_text, train_tokenizer
from konkanivani.errors import KonkaniVaniError
from konkanivani.flags import resolve, resolved
from konkanivani.lengths import SAMPLE_RATE

OFTEN = 0.05  # share of the recordings or sentences; a rarer problem is less severe, or not reported
FEW_WORDS = 1_000  # in a validation or test set
FEW_HOURS = 1.0
MAX_PADDING = 0.2
MAX_SPEAKER_SHARE = 0.5
LEVELS_APART = 12.0  # dB between the medians of two manifests
FEW_SENTENCES = 0.2  # distinct sentences as a share of the utterances


@dataclass(frozen=True)
class Finding:
    """A finding: its severity, the problem and its location, and a remedy."""

    severity: Literal["error", "warning", "note"]
    sentence: str
    remedy: str


error = partial(Finding, "error")
warning = partial(Finding, "warning")
note = partial(Finding, "note")


@dataclass(frozen=True)
class Verdict:
    """Whether the corpus can be trained on, and the reason."""

    can_be_trained: bool
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """Result of a health check: measurements, findings, verdict. `vocabulary` is in tokens, 0 without a tokenizer."""

    health: CorpusHealth
    findings: tuple[Finding, ...]
    verdict: Verdict
    vocabulary: int
    vocabulary_asked: int
    tokenizer_type: str


def diagnose(manifests: tuple[str, ...], config: TrainConfig, audio_utterances: int) -> Diagnosis:
    """Return the diagnosis of the manifests; the first is the training set, and unreadable ones are findings."""
    parts = []
    refusals = []
    tokenizer = None
    for number, path in enumerate(manifests):
        try:
            manifest = read_manifest(path, config.data.audio_roots)
            parts.append(CorpusPart(path, number == 0, manifest, len(manifest), manifest.broken))
            if number == 0 and len(manifest):  # if all rows are broken, that is the only finding
                config = resolve(config, measure_corpus_size(manifest))
                tokenizer = build_tokenizer(manifest, config)
        except KonkaniVaniError as refusal:
            refusals.append(str(refusal))
    # Without a usable training manifest, the automatic settings get the defaults for much speech.
    health = measure_corpus(parts, HealthRequest(resolve(config), tokenizer, audio_utterances))
    findings = find_all(health, tuple(refusals), config)
    verdict = reach_verdict(health, findings)
    size = tokenizer.size if tokenizer else 0
    return Diagnosis(health, findings, verdict, size, config.text.vocab_size, config.text.tokenizer_type)


def build_tokenizer(manifest: Manifest, config: TrainConfig) -> Tokenizer:
    """Return the tokenizer that the trainer would train on the manifest.

    Raises:
        DataError, UsageError: If no tokenizer can be trained.
    """
    texts = {normalize_text(text, config.text.digits) for text in iterate_texts(manifest)} - {""}
    if not texts:
        raise no_text(manifest)
    with contextlib.redirect_stdout(io.StringIO()):  # its message on a smaller vocabulary is in the report, too
        return train_tokenizer(texts, resolved(config.text.tokenizer_type), config.text.vocab_size)


def find_all(health: CorpusHealth, refusals: tuple[str, ...], config: TrainConfig) -> tuple[Finding, ...]:
    """Return all findings, errors first.

    Args:
        refusals: Messages on manifests that cannot be read, or on a vocabulary that cannot be built.
    """
    most_rejected = parse_share(config.data.max_rejected, "--max_rejected")
    findings = [Finding("error", refusal, "") for refusal in refusals]
    for part in health.parts:
        findings += _row_findings(part, most_rejected)
        findings += _speaker_findings(part)
        findings += _rate_findings(part)
        if part.sound:
            findings += _sound_findings(part, part.sound, most_rejected)
        findings += _size_findings(part)
    findings += _recording_findings(health)
    for crossing in health.crossings:
        findings += _overlap_findings(crossing, health)
    findings += _character_findings(health.characters, config)
    order = ("error", "warning", "note")
    # sorted() is stable: within a severity, findings stay in the order above.
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def reach_verdict(health: CorpusHealth, findings: tuple[Finding, ...]) -> Verdict:
    """Return whether the corpus can be trained on, in one sentence."""
    errors = [finding.sentence.rstrip(".") for finding in findings if finding.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return Verdict(False, f"Can be trained: no. {errors[0]}{more}.")
    train = next(part for part in health.parts if part.is_training)
    warnings = sum(finding.severity == "warning" for finding in findings)
    look = f"; see {count(warnings, 'warning')}" if warnings else ""
    usable = f"{count(train.usable, 'utterance')} ({duration_words(train.usable_hours)}) are usable"
    return Verdict(True, f"Can be trained: yes, {usable}{look}.")


def _first_example(listed: Listed) -> str:
    """Return the location and problem of the first example, to be appended to a sentence."""
    worst = listed.examples[0]
    return f"{worst.place}: {worst.detail}"


def _row_count(part: PartHealth) -> int:
    """Return the number of rows in the manifest, from which the share of broken rows is computed."""
    return part.utterances + part.broken.count


def _row_findings(part: PartHealth, most_rejected: float) -> Iterator[Finding]:
    name = short_name(part.path)
    limited = part.rejected.count - part.empty.count
    # The trainer counts empty transcripts as broken rows, too.
    broken = part.broken.count + part.empty.count
    rows = _row_count(part)
    if broken:
        too_many = broken > most_rejected * rows
        allowed = f", more than --max_rejected {100 * most_rejected:g}%" if too_many else ""
        first = _first_example(part.broken if part.broken.count else part.empty)
        yield Finding(
            "error" if too_many else "warning",
            f"{name}: {count(broken, 'row', 'is/are')} broken ({100 * broken / rows:.3g} %{allowed}): {first}.",
            "Fix or remove the listed rows, or raise --max_rejected to skip them.",
        )
    if not part.usable:
        unusable, *_ = part.rejected.examples or part.broken.examples
        yield error(
            f"None of the {count(rows, 'row')} of {name} is usable: {unusable.detail}.",
            "Check durations, transcripts and the flags --min_duration, --max_duration and --vocab_size.",
        )
    elif limited:
        reasons = "; ".join(f"{tally.count} x {tally.name}" for tally in part.reasons[:3])
        yield warning(
            f"{name}: {count(limited, 'utterance')} ({100 * limited / part.utterances:.3g} %) will be skipped: "
            f"{reasons}.",
            "Split long recordings into sentences; check the transcripts of the others.",
        )
    if part.repeated_rows.count:
        yield warning(
            f"{name} lists {count(part.repeated_rows.count, 'recording')} more than once "
            f"({_first_example(part.repeated_rows)}).",
            "Remove the duplicate rows.",
        )
    # A duplicate row also has duplicate audio; report it once.
    copies = part.repeated_audio.count - part.repeated_rows.count
    if copies > 0:
        yield warning(
            f"{name}: {count(copies, 'file', 'is/are')} identical to another file "
            f"({_first_example(part.repeated_audio)}).",
            "Keep one row per recording; check that their transcripts agree.",
        )


def _speaker_findings(part: PartHealth) -> Iterator[Finding]:
    name = short_name(part.path)
    speakers = part.speakers
    if not speakers.count:
        yield note(
            f"{name} has no speaker labels, so speaker overlap between training and test cannot be checked.",
            'Add "speaker" to each row.',
        )
    elif speakers.unnamed:
        yield note(f"{name}: {count(speakers.unnamed, 'row', 'has/have')} no speaker label.", 'Add "speaker" to them.')
    if part.is_training and speakers.count == 1 and not speakers.unnamed:
        yield warning(
            f"{name} has only one speaker, {speakers.largest}: expect a higher WER for other voices.",
            "Record more speakers, a little speech of each.",
        )
    if part.is_training and speakers.count > 1 and speakers.largest_share > MAX_SPEAKER_SHARE:
        yield warning(
            f"{name}: {100 * speakers.largest_share:.0f} % of the speech is by one of {speakers.count} "
            f"speakers, {speakers.largest}.",
            "Record more speech of the others.",
        )


def _rate_findings(part: PartHealth) -> Iterator[Finding]:
    unusual = part.rates.unusual
    if unusual.count:
        yield warning(
            f"{short_name(part.path)}: {count(unusual.count, 'transcript')} may not match the audio, judging "
            f"by characters per second (row {unusual.examples[0].row}: {unusual.examples[0].detail}).",
            "Listen to the listed recordings, worst first.",
        )


def _sound_findings(part: PartHealth, sound: SoundHealth, most_rejected: float) -> Iterator[Finding]:
    name = short_name(part.path)
    # Extrapolate from the sample to all utterances; the trainer adds these to the broken rows.
    left_out = part.utterances * sound.left_out / max(sound.asked, 1)
    broken = part.broken.count + part.empty.count + left_out
    rows = _row_count(part)
    # Without unusable audio, too many broken rows are already an error of `_row_findings`.
    too_many = left_out > 0 and broken > most_rejected * rows
    # Exact only if all recordings were sampled.
    share = f"{'' if sound.asked == part.utterances else 'about '}{100 * broken / rows:.3g} %"
    limit = f"--max_rejected {100 * most_rejected:g}%"
    allowed = f"; {share} of the rows are broken, more than {limit}" if too_many else ""
    left_out_finding = error if too_many else warning
    if sound.unreadable.count:
        yield left_out_finding(
            f"{name}: {sound.unreadable.count} of {sound.asked} sampled recordings cannot be read "
            f"({_first_example(sound.unreadable)}){allowed}.",
            "Training skips them, up to --max_rejected. --audio_utterances checks more of them.",
        )
    if sound.deviating.count:
        yield left_out_finding(
            f"{name}: {sound.deviating.count} of {sound.decoded} recordings are shorter or longer than their "
            f"rows state, so training skips them ({_first_example(sound.deviating)}){allowed}.",
            "Correct the durations in the manifest.",
        )
    if sound.mute.count:
        yield warning(
            f"{name}: {sound.mute.count} of {sound.decoded} recordings {is_or_are(sound.mute.count)} empty "
            f"({_first_example(sound.mute)}).",
            "Record them again, or remove the rows.",
        )
    yield from _level_findings(name, sound)


def _level_findings(name: str, sound: SoundHealth) -> Iterator[Finding]:
    speakers = [f"{speaker.name} ({speaker.level:.0f})" for speaker in sound.speaker_levels if speaker.level < QUIET]
    quiet = f"quieter than {QUIET:g} dBFS" + (f", mainly {', '.join(speakers[:5])}" if speakers else "")
    filtered = "Check the microphone or the sound card; a high-pass filter removes the offset."
    checks = (
        (sound.clipped, "clipped", "Record with less gain: clipped samples cannot be restored."),
        (sound.quiet, quiet, "Move closer to the microphone, or increase the gain."),
        (sound.loud, f"louder than {LOUD:g} dBFS", "Check for clipping and compression."),
        (sound.silent, f"over {100 * MAX_SILENCE:.0f} % silence", "Trim the pauses; check the transcripts."),
        (sound.offset, "shifted by a DC offset", filtered),
        (sound.gated, "interrupted by digital silence", "Switch off the noise gate; record in an uncompressed format."),
        (sound.narrow, "without sound above the given frequency", "Expect more errors on recordings with all of it."),
        (sound.mixing, "used with one channel only", "Check the cable; set the row's channel to choose another one."),
    )
    for listed, problem, remedy in checks:
        if listed.count:
            share = listed.count / sound.decoded
            yield Finding(
                "warning" if share > OFTEN else "note",
                f"{name}: {listed.count} of {sound.decoded} recordings {is_or_are(listed.count)} {problem} "
                f"({_first_example(listed)}).",
                remedy,
            )


def _recording_findings(health: CorpusHealth) -> Iterator[Finding]:
    """Yield findings from the comparison of all manifests' recordings with the training set."""
    with_sound = [(part, part.sound) for part in health.parts if part.sound and part.sound.decoded]
    rates = sorted({int(tally.name) for _, sound in with_sound for tally in sound.rates})
    # Upsampled audio has no energy above its old Nyquist frequency.
    if len(rates) > 1 or any(rate < SAMPLE_RATE for rate in rates):
        yield note(
            f"The recordings' sample rates are {', '.join(map(str, rates))} Hz; all are resampled to {SAMPLE_RATE} Hz.",
            "Audio with a lower rate has no high frequencies: use the same kind of audio at inference.",
        )
    trained = next(((part, sound) for part, sound in with_sound if part.is_training), None)
    if trained is None:
        return
    train, train_sound = trained
    for part, sound in with_sound:
        if not {tally.name for tally in sound.rates} & {tally.name for tally in train_sound.rates}:
            yield warning(
                f"No recording of {short_name(part.path)} has a sample rate that occurs in {short_name(train.path)}.",
                "The model is not trained on such audio: train on some, or expect a higher WER.",
            )
        if abs(sound.median_level - train_sound.median_level) > LEVELS_APART:
            yield warning(
                f"{short_name(part.path)} is at {sound.median_level:.0f} dBFS, {short_name(train.path)} "
                f"at {train_sound.median_level:.0f}.",
                "The microphones or rooms differ: add some such recordings to the training set.",
            )


def _size_findings(part: PartHealth) -> Iterator[Finding]:
    name = short_name(part.path)
    if part.is_training and 0 < part.usable_hours < FEW_HOURS:
        yield warning(
            f"{name} has {duration_words(part.usable_hours)} of speech: enough only to test the pipeline.",
            "Start with a small --preset; record more.",
        )
    if part.is_training and part.usable and part.sentences < FEW_SENTENCES * part.utterances:
        yield warning(
            f"{name}: the {part.utterances} utterances contain only {part.sentences} different sentences.",
            "The model may memorise the sentences: add others.",
        )
    elif part.repeated_sentences.count > OFTEN * part.utterances:
        yield note(
            f"{name}: {count(part.repeated_sentences.count, 'utterance', 'repeats/repeat')} a sentence "
            f"({_first_example(part.repeated_sentences)}).",
            "That is fine if different speakers say them.",
        )
    if not part.is_training and 0 < part.words < FEW_WORDS:
        yield note(
            f"{name} has {count(part.words, 'word')}: one wrong word is {100 / part.words:.3g} % of word error rate.",
            "Differences of a few words are not significant; add utterances.",
        )
    if part.epoch and part.epoch.padding_share > MAX_PADDING:
        yield note(
            f"{name}: {100 * part.epoch.padding_share:.0f} % of the computation in an epoch is padding.",
            "A smaller --batch_size with more --gradient_accumulation_steps gives the same result with less padding.",
        )


def _overlap_findings(crossing: PartOverlap, health: CorpusHealth) -> Iterator[Finding]:
    first = short_name(crossing.first)
    second = short_name(crossing.second)
    total = next(part.utterances for part in health.parts if part.path == crossing.second)
    audio = crossing.audio
    # Only overlap with the training set makes a score meaningless.
    graver, milder = (error, warning) if crossing.with_training else (warning, note)
    if audio.count:
        yield graver(
            f"{count(audio.count, 'recording')} of {second} {is_or_are(audio.count)} also in {first} "
            f"({_first_example(audio)}).",
            "A score on training data is meaningless: remove them from one of the two.",
        )
    if crossing.speakers:
        yield milder(
            f"{count(crossing.speakers, 'speaker')} of {second} {is_or_are(crossing.speakers)} also in {first} "
            f"({', '.join(crossing.shared_speakers[:5])}).",
            "Scores will be better than for new speakers: put each speaker into one manifest only.",
        )
    if crossing.sentences.count and (crossing.with_training or crossing.sentences.count > OFTEN * total):
        yield milder(
            f"{crossing.sentences.count} of {count(total, 'utterance')} of {second} have a sentence that is "
            f"also in {first} ({_first_example(crossing.sentences)}).",
            "The model may have memorised them: use different sentences in each manifest, if possible.",
        )
    if crossing.with_training and crossing.unknown_characters:
        shown = ", ".join(f"{tally.name} (U+{ord(tally.name):04X})" for tally in crossing.unknown_characters[:5])
        yield warning(
            f"{count(crossing.unknown_character_count, 'character')} of {second} do not occur in {first}: {shown}.",
            "They cannot be recognised: fix the spelling, or train on text that contains them.",
        )


def _character_findings(text: CharacterHealth, config: TrainConfig) -> Iterator[Finding]:
    yield from _marked_character_findings(text)
    if text.mixed_word_count:
        word = text.mixed_words[0]
        yield warning(
            f"{count(text.mixed_word_count, 'word', 'mixes/mix')} scripts, such as {word.word} (row {word.row}).",
            "Similar letters of two scripts are different tokens: write each word in one script.",
        )
    if text.twins:
        yield note(
            f"{count(len(text.twins), 'character', 'is/are')} encoded in two ways, such as {text.twins[0].shape}.",
            "Normalisation (NFC) unifies them; other programs may not.",
        )
    changes = text.changes
    if changes.joiners_removed:
        yield note(
            f"{count(changes.joiners_removed, 'joiner', 'is/are')} removed (ZWJ, ZWNJ).",
            "They are not pronounced: no action is needed.",
        )
    if changes.digits and config.text.digits == "keep":
        yield warning(
            f"{count(changes.digits, 'digit', 'is/are')} in the transcripts as digits, not as spoken.",
            "Write numbers as words; --digits spell spells each digit.",
        )


def _marked_character_findings(text: CharacterHealth) -> Iterator[Finding]:
    foreign = f"of another script than {text.script.capitalize()}"
    checks = (
        ("foreign script", foreign, "Use the script of the other transcripts, or remove them."),
        ("invisible", "invisible or undefined", "Remove them at their source."),
        ("rare", f"seen fewer than {RARE} times", "Often typing errors, and too rare to be learnt: check them."),
    )
    for mark, problem, remedy in checks:
        marked = [character for character in text.inventory if mark in character.marks]
        if marked:
            shown = ", ".join(f"{_visible_character(c.code)}U+{c.code:04X} {c.name}" for c in marked[:4])
            more = f" and {len(marked) - 4} more" if len(marked) > 4 else ""
            yield warning(f"{count(len(marked), 'character', 'is/are')} {problem}: {shown}{more}.", remedy)


def _visible_character(code: int) -> str:
    """Return the character and a space, to precede its code point; "" if it is not visible."""
    return f"{chr(code)} " if chr(code).isprintable() and not chr(code).isspace() else ""
