#!/usr/bin/env bash
# Make a tiny model and the games' data, warm the model up with SFT, train it with GRPO over several turns.
#   examples/guessing_game/run.sh [SEED [OUT]]        everything is written to OUT (outputs/guessing_game), anew
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/guessing_game}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

rm -rf "$out"
echo "1/4 a tokenizer, a 0.43M-parameter model, and games, made from nothing"
"$python" -m examples.guessing_game.make_task --out "$out" --seed "$seed"
echo "2/4 warm-up: SFT on a teacher who ignores the answers"
"$python" -m alphaapollo.trainer.main_sft --config-dir examples/guessing_game --config-name sft \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
echo "3/4 GRPO: the number found or not, nothing else"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/guessing_game --config-name grpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/test.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
echo "4/4 the trained model, told nothing: the environment always says higher"
"$python" -m alphaapollo.trainer.main_generation --config-dir examples/guessing_game --config-name deaf \
    data.path="$out/data/test.parquet" model.path="$out/grpo/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")"
"$python" -m alphaapollo.observability.curve "$out/grpo/metrics.jsonl" val/accuracy val/accuracy_greedy
