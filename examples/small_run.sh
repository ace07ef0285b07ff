#!/usr/bin/env bash
# Run a small example: create a task and a tiny model, warm up the model with SFT, then train it with RL.
#   examples/small_run.sh EXAMPLE CONFIG SEED OUT [ARGUMENT ...]
# EXAMPLE is a folder beside this file with make_task.py, sft.yaml and CONFIG.yaml. Writes to OUT;
# an existing OUT is moved to OUT.1, ... The ARGUMENTs are passed to make_task.py.
set -euo pipefail
cd "$(dirname "$0")/.."
example=$1 config=$2 seed=$3 out=${4%/} more=("${@:5}")
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")

if [ -e "$out" ]; then
    number=1
    while [ -e "$out.$number" ]; do number=$((number + 1)); done
    mv "$out" "$out.$number"
    echo "== the earlier $out was moved to $out.$number"
fi
echo "== creating a task, a tokenizer and a tiny model"
"$python" -m "examples.$example.make_task" --out "$out" --seed "$seed" "${more[@]}"
echo "== warm-up: SFT on demonstrations that leave one choice open (examples/$example/sft.yaml)"
"$python" -m alphaapollo.trainer.main_sft --config-dir "examples/$example" --config-name sft \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" "${run[@]}"
[ -d alphaapollo/plugins/verify ] || run+=(trainer.verify_first_iteration=false) # without the plug-in that verifies it
echo "== RL with Ray, FSDP2 and vLLM; only the reward tells which choice is correct (examples/$example/$config.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir "examples/$example" --config-name "$config" \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" "${run[@]}"
