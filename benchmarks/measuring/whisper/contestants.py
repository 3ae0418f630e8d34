"""Contestants of the comparison of Whisper steps."""

import os

import bootstrap

from benchmarks.measuring.peers.contest import Contestant, Entry
from benchmarks.measuring.whisper.work import WhisperTerms


def build(entry: dict, terms: dict) -> Contestant:
    """Import the toolkit of an entry and return the contestant."""
    entry, terms = Entry(**entry), WhisperTerms(**terms)
    if entry.toolkit == "konkanivani":
        bootstrap.set_malloc_options(os.environ)  # as in every training script
        from benchmarks.measuring.whisper.ours import KonkaniVani

        return KonkaniVani(entry, terms)
    from benchmarks.measuring.whisper.theirs import Transformers

    return Transformers(terms)
