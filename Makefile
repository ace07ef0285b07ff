# Everything runs in .venv, which scripts/setup.sh makes (PYTHON=..., DEVICE=cpu|gpu choose what goes into it).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
SIDE_BY_SIDE := -n logical --maxprocesses 4
ARGS ?=
CHECKS := tests/unit/test_layers.py tests/unit/test_sizes.py tests/unit/test_requirements.py

help: ## this list
	@printf '\n  \033[1malphaapollo\033[0m: reinforcement-learning post-training for language models\n\n'
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | \
		while IFS=$$'\t' read -r name text; do printf '  \033[36mmake %-13s\033[0m %s\n' "$$name" "$$text"; done
	@printf '\n  PYTHON=python3.12 or DEVICE=cpu|gpu choose what is installed; ARGS="-k grpo" goes to pytest.\n\n'

quickstart: setup ## install, then train a small model with RL until it visibly learns (minutes, no GPU needed)
	@bash examples/quickstart/run.sh

setup: ## install what running needs into .venv
	@scripts/setup.sh

setup-dev: ## and what tests and checks need
	@scripts/setup.sh dev

test: setup-dev ## all tests (those that need a GPU skip without one)
	@$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

test-unit: setup-dev ## the tests without engine and Ray
	@$(PYTEST) $(SIDE_BY_SIDE) tests/unit $(ARGS)

test-loop: setup-dev ## whole runs on the real stack, on a CPU
	@$(PYTEST) tests/loop $(ARGS)

check: setup-dev ## format, lint, types, import layers, sizes
	@status=0; for tool in "ruff format --check" "ruff check" mypy "pytest -q $(CHECKS)"; do \
		echo "== $$tool"; $(PY) -m $$tool || status=1; done; exit $$status

format: setup-dev ## let ruff format and mend
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: setup-dev ## write docs/config.md, docs/config/ and docs/verl_keys.md from the schema
	@$(PY) -m alphaapollo.config docs

lock: setup-dev ## pin requirements/*.txt anew (ARGS=--upgrade takes the newest versions)
	@source scripts/pip_settings.sh; $(PY) scripts/lock.py $(ARGS)

audit: setup-dev ## known vulnerabilities of the pinned packages; says so where no index of them can be asked
	@source scripts/pip_settings.sh; $(PY) scripts/audit.py

wheel: setup-dev ## build dist/*.whl
	@$(PY) -m hatchling build -t wheel

bench: setup ## measure speed, against other tools on the same machine (long)
	@for script in scripts/bench/[a-z]*.py; do echo "== $$script"; $(PY) $$script; done

gpu-check: setup ## does this machine train rightly? ten minutes on one GPU; runs on a CPU too and says what it could not see
	@$(PY) -m scripts.gpu_check $(ARGS)

cluster-check: setup ## does a run on several nodes work? minutes on two cores, with machines of paper; needs root (or user namespaces)
	@$(PY) -m scripts.cluster_check $(ARGS)

clean: ## remove .venv, builds and caches (outputs/ stays)
	@rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './outputs/*' -prune -exec rm -rf {} +

.PHONY: help quickstart setup setup-dev test test-unit test-loop check format docs lock audit wheel bench gpu-check cluster-check clean
