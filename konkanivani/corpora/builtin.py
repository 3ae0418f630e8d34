"""Built-in corpus of synthetic speech: sentence patterns, plan and creation.

No sentence is in two splits, no voice is in two splits, and half of the test sentences follow patterns that do not
occur in training (`pattern` is `unseen`).
"""

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
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np
import soundfile

from konkanivani.corpora.synthesis import SpeakingStyle, SpeechSynthesizer, UnspeakableError, reads_signs_by_name
from konkanivani.data.index import Utterance
from konkanivani.data.manifest import write_manifest
from konkanivani.errors import DataError, ResourceError, UsageError, explained
from konkanivani.files import exclusive_lock

# --------------------
# Sentences spoken by espeak-ng into FLAC files, with their manifest: synthetic, Marathi voices.


RECIPE_VERSION = 1  # of the conversion to files; changed sentences and styles change the digest without it

# Variants of the voice `mr` that differ in pitch and formants and stay intelligible; no breathy or creaky ones.
TRAIN_VOICES = tuple(
    f"mr+{variant}" for variant in ("m1", "f1", "m2", "f2", "m4", "f4", "m6", "Annie", "m7", "Alex", "Mario", "Mike")
)
VALID_VOICES = ("mr+robert", "mr+f5")
TEST_VOICES = ("mr+m3", "mr+f3", "mr+max", "mr+linda")
RATES = (130, 145, 160, 175, 190)  # words per minute
PITCHES = (38, 46, 54, 62)  # 0 to 99
LEVELS = (-9.0, -6.0, -3.0, -1.0)  # dB relative to espeak-ng's own level


@dataclass(frozen=True)
class SpokenSentence:
    """A sentence, its speaking style, its level in dB relative to espeak-ng's own, and `seen`, `unseen` or ""."""

    text: str
    style: SpeakingStyle
    level: float
    pattern: str = ""


def assign_styles(sentences: Sequence[str], voices: Sequence[str], pattern: str = "") -> list[SpokenSentence]:
    """Return the sentences with the voices in turn, and a rate, pitch and level that depend on the text."""
    styled = []
    for index, text in enumerate(sentences):
        # From a hash of the text, so that other sentences of the corpus do not change the audio of this one.
        choice = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        choice, rate = divmod(choice, len(RATES))
        choice, pitch = divmod(choice, len(PITCHES))
        style = SpeakingStyle(voices[index % len(voices)], RATES[rate], PITCHES[pitch])
        styled.append(SpokenSentence(text, style, LEVELS[choice % len(LEVELS)], pattern))
    return styled


def write_split(
    sentences: Sequence[SpokenSentence], manifest: Path, synthesizer: SpeechSynthesizer
) -> list[UnspeakableError]:
    """Write `manifest`, and its audio to audio/<its name>-<number>.flac in the same folder, 16 kHz mono 16-bit.

    Sentences that cannot be spoken are left out; their errors are returned.
    """
    from konkanivani.lengths import SAMPLE_RATE

    audio = manifest.parent / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    utterances: list[Utterance] = []
    errors: list[UnspeakableError] = []
    for sentence in sentences:
        path = audio / f"{manifest.stem}-{len(utterances):04d}.flac"
        try:
            waveform = spoken_waveform(sentence, synthesizer)
        except UnspeakableError as error:
            errors.append(error)
            continue
        content = io.BytesIO()  # written to disk by Python, which reports a full disk
        soundfile.write(content, waveform, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        path.write_bytes(content.getvalue())
        audio_fields = f"audio/{path.name}", str(path), len(waveform) / SAMPLE_RATE
        utterances.append(Utterance(*audio_fields, sentence.text, sentence.style.voice, sentence.pattern))
    write_manifest(manifest, utterances)
    return errors


def spoken_waveform(sentence: SpokenSentence, synthesizer: SpeechSynthesizer) -> np.ndarray:
    """Return the audio of `sentence` (S,) int16 at 16 kHz, from espeak-ng's first sample to its last."""
    import torch
    import torchaudio

    from konkanivani.data.audio.waveform import one_thread
    from konkanivani.lengths import SAMPLE_RATE

    samples = torch.frombuffer(bytearray(synthesizer.speak(sentence.text, sentence.style)), dtype=torch.int16)
    # With one thread and float64, the rounding below does not depend on the machine's kernels.
    with one_thread():
        waveform = torchaudio.functional.resample(samples.double(), synthesizer.sample_rate, SAMPLE_RATE)
    return (waveform * 10 ** (sentence.level / 20)).round().clamp(-32768, 32767).to(torch.int16).numpy()


# --------------------
# Sentences of the built-in corpus, made from the patterns in `builtin_patterns.txt`.


PATTERNS_FILE = Path(__file__).with_name("builtin_patterns.txt")


@dataclass(frozen=True)
class PatternBook:
    """Sentence patterns with slot names in braces; `slots` maps a slot's name to its fillers."""

    slots: dict[str, tuple[str, ...]]
    seen: tuple[str, ...]
    unseen: tuple[str, ...]


def read_patterns(path: Path = PATTERNS_FILE) -> PatternBook:
    """Load the pattern book at `path`; a DataError names an invalid line."""
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
            raise DataError(f"{path}, line {row}: {line!r} uses an undefined slot. Define it under [slots].")
    return PatternBook(slots, tuple(patterns["seen"]), tuple(patterns["unseen"]))


def slot_names(pattern: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", pattern)


def shuffled_cycle(fillers: Sequence[str], seed: str) -> Iterator[str]:
    """Yield the fillers without end, in a new order after each cycle; the orders depend on the seed."""
    # A text seed is hashed with SHA-512, so the order is the same on every machine and in every process.
    generator = random.Random(seed)
    deck = list(fillers)
    while True:
        generator.shuffle(deck)
        yield from deck


def pattern_sentences(pattern: str, slots: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield sentences of `pattern`, each possible one at least once; the fillers of a slot are equally frequent."""
    names = slot_names(pattern)
    decks = [shuffled_cycle(slots[name], f"{pattern} {place}") for place, name in enumerate(names)]
    count = math.prod(len(slots[name]) for name in names)
    # Balanced random combinations first; the complete product after them yields those that were missed.
    dealt = (tuple(map(next, decks)) for _ in range(count))
    for fillers in itertools.chain(dealt, itertools.product(*(slots[name] for name in names))):
        if len(set(zip(names, fillers, strict=True))) == len(names):  # a slot used twice needs different fillers
            yield re.sub(r"\{\w+\}", "%s", pattern) % fillers


def interleave_sentences(patterns: Sequence[str], slots: dict[str, tuple[str, ...]], count: int) -> list[str]:
    """Return `count` different sentences: the first of each pattern, then the second of each, and so on.

    Raises:
        UsageError: If the patterns have fewer sentences; the message states their number.
    """
    # A dict as an ordered set: the order of a set of strings differs between processes.
    sentences: dict[str, None] = {}
    streams = [pattern_sentences(pattern, slots) for pattern in patterns]
    while streams and len(sentences) < count:
        for stream in tuple(streams):  # a copy: exhausted streams are removed
            new = next((sentence for sentence in stream if sentence not in sentences), None)
            if new is None:
                streams.remove(stream)
            else:
                sentences[new] = None
    if len(sentences) < count:
        raise UsageError(
            f"The built-in corpus has only {len(sentences)} different sentences of {len(patterns)} patterns, "
            f"not {count}. Use fewer utterances."
        )
    return list(sentences)[:count]


def evenly_spaced(count: int, total: int) -> list[int]:
    """Return `count` evenly spaced integers from 0 to total - 1."""
    return [(2 * index + 1) * total // (2 * count) for index in range(count)]


def hold_out(sentences: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """Split off `count` evenly spaced sentences; return them and the others, both in order."""
    places = set(evenly_spaced(count, len(sentences)))
    held_out = [text for place, text in enumerate(sentences) if place in places]
    return held_out, [text for place, text in enumerate(sentences) if place not in places]


# --------------------
# The built-in corpus, its plan and its creation: synthetic speech in a Marathi voice, to show that the pipeline works.


WHAT_IT_IS = "synthetic, Marathi voice"
BUILT_IN = "built-in corpus"
NO_ROOM = (
    "Free about 100 MB there, or run konkanivani builtin with a writable --output folder and give the "
    "manifests in it to the trainer."
)
PROBE = "म्हाका शाळेंत वचपाक कितें जाय"  # vowel signs, anusvara and virama in one sentence


@dataclass(frozen=True)
class SplitSizes:
    """Utterances per split. Half of the test utterances (rounded down) follow unseen patterns."""

    train: int = 1250
    valid: int = 60
    test: int = 140


@dataclass(frozen=True)
class CorpusPlan:
    """Sentences to be spoken, per split."""

    train: tuple[SpokenSentence, ...]
    valid: tuple[SpokenSentence, ...]
    test: tuple[SpokenSentence, ...]

    def digest(self) -> str:
        """Return a hash of everything that determines the audio, except espeak-ng itself."""
        recipe = json.dumps([RECIPE_VERSION, asdict(self)], ensure_ascii=False)
        return hashlib.sha256(recipe.encode()).hexdigest()


@dataclass(frozen=True)
class CorpusRecipe:
    """Name, plan and digest of a corpus; the digest changes if any of its files would.

    `files` must exist in a complete corpus, in addition to audio/.
    """

    name: str
    plan: CorpusPlan
    digest: str
    files: tuple[str, ...] = ("train.jsonl", "valid.jsonl", "test.jsonl")


def plan_corpus(size: SplitSizes) -> CorpusPlan:
    """Return the sentences and voices of a corpus of `size`; the same for the same size and pattern book.

    Raises:
        UsageError: If the size is too small, or too large for the patterns.
    """
    if size.train < 1 or size.valid < 1 or size.test < 2:
        raise UsageError(
            f"The built-in corpus cannot have {size.train} train, {size.valid} valid and {size.test} test "
            "utterances: it needs at least 1, 1 and 2. Use larger numbers."
        )
    book = read_patterns()
    # A small corpus uses some of the patterns, evenly spaced.
    patterns = [book.seen[place] for place in evenly_spaced(min(len(book.seen), size.train), len(book.seen))]
    unseen_count = size.test // 2
    held_out = size.valid + size.test - unseen_count
    sentences = interleave_sentences(patterns, book.slots, size.train + held_out)
    # The first round has one sentence of every pattern, all for training: thus every `seen` test pattern is trained on.
    first_round = sentences[: len(patterns)]
    rest = sentences[len(patterns) :]
    evaluation, for_training = hold_out(rest, held_out)
    valid, test = hold_out(evaluation, size.valid)
    unseen = interleave_sentences(book.unseen, book.slots, unseen_count)
    return CorpusPlan(
        train=tuple(assign_styles(first_round + for_training, TRAIN_VOICES, "seen")),
        valid=tuple(assign_styles(valid, VALID_VOICES, "seen")),
        test=tuple(assign_styles(test, TEST_VOICES, "seen") + assign_styles(unseen, TEST_VOICES, "unseen")),
    )


def build_builtin_corpus(directory: str | Path, size: SplitSizes = SplitSizes()) -> bool:
    """Create the built-in corpus at `directory`; return False if it exists, complete and of the same recipe.

    Raises a UsageError for an impossible size, and the errors of `publish_corpus`.
    """
    plan = plan_corpus(size)
    recipe = CorpusRecipe(BUILT_IN, plan, plan.digest())

    def write(partial: Path) -> None:
        for error in write_corpus(recipe, partial):
            raise error  # none of the built-in sentences may be left out

    return publish_corpus(Path(directory), recipe, write)


def publish_corpus(directory: Path, recipe: CorpusRecipe, write: Callable[[Path], None]) -> bool:
    """Create a corpus at `directory` by calling `write`; return False if it exists, complete and of the same recipe.

    The folder gets audio/, train.jsonl, valid.jsonl, test.jsonl and corpus.json. It is made next to `directory` and
    renamed, so a build that is killed leaves nothing incomplete at `directory`; the next build deletes its remains.
    Concurrent builds wait for each other, where the file system has locks. If `directory` is a symbolic link, it stays
    one: the corpus is in the folder to which it points.

    Raises:
        UsageError: If the folder contains anything else.
        ResourceError: If espeakng-loader is not installed, or the disk cannot be written.
    """
    # A link would be renamed instead of its folder, and the new corpus written to the disk of the link. Not resolve(),
    # which raises RuntimeError for links in a circle.
    directory = Path(os.path.realpath(directory))
    with explained(ResourceError, f"The corpus cannot be written to {directory}", NO_ROOM):
        if is_complete(directory, recipe):  # needs no lock, so the folder may be read-only
            return False
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Lock the parent, because `directory` itself is renamed.
        with exclusive_lock(directory.parent, is_required=False):
            if is_complete(directory, recipe):
                return False
            check_replaceable(directory, recipe.name)
            partial, outdated = (directory.with_name(f".{directory.name}.{state}") for state in ("partial", "outdated"))
            _delete(partial)
            try:
                write(partial)
                # Delete the old corpus only after the new one is complete.
                _delete(outdated)
                if directory.exists():
                    os.rename(directory, outdated)
                os.rename(partial, directory)
                _delete(outdated)
            finally:
                _delete(partial)
    return True


def _delete(folder: Path) -> None:
    """Delete a folder as far as possible; of a link, as earlier versions left them, delete only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def write_corpus(recipe: CorpusRecipe, directory: Path) -> list[UnspeakableError]:
    """Write the three splits and corpus.json to `directory`; return the errors of sentences that cannot be spoken.

    Raises:
        DataError: If the voice misreads Devanagari.
    """
    errors = []
    counts = []
    texts = []
    with SpeechSynthesizer() as synthesizer:
        # espeak-ng reports no error if a voice reads vowel signs by their names.
        if reads_signs_by_name(PROBE, synthesizer.phonemes(PROBE, "mr")):
            raise DataError(
                f"{synthesizer.engine} pronounces the names of Devanagari vowel signs with its Marathi voice, "
                "so its speech is unusable. Install another version of espeakng-loader."
            )
        for split in ("train", "valid", "test"):
            sentences = getattr(recipe.plan, split)
            refused = write_split(sentences, directory / f"{split}.jsonl", synthesizer)
            unspoken = {error.text for error in refused}
            texts += [sentence.text for sentence in sentences if sentence.text not in unspoken]
            counts.append(len(sentences) - len(refused))
            errors += refused
    description = {
        "name": recipe.name,
        "engine": synthesizer.engine,
        "utterances": asdict(SplitSizes(*counts)),
        "sentences": hashlib.sha256("".join(f"{text}\n" for text in texts).encode()).hexdigest(),
        "recipe": recipe.digest,
        "what": WHAT_IT_IS,
        "shows": "that the pipeline works, not how well it recognises Konkani",
    }
    (directory / "corpus.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return errors


def read_description(directory: Path) -> dict[str, object]:
    """Return the content of corpus.json in `directory`; empty if there is none, or none of this project."""
    try:
        description = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return description if isinstance(description, dict) and description.get("what") == WHAT_IT_IS else {}


def read_sizes(directory: Path) -> SplitSizes:
    """Return the recorded sizes of the splits; a DataError if corpus.json in `directory` has none."""
    sizes = read_description(directory).get("utterances")
    if not isinstance(sizes, dict) or sizes.keys() != {"train", "valid", "test"}:
        raise DataError(f"{directory / 'corpus.json'} is damaged. Delete {directory} and generate it again.")
    return SplitSizes(**sizes)


def is_complete(directory: Path, recipe: CorpusRecipe) -> bool:
    """Return whether `directory` contains the corpus of `recipe` without a missing file."""
    description = read_description(directory)
    if description.get("recipe") != recipe.digest:
        return False
    has_files = all((directory / name).is_file() for name in recipe.files)
    # Sentences that cannot be spoken are not counted: the recorded sizes are the numbers of files.
    count = sum(astuple(read_sizes(directory)))
    return has_files and (directory / "audio").is_dir() and len(os.listdir(directory / "audio")) == count


def check_replaceable(directory: Path, name: str) -> None:
    """Raise a UsageError if `directory` contains anything but an older or damaged corpus of this name."""
    if not os.path.lexists(directory):
        return
    description = read_description(directory)
    if description and description.get("name", BUILT_IN) == name:  # the first versions of corpus.json had no name
        return
    if not directory.is_dir() or directory.is_symlink() or any(directory.iterdir()):
        raise UsageError(
            f"The {name} cannot be written to {directory}: it contains other files that would be overwritten. "
            "Choose another --output."
        )
