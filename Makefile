# make digits   set up, train, and print the results      make test    set up, and test each part
# PYTHON=python3.12 selects the interpreter (3.11 or newer); PROCS=4 the number of processes; SEED=7 the order of the tests
# and their generated cases; JOBS=4 the number of test files that run in parallel; TORCH_INDEX=URL the index for torch
# (without a GPU PyTorch's CPU builds by default; TORCH_INDEX= for none).

SHELL := /bin/bash
PYTHON ?= python3
PROCS ?= 2
PYTEST_ARGS ?=
SEED ?= 1
JOBS ?= 4
DATA ?= data/mnist
BENCH_ARGS ?=
PY := .venv/bin/python
# Without compiled modules each process that a test starts would compile them again.
COMPILED = PYTHONDONTWRITEBYTECODE= $(PY) -m compileall -q -j 0 -x '/test_' src tests benchmarks
PYTEST = $(COMPILED) && PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --randomly-seed=$(SEED) --hypothesis-seed=$(SEED)
SOURCES := src tests benchmarks examples docs/site
.DEFAULT_GOAL := help
.PHONY: help digits demo-ranks test test-full test-all test-cluster test-faults test-gpu test-versions fuzz check reference docs foreign audit format dist venv clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Benchmarks; BENCH_ARGS=--help lists the options of one:"
	@for file in $$(grep -l '^def main' benchmarks/*.py); do name=$$(basename $$file .py); \
	printf "  make %-24s %s\n" "bench-$${name//_/-}" "$$(sed -n '1s/"""//gp' $$file)"; done

digits: .venv/.installed  ## train the digits recipe on 2 processes, in under a minute after set-up
	@$(PY) -m samebits train digits --procs $(PROCS)

test: .venv/.installed-dev  ## run at least one test of each promise and part: 8 to 12 minutes on 2 cores
	@$(PYTEST) -m "not full and not lab and not check" $(PYTEST_ARGS)

test-full: .venv/.installed-dev  ## run the tests that `make test` leaves out
	@$(PYTEST) -m "full and not lab" $(PYTEST_ARGS)

test-all: .venv/.installed-dev  ## run all tests: about 40 minutes on 2 cores
	@$(PYTEST) -m "not lab and not check" $(PYTEST_ARGS)

test-cluster: .venv/.installed-lab  ## test with a real Slurm, MPI, ssh, and hosts with separate network links; needs Debian and root
	@tests/lab/install
	@$(PY) -m pytest tests/cluster tests/lab $(PYTEST_ARGS)
	@$(PY) -m pytest -m lab $(PYTEST_ARGS)

test-faults: .venv/.installed-dev  ## kill ranks at 20 random moments; FAULTS=100 for more, FAULTS_SEED=7 to repeat a run
	@FAULTS="$${FAULTS:-20}" FAULTS_SEED="$${FAULTS_SEED:-$$(date +%s)}" $(PY) -m pytest -s tests/faults/test_kill.py $(PYTEST_ARGS)

test-gpu: .venv/.installed-dev  ## run the tests that need a GPU; without one, list them
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then $(PYTEST) -m gpu $(PYTEST_ARGS); \
	else echo "No CUDA device is available here. On a machine with one, this would run:"; \
	$(PY) -m pytest -m gpu --collect-only -q $(PYTEST_ARGS); fi

fuzz: .venv/.installed-dev  ## read 5,000 mutated files, attack 20 runs; FUZZ=50000 ATTACKS=100 for more, FUZZ_SEED=7 to repeat a run
	@FUZZ="$${FUZZ:-5000}" FUZZ_SEED="$${FUZZ_SEED:-$$(date +%s)}" $(PY) -m pytest -s tests/fuzz $(PYTEST_ARGS)
	@ATTACKS="$${ATTACKS:-20}" ATTACKS_SEED="$${ATTACKS_SEED:-$$(date +%s)}" $(PY) -m pytest -s -m "" tests/cluster/test_random_attacks.py $(PYTEST_ARGS)

check: .venv/.installed-dev build/docs/.built  ## check format, lint, types, import layers, house rules and documentation
	@$(PY) -m ruff format --check --quiet $(SOURCES) || { echo "fix: make format" >&2; exit 1; }
	@$(PY) -m ruff check --quiet $(SOURCES)
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m pytest -q -W ignore -m check tests/house
	@echo "check: format, lint, types, import layers, house rules and documentation are fine"

reference: .venv/.installed-dev  ## write docs/reference and the lists of pages from the code; commit them
	@$(PY) docs/site/generate.py

docs: build/docs/.built  ## build the documentation site in build/docs/html; a dead link is an error
	@echo "open build/docs/html/index.html"

# Rebuilt if any page has changed: about 10 seconds.
build/docs/.built: .venv/.installed-dev $(shell find docs src examples *.md -type f -not -name '*.pyc' -not -name '.*')
	@mkdir -p $(@D)
	@$(PY) docs/site/build.py $(@D)
	@touch $@

foreign: .venv/.installed-dev  ## run scripts of others in usual and exact form, and write the table of their hashes
	@$(PY) -m tests.foreign.record

audit: .venv/.installed-dev  ## list known vulnerabilities of the pinned and the lowest allowed versions; needs the network
	@$(PY) .ci/audit

test-versions: .venv/.installed-dev  ## run quick tests with other versions of Python and torch; VERSIONS="3.12/2.15 3.11/lowest"
	@JOBS="$(JOBS)" $(PY) .ci/versions $(VERSIONS)

format: .venv/.installed-dev  ## reformat the sources
	@$(PY) -m ruff check --quiet --fix $(SOURCES) || true
	@$(PY) -m ruff format $(SOURCES)

dist:  ## build sdist, wheel, SBOM and checksums into dist/, signed with SIGN_KEY=FILE; needs the network
	@SIGN_KEY="$(SIGN_KEY)" $(PYTHON) .ci/dist

venv: .venv/.installed-dev  ## create .venv with all development tools

.venv/.installed: pyproject.toml constraints.txt .ci/venv
	@MAKECMDGOALS="$(MAKECMDGOALS)" .ci/venv "$(PYTHON)" "[all]"
	@touch $@

.venv/.installed-dev: .venv/.installed
	@MAKECMDGOALS="$(MAKECMDGOALS)" .ci/venv "$(PYTHON)" "[dev]"
	@touch $@

.venv/.installed-lab: .venv/.installed-dev
	@MAKECMDGOALS="$(MAKECMDGOALS)" .ci/venv "$(PYTHON)" "[dev,lab]"
	@touch $@

# make bench-steps runs benchmarks/steps.py, and so on for each file there that has a main().
bench-%: .venv/.installed-dev
	@$(PY) -m benchmarks.$(subst -,_,$*) $(PEERS_ARGS) $(BENCH_ARGS)

# These compare with tools that have an environment of their own.
demo-ranks: bench-ranks  ## a script for eight GPUs, under torchrun and as 8 ranks in several places

WITH_PEERS := bench-faults bench-gpu bench-mnist-peers bench-spot bench-steps
$(WITH_PEERS): .venv/bench/.installed
$(WITH_PEERS): PEERS_ARGS = --peers-python .venv/bench/bin/python
bench-mnist-peers: PEERS_ARGS += --data "$(DATA)"

# The other tools have their own environment, so that they cannot change Samebits's packages; torch is shared with .venv.
.venv/bench/.installed: .venv/.installed
	@echo "installing Lightning and Accelerate into .venv/bench"
	@$(PY) -m venv --clear .venv/bench
	@$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$(.venv/bench/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/samebits_venv.pth"
	@.venv/bench/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	    -c constraints.txt accelerate lightning
	@touch $@

clean:  ## remove .venv and caches; keep runs/
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
