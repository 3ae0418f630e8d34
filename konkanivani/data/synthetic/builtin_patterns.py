"""Sentences of the built-in corpus, made from the patterns in `builtin_patterns.txt`."""

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.errors import DataError, UsageError

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
