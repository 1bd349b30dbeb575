# Every target sets up what it needs. PYTHON=python3.12 picks another interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-vllm up test test-vllm bench lint format docs constraints clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvhearth needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv" >&2; exit 2; }
	@echo "Installing kvhearth into $(VENV) (about a minute the first time) …"
	@$(PIP) --editable '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing what the tests need …"
	@$(PIP) --editable '.[dev]'
	@touch $@

setup: $(VENV)/.dev ## Make .venv with everything that development needs

demo: $(VENV)/.run ## Run one workload three ways (none, native, shared) and show what offloading saved
	@$(BIN)/kvhearth demo $(ARGS)

demo-vllm: $(VENV)/.run ## The same on two real vLLM engines of this CPU, small (own environment: .venv-vllm)
	@sh tests/vllm/install.sh .venv-vllm
	@$(BIN)/kvhearth demo --engine vllm --python .venv-vllm/bin/python $(ARGS)

up: $(VENV)/.run ## Run a stack on this machine: four emulated engines, router, store (Ctrl-C stops it)
	@$(BIN)/kvhearth up $(or $(ARGS),examples/local.yaml)

test: $(VENV)/.dev ## Run every test that needs no vLLM
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-vllm: ## Tests with the real vLLM: our model beside its scheduler, the connector in engines (.venv-vllm)
	@sh tests/vllm/install.sh .venv-vllm
	@.venv-vllm/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm $(ARGS)

bench: $(VENV)/.dev ## Run the benchmarks beside their peers; each prints a JSON line last
	@for script in bench/*.py; do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

lint: $(VENV)/.dev ## Check format, rules, types and which way the imports point
	@$(BIN)/ruff format --check src tests bench docs
	@$(BIN)/ruff check src tests bench docs
	@$(BIN)/mypy
	@PYTHONPATH=src $(BIN)/lint-imports

format: $(VENV)/.dev ## Format the code and fix what can be fixed
	@$(BIN)/ruff format src tests bench docs
	@$(BIN)/ruff check --fix src tests bench docs

docs: $(VENV)/.dev ## Write the reference pages (command line, metrics, Stack) from the code
	@$(BIN)/python docs/generate.py

constraints: ## Resolve the newest versions afresh and pin them in constraints.txt (then run the tests)
	@rm -rf .venv-pin && $(PYTHON) -m venv .venv-pin
	@.venv-pin/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[dev]'
	@.venv-pin/bin/python -m pip --disable-pip-version-check freeze --exclude-editable --exclude torch > constraints.txt
	@rm -rf .venv-pin

clean: ## Remove environments, caches and reports
	@rm -rf .venv .venv-vllm .venv-pin report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
