#!/usr/bin/env bash
# Make a tiny vision-language model and images, warm the model up with SFT, and train it with GRPO on both tasks.
#   examples/colours/run.sh [SEED [OUT]]        writes to OUT (default: outputs/colours); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/colours}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh colours grpo "$seed" "$out"
echo "== RL in two turns with an image in each, from the same warm-up (examples/colours/grpo_two_turns.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/colours --config-name grpo_two_turns \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" trainer.seed="$seed" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")"
for run in grpo grpo_two_turns; do
    echo "== $run"
    "$python" -m alphaapollo plot "$out/$run/metrics.jsonl" val/accuracy val/accuracy_greedy
done
