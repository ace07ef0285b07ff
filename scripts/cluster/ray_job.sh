#!/usr/bin/env bash
# Trains on a Ray cluster that stands already, as a Ray job; follows its output, and ends with its exit status.
#
#     scripts/cluster/ray_job.sh http://HEAD:8265 algorithm.adv_estimator=grpo trainer.nnodes=4 trainer.n_gpus_per_node=8 ...
#
# The project, with its .venv, data and models, must lie under the same path on every node: a shared file system, or an
# image made from docker/. Ctrl-C only stops following; `.venv/bin/ray job stop --address http://HEAD:8265 ID` ends it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dashboard="${1:?usage: scripts/cluster/ray_job.sh http://HEAD:8265 KEY=VALUE ...}"
shift
printf -v command '%q ' "$PWD/.venv/bin/python" -m alphaapollo.trainer.main_ppo "$@"
# One string: the job runs in a folder of its own on the head node, so it goes to ours first.
exec .venv/bin/python -m ray.scripts.scripts job submit --address "$dashboard" -- bash -c "cd $(printf %q "$PWD") && exec $command"
