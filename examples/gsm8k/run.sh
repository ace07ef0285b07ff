#!/usr/bin/env bash
# GSM8K end to end. Without arguments: data from the hub, and the recipe for one GPU (docs/recipes.md).
#   examples/gsm8k/run.sh [KEY=VALUE ...]
#   examples/gsm8k/run.sh small FOLDER [KEY=VALUE ...]    a small new model, on FOLDER/gsm8k_{train,test}.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
out=outputs/gsm8k

prepare() { "$python" -m examples.data_preprocess.prepare_informal_math "$@"; }
train() { "$python" -m alphaapollo.trainer.main_ppo --config-dir examples/recipes/gsm8k "$@"; }

if [ "${1:-}" != small ]; then
    prepare --data_source openai/gsm8k --config_name main --local_dir data/gsm8k
    train --config-name one_gpu "$@"
    exit
fi
folder=$2
shift 2
export OMP_WAIT_POLICY=PASSIVE
mkdir -p "$out/source/gsm8k"
cp "$folder"/gsm8k_{train,test}.jsonl "$out/source/gsm8k"
prepare --data_source "$out/source/gsm8k" --splits train test --local_dir "$out/data"
"$python" -m examples.gsm8k.make_small_model --text "$folder/gsm8k_train.jsonl" --out "$out/model"
"$python" -m examples.gsm8k.make_sft_data --data "$out/data/train.parquet" --text "$folder/gsm8k_train.jsonl" --out "$out/data/sft.parquet"
"$python" -m alphaapollo.trainer.main_sft --config-dir examples/gsm8k --config-name small_sft
train --config-name small "$@"
