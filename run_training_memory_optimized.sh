#!/usr/bin/env bash
# Set up .venv (once), generate the built-in corpus (once), and train; resume
# from the newest checkpoint if there is one.
#
#   ./run_training_memory_optimized.sh
#       train on the built-in corpus
#   ./run_training_memory_optimized.sh --train_manifest my/train.jsonl
#       train on your corpus (give --valid_manifest too); writes to
#       checkpoints/my and runs/my
#   ./run_training_memory_optimized.sh --dry_run
#       test everything in a minute and leave no files
#   ./run_training_memory_optimized.sh --nproc_per_node 2
#       train in two processes, on two GPUs if available
#
# The flags are those of training_scripts/train_konkanivani_asr.py (listed below)
# and override the defaults of this script; torchrun's flags are passed to
# torchrun (docs/scaling.md). Relative paths are relative to the script's folder.

set -euo pipefail
# Replace closed standard streams by /dev/null: otherwise a file opened later gets their number and the output.
if [[ ! -e /dev/fd/0 ]]; then exec </dev/null; fi
if [[ ! -e /dev/fd/1 ]]; then exec >/dev/null; fi
if [[ ! -e /dev/fd/2 ]]; then exec 2>/dev/null; fi
cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

# Transparent huge pages make a CPU step 2.5 % faster; glibc reads this variable when a program starts.
if [[ "${GLIBC_TUNABLES-}" != *glibc.malloc.hugetlb* ]]; then
    export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"
fi

BASE=""
for name in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c "import sys; sys.exit(sys.version_info < (3, 6))" 2>/dev/null; then BASE="$name"; break; fi
done
if [[ -z "$BASE" ]]; then
    echo "error: no python3 on PATH. Install Python 3.10 to 3.14 and start again." >&2
    exit 6
fi
PYTHON="$("$BASE" training_scripts/bootstrap.py --extras synthesis)"

wants_help=no begins_anew=no has_shape=no takes_value=no elsewhere=no previous=""
manifest="" folder="" name="" device="" resumed=auto size=auto
torchrun=() trainer=()
for argument in "$@"; do
    if [[ $takes_value == yes ]]; then
        torchrun+=("$argument") takes_value=no
        continue
    fi
    case "$argument" in
        --standalone) torchrun+=("$argument") elsewhere=yes; continue ;;
        --nproc[-_]per[-_]node* | --nnodes* | --node[-_]rank* | --max[-_]restarts* | --rdzv[-_]* | --master[-_]*)
            torchrun+=("$argument")
            case "$argument" in --nproc* | --max*) ;; *) elsewhere=yes ;; esac
            if [[ "$argument" != *=* ]]; then takes_value=yes; fi
            continue ;;
    esac
    trainer+=("$argument")
    case "$argument" in
        -h | --help) wants_help=yes ;;
        --fresh) begins_anew=yes ;;
        --init[-_]from | --init[-_]from=* | --pretrained | --pretrained=* | --preset | --preset=*) has_shape=yes ;;
    esac
    flag="$previous" value="$argument"
    if [[ "$argument" == --*=* ]]; then flag="${argument%%=*}" value="${argument#*=}"; fi
    case "${flag//-/_}" in
        __train_manifest) manifest="$value" ;;
        __checkpoint_dir) folder="$value" ;;
        __run_name) name="$value" ;;
        __device) device="$value" ;;
        __resume) resumed="$value" ;;
        __gradient_accumulation_steps) size=2 ;;
    esac
    previous="$argument"
done
if [[ $wants_help == yes ]]; then
    sed -n '2,/^$/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]##*/}"  # the comment at the top
    echo
    exec "$PYTHON" training_scripts/train_konkanivani_asr.py "${trainer[@]}"
fi

# Default device: the GPU, if nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it.
if [[ -z "$device" ]]; then
    device=cpu
    if [[ "${CUDA_VISIBLE_DEVICES-all}" != "" && "${CUDA_VISIBLE_DEVICES-all}" != -1 ]]; then
        cards="$(nvidia-smi -L 2>/dev/null || true)"
        if [[ "$cards" == *"GPU "[0-9]* ]]; then device=cuda; fi
    fi
fi

# A GPU is faster with larger micro-batches: auto fills the free memory; the effective batch is the same.
CUDA_DEFAULTS=(--device cuda --mixed_precision --batch_size "$size") preset=optimized
CPU_DEFAULTS=(--device cpu --batch_size 4)
if [[ "$device" == cpu ]]; then defaults=("${CPU_DEFAULTS[@]}") preset=minimal; else defaults=("${CUDA_DEFAULTS[@]}"); fi

if [[ -z "$manifest" && $resumed == auto ]]; then
    "$PYTHON" training_scripts/prepare_builtin_corpus.py --output data/builtin
    defaults+=(--run_name builtin --epochs 20
        --train_manifest data/builtin/train.jsonl
        --valid_manifest data/builtin/valid.jsonl
        --test_manifest data/builtin/test.jsonl)
elif [[ $resumed == auto ]]; then
    # Each corpus gets its own checkpoint folder and run name, after the folder of its manifest. A run of an earlier
    # version, which put all corpora into one folder, is resumed there.
    corpus="$(basename "$(dirname "$(realpath -m -- "$manifest")")")" part="$(basename -- "$manifest" .jsonl)"
    if [[ "$part" != train ]]; then corpus="$corpus-$part"; fi
    earlier=checkpoints/checkpoint_last.pt
    if [[ -z "$folder" && ! -e "checkpoints/$corpus" ]] && grep -aqsF -- "--train_manifest '$manifest'" "$earlier"; then
        folder=checkpoints
    elif [[ -z "$folder" ]]; then
        folder="checkpoints/$corpus"
        defaults+=("--checkpoint_dir=$folder")
    fi
    if [[ -z "$name" && ($begins_anew == yes || ! -e "$folder/checkpoint_last.pt") ]]; then
        defaults+=("--run_name=$(basename -- "$folder")")  # a resumed run keeps its name
    fi
fi

# Initial weights and a resumed run define the model shape: a preset would contradict it.
if [[ $begins_anew == no && -e "${folder:-checkpoints}/checkpoint_last.pt" ]]; then has_shape=yes; fi
if [[ $has_shape == no ]]; then
    defaults+=(--preset "$preset")
fi

# A checkpoint that is given by its path contains all settings.
if [[ $resumed != auto ]]; then defaults=(); fi
if [[ $resumed == auto && $begins_anew == no ]]; then defaults=(--resume auto "${defaults[@]}"); fi

# exec: signals (Ctrl-C, a job scheduler) reach the trainer itself, which saves a checkpoint before it exits.
training=(training_scripts/train_konkanivani_asr.py ${defaults[@]+"${defaults[@]}"} ${trainer[@]+"${trainer[@]}"})
if [[ ${#torchrun[@]} == 0 ]]; then exec "$PYTHON" "${training[@]}"; fi
# On one machine each start gets its own rendezvous, so that two runs do not mix their ranks.
if [[ $elsewhere == no ]]; then torchrun+=(--standalone); fi
# Keep several processes alive under nohup too: by default torchrun handles SIGHUP, which nohup ignores.
if [[ "$(trap -p SIGHUP)" == "trap -- '' SIGHUP" ]]; then
    export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE-SIGTERM,SIGINT,SIGQUIT}"
fi
exec "$PYTHON" -m torch.distributed.run "${torchrun[@]}" "${training[@]}"
