#!/usr/bin/env bash
# Make a tiny model and its data, warm the model up with SFT, train it with GiGPO over several turns.
#   examples/grid_world/run.sh [SEED [OUT]]        writes to OUT (default: outputs/grid_world); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/grid_world}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh grid_world gigpo "$seed" "$out"
"$python" -m alphaapollo plot "$out/gigpo/metrics.jsonl" val/accuracy val/accuracy_greedy
