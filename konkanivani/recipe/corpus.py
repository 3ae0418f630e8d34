"""Comparison of a run's corpus with the corpus of its checkpoint, and of its text with the checkpoint's tokenizer."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from konkanivani.base.console import say
from konkanivani.base.errors import CheckpointError, DataError
from konkanivani.base.flags import config_from_text
from konkanivani.data.fingerprint import Fingerprint, make_fingerprint, read_fingerprint
from konkanivani.data.manifest import Manifest
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.recipe.start import Start

MIN_SHARED = 0.5  # share of the smaller corpus's utterances: recordings may have been added and removed
WARNED_OF = 0.05  # a smaller share may come from two corpora that number their files alike
MAX_UNKNOWN = 0.005  # share of the tokens
NAMED_CHARACTERS = 10
TOLD_BY = 20_000  # texts to check if the corpus seems unchanged: its transcripts may have been corrected


def remembered_corpus(start: Start) -> Fingerprint | None:
    """Return the fingerprint of the checkpoint's corpus; None without a checkpoint, or if an old version wrote it."""
    state = start.resumed.states.get("corpus") if start.resumed else None
    return None if state is None else read_fingerprint(state)


def check_corpus(start: Start, corpus: Fingerprint) -> None:
    """Raise a CheckpointError if a resumed run has another corpus and --new_corpus is not given."""
    remembered = remembered_corpus(start)
    if remembered is None or remembered.shared(corpus) >= MIN_SHARED:
        return
    if start.config.run.new_corpus:
        say(f"Resuming with a different corpus: {corpus.sentence()}, after {remembered.sentence()}.")
        return
    raise CheckpointError(
        f"The run in {start.config.run.checkpoint_dir} was trained on {remembered.sentence()}, but the "
        f"training manifest now is {corpus.sentence()}. Start a new run with another --checkpoint_dir, or with "
        "--fresh instead of --resume (existing checkpoints are moved to a separate folder). To resume the old "
        "run on the new corpus, give --new_corpus."
    )


def warn_of_shared(corpus: Fingerprint, *others: Manifest | None) -> None:
    """Warn about manifests that share utterances with the training set: their error rates are too optimistic."""
    for other in others:
        if other is None:
            continue
        shared = corpus.shared(make_fingerprint(other))
        if shared >= WARNED_OF:
            say(
                f"{shared:.0%} of the utterances of {other.path} are also in the training set, so its error "
                "rates are too optimistic. inspect_data.py lists them."
            )


def keeps_tokens(start: Start) -> bool:
    """Return whether a run with --init_from keeps the checkpoint's tokenizer.

    It does unless --new_tokenizer is given, or another tokenizer type or vocabulary size.
    """
    if start.initial is None or start.config.tuning.new_tokenizer:
        return False
    asked = start.config.text
    stored = config_from_text(start.initial.config).text
    return (asked.tokenizer_type, asked.vocab_size) == (stored.tokenizer_type, stored.vocab_size)


def check_spelling(start: Start, corpus: Fingerprint, tokenizer: Vocabulary, texts: Iterable[str]) -> None:
    """Raise a DataError if the checkpoint's tokenizer lacks too many tokens of the normalised `texts`.

    The limit is 0.5 % of the tokens; up to that, the unknown characters are only printed.
    """
    if not (start.resumed or keeps_tokens(start)):
        return
    unknown_token = tokenizer.special.unknown
    if unknown_token is None:
        return
    remembered = remembered_corpus(start)
    characters: Counter[str] = Counter()
    tokens: Counter[int] = Counter()
    # Tokenizing a large corpus takes long: an unchanged one is only sampled.
    for text in islice(texts, TOLD_BY if remembered is not None and remembered.is_unchanged(corpus) else None):
        characters.update(text)
        tokens.update(tokenizer.encode(text))
    unknown = {c: number for c, number in characters.items() if unknown_token in tokenizer.encode(c)}
    part = tokens[unknown_token] / max(1, tokens.total())
    if not unknown:
        return
    commonest = sorted(unknown, key=unknown.__getitem__, reverse=True)
    named = ", ".join(f"{character} {unknown[character]:,} times" for character in commonest[:NAMED_CHARACTERS])
    named += ", …" if len(commonest) > NAMED_CHARACTERS else ""
    found = (
        f"{part:.2%} of the tokens of {corpus.manifest} are unknown to the checkpoint's tokenizer: it has no {named}"
    )
    if part <= MAX_UNKNOWN:
        say(f"{found}. They are trained as the unknown token.")
        return
    spelt = "--digits spell, which writes digits as words, or " if any(map(str.isdecimal, unknown)) else ""
    spelt = spelt if start.config.text.digits == "keep" and start.initial else ""
    advice = f"Use {spelt}--new_tokenizer, which trains a tokenizer on this text and a new output head."
    if start.resumed:
        advice = "Start a new run with --init_from and --new_tokenizer, in another --checkpoint_dir."
    raise DataError(f"{found}. That is more than {MAX_UNKNOWN:.1%}: the model could never output them. {advice}")
