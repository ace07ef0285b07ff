#!/usr/bin/env bash
# Make a tiny model and the games' data, warm the model up with SFT, train it with GRPO over several turns.
#   examples/guessing_game/run.sh [SEED [OUT]]        writes to OUT (default: outputs/guessing_game); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/guessing_game}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh guessing_game grpo "$seed" "$out"
echo "== the trained model without information: the environment always says higher"
"$python" -m alphaapollo.trainer.main_generation --config-dir examples/guessing_game --config-name deaf \
    data.path="$out/data/val.parquet" model.path="$out/grpo/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")"
"$python" -m alphaapollo plot "$out/grpo/metrics.jsonl" val/accuracy val/accuracy_greedy
