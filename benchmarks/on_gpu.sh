#!/usr/bin/env bash
# The guide's command lines on a CUDA card, the peak memory of each preset in fp16, plans beside measures, and many steps.
# Needs .venv or a Python that has everything, pytest included, and data/builtin
# (`python3 training_scripts/prepare_builtin_corpus.py --output data/builtin`).
#
#   benchmarks/on_gpu.sh [FOLDER]      where checkpoints and logs go; a temporary folder by default
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-$(mktemp -d)}"
train=(python3 training_scripts/train_konkanivani_asr.py)
corpus=(--train_manifest data/builtin/train.jsonl --valid_manifest data/builtin/valid.jsonl
    --test_manifest data/builtin/test.jsonl --vocab_size 100)
optimized=(--mixed_precision --device cuda --d_model 192 --encoder_layers 8 --decoder_layers 4)

echo "== 192 wide, 8 + 4 layers, 2 x 4, fp16: two epochs, then on from the first one's checkpoint, cut as 1 x 8"
"${train[@]}" "${corpus[@]}" "${optimized[@]}" --batch_size 2 --gradient_accumulation_steps 4 --epochs 2 \
    --checkpoint_dir "$folder/checkpoints" --log_dir "$folder/runs"
"${train[@]}" --batch_size 2 --gradient_accumulation_steps 4 "${optimized[@]}" \
    --resume "$folder/checkpoints/checkpoint_epoch_1.pt"
"${train[@]}" --batch_size 1 --gradient_accumulation_steps 8 --mixed_precision --device cuda \
    --resume "$folder/checkpoints/checkpoint_epoch_1.pt"

echo "== a card of 4 GB and one of 1.2 GB, played on this one: the plan, the rehearsal, planned and measured peaks"
for budget in 4GiB 1200MiB; do
    "${train[@]}" "${corpus[@]}" --preset original --mixed_precision --device cuda --memory_budget "$budget" \
        --batch_size auto --gradient_checkpointing auto --epochs 1 --run_name "$budget" \
        --checkpoint_dir "$folder/checkpoints_$budget" --log_dir "$folder/runs"
done

echo "== peak memory and time of one step, fp16"
for preset in original optimized minimal; do
    for accum in 8 4 1; do
        for recompute in never always; do
            python3 benchmarks/step.py --preset "$preset" --batch 8 --accum "$accum" --gradient_checkpointing "$recompute" \
                --device cuda --mixed_precision --json
        done
    done
done

echo "== beside other toolkits in one run, fp16, effective batches of 8 and 64; growth with length, batch and width"
for utterances in 8 64; do
    python3 benchmarks/compare_peers.py --device cuda --mixed_precision --utterances "$utterances" --cuts 1 2 4 8 \
        --markdown "$folder/peers_$utterances.md"
done
python3 benchmarks/growth.py --device cuda --mixed_precision --plot "$folder/growth.png"

echo "== the plan beside what the allocator gave"
python3 benchmarks/plan_accuracy.py --full --device cuda

echo "== 2,000 steps of mixed lengths, fp16: what memory does with time"
python3 benchmarks/drift.py --steps 2000 --preset minimal --device cuda --mixed_precision
echo "== the same of four windows, again and again: what lengths that are news cost beside it"
python3 benchmarks/drift.py --steps 200 --distinct 4 --preset minimal --device cuda --mixed_precision

echo "== one rank over NCCL, its weights whole and dealt, fp16; then all cards of this machine, if there are several"
for shard in never always; do
    for ranks in 1 gpu; do
        "$(python3 training_scripts/bootstrap.py)" -m torch.distributed.run --standalone --nproc_per_node "$ranks" \
            training_scripts/train_konkanivani_asr.py "${corpus[@]}" "${optimized[@]}" --shard "$shard" --max_steps 40 \
            --batch_size 8 --gradient_accumulation_steps 4 --gradient_checkpointing always --run_name "$shard$ranks" \
            --checkpoint_dir "$folder/checkpoints_$shard$ranks" --log_dir "$folder/runs"
    done
done

echo "== Whisper larger than 3.5 GiB, weights on the card (of 16 GiB), half and on the host; 34 to 80 GB of disk"
python3 benchmarks/large_model.py --folder "$folder/large" --device cuda --steps 20 --weights card --budget 16GiB \
    --mixed_precision
for weights in half host; do
    python3 benchmarks/large_model.py --folder "$folder/large" --device cuda --steps 20 --weights "$weights" \
        --budget 3.5GiB --mixed_precision
done
python3 benchmarks/large_model.py --folder "$folder/large" --device cuda --steps 20 --size large-v3 --weights host \
    --budget 3.5GiB --mixed_precision

echo "== the tests of a card: its step beside a CPU's, plan and measure, what a step waits for"
"$(python3 training_scripts/bootstrap.py --extras test)" -m pytest --card
