#!/usr/bin/env bash
# The demo: train SmolLM2-135M-Instruct, a pretrained model, with GRPO to follow instructions, and show the results.
#   examples/smollm2/run.sh [KEY=VALUE ...]        e.g. trainer.seed=77
# Writes to OUT (default: outputs/demo).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-outputs/demo}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
start=$SECONDS

examples/smollm2/get_model.sh "$out/model"
"$python" -m examples.smollm2.make_task --out "$out/data"
grep -qsE 'amx_bf16|avx512_bf16' /proc/cpuinfo || [ -e /dev/nvidia0 ] ||
    echo "This CPU has no bfloat16 instructions: an iteration takes half a minute to a minute on two cores."
echo "== RL with Ray, FSDP2 and vLLM; the reward is 1 if an answer follows its instruction (examples/smollm2/grpo.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/smollm2 --config-name grpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/model" \
    trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" "$@"
metrics="$(ls -t "$out"/*/metrics.jsonl | head -n 1)" # of this run, whatever its name
echo "== what it learned"
"$python" -m examples.smollm2.report --run "$(dirname "$metrics")" --model "$out/model" --seconds "$((SECONDS - start))"
