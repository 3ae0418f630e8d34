"""oneDNN products under a storm of signals: `python -m tests.faults.signal_storm`, with --bare outside run_script.

Ends with exit code 0 after a thousand handled signals, unless they corrupt the heap before.
"""

import signal
import sys
import time

import torch

from konkanivani.command_line import run_script
from tests.timeouts import PROCESS_TIMEOUT

PERIOD = 0.0005  # seconds
SIGNALS = 1000  # signals


def run_products_under_signals() -> str:
    """Return the number of products, of varying shapes, computed until enough signals were handled."""
    torch.manual_seed(0)
    handled: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _frame: handled.append(number))
    signal.setitimer(signal.ITIMER_REAL, PERIOD, PERIOD)
    began, made = time.monotonic(), 0
    while len(handled) < SIGNALS and time.monotonic() < began + PROCESS_TIMEOUT:
        rows, inputs, outputs = torch.randint(64, 500, (3,)).tolist()
        left, right = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        made += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return f"{made} products, {len(handled)} signals"


if __name__ == "__main__":
    if "--bare" in sys.argv:
        print(run_products_under_signals())
    else:
        sys.exit(run_script(run_products_under_signals))
