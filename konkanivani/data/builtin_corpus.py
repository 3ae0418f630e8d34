"""The built-in corpus: Konkani sentences from patterns, spoken by espeak-ng. Synthetic, Marathi voice.

It lets a first run start without recordings and shows that the machine works: that training learns, that decoding
decodes. It does not show how well the machine hears Konkani: no person speaks in it, and the voice is a Marathi one.

The sentences come from `builtin_patterns.txt`. No sentence is in two splits, no voice is in two splits, and half of the
test sentences follow patterns of which training has no sentence (`pattern` is `unseen`).
"""

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from konkanivani.data.manifest import write_manifest
from konkanivani.data.speech_synthesis import SpeakingStyle, SpeechSynthesizer, UnspeakableError, reads_signs_by_name
from konkanivani.data.utterance import Utterance
from konkanivani.errors import DataError, ResourceError, UsageError
from konkanivani.held_folder import held_folder

if TYPE_CHECKING:
    import numpy as np

WHAT_IT_IS = "synthetic, Marathi voice"
BUILT_IN = "built-in corpus"
RECIPE_VERSION = 1  # counts changes of how sentences become files; changes of sentences and styles are seen without it
PATTERNS_FILE = Path(__file__).with_name("builtin_patterns.txt")

# Variants of the voice `mr` that differ in pitch and formants and stay intelligible: no whisper, croak or robot.
TRAIN_VOICES = tuple(
    f"mr+{variant}" for variant in ("m1", "f1", "m2", "f2", "m4", "f4", "m6", "Annie", "m7", "Alex", "Mario", "Mike")
)
VALID_VOICES = ("mr+robert", "mr+f5")
TEST_VOICES = ("mr+m3", "mr+f3", "mr+max", "mr+linda")
RATES = (130, 145, 160, 175, 190)  # words a minute
PITCHES = (38, 46, 54, 62)  # 0 to 99
LEVELS = (-9.0, -6.0, -3.0, -1.0)  # dB under espeak-ng's own level

PROBE = "म्हाका शाळेंत वचपाक कितें जाय"  # vowel signs, anusvara and virama in one sentence


@dataclass(frozen=True)
class CorpusSize:
    """Utterances in each split. Half of the test utterances (rounded down) follow unseen patterns."""

    train: int = 1250
    valid: int = 60
    test: int = 140


@dataclass(frozen=True)
class PatternBook:
    """The sentence patterns: `slots` maps a slot's name to its fillers, the patterns name slots in braces."""

    slots: dict[str, tuple[str, ...]]
    seen: tuple[str, ...]
    unseen: tuple[str, ...]


@dataclass(frozen=True)
class SpokenSentence:
    """A sentence, how it is spoken, its level in dB under espeak-ng's own, and `seen`, `unseen` or nothing."""

    text: str
    style: SpeakingStyle
    level: float
    pattern: str = ""


@dataclass(frozen=True)
class CorpusPlan:
    """What will be spoken, split by split."""

    train: tuple[SpokenSentence, ...]
    valid: tuple[SpokenSentence, ...]
    test: tuple[SpokenSentence, ...]

    def digest(self) -> str:
        """A hash of everything that the audio follows from but espeak-ng itself."""
        recipe = json.dumps([RECIPE_VERSION, asdict(self)], ensure_ascii=False)
        return hashlib.sha256(recipe.encode()).hexdigest()


@dataclass(frozen=True)
class CorpusRecipe:
    """What a corpus is made from: what it is called, its plan, and a hash that changes when any file of it would.

    `files` must lie in a corpus that is whole, beside audio/.
    """

    name: str
    plan: CorpusPlan
    digest: str
    files: tuple[str, ...] = ("train.jsonl", "valid.jsonl", "test.jsonl")


@dataclass(frozen=True)
class CorpusDescription:
    """What corpus.json says; `sentences` is the SHA-256 of what is spoken, one sentence a line."""

    name: str
    engine: str
    utterances: CorpusSize
    sentences: str
    recipe: str
    what: str = WHAT_IT_IS
    shows: str = "that the machine works, not how well it hears Konkani"


# ------------------------------------------------------------------------------------------------------------ sentences


def read_patterns(path: Path = PATTERNS_FILE) -> PatternBook:
    """The pattern book at `path`; a DataError names the line that cannot be read."""
    slots: dict[str, tuple[str, ...]] = {}
    patterns: dict[str, list[str]] = {"seen": [], "unseen": []}
    section = ""
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line in ("[slots]", "[seen]", "[unseen]"):
            section = line[1:-1]
        elif section == "slots":
            name, _, fillers = line.partition(" = ")
            slots[name] = tuple(filler.strip() for filler in fillers.split("|"))
        elif section and set(slot_names(line)) <= slots.keys():
            patterns[section].append(line)
        else:
            raise DataError(f"{path}, line {row}: {line!r} names a slot that is not defined. Define it under [slots].")
    return PatternBook(slots, tuple(patterns["seen"]), tuple(patterns["unseen"]))


def slot_names(pattern: str) -> list[str]:
    """The slots of `pattern` in their order."""
    return re.findall(r"\{(\w+)\}", pattern)


def deal(fillers: Sequence[str], seed: str) -> Iterator[str]:
    """The fillers in an order of their own for each seed, then again in another order, without end."""
    generator = random.Random(seed)
    deck = list(fillers)
    while True:
        generator.shuffle(deck)
        yield from deck


def pattern_sentences(pattern: str, slots: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Sentences of `pattern`, each possible one at least once; a slot's fillers come up equally often."""
    names = slot_names(pattern)
    decks = [deal(slots[name], f"{pattern} {place}") for place, name in enumerate(names)]
    count = math.prod(len(slots[name]) for name in names)
    dealt = (tuple(map(next, decks)) for _ in range(count))
    for fillers in itertools.chain(dealt, itertools.product(*(slots[name] for name in names))):
        if len(set(zip(names, fillers, strict=True))) == len(names):  # a slot that stands twice differs from itself
            yield re.sub(r"\{\w+\}", "%s", pattern) % fillers


def interleave_sentences(patterns: Sequence[str], slots: dict[str, tuple[str, ...]], count: int) -> list[str]:
    """`count` different sentences: the first of each pattern, then the second of each, and so on.

    A UsageError says how many there are where the patterns have fewer.
    """
    sentences: dict[str, None] = {}
    streams = [pattern_sentences(pattern, slots) for pattern in patterns]
    while streams and len(sentences) < count:
        streams = [stream for stream in streams if _take_new(stream, sentences)]
    if len(sentences) < count:
        raise UsageError(
            f"The built-in corpus cannot have {count} different sentences of {len(patterns)} patterns: "
            f"there are {len(sentences)}. Ask for fewer utterances."
        )
    return list(sentences)[:count]


def _take_new(stream: Iterator[str], sentences: dict[str, None]) -> bool:
    """Adds the stream's next sentence that is not in `sentences`; False where there is none."""
    for sentence in stream:
        if sentence not in sentences:
            sentences[sentence] = None
            return True
    return False


def spread(count: int, total: int) -> list[int]:
    """`count` places among 0 .. total - 1, evenly apart."""
    return [(2 * index + 1) * total // (2 * count) for index in range(count)]


# ----------------------------------------------------------------------------------------------------------------- plan


def plan_corpus(size: CorpusSize) -> CorpusPlan:
    """What a corpus of `size` says and in which voices; the same for the same size and pattern book.

    Raises a UsageError for a size that the patterns cannot fill.
    """
    if size.train < 1 or size.valid < 1 or size.test < 2:
        raise UsageError(
            f"The built-in corpus cannot have {size.train} train, {size.valid} valid and {size.test} test utterances: "
            "it needs at least 1, 1 and 2. Ask for more of them."
        )
    book = read_patterns()
    patterns = [book.seen[place] for place in spread(min(len(book.seen), size.train), len(book.seen))]
    unseen_count = size.test // 2
    held_out = size.valid + size.test - unseen_count
    sentences = interleave_sentences(patterns, book.slots, size.train + held_out)
    # The first round has one sentence of every pattern, all for training: so each pattern in test is a seen one.
    first_round, rest = sentences[: len(patterns)], sentences[len(patterns) :]
    places = set(spread(held_out, len(rest)))
    train = first_round + [sentence for place, sentence in enumerate(rest) if place not in places]
    kept = [rest[place] for place in sorted(places)]
    valid_places = set(spread(size.valid, len(kept)))
    valid = [sentence for place, sentence in enumerate(kept) if place in valid_places]
    test = [sentence for place, sentence in enumerate(kept) if place not in valid_places]
    unseen = interleave_sentences(book.unseen, book.slots, unseen_count)
    return CorpusPlan(
        train=tuple(assign_styles(train, TRAIN_VOICES, "seen")),
        valid=tuple(assign_styles(valid, VALID_VOICES, "seen")),
        test=tuple(assign_styles(test, TEST_VOICES, "seen") + assign_styles(unseen, TEST_VOICES, "unseen")),
    )


def assign_styles(sentences: Sequence[str], voices: Sequence[str], pattern: str = "") -> list[SpokenSentence]:
    """The sentences with the voices dealt out evenly, and a rate, pitch and level that follow from the text."""
    spoken = []
    for index, text in enumerate(sentences):
        choice = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        choice, rate = divmod(choice, len(RATES))
        choice, pitch = divmod(choice, len(PITCHES))
        style = SpeakingStyle(voices[index % len(voices)], RATES[rate], PITCHES[pitch])
        spoken.append(SpokenSentence(text, style, LEVELS[choice % len(LEVELS)], pattern))
    return spoken


# ---------------------------------------------------------------------------------------------------------------- audio


def synthesize_corpus(
    sentences: Sequence[str], directory: str | Path, *, name: str = "train", voices: Sequence[str] = TRAIN_VOICES
) -> Path:
    """The manifest `directory`/`name`.jsonl of any sentences, spoken as the built-in ones: synthetic, Marathi voice.

    Raises a DataError for a sentence or a voice that espeak-ng cannot speak, and a ResourceError where espeakng-loader
    is not installed or the disk cannot be written.
    """
    manifest = Path(directory) / f"{name}.jsonl"
    with explained_disk_errors(manifest.parent), SpeechSynthesizer() as synthesizer:
        refuse_unspoken(write_split(assign_styles(sentences, voices), manifest, synthesizer))
    return manifest


def refuse_unspoken(errors: Sequence[UnspeakableError]) -> None:
    """Raises the first of the errors, if there is one."""
    if errors:
        raise errors[0]


def write_split(
    sentences: Sequence[SpokenSentence], manifest: Path, synthesizer: SpeechSynthesizer
) -> list[UnspeakableError]:
    """Writes `manifest` and beside it audio/<its name>-<number>.flac, 16 kHz mono 16-bit.

    Sentences that cannot be spoken are left out; their errors come back.
    """
    audio = manifest.parent / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    utterances, errors = [], []
    for sentence in sentences:
        path = audio / f"{manifest.stem}-{len(utterances):04d}.flac"
        try:
            duration = write_audio(sentence, path, synthesizer)
        except UnspeakableError as error:
            errors.append(error)
            continue
        utterances.append(
            Utterance(
                audio_filepath=f"audio/{path.name}",
                audio_path=str(path),
                duration=duration,
                text=sentence.text,
                speaker=sentence.style.voice,
                pattern=sentence.pattern,
            )
        )
    write_manifest(manifest, utterances)
    return errors


def write_audio(sentence: SpokenSentence, path: Path, synthesizer: SpeechSynthesizer) -> float:
    """Writes `sentence` as a FLAC file, 16 kHz mono 16-bit; returns its duration in seconds."""
    import soundfile

    from konkanivani.lengths import SAMPLE_RATE

    waveform = spoken_waveform(sentence, synthesizer)
    content = io.BytesIO()  # written by Python, which reports a full disk
    soundfile.write(content, waveform, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    path.write_bytes(content.getvalue())
    return len(waveform) / SAMPLE_RATE


def spoken_waveform(sentence: SpokenSentence, synthesizer: SpeechSynthesizer) -> "np.ndarray":
    """(S,) int16 at 16 kHz: `sentence` as the corpus has it, from espeak-ng's first sample to its last."""
    import torch
    import torchaudio

    from konkanivani.audio import one_thread
    from konkanivani.lengths import SAMPLE_RATE

    spoken = torch.frombuffer(bytearray(synthesizer.speak(sentence.text, sentence.style)), dtype=torch.int16)
    with one_thread():  # and in float64: the rounding below then never depends on the machine's kernels
        waveform = torchaudio.functional.resample(spoken.double(), synthesizer.sample_rate, SAMPLE_RATE)
    return (waveform * 10 ** (sentence.level / 20)).round().clamp(-32768, 32767).to(torch.int16).numpy()


# ---------------------------------------------------------------------------------------------------------- publication


def build_builtin_corpus(directory: str | Path, size: CorpusSize = CorpusSize()) -> bool:
    """Puts the built-in corpus at `directory`; False where it was there already, whole and of the same recipe.

    Raises a UsageError for a size that cannot be had, and what publish_corpus does.
    """
    plan = plan_corpus(size)
    recipe = CorpusRecipe(BUILT_IN, plan, plan.digest())
    return publish_corpus(Path(directory), recipe, lambda partial: refuse_unspoken(write_corpus(recipe, partial)))


def publish_corpus(directory: Path, recipe: CorpusRecipe, write: Callable[[Path], None]) -> bool:
    """Puts at `directory` what `write` makes; False where it was there already, whole and of the same recipe.

    The folder gets audio/, train.jsonl, valid.jsonl, test.jsonl and corpus.json. It is made beside `directory` and
    renamed into place, so a build that is killed leaves nothing half-written there; the next one clears up after it.
    Two builds at a time wait for each other. Raises a UsageError for a folder that holds something else, and a
    ResourceError where espeakng-loader is not installed or the disk cannot be written.
    """
    directory = Path(os.path.abspath(directory))
    with explained_disk_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with held_folder(directory.parent):
            if is_complete(directory, recipe):
                return False
            check_replaceable(directory, recipe.name)
            partial = directory.with_name(f".{directory.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                write(partial)
                put_in_place(partial, directory)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return True


def write_corpus(recipe: CorpusRecipe, directory: Path) -> list[UnspeakableError]:
    """Writes the three splits and corpus.json to `directory`; the errors of what cannot be spoken come back.

    Raises a DataError where the voice misreads Devanagari.
    """
    errors, counts, texts = [], [], []
    with SpeechSynthesizer() as synthesizer:
        if reads_signs_by_name(PROBE, synthesizer.phonemes(PROBE, "mr")):
            raise DataError(
                f"{synthesizer.engine} reads Devanagari vowel signs by their names with its Marathi voice, "
                "so its speech is of no use. Install another version of espeakng-loader."
            )
        for split in ("train", "valid", "test"):
            sentences = getattr(recipe.plan, split)
            refused = write_split(sentences, directory / f"{split}.jsonl", synthesizer)
            unspoken = {error.text for error in refused}
            texts += [sentence.text for sentence in sentences if sentence.text not in unspoken]
            counts.append(len(sentences) - len(refused))
            errors += refused
        engine = synthesizer.engine
    digest = hashlib.sha256("".join(f"{text}\n" for text in texts).encode()).hexdigest()
    description = CorpusDescription(recipe.name, engine, CorpusSize(*counts), digest, recipe.digest)
    (directory / "corpus.json").write_text(json.dumps(asdict(description), indent=2) + "\n", encoding="utf-8")
    return errors


def read_description(directory: Path) -> dict[str, object]:
    """What corpus.json in `directory` says; empty where there is none of ours."""
    try:
        description = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return description if isinstance(description, dict) and description.get("what") == WHAT_IT_IS else {}


def is_complete(directory: Path, recipe: CorpusRecipe) -> bool:
    """Whether `directory` holds the corpus of `recipe`, no file missing."""
    description = read_description(directory)
    if description.get("recipe") != recipe.digest:
        return False
    has_files = all((directory / name).is_file() for name in recipe.files)
    count = sum(description["utterances"].values())
    return has_files and (directory / "audio").is_dir() and len(os.listdir(directory / "audio")) == count


def check_replaceable(directory: Path, name: str) -> None:
    """Raises a UsageError where `directory` holds anything but an older or damaged corpus of this name."""
    if not os.path.lexists(directory):
        return
    description = read_description(directory)
    if description and description.get("name", BUILT_IN) == name:  # before there were others, it had no name
        return
    if not directory.is_dir() or directory.is_symlink() or any(directory.iterdir()):
        raise UsageError(
            f"The {name} cannot be put at {directory}: something else is there, and it would be lost. "
            "Give --output a path where nothing is."
        )


def put_in_place(partial: Path, directory: Path) -> None:
    """Renames `partial` to `directory`; what was there goes only when the new folder is whole."""
    outdated = directory.with_name(f".{directory.name}.outdated")
    shutil.rmtree(outdated, ignore_errors=True)
    if directory.exists():
        os.rename(directory, outdated)
    os.rename(partial, directory)
    shutil.rmtree(outdated, ignore_errors=True)


@contextlib.contextmanager
def explained_disk_errors(directory: Path) -> Iterator[None]:
    """Turns an OSError of the block into a ResourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"The corpus cannot be written to {directory}: {error.strerror or error} ({error.filename or directory}). "
            "Free about 100 MB there, or give --output a folder that you can write to."
        ) from None
