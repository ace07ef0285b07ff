# All targets use .venv, which scripts/setup.sh creates (PYTHON=... and DEVICE=cpu|gpu select what is installed).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
SIDE_BY_SIDE := -n $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4))) # tests often wait for processes
ARGS ?=
CHOSEN := $(PLUGIN:%=tests/plugins/%) $(FILES)
CHECKS := tests/unit/test_layers.py tests/unit/test_sizes.py tests/unit/test_requirements.py tests/unit/test_language.py tests/unit/test_docs.py tests/unit/test_page_commands.py

help: ## list the targets
	@printf '\n  \033[1malphaapollo\033[0m: reinforcement-learning post-training for language models\n\n'
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | \
		while IFS=$$'\t' read -r name text; do printf '  \033[36mmake %-17s\033[0m %s\n' "$$name" "$$text"; done
	@printf '\n  PYTHON=python3.12 or DEVICE=cpu|gpu choose what is installed; ARGS="-k grpo" goes to pytest, ARGS="trainer.seed=1" to the demo.\n  make test PLUGIN=viewer, or FILES="tests/unit/data tests/loop/test_main_sft.py", runs these tests.\n\n'

quickstart: setup ## install, then train a small model with RL until it visibly learns (minutes, no GPU needed)
	@bash examples/quickstart/run.sh

demo: setup ## install a pretrained model of 135M parameters (93 MB), then train it with RL to follow instructions
	@bash examples/smollm2/run.sh $(ARGS)

setup: ## install the runtime requirements into .venv
	@scripts/setup.sh

setup-suites: ## install the runtime requirements, and lm-eval and inspect-ai into .venv/suites
	@scripts/setup.sh suites

setup-sglang: ## install the runtime requirements, and SGLang into .venv/sglang
	@scripts/setup.sh sglang

setup-dev: ## install the runtime, test and check requirements into .venv
	@scripts/setup.sh dev

test: setup-dev ## run the core tests: mathematics, config, data, rewards, and one complete run per promise (7 to 18 minutes)
	@$(PYTEST) $(SIDE_BY_SIDE) $(if $(strip $(CHOSEN)),$(CHOSEN) -m "not nightly",-m core) --durations=10 $(ARGS)

test-all: setup-dev ## run all tests but the nightly ones, and those of `check` in `make check test-all` (GPU tests are skipped without a GPU)
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not nightly" --durations=10 $(if $(filter check,$(MAKECMDGOALS)),$(CHECKS:%=--ignore=%)) $(ARGS)

durations: setup-dev ## run all tests but the nightly ones, and record the slow ones in tests/durations.json
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not nightly" --record-durations $(ARGS)

coverage: setup-dev ## measure which lines the tests without complete runs execute
	@$(PYTEST) $(SIDE_BY_SIDE) tests/unit tests/golden tests/plugins -m "not nightly and not loop" --cov=alphaapollo --cov-report=term:skip-covered $(ARGS)

test-nightly: setup-dev ## run the slow tests that test-all leaves out
	@$(PYTEST) $(SIDE_BY_SIDE) -m nightly --durations=10 $(ARGS)

test-gpu: setup-dev ## run the tests that need a GPU
	@$(PYTEST) tests/gpu $(ARGS)

check: setup-dev ## check format, lint, spelling, types, import layers and file sizes
	@status=0; for tool in "ruff format --check" "ruff check" codespell_lib mypy "pytest $(CHECKS)"; do \
		echo "== $$tool"; $(PY) -m $$tool || status=1; done; exit $$status

format: setup-dev ## format and fix the code with ruff
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: setup-dev ## draw docs/images/ from the quickstart's run
	@$(PY) -m scripts.images

docs-site: setup-dev ## build the documentation site in site/ (checks links and anchors)
	@$(PY) -m scripts.docs_site

lock: setup-dev ## pin requirements/*.txt again (ARGS=--upgrade takes the newest versions)
	@source scripts/pip_settings.sh; $(PY) scripts/lock.py $(ARGS)

audit: setup-dev ## list known vulnerabilities of the pinned packages (needs an advisory index)
	@source scripts/pip_settings.sh; $(PY) scripts/audit.py

wheel: setup-dev ## build the wheel and the source distribution in dist/
	@$(PY) -m hatchling build

bench: setup ## measure speed, against other tools on the same machine (long)
	@for script in scripts/bench/[a-z]*.py; do echo "== $$script"; $(PY) $$script; done

gpu-check: setup ## check training, and measure speed and memory: ten minutes on one GPU; on a CPU with small models
	@$(PY) -m scripts.gpu_check $(ARGS)

gpu-check-wheels: setup ## download the wheels that gpu-check needs on a machine with only torch and transformers
	@$(PY) -m scripts.gpu_check.wheels $(ARGS)

cluster-check: setup ## check multi-node runs on simulated machines: minutes on two cores; needs root (or user namespaces)
	@$(PY) -m scripts.cluster_check $(ARGS)

clean: ## remove .venv, builds and caches (outputs/ stays)
	@rm -rf .venv dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './outputs/*' -prune -exec rm -rf {} +

.PHONY: help quickstart demo setup setup-suites setup-sglang setup-dev test test-all test-nightly test-gpu check format docs docs-site lock audit wheel bench gpu-check gpu-check-wheels cluster-check clean
