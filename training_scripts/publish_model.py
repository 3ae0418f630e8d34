#!/usr/bin/env python3
"""Run `konkanivani publish` (konkanivani/cli/publish.py) in the project's environment."""

import bootstrap

bootstrap.rerun_under_venv()

from konkanivani.cli.main import run_command

if __name__ == "__main__":
    run_command("publish")
