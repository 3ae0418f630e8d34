#!/usr/bin/env bash
# Style, layers, tests. Arguments go to pytest:  ./run_tests.sh -k resume
set -euo pipefail
# A stream that is closed is /dev/null from here on: else files take its number, and what is printed goes into them.
if [[ ! -e /dev/fd/0 ]]; then exec </dev/null; fi
if [[ ! -e /dev/fd/1 ]]; then exec >/dev/null; fi
if [[ ! -e /dev/fd/2 ]]; then exec 2>/dev/null; fi
cd -P "$(dirname "${BASH_SOURCE[0]}")"

BASE=""
for name in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c "" 2>/dev/null; then BASE="$name"; break; fi
done
if [[ -z "$BASE" ]]; then
    echo "error: no python3 is on PATH: install Python 3.10 to 3.14 and start this again." >&2
    exit 6
fi
PYTHON="$("$BASE" training_scripts/bootstrap.py --extras synthesis,test)"

status=0
stage() {
    echo "== $1"
    shift
    "$@" || status=1
}
stage "ruff check" "$PYTHON" -m ruff check .
stage "lint-imports" "$PYTHON" -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
# A file of tests at a time on each core: most tests wait for child processes.
stage "pytest" "$PYTHON" -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile "$@"
if [[ -n "$(nvidia-smi -L 2>/dev/null || true)" ]]; then stage "pytest on the card" "$PYTHON" -m pytest --card "$@"; fi
if [[ $status -ne 0 ]]; then echo "== failed" >&2; fi
exit $status
