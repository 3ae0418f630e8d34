"""Whether a run goes on with the corpus that it began with, or on purpose with another one that it can spell."""

from collections import Counter
from collections.abc import Iterable

from konkanivani.base.console import say
from konkanivani.base.errors import CheckpointError, DataError
from konkanivani.data.fingerprint import Fingerprint, make_fingerprint, read_fingerprint
from konkanivani.data.manifest import Manifest
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.recipe.start import Start

MIN_SHARED = 0.5  # of the smaller one's utterances: recordings may have been added and taken out
WARNED_OF = 0.05  # less may be two corpora that number their files alike
MAX_UNKNOWN = 0.005  # of the characters
NAMED_CHARACTERS = 10


def remembered_corpus(start: Start) -> Fingerprint | None:
    """What the checkpoint was trained on; None where there is none, or it is of a version that did not say."""
    state = start.resumed.states.get("corpus") if start.resumed else None
    return None if state is None else read_fingerprint(state)


def check_corpus(start: Start, corpus: Fingerprint) -> None:
    """Raises a CheckpointError where a run would go on with another corpus and nobody has said so."""
    remembered = remembered_corpus(start)
    if remembered is None or remembered.shared(corpus) >= MIN_SHARED:
        return
    if start.config.run.new_corpus:
        say(f"Going on with another corpus: {corpus.sentence()}, after {remembered.sentence()}.")
        return
    raise CheckpointError(
        f"The run in {start.config.run.checkpoint_dir} was trained on {remembered.sentence()}, and "
        f"{corpus.sentence()} is another corpus. Begin a run of its own: with another --checkpoint_dir, or with "
        "--fresh in place of --resume (what is there is moved into a folder beside). To go on with the old one's "
        "weights all the same, give --new_corpus."
    )


def warn_of_shared(corpus: Fingerprint, *others: Manifest | None) -> None:
    """Says which other manifests hold utterances that are trained on: what is scored on them says little."""
    for other in others:
        shared = 0.0 if other is None else corpus.shared(make_fingerprint(other))
        if shared >= WARNED_OF:
            say(
                f"Careful: {shared:.0%} of the utterances of {other.path} are trained on too, so its error rates "
                "say little about other speech. inspect_data.py names what stands in both."
            )


def check_spelling(start: Start, corpus: Fingerprint, tokenizer: Vocabulary, texts: Iterable[str]) -> None:
    """Raises a DataError where a checkpoint's tokenizer lacks too many characters of a corpus that has changed.

    `texts` are the corpus's, normalised.
    """
    remembered = remembered_corpus(start)
    if not start.resumed or (remembered is not None and remembered.is_unchanged(corpus)):
        return
    counts = Counter(character for text in texts for character in text if character != " ")
    unknown = {c: number for c, number in counts.items() if tokenizer.special.unknown in tokenizer.encode(c)}
    part = sum(unknown.values()) / max(1, sum(counts.values()))
    if not unknown:
        return
    commonest = sorted(unknown, key=unknown.__getitem__, reverse=True)
    named = " ".join(commonest[:NAMED_CHARACTERS]) + (" …" if len(commonest) > NAMED_CHARACTERS else "")
    found = f"{part:.2%} of the characters of {corpus.manifest} are none of the checkpoint's tokenizer ({named})"
    if part <= MAX_UNKNOWN:
        say(f"{found}: they are trained on as unknown.")
        return
    raise DataError(
        f"{found}, more than {MAX_UNKNOWN:.1%}: the model could never write them. Begin a run of its own with "
        "--init_from, which takes the checkpoint's weights and a tokenizer of the new text, and another "
        "--checkpoint_dir."
    )
