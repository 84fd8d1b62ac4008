# `make` alone lists the commands. Each sets up what it needs, once: see $(READY).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup check test test-main test-newest test-slow torture mutants compare docs clean

# The Python that .venv is made with.
PYTHON ?= python3
# cuda or tpu; empty means CPU only.
ACCELERATOR ?=
# The Python that .venv-newest is made with; found automatically if there is one.
NEWEST_PYTHON ?= $(shell .ci/newest-python)
# Worker processes of pytest. More than cores are slower.
WORKERS ?= auto
# For `make torture`: number of kills, and its new folder.
KILLS ?= 50
TORTURED ?= runs/torture
# Number of faults that `make mutants` tries.
FAULTS ?= 30
# What `make compare` compares.
CONFIG ?= experiments/configs/quick.py
ENCODINGS ?= cope,rope,relative,learned
SEEDS ?= 1
WORKDIR ?= runs/quick

BIN := .venv/bin
READY := .venv/.ready$(ACCELERATOR:%=-%)
REFERENCE := .venv/.ready-reference
PYTEST := -m pytest -n $(WORKERS) --maxprocesses=4 --dist loadgroup
TESTS_ON_CPU := JAX_PLATFORMS=cpu

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  Variables, e.g. make compare ENCODINGS=cope,alibi SEEDS=3:"
	@echo "  PYTHON, ACCELERATOR=cuda|tpu, NEWEST_PYTHON, WORKERS, KILLS, TORTURED, FAULTS, CONFIG, ENCODINGS, SEEDS, WORKDIR"

setup: $(READY) ## make .venv, with the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	       || { echo "cope-jax needs Python 3.11 or newer, and '$(PYTHON)' is not: choose another, e.g. make PYTHON=python3.12" >&2; exit 1; }; \
	       $(PYTHON) -m venv --clear .venv; }
	@echo "Installing into .venv: this takes a few minutes, once."
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev$(ACCELERATOR:%=,%)]'
	@touch $@

check: $(READY) ## format, lint, types, the direction of imports, and plain words
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -qq --durations=1 tests/test_words.py

test: check docs test-newest test-main ## check, docs, the short suite on the newest JAX, and all tests that are not slow

# PyTorch and transformers, which only tests compare with.
$(REFERENCE): $(READY)
	@echo "Installing PyTorch and transformers for the tests: this takes a few minutes, once."
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev,reference$(ACCELERATOR:%=,%)]'
	@touch $@

test-main: $(REFERENCE)
	$(TESTS_ON_CPU) $(BIN)/python $(PYTEST)

test-newest: $(READY)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	  echo "The short suite on the newest JAX is skipped: .venv has the newest JAX already."; \
	elif newest="$(NEWEST_PYTHON)"; [ -z "$$newest" ]; then \
	  echo "The short suite on the newest JAX is skipped: no Python 3.12 or 3.13 found; set NEWEST_PYTHON=..."; \
	else \
	  $(MAKE) --no-print-directory .venv-newest/.ready NEWEST_PYTHON="$$newest" && \
	  $(TESTS_ON_CPU) .venv-newest/bin/python $(PYTEST) -m "newest and not slow"; \
	fi

.venv-newest/.ready: pyproject.toml constraints.txt
	@.venv-newest/bin/python -m pip --version >/dev/null 2>&1 || $(NEWEST_PYTHON) -m venv --clear .venv-newest
	@echo "Installing the newest JAX into .venv-newest: this takes a few minutes, once."
	@.venv-newest/bin/python -m pip install -qq --constraint constraints.txt --editable '.[test,tpu-compile]'
	@touch $@

test-slow: $(REFERENCE) ## the slow tests
	$(TESTS_ON_CPU) $(BIN)/python $(PYTEST) -m slow

torture: $(READY) ## kill a small training run KILLS times, and compare every bit with an uninterrupted one
	$(TESTS_ON_CPU) $(BIN)/python -m tests.torture --kills=$(KILLS) --seed=0 --workdir=$(TORTURED)

mutants: $(REFERENCE) ## count the random faults in the numerical packages that the tests catch
	$(BIN)/python -m tests.mutants --count=$(FAULTS) --jobs=2

compare: $(READY) ## train CoPE and its rivals on a small task: a table and plots in WORKDIR
	$(BIN)/python -m experiments.compare --config=$(CONFIG) --encodings=$(ENCODINGS) --seeds=$(SEEDS) --workdir=$(WORKDIR)

docs: .venv/.ready-docs ## build the documentation site in build/site; a broken link or a missing name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/.ready-docs: $(READY)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

clean: ## remove environments and caches; runs/ stays
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build *.egg-info
