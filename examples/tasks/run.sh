#!/usr/bin/env bash
# Train a model on the local tasks: make tasks and lessons, warm the model up with SFT, then train it with GRPO.
#   examples/tasks/run.sh [MODEL [SEED [OUT]]]     MODEL: tiny (default) or smollm2; OUT (default: outputs/learn_tasks) must not exist
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${1:-tiny} seed=${2:-0} out=${3:-outputs/learn_tasks}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
config=(--config-dir examples/tasks)
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")
lessons=(--tiny-model) suffix="" held_out=96
if [ "$model" = smollm2 ]; then
    lessons=(--count 320) suffix=_smollm2 held_out=48
fi
if [ -e "$out" ]; then
    echo "$out exists. Remove it, or pass another OUT." >&2
    exit 2
fi

"$python" -m examples.tasks.make_tasks --out "$out/tasks" --seed "$seed" --train 240 --held-out "$held_out"
"$python" -m examples.tasks.make_lessons --out "$out" --seed "$seed" "${lessons[@]}"
[ "$model" = tiny ] || examples/smollm2/get_model.sh "$out/model"
echo "== warm-up: SFT on commands of which one in five is correct (examples/tasks/sft$suffix.yaml)"
"$python" -m alphaapollo.trainer.main_sft "${config[@]}" --config-name "sft$suffix" \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" "${run[@]}"
echo "== RL: each command runs in a sandbox, and the tests of the task give the reward (examples/tasks/grpo$suffix.yaml)"
"$python" -m alphaapollo.trainer.main_ppo "${config[@]}" --config-name "grpo$suffix" \
    data.train_files="$out/tasks/train" data.val_files="$out/tasks/held_out" \
    actor_rollout_ref.model.path="$out/sft/model" "${run[@]}"
echo "== what it learned"
"$python" -m examples.tasks.report "$out/grpo"
