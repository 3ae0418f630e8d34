"""Contestants of the comparison between toolkits."""

import os

import bootstrap

from benchmarks.measuring.peers.contest import Contestant, Entry, Terms


def build(entry: dict, terms: dict) -> Contestant:
    """Import the toolkit of an entry and return the contestant."""
    entry, terms = Entry(**entry), Terms(**terms)
    if entry.toolkit == "konkanivani":
        bootstrap.set_malloc_options(os.environ)  # as in every training script
        from benchmarks.measuring.peers.ours import KonkaniVani

        return KonkaniVani(entry, terms)
    from benchmarks.measuring.peers.others import OtherToolkit

    return OtherToolkit(entry, terms)
