#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct with one method, or evaluate it: short runs of a few minutes on two CPU cores.
#   examples/smollm2/methods/run.sh METHOD [KEY=VALUE ...]       keys of the method's last command
# METHOD: sft, lora, dpo, ppo, tool, agent, distill, pass_at_k or suite. Writes to OUT (default: outputs/demo, where the demo
# writes its model, too). For sft, GSM8K is a data set of the hub or a folder with gsm8k_{train,test}.jsonl; for suite, RUN is a
# run with another model.
set -euo pipefail
cd "$(dirname "$0")/../../.."
method=${1:-} keys=("${@:2}")
out=${OUT:-outputs/demo}
out=${out%/}
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
folder=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")")
model=$out/model data=(data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet")

train() { # COMMAND CONFIG [KEY=VALUE ...]
    "$python" -m "alphaapollo.trainer.$1" --config-dir "${configs:-examples/smollm2}" \
        --config "examples/smollm2/methods/$2.yaml" "${folder[@]}" "${@:3}"
}
reinforce() { # CONFIG [KEY=VALUE ...]
    train main_ppo "$1" actor_rollout_ref.model.path="$model" "${data[@]}" "${@:2}"
}
answer() { # DATA EXPERIMENT [KEY=VALUE ...]
    train main_generation pass_at_k model.path="$model" data.path="$out/data/$1.parquet" trainer.experiment_name="$2" "${@:3}"
}

examples/smollm2/get_model.sh "$model"
"$python" -m examples.smollm2.make_task --out "$out/data"
case $method in
sft)
    "$python" -m examples.data_preprocess.prepare_sft --protocol tools --data_source "${GSM8K:-openai/gsm8k}" \
        --config_name main --splits train test --local_dir "$out/gsm8k"
    train main_sft sft model.path="$model" data.train_files="$out/gsm8k/train.parquet" \
        data.val_files="$out/gsm8k/test.parquet" "${keys[@]}"
    "$python" -m examples.smollm2.methods.show_trained "$out/sft"
    ;;
lora | ppo | agent) reinforce "$method" "${keys[@]}" ;;
dpo)
    for split in train val; do
        answer "$split" "answers_$split"
        "$python" -m examples.data_preprocess.prepare_preference --data_source "$out/answers_$split/results.jsonl" \
            --local_dir "$out/pairs_$split"
    done
    train main_dpo dpo model.path="$model" data.train_files="$out/pairs_train/train.parquet" \
        data.val_files="$out/pairs_val/train.parquet" "${keys[@]}"
    ;;
tool)
    configs=examples/informal_math task=$out/tool_task
    "$python" -m examples.informal_math.make_task --out "$task" --num_sft 1280 --num_rl 512 --num_val 64
    train main_sft tool_sft model.path="$model" data.train_files="$task/data/sft.parquet"
    model=$out/tool_sft/model data=(data.train_files="$task/data/train.parquet" data.val_files="$task/data/val.parquet")
    reinforce tool "${keys[@]}"
    ;;
distill)
    "$python" -m examples.smollm2.methods.make_student --teacher "$model" --out "$out/student"
    reinforce distill actor_rollout_ref.model.path="$out/student" teacher.model.path="$model" "${keys[@]}"
    ;;
pass_at_k) answer val pass_at_k "${keys[@]}" ;;
suite)
    "$python" -m alphaapollo eval "${RUN:-$model}" --suite "lm-eval:sums --include_path examples/suites --apply_chat_template" \
        --suite "inspect:examples/suites/sums.py@sums_chat --temperature 0 --max-tokens 48" "${keys[@]}"
    ;;
*) echo "unknown method '$method'. Use sft, lora, dpo, ppo, tool, agent, distill, pass_at_k or suite." >&2 && exit 2 ;;
esac
