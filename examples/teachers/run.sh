#!/usr/bin/env bash
# Train a student that makes mistakes in two tasks and one teacher per task, and distill both teachers: one on the
# training ranks, and one behind a server.
#   examples/teachers/run.sh [SEED [OUT]]       writes to OUT (default: outputs/teachers); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/teachers}
out=${out%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")

if [ -e "$out" ]; then
    number=1
    while [ -e "$out.$number" ]; do number=$((number + 1)); done
    mv "$out" "$out.$number"
    echo "== the earlier $out was moved to $out.$number"
fi
echo "== a student and two teachers with one tokenizer"
"$python" -m examples.teachers.make_task --out "$out" --seed "$seed"
for model in student:1000 adder:1200 reverser:400; do
    name=${model%:*}
    echo "== the $name learns by SFT (examples/quickstart/sft.yaml)"
    "$python" -m alphaapollo.trainer.main_sft --config-dir examples/quickstart --config-name sft "${run[@]}" \
        data.train_files="$out/$name/sft.parquet" model.path="$out/$name/model" \
        trainer.experiment_name="${name}_sft" trainer.total_training_steps="${model#*:}"
done
