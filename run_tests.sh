#!/usr/bin/env bash
# Style, import contracts, tests. Arguments go to pytest:  ./run_tests.sh -k resume
set -euo pipefail
# Open closed streams as /dev/null: otherwise a file would get the stream's number, and output would be written to it.
if [[ ! -e /dev/fd/0 ]]; then exec </dev/null; fi
if [[ ! -e /dev/fd/1 ]]; then exec >/dev/null; fi
if [[ ! -e /dev/fd/2 ]]; then exec 2>/dev/null; fi
cd -P "$(dirname "${BASH_SOURCE[0]}")"

BASE=""
for name in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c "import sys; sys.exit(sys.version_info < (3, 6))" 2>/dev/null; then BASE="$name"; break; fi
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
# mypy takes 20 s of one core without its cache: it runs beside the other stages, and its report comes after pytest's.
report="$(mktemp)"
"$PYTHON" -m mypy >"$report" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$report"' EXIT
end_of_mypy() {
    local code=0
    wait "$checker" || code=$?
    cat "$report"
    return "$code"
}
stage "ruff check" "$PYTHON" -m ruff check .
stage "ruff format" "$PYTHON" -m ruff format --check .
stage "lint-imports" "$PYTHON" -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
# Compiled files stay: each of pytest's processes, and each script that it starts, would compile them again.
unset PYTHONDONTWRITEBYTECODE
# Each process runs one test file at a time. More processes than cores, because tests wait for children and disks.
# The slowest files come first (tests/conftest.py), so that no process is left alone with one at the end.
cores="$("$PYTHON" -c "import os; print(len(os.sched_getaffinity(0)))")"
processes="$((cores < 3 ? cores + 2 : 4))"
stage "pytest" "$PYTHON" -m pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder "$@"
stage "mypy" end_of_mypy
if [[ -n "$(nvidia-smi -L 2>/dev/null || true)" ]]; then stage "pytest on the card" "$PYTHON" -m pytest --card "$@"; fi
if [[ $status -ne 0 ]]; then echo "== failed" >&2; fi
exit $status
