#!/usr/bin/env bash
# Make a tiny model and its data, warm the model up with SFT, train it with GRPO.
#   examples/reasoning_gym/run.sh [SEED [OUT]]        writes to OUT (default: outputs/reasoning_gym); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/reasoning_gym}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh reasoning_gym grpo "$seed" "$out"
"$python" -m alphaapollo plot "$out/grpo/metrics.jsonl" val/accuracy val/accuracy_greedy
