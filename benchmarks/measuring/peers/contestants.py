"""The contestants of the race between toolkits."""

import os

import bootstrap

from benchmarks.measuring.peers.contest import Contestant, Entry, Terms


def build(entry: dict, terms: dict) -> Contestant:
    """The contestant, its toolkit imported."""
    entry, terms = Entry(**entry), Terms(**terms)
    if entry.toolkit == "konkanivani":
        bootstrap.set_malloc_options(os.environ)  # as at the head of each of our scripts
        from benchmarks.measuring.peers.ours import KonkaniVani

        return KonkaniVani(entry, terms)
    from benchmarks.measuring.peers.others import OtherToolkit

    return OtherToolkit(entry, terms)
