# Everything Penstock needs goes into this folder: .venv (our environment), .tenant (the one that tenant code sees).
SHELL := /bin/sh
PYTHON ?= python3
UV := .cache/uv/bin/uv
BIN := .venv/bin
NAME ?= all

.DEFAULT_GOAL := help
.PHONY: help install install-dev up test check format soak bench lock contract wheel

help: ## Show what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	@echo "Fetching uv, the installer, into .cache/uv"
	@$(PYTHON) -m venv .cache/uv
	@.cache/uv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock

.venv/.runtime: $(UV) requirements.lock pyproject.toml
	@echo "Installing Penstock into .venv"
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) .venv
	@$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

.venv/.dev: .venv/.runtime requirements-dev.lock
	@echo "Installing the tools of development into .venv"
	@$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements-dev.lock
	@touch $@

.cache/contract/.ready: $(UV) requirements-contract.lock
	@echo "Installing the validator and generator of the API's document into .cache/contract"
	@rm -rf .cache/contract && $(UV) venv --quiet --python $(PYTHON) .cache/contract
	@$(UV) pip install --quiet --python .cache/contract/bin/python --require-hashes -r requirements-contract.lock
	@touch $@

.tenant/.ready: $(UV)
	@echo "Making the environment of tenant code in .tenant"
	@rm -rf .tenant && $(UV) venv --quiet --python $(PYTHON) .tenant
	@touch $@

install: .venv/.runtime .tenant/.ready ## Prepare the environment; the command is .venv/bin/penstock

install-dev: install .venv/.dev

up: install ## Start the whole cloud here; Ctrl-C stops it
	@exec $(BIN)/penstock up

test: install-dev ## Run the whole test suite against real servers
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not soak" tests

check: install-dev .cache/contract/.ready ## Formatting, lint, types, layers, contracts
	@$(BIN)/ruff format --check src tests bench tools migrations
	@$(BIN)/ruff check src tests bench tools migrations
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports
	@$(BIN)/python tools/contract.py check
	@$(BIN)/python tools/generator.py .cache/contract/bin

format: install-dev ## Format and fix what can be fixed
	@$(BIN)/ruff format src tests bench tools migrations
	@$(BIN)/ruff check --fix src tests bench tools migrations

contract: install-dev ## Write docs/api and the diagrams anew from the code
	@$(BIN)/python tools/contract.py write

soak: install-dev ## Run the long fault tests
	@$(BIN)/python -m pytest -m soak --timeout 7200 tests

bench: install-dev ## Measure; NAME=allocate|handoff|relay|api|tunnel|placement|nodes|accrual|ledger|invoke|coldstart|cli, or all
	@$(BIN)/python -m bench $(NAME)

wheel: install ## Build the package into dist/, for `pip install` elsewhere
	@rm -rf dist
	@$(UV) build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir dist
	@ls dist/*.whl

lock: $(UV) ## Resolve the dependencies again
	@$(UV) pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --python-version 3.11 \
	  --extra server --extra embedded pyproject.toml requirements-build.in -o requirements.lock
	@$(UV) pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --python-version 3.11 \
	  --extra server --extra embedded --group dev pyproject.toml requirements-build.in -c requirements.lock -o requirements-dev.lock
	@$(UV) pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --python-version 3.11 \
	  requirements-contract.in -o requirements-contract.lock
