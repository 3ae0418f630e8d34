"""The health report as lines for a terminal."""

from collections.abc import Iterable, Iterator

from konkanivani.base.console import count, duration_words, short_name
from konkanivani.data.health.characters import CharacterHealth
from konkanivani.data.health.examples import Listed, Tally
from konkanivani.data.health.findings import Diagnosis
from konkanivani.data.health.health import Crossing, PartHealth
from konkanivani.data.health.histogram import Histogram
from konkanivani.data.health.recordings import SoundHealth

BLOCKS = "·▁▂▃▄▅▆▇█"
WIDTH = 24
MOST_SHOWN = 5
MOST_LETTERS = 60


def health_lines(diagnosis: Diagnosis) -> str:
    """The whole report; its last line is the verdict."""
    health = diagnosis.health
    lines: list[str] = []
    for part in health.parts:
        lines += [part.path, *("  " + line for line in _part_lines(part)), ""]
    if health.crossings:
        lines += ["Between the manifests", *("  " + line for c in health.crossings for line in _crossing_lines(c)), ""]
    if health.parts:
        lines += [
            f"Text: {vocabulary_words(diagnosis)}",
            *("  " + line for line in _character_lines(health.characters)),
            "",
        ]
    lines += ["Findings" if diagnosis.findings else "No findings"]
    for finding in diagnosis.findings:
        remedy = f"\n           {finding.remedy}" if finding.remedy else ""
        lines.append(f"  {finding.severity:8} {finding.sentence}{remedy}")
    return "\n".join([*lines, "", diagnosis.verdict.sentence])


def vocabulary_words(diagnosis: Diagnosis) -> str:
    """The vocabulary's size, and the one asked for where the text allows no more."""
    if not diagnosis.vocabulary:
        return "no vocabulary"
    size = f"{diagnosis.vocabulary:,} {diagnosis.tokenizer_type} tokens"
    is_less = diagnosis.vocabulary < diagnosis.vocabulary_asked
    return size + (f", all that it allows of --vocab_size {diagnosis.vocabulary_asked}" if is_less else "")


def _row(title: str, text: str) -> str:
    return f"{title:<{WIDTH}}{text}"


def speaker_levels(sound: SoundHealth) -> str:
    """The quietest speakers with their level."""
    return ", ".join(f"{speaker.name} {speaker.level:.0f}" for speaker in sound.speaker_levels[:MOST_SHOWN])


def _part_lines(part: PartHealth) -> Iterator[str]:
    speakers = part.speakers
    yield _row("role", "trained on" if part.is_training else "validated or tested on")
    usable = f"usable {part.usable:,} in {duration_words(part.usable_hours)}"
    yield _row("utterances", f"{part.utterances:,} in {duration_words(part.hours)}; {usable}")
    yield _row("words", f"{part.words:,} in {part.sentences:,} different sentences")
    named = f"{speakers.count}, median {duration_words(speakers.median_hours)}; {speakers.largest} has "
    share = f"{100 * speakers.largest_share:.0f} %" + (
        f"; {count(speakers.unnamed, 'row', 'names/name')} none" if speakers.unnamed else ""
    )
    yield _row("speakers", named + share if speakers.count else "none named")
    yield _row("file formats", _tallied(part.formats))
    yield _row("duration", sparkline(part.durations, "s"))
    yield _row("  in hours", sparkline(part.hours_by_duration, "s"))
    yield _row("characters a second", f"{sparkline(part.rates.characters, '')}, median {part.rates.median:.1f}")
    yield _row("words a second", sparkline(part.rates.words, ""))
    if part.epoch:
        epoch = part.epoch
        yield _row("steps an epoch", f"{epoch.steps:,} of {epoch.window_size} utterances, {epoch.window_seconds:.0f} s")
        yield _row("padding", f"{100 * epoch.padding_share:.1f} % in micro-batches of {epoch.micro_batch}")
    if part.sound:
        yield from _sound_lines(part.sound)
    yield from _listing("broken rows", part.broken)
    yield from _listing("cannot be used", part.rejected)
    yield from _listing("unusual transcripts", part.rates.unusual)
    yield from _listing("rows listed again", part.repeated_rows)
    yield from _listing("same audio again", part.repeated_audio)
    yield _row("sentences again", f"{part.repeated_sentences.count:,}")


def _sound_lines(sound: SoundHealth) -> Iterator[str]:
    yield _row("recordings decoded", f"{sound.heard} of {sound.asked} tried")
    if not sound.heard:
        yield from _listing("unreadable", sound.unreadable)
        return
    yield _row("sample rates", ", ".join(f"{tally.name} Hz ({tally.count})" for tally in sound.rates))
    yield _row("channels", _tallied(sound.channels))
    yield _row("level", f"{sparkline(sound.levels, 'dBFS')}, median {sound.median_level:.1f}")
    if len(sound.speaker_levels) > 1:
        yield _row("  quietest speakers", f"{speaker_levels(sound)} dBFS")
    ends = f"median {sound.median_leading:.2f} s before, {sound.median_trailing:.2f} s after"
    yield _row("silence", f"{sparkline(sound.silence, '%')}, {100 * sound.silence_share:.0f} % in all; {ends}")
    yield _row("at full scale", f"{100 * sound.full_scale_share:.3g} % of the samples")
    for title, listed in (
        ("unreadable", sound.unreadable),
        ("clipped", sound.clipped),
        ("quiet", sound.quiet),
        ("loud", sound.loud),
        ("empty", sound.mute),
        ("mostly silence", sound.silent),
        ("DC offset", sound.offset),
        ("other duration", sound.deviating),
    ):
        yield from _listing(title, listed)


def _crossing_lines(crossing: Crossing) -> Iterator[str]:
    both = f"{short_name(crossing.second)} in {short_name(crossing.first)}"
    shared = (
        f"{count(crossing.audio.count, 'recording')}, {count(crossing.speakers, 'speaker')}, "
        f"{count(crossing.sentences.count, 'sentence')}"
    )
    unknown = len(crossing.unknown_characters)
    yield f"{both}: {shared}" + (f"; {count(unknown, 'character')} only in the former" if unknown else "")


def _character_lines(text: CharacterHealth) -> Iterator[str]:
    changes = text.changes
    yield _row("script", text.script.capitalize() or "none")
    yield _row("characters", f"{text.different} different, {text.letters} of them after normalisation")
    yield _row("normalisation changes", f"{count(changes.texts, 'text')}: " + changed_words(text))
    for twin in text.twins[:MOST_SHOWN]:
        ways = " or ".join(f"{code_points(s.codes)} ({s.count})" for s in twin.spellings)
        yield _row("written in two ways", f"{twin.shape}: {ways}")
    for word in text.mixed_words[:MOST_SHOWN]:
        yield _row(
            "mixed scripts", f"{word.word}: {' and '.join(word.scripts).lower()}, {word.count} x, row {word.row}"
        )
    for character in text.inventory:
        if character.marks:
            shown = f"U+{character.code:04X} {character.name}, {character.count} x: {', '.join(character.marks)}"
            yield _row("noteworthy", shown)


def changed_words(text: CharacterHealth) -> str:
    """What normalisation changes, in words."""
    changes = text.changes
    parts = (
        (changes.not_composed, "text", "not in NFC"),
        (changes.joiners_removed, "joiner", "removed"),
        (changes.format_removed, "format character", "removed"),
        (changes.to_space, "mark", "made spaces"),
        (changes.lowered, "letter", "lower-cased"),
    )
    return ", ".join(f"{count(number, noun)} {what}" for number, noun, what in parts if number) or "nothing"


def code_points(codes: Iterable[int]) -> str:
    """As in "U+0915 U+093C"."""
    return " ".join(f"U+{code:04X}" for code in codes)


def sparkline(histogram: Histogram, unit: str) -> str:
    """The bins as blocks between the first one's start and the last one's end; what lies outside is told."""
    most = max(histogram.amounts, default=0)
    if not most:
        return "nothing"
    # A bin with anything in it can be seen.
    levels = [-(-8 * amount // most) for amount in histogram.amounts]
    unit = f" {unit}" if unit else ""
    outside = "".join(
        f", {amount:,.5g} {word}"
        for amount, word in ((histogram.below, "below"), (histogram.beyond, "beyond"))
        if amount
    )
    return f"{histogram.start:g} {''.join(BLOCKS[int(level)] for level in levels)} {histogram.end:g}{unit}{outside}"


def _tallied(counted: tuple[Tally, ...]) -> str:
    return ", ".join(f"{tally.name} ({tally.count:,})" for tally in counted)


def _listing(title: str, listed: Listed) -> Iterator[str]:
    """A line with the count and one for each of the first few; none where there are none."""
    if not listed.count:
        return
    yield _row(title, f"{listed.count:,}")
    for example in listed.examples[:MOST_SHOWN]:
        cut = example.text if len(example.text) <= MOST_LETTERS else example.text[:MOST_LETTERS] + "…"
        yield f"    {example.place}: {example.detail}" + (f": {cut}" if cut else "")
    if listed.count > MOST_SHOWN:
        yield "    …"
