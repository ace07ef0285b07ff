#!/usr/bin/env bash
# The quickstart: make a task and a tiny model, warm it up with SFT, train it with GRPO, and show the results.
#   examples/quickstart/run.sh [SEED [OUT]]        writes to OUT (default: outputs/quickstart); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/quickstart}
python=.venv/bin/python
[ -x "$python" ] || python=python3
start=$SECONDS

examples/small_run.sh quickstart grpo "$seed" "$out"
echo "== what it learned"
"$python" -m examples.quickstart.report --out "$out" --seconds "$((SECONDS - start))"
