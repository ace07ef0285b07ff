#!/usr/bin/env bash
# Train the program prices.py: make a task and a tiny model, warm it up with SFT, then train it with GRPO.
#   examples/agents/run.sh [SEED [OUT]]        writes to OUT (default: outputs/agents)
# Needs the OpenAI Agents SDK: .venv/bin/pip install openai-agents
set -euo pipefail
cd "$(dirname "$0")/../.."
examples/small_run.sh agents grpo val "${1:-0}" "${2:-outputs/agents}"
