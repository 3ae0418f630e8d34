"""How long a test waits for what takes seconds on a quiet machine; pytest's own limit is three times that."""

PATIENCE = 600.0  # seconds; what takes longer hangs, on a slow machine with much else to do too
