#!/usr/bin/env bash
# A complete reward model workflow: pairs -> reward model -> GRPO on its score -> more sums are right.
#   examples/reward_model/run.sh [SEED [OUT [KEY=VALUE ...]]]      writes to OUT (default: outputs/reward_model)
# Keys are those of main_ppo, e.g. actor_rollout_ref.actor.use_kl_loss=false.
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0} out=${2:-outputs/reward_model}
out=${out%/}
python=.venv/bin/python
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
run=(trainer.output_dir="$(dirname "$out")" trainer.project_name="$(basename "$out")" trainer.seed="$seed")

examples/preferences/warm_up.sh "$seed" "$out"
echo "== a reward model of the warmed-up model (examples/reward_model/rm.yaml)"
"$python" -m alphaapollo.trainer.main_rm --config-dir examples/reward_model --config-name rm \
    data.train_files="$out/data/pairs.parquet" data.val_files="$out/data/val_pairs.parquet" \
    model.path="$out/sft/model" "${run[@]}"
echo "== GRPO: the reward model's score is the reward, the true sum is watched (examples/reward_model/grpo.yaml)"
"$python" -m alphaapollo.trainer.main_ppo --config-dir examples/reward_model --config-name grpo \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/val.parquet" \
    actor_rollout_ref.model.path="$out/sft/model" reward_model.model.path="$out/rm/model" "${run[@]}" "${@:3}"
