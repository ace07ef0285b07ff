#!/usr/bin/env bash
# SFT, DPO and GRPO in this order, on the quickstart's task: examples/preferences/run.sh with 96 of its 128 steps, then grpo.yaml.
#   examples/quickstart/sft_dpo_grpo.sh [SEED [OUT]]        writes to OUT (default: outputs/sft_dpo_grpo)
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0} out=${2:-outputs/sft_dpo_grpo}
out=${out%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

examples/preferences/run.sh "$seed" "$out" trainer.total_training_steps=96
echo "== GRPO from the model of DPO (examples/quickstart/grpo.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/quickstart --config-name grpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/dpo/model" trainer.output_dir="$(dirname "$out")" \
    trainer.project_name="$(basename "$out")" trainer.seed="$seed" trainer.verify_first_iteration=false
"$python" -m alphaapollo plot "$out/grpo/metrics.jsonl" val/accuracy val/accuracy_greedy
