"""Find or create the Python environment of KonkaniVani.

    python3 training_scripts/bootstrap.py --extras synthesis,test

prints only the path of the Python to use on stdout; progress goes to stderr. Every script calls
`rerun_under_venv()` first. Exit codes: 0 done, 2 usage, 6 no environment could be created (one sentence says why).

Standard library only. Python 3.6 to 3.9 can parse this file, and end in `leave_unsuitable_python`; for an older Python
it is a SyntaxError, so the shell scripts do not start it with one.
"""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
EXIT_RESOURCES = 6


def say(text):
    """Print one line of progress on stderr; stdout is for the path only."""
    print(text, file=sys.stderr, flush=True)


def leave_unsuitable_python():
    """Run the same command line under .venv's Python or the newest suitable one on PATH; without one, exit."""
    question = (
        "import sys; from importlib.util import find_spec as f; (3, 10) <= sys.version_info[:2] <= (3, 14) "
        "and any(map(f, ['ensurepip', 'virtualenv', 'pip'])) or sys.exit(1); print(sys.executable)"
    )
    for name in [VENV_PYTHON, "python3.14", "python3.13", "python3.12", "python3.11", "python3.10"]:
        try:  # run, not only found: a version manager's shim on PATH may have no Python installed
            python = subprocess.check_output([name, "-c", question], stderr=subprocess.DEVNULL).decode().strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        os.execv(python, [python] + sys.argv)
    say(
        "error: This is Python %d.%d, and KonkaniVani needs Python 3.10 to 3.14, which is not on PATH. Install it (for "
        "example apt install python3.11 python3.11-venv, or conda create -n konkanivani python=3.12 and activate it) "
        "and start again." % sys.version_info[:2]
    )
    sys.exit(EXIT_RESOURCES)


if not (3, 10) <= sys.version_info[:2] <= (3, 14):  # range of the PyTorch releases in setup.cfg
    leave_unsuitable_python()

sys.path.insert(0, ROOT)

import argparse
from pathlib import Path

from konkanivani.install.environment import (
    Requirements,
    Venv,
    add_huge_pages,
    end_in_a_line,
    mend_streams,
    set_malloc_options,
    set_process_defaults,
)
from konkanivani.install.packages import SetupError, explain_failure

RERUN_MARK = "KONKANIVANI_RERUN"


def rerun_under_venv(*extras: str) -> None:
    """Return if the running Python has all requirements; else run the same command line under .venv instead.

    `extras` names optional extras of setup.cfg that the script needs too.

    Ends the process with exit code 6 and one sentence if there is no usable environment. Also repairs the streams and
    sets the allocators' defaults; the import of this file has put the repository's root first on sys.path.
    """
    mend_streams()
    sys.excepthook = end_in_a_line
    set_process_defaults(os.environ)
    was_rerun = os.environ.pop(RERUN_MARK, None)  # popped, so that child processes may rerun themselves
    venv = Venv(Path(ROOT))
    missing = Requirements(venv.root).missing(extras)
    is_unfinished = venv.unfinished.exists()
    # An incomplete .venv may have all modules, but some of them in pieces.
    if not missing and not (venv.is_running() and is_unfinished):
        set_malloc_options(os.environ)
        return
    if venv.python.exists() and not is_unfinished and not venv.is_running() and not was_rerun:
        os.environ[RERUN_MARK] = "1"  # prevents an endless loop if .venv lacks a requirement
        add_huge_pages(os.environ)
        os.execv(VENV_PYTHON, [VENV_PYTHON, *sys.orig_argv[1:]])
    reason = f"The Python at {sys.executable} does not have {', '.join(missing)}"
    if is_unfinished:
        reason = f"The environment {venv.folder} is incomplete: its installation was interrupted, or is still running"
    command = "./run_training_memory_optimized.sh or python3 training_scripts/bootstrap.py"
    if extras:
        command = f"python3 training_scripts/bootstrap.py --extras {','.join(extras)}"
    say(f"error: {reason}. Run {command} in {ROOT}, then start again.")
    sys.exit(EXIT_RESOURCES)


def main(arguments: list[str]) -> int:
    """Print the path of the Python to use, after creating .venv if necessary, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Create the Python environment if needed and print the path of its Python."
    )
    parser.add_argument(
        "--extras", default="", help="optional extras to install: synthesis, test, or both separated by a comma"
    )
    extras = [extra for extra in parser.parse_args(arguments).extras.split(",") if extra]
    venv = Venv(Path(ROOT))
    requirements = Requirements(venv.root)
    if not set(extras) <= set(requirements.extras):
        parser.error(f"--extras knows {', '.join(requirements.extras)}, not {','.join(extras)}")
    try:
        if not venv.is_running() and not requirements.missing(extras):
            print(sys.executable)
            return 0
        venv.prepare(extras)
        print(venv.python)
        return 0
    except SetupError as error:
        say(f"error: {error}.")
    except OSError as error:
        say(f"error: {explain_failure(str(error), venv.root, 'The set-up')}.")
    except KeyboardInterrupt:
        say("Interrupted; the next start continues with the completed downloads.")
        return 130
    return EXIT_RESOURCES


if __name__ == "__main__":
    mend_streams()
    sys.exit(main(sys.argv[1:]))
