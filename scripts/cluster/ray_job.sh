#!/usr/bin/env bash
# Run a command on an existing Ray cluster as a Ray job, follow its output, and exit with its status.
#
#     scripts/cluster/ray_job.sh http://HEAD:8265 rl algorithm.adv_estimator=grpo trainer.nnodes=4 trainer.n_gpus_per_node=8 ...
#
# The first word is a command of alphaapollo, or a Python file, as for slurm.sbatch.
# The project with its .venv, data and models must have the same path on every node: use a shared file system, or an
# image from docker/. Ctrl-C stops following the output; `.venv/bin/ray job stop --address http://HEAD:8265 ID` ends the job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dashboard="${1:?usage: scripts/cluster/ray_job.sh http://HEAD:8265 COMMAND KEY=VALUE ...}"
shift
case "${1:-}" in
'' | -* | *=*) program=(-m alphaapollo rl) ;;
*.py) program=("$1") && shift ;;
*) program=(-m alphaapollo "$1") && shift ;;
esac
job="alphaapollo-$(date +%Y%m%d-%H%M%S)-$$"
printf -v command '%q ' "$PWD/.venv/bin/python" "${program[@]}" "$@"
# One string: the job starts in its own folder on the head node, so the command changes to the project first.
.venv/bin/python -m ray.scripts.scripts job submit --address "$dashboard" --submission-id "$job" -- \
    bash -c "cd $(printf %q "$PWD") && exec $command" || true # exits with 1 for every failure, and with 0 for a stopped job
.venv/bin/python - "$dashboard" "$job" <<'PYTHON'
import sys
from ray.job_submission import JobSubmissionClient

try:
    job = JobSubmissionClient(sys.argv[1]).get_job_info(sys.argv[2])
except (ConnectionError, RuntimeError):
    sys.exit(1)  # the job was not submitted; `ray job submit` printed the reason
if job.driver_exit_code is None and job.status != "SUCCEEDED":
    print(f"{sys.argv[2]}: {job.status}. {job.message or ''}", file=sys.stderr)
    sys.exit(1)
sys.exit(job.driver_exit_code or 0)
PYTHON
