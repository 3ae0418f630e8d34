"""The built-in corpus, its plan and its creation: synthetic speech in a Marathi voice, to show that the pipeline works.

No sentence is in two splits, no voice is in two splits, and half of the test sentences follow patterns that do not
occur in training (`pattern` is `unseen`).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from konkanivani.base.errors import DataError, ResourceError, UsageError, explained
from konkanivani.base.files import folder_lock
from konkanivani.data.synthetic.builtin_patterns import evenly_spaced, hold_out, interleave_sentences, read_patterns
from konkanivani.data.synthetic.speech_synthesis import SpeechSynthesizer, UnspeakableError, reads_signs_by_name
from konkanivani.data.synthetic.spoken_sentences import (
    RECIPE_VERSION,
    TEST_VOICES,
    TRAIN_VOICES,
    VALID_VOICES,
    SpokenSentence,
    assign_styles,
    write_split,
)

WHAT_IT_IS = "synthetic, Marathi voice"
BUILT_IN = "built-in corpus"
NO_ROOM = (
    "Free about 100 MB there, or run prepare_builtin_corpus.py with a writable --output folder and give the "
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
    kept, for_training = hold_out(rest, held_out)
    valid, test = hold_out(kept, size.valid)
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
    Concurrent builds wait for each other.

    Raises:
        UsageError: If the folder contains anything else.
        ResourceError: If espeakng-loader is not installed, or the disk cannot be written.
    """
    directory = Path(os.path.abspath(directory))
    with explained(ResourceError, f"The corpus cannot be written to {directory}", NO_ROOM):
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Lock the parent, because `directory` itself is renamed.
        with folder_lock(directory.parent):
            if is_complete(directory, recipe):
                return False
            check_replaceable(directory, recipe.name)
            partial, outdated = (directory.with_name(f".{directory.name}.{state}") for state in ("partial", "outdated"))
            shutil.rmtree(partial, ignore_errors=True)
            try:
                write(partial)
                # Delete the old corpus only after the new one is complete.
                shutil.rmtree(outdated, ignore_errors=True)
                if directory.exists():
                    os.rename(directory, outdated)
                os.rename(partial, directory)
                shutil.rmtree(outdated, ignore_errors=True)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return True


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
