#!/usr/bin/env bash
# Make a task and a tiny model, train it to add and to check, and run two evolutions: with its own votes and with random ones.
#   examples/evolving/run.sh [SEED [OUT]]        writes to OUT (default: outputs/evolving)
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
out=${2:-outputs/evolving}
python=.venv/bin/python
[ -x "$python" ] || python=python3
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")
evolve=("$python" -m alphaapollo.evolving.main --config-dir examples/evolving --config-name evolve
    data.path="$out/data/problems.parquet" models.policy.path="$out/sft/model" "${run[@]}")

"$python" -m examples.evolving.make_task --out "$out" --seed "$seed"
"$python" -m alphaapollo.trainer.main_sft --config-dir examples/evolving --config-name sft \
    data.train_files="$out/data/sft.parquet" model.path="$out/model" "${run[@]}"
echo "== four rounds with votes of the model"
"${evolve[@]}"
echo "== the same with random votes"
"${evolve[@]}" trainer.experiment_name=coin roles.verifier.plugin=coin roles.verifier.max_tokens=1
