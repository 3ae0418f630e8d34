#!/bin/bash
# Measure CUDA graphs on a GPU in at most 6 minutes: eager steps and replays in turn, beside other toolkits.
#
#     bash benchmarks/on_gpu.sh [FOLDER]            results in FOLDER (default: graphs_on_gpu)
#     bash benchmarks/on_gpu.sh --dry [FOLDER]      the same commands in tiny on a CPU, to test the script
#
# Each part has its own time limit and log; a part that fails or takes too long does not stop the others.
# The last line names the parts that failed, and the exit code is their number.
set -u
cd "$(dirname "$0")/.." || exit 2
dry=""
if [ "${1:-}" = "--dry" ]; then
    dry=yes
    shift
fi
folder="${1:-graphs_on_gpu}"
python="${PYTHON:-python3}"
mkdir -p "$folder" || exit 6
failed=()

part() {  # part NAME SECONDS COMMAND...
    local name="$1" seconds="$2" started="$SECONDS"
    shift 2
    echo "== $name: $*"
    if timeout -k 5 "$seconds" "$@" >"$folder/$name.txt" 2>"$folder/$name.log"; then
        cat "$folder/$name.txt"
    else
        echo "$name failed: $(tail -n 1 "$folder/$name.log")"
        failed+=("$name")
    fi
    echo "== $name took $((SECONDS - started)) s"
}

if [ -n "$dry" ]; then
    part native 100 "$python" benchmarks/graphs.py --device cpu --models tiny --steps 1 --utterances 4
    part whisper 100 "$python" benchmarks/graphs.py --device cpu --models whisper-tiny --steps 1 --utterances 4
else
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$folder/card.txt" 2>&1
    # First: whether replays compute the same gradient. A wrong one makes the times below meaningless.
    part card_tests 60 "$python" -m pytest -q -n 0 -p no:cacheprovider -m card tests/training/test_cuda_graphs.py
    part original 40 "$python" benchmarks/graphs.py --models original --utterances 8 --micro_batches 4
    part original_auto 30 "$python" benchmarks/graphs.py --models original --utterances 8 --micro_batches 1
    part small 40 "$python" benchmarks/graphs.py --models minimal optimized --micro_batches 4
    part whisper 60 "$python" benchmarks/graphs.py --models whisper-base whisper-speech --utterances 4 --micro_batches 4
    part nemo 30 "$python" benchmarks/graphs.py --models nemo --micro_batches 4
    part speechbrain 50 "$python" benchmarks/peers/step.py compare --device cuda --mixed_precision --cuts 4 \
        --contestants konkanivani speechbrain --concurrent_micro_batches 1 --rounds 3
    part transformers 50 "$python" benchmarks/peers/whisper_step.py compare --device cuda --amp --size base --rounds 3
fi
echo "total $SECONDS s; failed: ${failed[*]:-none}"
exit "${#failed[@]}"
