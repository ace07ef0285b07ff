#!/usr/bin/env bash
# Make a task, a tiny model that adds digit by digit and carries with probability 0.5, and pairs of right and wrong sums.
#   examples/preferences/warm_up.sh SEED OUT      an existing model in OUT/sft/model is kept
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=$1 out=${2%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE

if [ ! -e "$out/sft/model/config.json" ]; then
    echo "== creating a task, a tokenizer and a 0.43M-parameter model"
    "$python" -m examples.quickstart.make_task --out "$out" --seed "$seed" --carry_rate 0.5 --wrong_carry_rate 0.5 --num_sft 28800
    echo "== warm-up: SFT on a teacher that carries with probability 0.5 (examples/quickstart/sft.yaml)"
    "$python" -m alphaapollo.trainer.main_sft --config-dir examples/quickstart --config-name sft \
        data.train_files="$out/data/sft.parquet" model.path="$out/model" trainer.total_training_steps=900 \
        trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed"
fi
"$python" -m examples.preferences.make_pairs --out "$out" --seed "$seed"
