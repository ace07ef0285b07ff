#!/usr/bin/env bash
# Make a tiny model and questions, warm it up with SFT, train it with GRPO and the Python tool.
#   examples/informal_math/run.sh [SEED [OUT]]        writes to OUT (default: outputs/informal_math); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/informal_math}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh informal_math grpo "$seed" "$out"
echo "== the trained model without the tool"
"$python" -m alphaapollo.trainer.main_generation --config-dir examples/informal_math --config-name no_tool \
    data.path="$out/data/val.parquet" model.path="$out/grpo/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")"
"$python" -m alphaapollo plot "$out/grpo/metrics.jsonl" val/accuracy tool/calls_per_turn
