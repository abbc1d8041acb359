# Set-up and the common commands. `make` prints the targets.
#
#   VENV=DIR        folder of the environment (default .venv)
#   PYTHON=PROGRAM  interpreter that makes the environment, 3.11 or newer (default python3)

VENV   ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?= -n auto --dist worksteal

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PIP_OPTIONS := --disable-pip-version-check --no-input
BIN := $(VENV)/bin
# An environment is up to date as long as it was made from this very pyproject.toml, in this checkout.
STAMP := $(VENV)/.installed-$(shell { pwd; cat pyproject.toml; } | cksum | cut -d' ' -f1)

.PHONY: help demo test test-gpu lint format bench evidence ledger install install-dev clean

help: ## print this list
	@echo "targets (VENV=$(VENV), PYTHON=$(PYTHON)):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: install ## set up, then train three routed vision transformers on handwritten digits
	$(BIN)/python -m routing_lab.train router=amod scaling=multiply seed=0,1,2 -m

test: lint ## set up with development extras, then lint, types, layer contract and tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: install-dev ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests

lint: install-dev ## lint, formatting, types and layer contract only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

audit: install-dev ## look up known vulnerabilities of everything installed (asks a public database)
	$(BIN)/python -m pip install $(PIP_OPTIONS) pip-audit
	$(BIN)/pip-audit --skip-editable --progress-spinner off

bench: install-dev ## run the benchmarks
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

evidence: install ## write pages, tables and figures of the committed studies again, and "What we found"
	$(BIN)/python scripts/evidence.py

ledger: install ## write docs/paper_map.md and docs/ledger.md from the study files and docs/ledger.csv
	$(BIN)/python scripts/ledger.py

install: $(STAMP) ## environment and package
install-dev: $(STAMP)-dev ## environment and package with development extras

$(STAMP): | $(BIN)/pip
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install $(PIP_OPTIONS) -e .
	touch $@

$(STAMP)-dev: | $(BIN)/pip
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install $(PIP_OPTIONS) -e '.[dev]'
	touch $(STAMP) $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "routing_lab needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	    echo "Name another interpreter, for instance: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	    echo "python -m venv failed (on Debian and Ubuntu: install the package python3-venv)" >&2; exit 1; }

clean: ## remove the environment, caches and build products (never runs/ or data/)
	@if [ -f $(VENV)/pyvenv.cfg ]; then echo "rm -rf $(VENV)"; rm -rf $(VENV); fi
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
