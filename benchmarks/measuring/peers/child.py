"""A contestant in a process of its own: says when it is ready, then takes a step for each line that it reads.

    PYTHON -m benchmarks.measuring.peers.child '{"module": ..., "entry": ..., "terms": ...}'

One line of JSON each: ready (version, parameters), a step (seconds, loss), at `peak` the peaks. Another word than
`step` is another method of the contestant that is timed. The module has a `build`, from the two others to a contestant.
"""

import importlib
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

    from konkanivani.base.units import MIB

    def answer(**fields: object) -> None:
        """One line for the parent."""
        print(json.dumps(fields), file=answers, flush=True)

    asked = json.loads(sys.argv[1])
    contestant = importlib.import_module(asked["module"]).build(asked["entry"], asked["terms"])
    is_cuda = asked["terms"]["device"] == "cuda"
    contestant.step()  # warm-up
    answer(version=contestant.version, parameters=contestant.parameters)
    for line in sys.stdin:
        command = line.strip()
        if command == "peak":
            growth = contestant.resident_peak_mib() - contestant.resident_before  # before the tracker's own entries
            answer(peak_mib=contestant.peak_bytes() / MIB, growth_mib=growth)
            continue
        if is_cuda:
            torch.cuda.synchronize()
        started, worked = time.perf_counter(), time.process_time()
        value = getattr(contestant, command)()
        if is_cuda:
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
        answer(seconds=seconds, cpu_seconds=cpu_seconds, loss=value)
