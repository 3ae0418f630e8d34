#!/usr/bin/env bash
# What a newcomer's first hour takes: the README's two commands in a fresh clone, each timed.
#
#   benchmarks/first_run.sh [FOLDER]      a new folder; a temporary one, removed at the end, by default
set -euo pipefail
source_folder="$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)"
folder="${1:-}"
if [[ -z "$folder" ]]; then
    folder="$(mktemp -d)/konkanivani"
    trap 'rm -rf "$(dirname "$folder")"' EXIT
fi

git clone --quiet "$source_folder" "$folder"
cd "$folder"
SECONDS=0
./run_training_memory_optimized.sh | tee first_run.log
echo "first command: $SECONDS s, set-up included; test CER and the rest in the line above"
SECONDS=0
./run_tests.sh
echo "second command: $SECONDS s"
