# `make` alone lists the commands. Each command installs what it needs, once: see $(READY).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup check test test-main newest test-newest test-slow torture fuzz mutants compare docs clean

# The Python that creates .venv.
PYTHON ?= python3
# cuda or tpu; empty means CPU only.
ACCELERATOR ?=
# The Python that creates .venv-newest; by default it is found automatically.
NEWEST_PYTHON ?= $(shell .ci/newest-python)
# Number of worker processes of pytest. More workers than cores are slower.
WORKERS ?= auto
# For `make torture`: the number of kills, and a new folder.
KILLS ?= 50
TORTURED ?= runs/torture
# For `make fuzz`: the number of cases, and a new folder.
CASES ?= 2000
FUZZED ?= runs/fuzz
# Number of faults that `make mutants` tries.
FAULTS ?= 30
# For `make compare`: the flags of cope-jax compare.
CONFIG ?= quick
ENCODINGS ?= cope,rope,relative,learned
SEEDS ?= 1
WORKDIR ?= runs/quick

VARIABLES := PYTHON ACCELERATOR NEWEST_PYTHON WORKERS KILLS TORTURED CASES FUZZED FAULTS CONFIG ENCODINGS SEEDS WORKDIR
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNKNOWN := $(filter-out $(VARIABLES),$(GIVEN))
$(if $(UNKNOWN),$(error there is no variable $(UNKNOWN): choose from $(VARIABLES)))

BIN := .venv/bin
# What `check` reads: a file of a user's at the top level is none of its business.
CODE := cope_jax docs experiments notebooks tests tools
READY := .venv/.ready$(ACCELERATOR:%=-%)
PLAIN := .venv/.ready-plain$(ACCELERATOR:%=-%)
REFERENCE := .venv/.ready-reference
PYTEST := -m pytest -n $(WORKERS) --maxprocesses=4 --dist loadgroup
# Processes that tests start would else compile the package anew where the variable is set.
TESTS_ON_CPU := JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE=
INSTALL = set -o pipefail; $(1)/python -m pip install --disable-pip-version-check --progress-bar off \
  --constraint constraints.txt --report $(1)/../installed.json --editable
# Removes the environment if a package is not the one that was tested, but not if its file is only not listed (status
# 3); -S, for else a .pth file of the package would run.
COMPARE_HASHES = $(1)/python -I -S .ci/hashes $(1)/../installed.json || { [ $$? = 3 ] || rm -rf $(dir $(1)); exit 1; }
# A dot for each package that pip collects.
DOTS := { while read -r verb noun _; do case $$verb\ $$noun in Collecting*) printf .;; *\ collected) printf ' unpacking';; esac; done; echo; }

define venv
@$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	       || { echo "cope-jax needs Python 3.11 or newer, but '$(PYTHON)' is older or missing: choose another, e.g. make PYTHON=python3.12" >&2; exit 1; }; \
	       $(PYTHON) -m venv --clear .venv; }
endef

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  Variables, e.g. make compare ENCODINGS=cope,alibi SEEDS=3:"
	@echo "  $(VARIABLES). ACCELERATOR is cuda or tpu."

setup: $(READY) ## create .venv, with the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	$(venv)
	@echo "Installing into .venv: this takes a few minutes, once."
	@$(call INSTALL,$(BIN)) '.[dev$(ACCELERATOR:%=,%)]' | $(DOTS)
	@$(call COMPARE_HASHES,$(BIN))
	@touch $(PLAIN) $@

# Without the tools for tests and development.
$(PLAIN): pyproject.toml constraints.txt
	$(venv)
	@echo "Installing into .venv: this takes a minute or two, once."
	@$(call INSTALL,$(BIN)) '.[lab$(ACCELERATOR:%=,%)]' | $(DOTS)
	@$(call COMPARE_HASHES,$(BIN))
	@touch $@

check: $(READY) ## check format, lint, types, the direction of imports, and plain words
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -qq --durations=1 tests/test_words.py

test: .venv/.ready-docs ## run check, docs, the short suite on the newest JAX, and all tests that are not slow
	@$(MAKE) --no-print-directory -j3 check docs newest
	@$(MAKE) --no-print-directory -j2 test-newest $(REFERENCE)
	@$(MAKE) --no-print-directory test-main

# PyTorch and transformers, which the tests compare our models with.
$(REFERENCE): $(READY)
	@echo "Installing PyTorch and transformers for the tests: this takes a few minutes, once."
	@$(call INSTALL,$(BIN)) '.[dev,reference$(ACCELERATOR:%=,%)]' | $(DOTS)
	@$(call COMPARE_HASHES,$(BIN))
	@touch $@

# Without the words, which `check` looks at.
test-main: $(REFERENCE)
	$(TESTS_ON_CPU) $(BIN)/python $(PYTEST) --ignore=tests/test_words.py

# Runs a command if there is a newest JAX apart from that of .venv.
define with_newest
@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	  echo "The short suite on the newest JAX is skipped: .venv has the newest JAX already."; \
	elif newest="$(NEWEST_PYTHON)"; [ -z "$$newest" ]; then \
	  echo "The short suite on the newest JAX is skipped: no Python 3.12 or 3.13 found; set NEWEST_PYTHON=..."; \
	else \
	  $(1); \
	fi
endef

newest: $(READY)
	$(call with_newest,$(MAKE) --no-print-directory .venv-newest/.ready NEWEST_PYTHON="$$newest")

test-newest: newest
	$(call with_newest,$(TESTS_ON_CPU) .venv-newest/bin/python $(PYTEST) -m "newest and not slow" \
	    $$(grep -rl --include="test_*.py" "mark\.newest" tests))

.venv-newest/.ready: pyproject.toml constraints.txt
	@.venv-newest/bin/python -m pip --version >/dev/null 2>&1 || $(NEWEST_PYTHON) -m venv --clear .venv-newest
	@echo "Installing the newest JAX into .venv-newest: this takes a few minutes, once."
	@$(call INSTALL,.venv-newest/bin) '.[test,tpu-compile]' | $(DOTS)
	@$(call COMPARE_HASHES,.venv-newest/bin)
	@touch $@

test-slow: $(REFERENCE) ## run the slow tests
	$(TESTS_ON_CPU) $(BIN)/python $(PYTEST) -m slow

torture: $(READY) ## kill small runs and exports KILLS times, and compare every bit with uninterrupted ones
	$(TESTS_ON_CPU) $(BIN)/python -m tools.torture --kills=$(KILLS) --seed=0 --workdir='$(TORTURED)' \
	  --kinds=train,compare,sweep,text,export,dataset

fuzz: $(READY) ## call commands with CASES kinds of wrong input, and count the answers that are not clear
	$(TESTS_ON_CPU) $(BIN)/python -m tools.fuzz --cases=$(CASES) --seed=0 --workdir='$(FUZZED)'

mutants: $(REFERENCE) ## put FAULTS random faults into the numerical packages, and count how many the tests catch
	$(BIN)/python -m tools.mutants --count=$(FAULTS) --jobs=2

compare: $(PLAIN) ## train CoPE and its rivals on a small task, and write a table and plots into WORKDIR
	@echo "Python and JAX start: the first line comes after some seconds."
	$(BIN)/cope-jax compare --config='$(CONFIG)' --encodings='$(ENCODINGS)' --seeds=$(SEEDS) --workdir='$(WORKDIR)'

docs: .venv/.ready-docs ## build the documentation site in build/site; a broken link or a missing name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/.ready-docs: $(READY)
	@$(call INSTALL,$(BIN)) '.[dev,docs]' | $(DOTS)
	@$(call COMPARE_HASHES,$(BIN))
	@touch $@

clean: ## remove environments and caches; runs/ stays
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build *.egg-info
