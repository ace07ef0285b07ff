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
job="alphaapollo-$(date +%Y%m%d-%H%M%S)-$$"
printf -v command '%q ' "$PWD/.venv/bin/python" -m alphaapollo.trainer.main_ppo "$@"
# One string: the job runs in a folder of its own on the head node, so it goes to ours first.
.venv/bin/python -m ray.scripts.scripts job submit --address "$dashboard" --submission-id "$job" -- \
    bash -c "cd $(printf %q "$PWD") && exec $command" || true # 1 for every failure, 0 for a job that was stopped
.venv/bin/python - "$dashboard" "$job" <<'PYTHON'
import sys
from ray.job_submission import JobSubmissionClient

try:
    job = JobSubmissionClient(sys.argv[1]).get_job_info(sys.argv[2])
except (ConnectionError, RuntimeError):
    sys.exit(1)  # it was never submitted, and `ray job submit` has said why
if job.driver_exit_code is None and job.status != "SUCCEEDED":
    print(f"{sys.argv[2]}: {job.status}. {job.message or ''}", file=sys.stderr)
    sys.exit(1)
sys.exit(job.driver_exit_code or 0)
PYTHON
