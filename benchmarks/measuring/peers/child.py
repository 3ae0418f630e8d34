"""Process of one contestant: reports when it is ready, then runs a step for each line of stdin.

    PYTHON -m benchmarks.measuring.peers.child '{"module": ..., "entry": ..., "terms": ...}'

Prints one line of JSON when ready (version, parameters), after each `step` (seconds, loss), and after `peak` (peaks).
Any other line is the name of another method of the contestant to time. The module has a function `build(entry, terms)`
that returns a contestant.
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
    os.dup2(2, 1)  # stdout carries only the answers; other output of a toolkit goes to stderr
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    import torch

    from konkanivani.base.units import MIB

    def answer(**fields: object) -> None:
        """Print one line of JSON for the parent process."""
        print(json.dumps(fields), file=answers, flush=True)

    asked = json.loads(sys.argv[1])
    contestant = importlib.import_module(asked["module"]).build(asked["entry"], asked["terms"])
    is_cuda = asked["terms"]["device"] == "cuda"
    contestant.step()  # warm-up
    answer(version=contestant.version, parameters=contestant.parameters)
    for line in sys.stdin:
        command = line.strip()
        if command == "peak":
            # Read before `peak_bytes`, whose counter of live tensors allocates memory itself.
            growth = contestant.resident_peak_mib() - contestant.resident_before
            answer(peak_mib=contestant.peak_bytes() / MIB, growth_mib=growth)
            continue
        # CUDA kernels run asynchronously: without synchronisation, only their launch would be timed.
        if is_cuda:
            torch.cuda.synchronize()
        started, worked = time.perf_counter(), time.process_time()
        value = getattr(contestant, command)()
        if is_cuda:
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
        answer(seconds=seconds, cpu_seconds=cpu_seconds, loss=value)
