"""The contestants of the race between two steps of a Whisper model."""

import os

import bootstrap

from benchmarks.measuring.peers.contest import Contestant, Entry
from benchmarks.measuring.whisper.work import WhisperTerms


def build(entry: dict, terms: dict) -> Contestant:
    """The contestant, its toolkit imported."""
    entry, terms = Entry(**entry), WhisperTerms(**terms)
    if entry.toolkit == "konkanivani":
        bootstrap.set_malloc_options(os.environ)  # as at the head of each of our scripts
        from benchmarks.measuring.whisper.ours import KonkaniVani

        return KonkaniVani(entry, terms)
    from benchmarks.measuring.whisper.theirs import Transformers

    return Transformers(terms)
