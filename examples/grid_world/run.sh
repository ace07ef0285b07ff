#!/usr/bin/env bash
# Make a tiny model and its data, warm the model up with SFT, train it with GiGPO over several turns.
#   examples/grid_world/run.sh [SEED [OUT]]        everything is written to OUT (outputs/grid_world), anew
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/grid_world}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

rm -rf "$out"
echo "1/3 a tokenizer, a 0.43M-parameter model, and data, made from nothing"
"$python" -m examples.grid_world.make_task --out "$out" --seed "$seed"
echo "2/3 warm-up: SFT on a teacher who goes anywhere"
"$python" -m alphaapollo.trainer.main_sft --config-dir examples/grid_world --config-name sft \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
echo "3/3 GiGPO: the goal reached or not, nothing else"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/grid_world --config-name gigpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/test.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
"$python" -m alphaapollo.observability.curve "$out/gigpo/metrics.jsonl" val/accuracy val/accuracy_greedy
