#!/usr/bin/env bash
# Make a tiny model and questions, warm it up with SFT, train it with GRPO; its programs are run against unit tests.
#   examples/code/run.sh [SEED [OUT]]        writes to OUT (default: outputs/code); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/code}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh code grpo "$seed" "$out"
"$python" -m alphaapollo plot "$out/grpo/metrics.jsonl" val/accuracy val/accuracy_greedy
