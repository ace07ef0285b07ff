#!/usr/bin/env bash
# Make a tiny model and prompts of mixed difficulty, warm the model up with SFT, train it with both samplers, and compare.
#   examples/curriculum/run.sh [SEED [OUT]]        writes to OUT (default: outputs/curriculum); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/curriculum}
out=${out%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

examples/small_run.sh curriculum frontier "$seed" "$out"
echo "== the same with each prompt once per epoch"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/curriculum --config-name frontier \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed" \
    trainer.experiment_name=uniform data.sampler=uniform
"$python" -m examples.curriculum.compare "$out"
