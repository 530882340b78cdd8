# One way to run everything, for people and for CI. `make help` lists the verbs.
#
# Everything is installed into `.venv` inside the project, from requirements/*.txt with every hash
# checked. A stamp named after the digest of those files makes the second run quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Files of tests run in so many processes: most of them wait for processes of their own.
TEST_JOBS ?= 3
DEMO_ARGS ?=
BENCH_ARGS ?=
NAME ?= all

# Programs started from here behave the same on every machine, and compile what they import once.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

# What the installed environment depends on. A change to any of these makes another stamp.
DEMO_INPUTS := requirements/demo.txt pyproject.toml runtime/everstep/runtime/_version.py
DEV_INPUTS := requirements/dev.txt $(DEMO_INPUTS)
DEMO_STAMP := $(VENV)/.demo-$(shell cat $(DEMO_INPUTS) | sha256sum | cut -c1-16)
DEV_STAMP := $(VENV)/.dev-$(shell cat $(DEV_INPUTS) | sha256sum | cut -c1-16)

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench docs requirements clean

help: ## List the verbs.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
	    while IFS='|' read -r verb text; do printf '  make %-14s %s\n' "$$verb" "$$text"; done

setup: $(DEV_STAMP) ## Make .venv with everything that the other verbs need.

demo: $(DEMO_STAMP) ## Train, lose slices, go on, grow back, and compare with an undisturbed run.
	$(BIN)/everstep demo $(DEMO_ARGS)

test: check ## Run check, then every test (PYTEST_ARGS="-k name" narrows it).
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(DEV_STAMP) ## Format, lint, types and arrows; runs nothing of the product.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports --no-cache

format: $(DEV_STAMP) ## Rewrite the files as `check` wants them.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(DEV_STAMP) ## Run the benchmarks (NAME=recovery runs one); figures go to .everstep/bench.
	$(BIN)/python -m benchmarks $(NAME) $(BENCH_ARGS)

docs: $(DEV_STAMP) ## Check that every link and every name of code in the docs resolves.
	$(BIN)/python -m pytest tests/tidy/test_docs.py $(PYTEST_ARGS)

# Compiled from the ranges in pyproject.toml; needs `uv` on the path, nothing else here does.
requirements: ## Compile requirements/*.txt anew from pyproject.toml.
	uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	    --extra controller --extra runtime --extra examples --extra dev \
	    pyproject.toml requirements/build.in --output-file requirements/dev.txt
	uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	    --extra controller --extra runtime --extra examples \
	    --constraint requirements/dev.txt \
	    pyproject.toml requirements/build.in --output-file requirements/demo.txt

clean: ## Remove .venv, .everstep and what the tools left.
	rm -rf $(VENV) .everstep dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	    .import_linter_cache .coverage .coverage.*

# pip is the last thing that `venv` makes, so a set-up that was interrupted is made whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit(f"Everstep needs Python 3.11 to 3.13 and found {v[0]}.{v[1]}; name another one with PYTHON=, as in: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# `--only-binary` keeps compilers out of it: what has no wheel for this machine is refused by name.
$(DEMO_STAMP): | $(BIN)/pip
	$(PIP_INSTALL) --require-hashes --only-binary :all: -r requirements/demo.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# The development requirements contain the demo's at the same versions, so this stands for both.
$(DEV_STAMP): | $(BIN)/pip
	$(PIP_INSTALL) --require-hashes --only-binary :all: -r requirements/dev.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@ $(DEMO_STAMP)
