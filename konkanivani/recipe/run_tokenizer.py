"""Tokenizer of a run: the checkpoint's, the pretrained model's, or one that is trained on the texts of the run."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from konkanivani.auto_defaults import resolved
from konkanivani.console import say
from konkanivani.data.manifest import Fingerprint, Manifest, iterate_texts, no_text
from konkanivani.data.text import ZWJ, Digits, FormatCharacterCount, Vocabulary, normalize_text, train_tokenizer
from konkanivani.errors import DataError
from konkanivani.flags import config_from_text
from konkanivani.inference.speech_model import load_tokenizer
from konkanivani.recipe.resume import remembered_corpus
from konkanivani.recipe.startup import Start

MAX_UNKNOWN = 0.005  # share of the tokens
NAMED_CHARACTERS = 10
TOLD_BY = 20_000  # texts to check if the corpus seems unchanged: its transcripts may have been corrected


def choose_tokenizer(start: Start, manifest: Manifest) -> Vocabulary:
    """Return the tokenizer of the checkpoint or the pretrained folder, else train one on the manifest's texts."""
    if start.resumed:
        return load_tokenizer(start.resumed)
    if start.pretrained:
        return start.pretrained.vocabulary(start.config.pretrained)
    text = start.config.text
    texts = list(normalized_texts(manifest, text.digits))
    # An empty corpus is an error even if the tokenizer is a checkpoint's.
    if not texts:
        raise no_text(manifest)
    if start.initial is not None and keeps_tokens(start):
        return load_tokenizer(start.initial)
    return train_tokenizer(texts, resolved(text.tokenizer_type), text.vocab_size)


def normalized_texts(manifest: Manifest, digits: Digits) -> Iterator[str]:
    """Yield the normalised transcripts of the manifest that are not empty."""
    return filter(None, (normalize_text(text, digits) for text in iterate_texts(manifest)))


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


def say_removed(manifests: list[Manifest], tokenizer: Vocabulary) -> None:
    """Print one line that counts the format characters that the tokenizer drops from the transcripts, if any."""
    removed = FormatCharacterCount()
    for manifest in manifests:
        removed.add_all(manifest.index.format_characters)
    # The tokenizer is probed for whether it keeps zero-width joiners.
    sentence = removed.sentence(keeps_joiners=ZWJ in tokenizer.normalize(f"क{ZWJ}क", "keep"))
    if sentence:
        say(sentence)
