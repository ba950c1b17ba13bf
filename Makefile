# Everything runs inside .venv, made once: it is renewed only when pyproject.toml or constraints.txt changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
BIN := .venv/bin
INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable
PYTEST := OMP_NUM_THREADS=1 WANDB_MODE=offline $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint docs bench clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/installed ## Train on a small drifting stream in half a minute; needs no download.
	$(BIN)/python train.py --config conf/quickstart.yaml

test: lint ## Run lint and the fast tests; all that CI does.
	$(PYTEST) -m "not slow"

test-slow: .venv/installed-dev ## Run every test, the slow ones included.
	$(PYTEST)

lint: .venv/installed-dev ## Check style (ruff), types (mypy) and who may import whom (import-linter).
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: .venv/installed-dev ## Build the documentation into build/site; needs no network.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open build/site/index.html"

bench: .venv/installed ## Measure speed and memory on this machine.
	$(BIN)/fedbnn bench step
	$(BIN)/fedbnn bench memory --config conf/quickstart.yaml

clean: ## Remove .venv and all caches; runs and data stay.
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/python pyproject.toml constraints.txt
	@echo "Installing into .venv (once; this takes some minutes) ..."
	$(INSTALL) .
	@touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) ".[dev]"
	@touch $@
