#!/usr/bin/env bash
# Train the program prices.py or planner.py: make a task and a tiny model, warm it up with SFT, then train it with GRPO.
#   examples/agents/run.sh [PROGRAM [SEED [OUT]]]     PROGRAM: prices (default) or planner; writes to OUT (default: outputs/agents)
# Needs the OpenAI Agents SDK: .venv/bin/pip install openai-agents
set -euo pipefail
cd "$(dirname "$0")/../.."
program=${1:-prices}
examples/small_run.sh agents "$program" "${2:-0}" "${3:-outputs/agents}" --program "$program"
