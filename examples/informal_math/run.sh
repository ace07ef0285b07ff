#!/usr/bin/env bash
# Make a tiny model and questions, warm it up with SFT, train it with GRPO and the Python tool.
#   examples/informal_math/run.sh [SEED [OUT]]        everything is written to OUT (outputs/informal_math), anew
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/informal_math}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

rm -rf "$out"
echo "1/3 a tokenizer, a 0.43M-parameter model, and questions, made from nothing"
"$python" -m examples.informal_math.make_task --out "$out" --seed "$seed"
echo "2/3 warm-up: SFT on a teacher that guesses half of the time and seldom means the right operation"
"$python" -m alphaapollo.trainer.main_sft --config-dir examples/informal_math --config-name sft \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
echo "3/3 GRPO: rewarded only for right answers"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/informal_math --config-name grpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
"$python" -m alphaapollo.observability.curve "$out/grpo/metrics.jsonl" val/accuracy tool/calls_a_turn
