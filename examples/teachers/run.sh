#!/usr/bin/env bash
# Train a student that makes mistakes in two tasks and one teacher per task, and distill both teachers in three ways.
# One teacher is on the training ranks, the other behind a server.
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

port=$((8100 + seed))
echo "== a server for the reverser on port $port"
"$python" -m alphaapollo serve "$out/reverser_sft" --port "$port" --name reverser rollout.kv_cache_gib=0.1 > "$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null; wait $server || true' EXIT
until curl --silent --fail "http://127.0.0.1:$port/v1/models" > "$out/models.json"; do
    kill -0 $server || { tail -20 "$out/server.log"; exit 1; }
    sleep 1
done
ppo=("$python" -m alphaapollo.trainer.main_ppo --config-dir examples/teachers --config-name teachers
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet"
    actor_rollout_ref.model.path="$out/student_sft/model" teacher.models.adder.path="$out/adder_sft/model"
    teacher.models.reverser.base_url="http://127.0.0.1:$port/v1" "${run[@]}")
echo "== the student learns from both teachers, each in its task (examples/teachers/teachers.yaml)"
"${ppo[@]}"
echo "== the same with MOPD's policy gradient (configs/algorithm/mopd.yaml)"
"${ppo[@]}" algorithm=mopd trainer.experiment_name=mopd
echo "== MOPD with two teachers at each token: that of the task, and the student before this training"
"${ppo[@]}" algorithm=mopd trainer.experiment_name=mixed teacher.models.start.path="$out/student_sft/model" \
    'teacher.by_source={quickstart/addition:{adder:0.75,start:0.25},teachers/reversal:{reverser:0.75,start:0.25}}'
