#!/usr/bin/env bash
# The quickstart: make a task and a tiny model, warm it up with SFT, train it with GRPO, show what it learned.
#   examples/quickstart/run.sh [SEED [OUT]]        everything is written to OUT (outputs/quickstart), anew
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/quickstart}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

rm -rf "$out"
start=$SECONDS
echo "1/4 a task, a tokenizer and a 0.43M-parameter model, made from nothing"
"$python" -m examples.quickstart.make_task --out "$out" --seed "$seed"
echo "2/4 warm-up: SFT on a teacher that carries at random"
"$python" -m alphaapollo.trainer.main_sft --config-dir examples/quickstart --config-name sft \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
echo "3/4 GRPO: Ray, FSDP2 and vLLM, rewarded only for right sums"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/quickstart --config-name grpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
echo "4/4 what it learned"
"$python" -m examples.quickstart.report --out "$out" --seconds "$((SECONDS - start))"
