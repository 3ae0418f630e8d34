"""Timeout for operations that take seconds on an idle machine; the limit of pytest is three times this value."""

PROCESS_TIMEOUT = 600.0  # seconds; longer means a hang, even on a slow and busy machine
