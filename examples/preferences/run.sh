#!/usr/bin/env bash
# Preferences: warm up a tiny model, train it with DPO on pairs of right and wrong sums, and evaluate it before and after.
#   examples/preferences/run.sh [SEED [OUT [KEY=VALUE ...]]]      writes to OUT (default: outputs/preferences)
# Keys are those of main_dpo, e.g. preference.loss=kto.
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0} out=${2:-outputs/preferences}
out=${out%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")

examples/preferences/warm_up.sh "$seed" "$out"
echo "== DPO (examples/preferences/dpo.yaml)"
"$python" -m alphaapollo.trainer.main_dpo --config-dir examples/preferences --config-name dpo \
    data.train_files="$out/data/pairs.parquet" data.val_files="$out/data/val_pairs.parquet" \
    model.path="$out/sft/model" "${run[@]}" "${@:3}"
for model in sft dpo; do
    echo "== 256 held-out sums by $model/model"
    "$python" -m alphaapollo.trainer.main_generation data.path="$out/data/val.parquet" model.path="$out/$model/model" \
        data.max_prompt_length=22 data.max_response_length=42 custom_reward_function.path=examples/quickstart/reward.py \
        trainer.controller=local rollout.kv_cache_gib=0.25 trainer.resume_mode=disable \
        trainer.experiment_name="added_by_$model" "${run[@]}"
done
