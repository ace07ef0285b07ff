#!/usr/bin/env bash
# Expert iteration on the quickstart's task: sample, keep the right answers, train the warmed-up model on them, repeat.
#   examples/expert_iteration/run.sh [SEED [OUT [ROUNDS]]]        writes to OUT (default:
#                                                                 outputs/expert_iteration); an existing OUT is moved to OUT.1, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/expert_iteration}
out=${out%/}
rounds=${3:-2}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")
sft=("$python" -m alphaapollo.trainer.main_sft --config-dir examples/quickstart --config-name sft "${run[@]}")
generate=("$python" -m alphaapollo.trainer.main_generation data.max_prompt_length=22 data.max_response_length=42
    rollout.kv_cache_gib=0.25 rollout.max_num_seqs=512 custom_reward_function.path=examples/quickstart/reward.py "${run[@]}")

if [ -e "$out" ]; then
    number=1
    while [ -e "$out.$number" ]; do number=$((number + 1)); done
    mv "$out" "$out.$number"
    echo "== the earlier $out was moved to $out.$number"
fi
echo "== creating a task, a tokenizer and a 0.43M-parameter model"
"$python" -m examples.quickstart.make_task --out "$out" --seed "$seed"
echo "== warm-up: SFT on a teacher that forgets three carries of five (examples/quickstart/sft.yaml)"
"${sft[@]}" data.train_files="$out/data/sft.parquet" model.path="$out/model"
start=$out/sft/model model=$start
for round in $(seq "$rounds"); do
    echo "== round $round: 8 answers to each of the training prompts"
    "${generate[@]}" data.path="$out/data/train.parquet" data.n_samples=8 model.path="$model" trainer.experiment_name="round_$round"
    "$python" -m examples.data_preprocess.prepare_right_answers --max_answers 4 \
        --results "$out/round_$round/results.jsonl" --local_dir "$out/data/round_$round"
    echo "== round $round: the warmed-up model learns the right ones"
    "${sft[@]}" data.train_files="$out/data/round_$round/train.parquet" model.path="$start" optim.lr=1.0e-3 \
        trainer.total_training_steps=300 trainer.experiment_name="sft_$round"
    model=$out/sft_$round/model
done
for name in sft $(seq -f "sft_%g" "$rounds"); do
    echo "== the held-out prompts, after $name"
    "${generate[@]}" data.path="$out/data/val.parquet" data.n_samples=4 model.path="$out/$name/model" \
        trainer.experiment_name="val_$name"
done
