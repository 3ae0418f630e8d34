"""A contestant in a process of its own: says when it is ready, then takes a step for each line that it reads.

    PYTHON -m benchmarks.measuring.peers.child '{"entry": ..., "terms": ...}'

One line of JSON each: ready (version, parameters), a step (seconds, loss), at `peak` the peaks.
"""

import json
import logging
import os
import sys
import time
import warnings

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a toolkit prints is no answer
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    import torch

    from benchmarks.measuring.peers.contest import Contestant, Entry, Terms
    from konkanivani.base.units import MIB

    def build(entry: Entry, terms: Terms) -> Contestant:
        """The contestant, its toolkit imported."""
        if entry.toolkit == "konkanivani":
            import bootstrap

            bootstrap.set_malloc_options(os.environ)  # as at the head of each of our scripts
            from benchmarks.measuring.peers.ours import KonkaniVani

            return KonkaniVani(entry, terms)
        from benchmarks.measuring.peers.others import OtherToolkit

        return OtherToolkit(entry, terms)

    def answer(**fields: object) -> None:
        """One line for the parent."""
        print(json.dumps(fields), file=answers, flush=True)

    asked = json.loads(sys.argv[1])
    entry, terms = Entry(**asked["entry"]), Terms(**asked["terms"])
    contestant = build(entry, terms)
    contestant.step()  # warm-up
    answer(version=contestant.version, parameters=contestant.parameters)
    for line in sys.stdin:
        if line.strip() == "peak":
            growth = contestant.resident_peak_mib() - contestant.resident_before  # before the tracker's own entries
            answer(peak_mib=contestant.peak_bytes() / MIB, growth_mib=growth)
            continue
        if terms.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = contestant.step()
        if terms.device == "cuda":
            torch.cuda.synchronize()
        answer(seconds=time.perf_counter() - started, loss=loss)
