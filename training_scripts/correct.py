#!/usr/bin/env python3
"""Run `konkanivani correct` (konkanivani/cli/texts/correct.py) in the project's environment."""

import bootstrap

bootstrap.rerun_under_venv()

from konkanivani.cli.main import run_command

if __name__ == "__main__":
    run_command("correct")
