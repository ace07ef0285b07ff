#!/usr/bin/env bash
# Make additions and a tiny model, warm it up with SFT, and train it as its own teacher, with SDPO and with SDFT.
#   examples/self_distillation/run.sh [SEED [OUT]]    writes to OUT (default: outputs/self_distillation); an existing OUT is
#   moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/self_distillation}
python=.venv/bin/python
[ -x "$python" ] || python=python3

examples/small_run.sh self_distillation sdpo "$seed" "$out"
echo "== SDFT from the same warm-up (examples/self_distillation/sdft.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/self_distillation --config-name sdft \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" trainer.seed="$seed" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")"
for run in sdpo sdft; do
    echo "== $run"
    "$python" -m alphaapollo plot "$out/$run/metrics.jsonl" val/accuracy val/accuracy_greedy
done
