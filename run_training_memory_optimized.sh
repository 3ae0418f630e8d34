#!/usr/bin/env bash
# Sets up .venv once, makes the built-in corpus once, and trains, going on from the newest checkpoint if there is one.
#
#   ./run_training_memory_optimized.sh                                  the built-in corpus
#   ./run_training_memory_optimized.sh --train_manifest my/train.jsonl  your own (give --valid_manifest too), in
#                                                                       checkpoints/my and runs/my unless you say else
#   ./run_training_memory_optimized.sh --dry_run                        either, tried in a minute, nothing kept of it
#   ./run_training_memory_optimized.sh --nproc_per_node 2               in two processes, on two cards where there are
#
# Flags are the trainer's own (--help lists them) and win over the defaults below; torchrun's go to torchrun
# (docs/scaling.md). Paths in them are read from this folder, wherever this is called from.
set -euo pipefail
# A stream that is closed is /dev/null from here on: else files take its number, and what is printed goes into them.
if [[ ! -e /dev/fd/0 ]]; then exec </dev/null; fi
if [[ ! -e /dev/fd/1 ]]; then exec >/dev/null; fi
if [[ ! -e /dev/fd/2 ]]; then exec 2>/dev/null; fi
cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

# Memory in large pages spares a step on a CPU a fortieth of its time; glibc reads this as a program starts.
if [[ "${GLIBC_TUNABLES-}" != *glibc.malloc.hugetlb* ]]; then
    export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"
fi

BASE=""
for name in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c "" 2>/dev/null; then BASE="$name"; break; fi
done
if [[ -z "$BASE" ]]; then
    echo "error: no python3 is on PATH: install Python 3.10 to 3.14 and start this again." >&2
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
    exec "$PYTHON" training_scripts/train_konkanivani_asr.py "${trainer[@]}"
fi

# Without a wish of yours: the card, if nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it.
if [[ -z "$device" ]]; then
    device=cpu
    if [[ "${CUDA_VISIBLE_DEVICES-all}" != "" && "${CUDA_VISIBLE_DEVICES-all}" != -1 ]]; then
        cards="$(nvidia-smi -L 2>/dev/null || true)"
        if [[ "$cards" == *"GPU "[0-9]* ]]; then device=cuda; fi
    fi
fi

# A card is the faster the fuller it is: micro-batches as large as what is free there takes, and the same step.
CUDA_DEFAULTS=(--device cuda --mixed_precision --batch_size "$size") preset=optimized
CPU_DEFAULTS=(--device cpu --batch_size 4)
if [[ "$device" == cpu ]]; then defaults=("${CPU_DEFAULTS[@]}") preset=minimal; else defaults=("${CUDA_DEFAULTS[@]}"); fi

if [[ -z "$manifest" && $resumed == auto ]]; then
    "$PYTHON" training_scripts/prepare_builtin_corpus.py --output data/builtin
    defaults+=(--run_name builtin --epochs 20 --speed_perturbation 0.9 1.0 1.1
        --train_manifest data/builtin/train.jsonl
        --valid_manifest data/builtin/valid.jsonl
        --test_manifest data/builtin/test.jsonl)
elif [[ $resumed == auto ]]; then
    # A corpus has a folder and a name of its own, after the folder of its manifest. A run of an earlier version, which
    # put all of them into one folder, goes on there.
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
        defaults+=("--run_name=$(basename -- "$folder")")  # a run that goes on has its name
    fi
fi

# A model that has learnt already brings its shape, and a run that goes on has its own: a preset would ask for another.
if [[ $begins_anew == no && -e "${folder:-checkpoints}/checkpoint_last.pt" ]]; then has_shape=yes; fi
if [[ $has_shape == no ]]; then
    defaults+=(--preset "$preset")
fi

# What a checkpoint that is named by its path is not told anew, it says itself.
if [[ $resumed != auto ]]; then defaults=(); fi
if [[ $resumed == auto && $begins_anew == no ]]; then defaults=(--resume auto "${defaults[@]}"); fi

# exec: Ctrl-C and the kill of a job scheduler reach the trainer itself, which then saves before it ends.
training=(training_scripts/train_konkanivani_asr.py ${defaults[@]+"${defaults[@]}"} ${trainer[@]+"${trainer[@]}"})
if [[ ${#torchrun[@]} == 0 ]]; then exec "$PYTHON" "${training[@]}"; fi
# On one machine each start has a meeting point of its own, so that two runs do not take each other's ranks.
if [[ $elsewhere == no ]]; then torchrun+=(--standalone); fi
# Under nohup several processes outlive their terminal too: torchrun would take up the signal that is to be ignored.
if [[ "$(trap -p SIGHUP)" == "trap -- '' SIGHUP" ]]; then
    export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE-SIGTERM,SIGINT,SIGQUIT}"
fi
exec "$PYTHON" -m torch.distributed.run "${torchrun[@]}" "${training[@]}"
