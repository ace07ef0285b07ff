#!/usr/bin/env bash
# Train a teacher that carries and a student that does not, and distill the teacher on policy.
#   examples/distill/run.sh [SEED [OUT]]        writes to OUT (default: outputs/distill); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/distill}
out=${out%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")
sft=("$python" -m alphaapollo.trainer.main_sft --config-dir examples/quickstart --config-name sft "${run[@]}")

if [ -e "$out" ]; then
    number=1
    while [ -e "$out.$number" ]; do number=$((number + 1)); done
    mv "$out" "$out.$number"
    echo "== the earlier $out was moved to $out.$number"
fi
echo "== two random models with one tokenizer; the teacher's data carry, the student's forget three carries of five"
"$python" -m examples.quickstart.make_task --out "$out" --seed "$seed"
"$python" -m examples.quickstart.make_task --out "$out/teacher" --seed "$((seed + 1000))" --carry_rate 1
echo "== both learn by SFT (examples/quickstart/sft.yaml)"
"${sft[@]}" data.train_files="$out/teacher/data/sft.parquet" model.path="$out/teacher/model" trainer.experiment_name=teacher_sft
"${sft[@]}" data.train_files="$out/data/sft.parquet" model.path="$out/model"
echo "== the student samples, and learns what the teacher would have thought (examples/distill/distill.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/distill --config-name distill \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" teacher.model.path="$out/teacher_sft/model" "${run[@]}"
