#!/usr/bin/env python3
"""Run `konkanivani listen` (konkanivani/cli/listen.py) in the project's environment."""

import bootstrap

bootstrap.rerun_under_venv()

from konkanivani.cli.main import run_command

if __name__ == "__main__":
    run_command("listen")
