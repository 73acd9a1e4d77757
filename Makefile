# make digits   set up, train, and print the results      make test    set up, and test each part
# PYTHON=python3.12 selects the interpreter (3.11 or newer); PROCS=4 the number of processes; SEED=7 the order of the tests
# and their generated cases; JOBS=4 the number of test files that run in parallel; TORCH_INDEX=URL the index for torch.

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
.PHONY: help digits test test-full test-all test-cluster test-faults fuzz check docs format venv clean bench-mnist-peers bench-exact-cost bench-sync-batch-norm bench-precision bench-mnist-accuracy bench-link bench-faults bench-kills bench-spot bench-order bench-checkpoints bench-watch bench-pose bench-steps bench-recheck bench-kernels audit test-versions dist bench-verify bench-diff bench-check bench-own-loop foreign bench-runs bench-load-balance bench-exact-sharding bench-augmentation bench-connect test-gpu bench-gpu

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-26s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

digits: .venv/.installed  ## train the digits recipe on 2 processes, in under a minute after set-up
	@$(PY) -m samebits train digits --procs $(PROCS)

test: .venv/.installed-dev  ## run at least one test of each promise and part: about 6 minutes on 2 cores
	@$(PYTEST) -m "not full and not lab and not check" $(PYTEST_ARGS)

test-full: .venv/.installed-dev  ## run the tests that `make test` leaves out
	@$(PYTEST) -m "full and not lab" $(PYTEST_ARGS)

test-all: .venv/.installed-dev  ## run all tests: about half an hour on 2 cores
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
	@ATTACKS="$${ATTACKS:-20}" ATTACKS_SEED="$${ATTACKS_SEED:-$$(date +%s)}" $(PY) -m pytest -s tests/cluster/test_random_attacks.py $(PYTEST_ARGS)

check: .venv/.installed-dev build/docs/.built  ## check format, lint, types, import layers, house rules and documentation
	@$(PY) -m ruff format --check --quiet $(SOURCES) || { echo "fix: make format" >&2; exit 1; }
	@$(PY) -m ruff check --quiet $(SOURCES)
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m pytest -q -W ignore -m check tests/house
	@echo "check: format, lint, types, import layers, house rules and documentation are fine"

docs: build/docs/.built  ## build the documentation site in build/docs/html; a dead link is an error
	@echo "open build/docs/html/index.html"

# Rebuilt if any page, docstring, setting or command has changed: about 10 seconds.
build/docs/.built: .venv/.installed-dev $(shell find docs src examples *.md -type f -not -name '*.pyc' -not -name '.*')
	@mkdir -p $(@D)
	@$(PY) docs/site/build.py $(@D)
	@touch $@

bench-own-loop: .venv/.installed  ## compare a step of samebits.exact with the usual DDP step of the same script: time and memory
	@$(PY) benchmarks/own_loop.py $(BENCH_ARGS)

foreign: .venv/.installed-dev  ## run scripts of others in usual and exact form, and write the table of their hashes
	@$(PY) -m tests.foreign.record

audit: .venv/.installed-dev  ## list known vulnerabilities of the pinned and the lowest allowed versions; needs the network
	@$(PY) .ci/audit

test-versions: .venv/.installed-dev  ## run quick tests with other versions of Python and torch; VERSIONS="3.12/2.15 3.11/lowest"
	@JOBS="$(JOBS)" $(PY) .ci/versions $(VERSIONS)

format: .venv/.installed-dev  ## reformat the sources
	@$(PY) -m ruff check --quiet --fix $(SOURCES) || true
	@$(PY) -m ruff format $(SOURCES)

dist:  ## build sdist, wheel, SBOM and checksums into dist/; needs the network
	@$(PYTHON) .ci/dist

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

bench-mnist-peers: .venv/bench/.installed  ## compare with hand-written DDP, Lightning, Accelerate; DATA=folder with MNIST's .gz files
	@$(PY) benchmarks/mnist_peers.py --data "$(DATA)" --peers-python .venv/bench/bin/python $(BENCH_ARGS)

bench-steps: .venv/bench/.installed  ## compare the step time of ResNet-34, CRNN and HigherHRNet with plain PyTorch, Lightning and Accelerate
	@$(PY) benchmarks/steps.py --peers-python .venv/bench/bin/python $(BENCH_ARGS)

bench-check: .venv/.installed  ## plant 35 faults into a recipe and count those that samebits check finds: 15 minutes; BENCH_ARGS="clock" for some
	@$(PY) benchmarks/check_faults.py $(BENCH_ARGS)

bench-exact-cost: .venv/.installed  ## compare the step time in exact mode with torch's DDP
	@$(PY) -m benchmarks.exact_cost

bench-sync-batch-norm: .venv/.installed  ## compare batch_norm=sync with batch_norm=micro and torch's DDP
	@$(PY) -m benchmarks.sync_batch_norm $(BENCH_ARGS)

bench-precision: .venv/.installed  ## compare the final accuracy of digits in fp32, bf16 and fp16; BENCH_ARGS="mnist data.root=DIR" for other recipes
	@$(PY) benchmarks/precision.py $(BENCH_ARGS)

bench-mnist-accuracy: .venv/.installed  ## compare the accuracy after each epoch with hand-written DDP; DATA=folder with MNIST's .gz files
	@$(PY) benchmarks/mnist_accuracy.py --data "$(DATA)" $(BENCH_ARGS)

bench-connect: .venv/.installed  ## measure how long the ranks of a large world take to connect: 2 minutes; BENCH_ARGS="--ranks 64 128"
	@$(PY) -m benchmarks.connect $(BENCH_ARGS)

bench-augmentation: .venv/.installed  ## compare images/s with augmentation with torchvision's v2 pipeline; DATA=folder of class folders
	@$(PY) benchmarks/augmentation.py --data "$(DATA)" $(BENCH_ARGS)

bench-checkpoints: .venv/.installed  ## compare how long a checkpoint blocks training with torch.save and fsync
	@$(PY) benchmarks/checkpoints.py $(BENCH_ARGS)

bench-watch: .venv/.installed  ## measure the cost of the hang detector and the replica check
	@$(PY) -m benchmarks.watch_cost $(BENCH_ARGS)

bench-recheck: .venv/.installed  ## check how soon watch.recheck names a rank with flipped bits, and measure its cost
	@$(PY) -m benchmarks.recheck $(BENCH_ARGS)

bench-kernels: .venv/.installed  ## compare the bits of operations under other CPU kernels; BENCH_ARGS="--emulator qemu-x86_64-static" for other processors
	@$(PY) benchmarks/kernels.py $(BENCH_ARGS)

bench-verify: .venv/.installed-dev  ## verify tampered and honest runs, and measure the cost of record and verification
	@$(PY) -m benchmarks.tampered_runs $(BENCH_ARGS)

bench-link: .venv/.installed-dev  ## compare a step over a 100 Mbit/s link with the time its bytes need; needs Linux and root
	@$(PY) benchmarks/link.py $(BENCH_ARGS)

bench-pose: .venv/.installed-dev  ## compare pose grouping, targets, samples and evaluation with the reference implementations
	@$(PY) benchmarks/pose.py $(BENCH_ARGS)

bench-faults: .venv/bench/.installed  ## compare how tools handle a kill, a hang, a NaN, a full disk and more: half an hour
	@$(PY) benchmarks/faults.py --peers-python .venv/bench/bin/python $(BENCH_ARGS)

bench-kills: .venv/.installed-dev  ## kill and stop processes of a run that recovers in the step, at random: 20 trials, 4 minutes; BENCH_ARGS="--trials 200 --seed 7"
	@$(PY) -m benchmarks.kills $(BENCH_ARGS)

bench-spot: .venv/.installed-dev .venv/bench/.installed  ## replay losses and returns of spot machines with Samebits, DDP, Lightning and Accelerate: 20 minutes
	@$(PY) -m benchmarks.spot --peers-python .venv/bench/bin/python $(BENCH_ARGS)

bench-diff: .venv/.installed  ## plant 50 differences between two runs and count how many samebits diff locates: 3 minutes
	@$(PY) benchmarks/diff_faults.py $(BENCH_ARGS)

bench-runs: .venv/.installed-dev  ## measure how long samebits runs, compare and report take on 1,000 run folders
	@$(PY) -m benchmarks.many_runs $(BENCH_ARGS)

bench-load-balance: .venv/.installed-dev  ## compare balanced work with even work and DDP, with one rank on half a core
	@$(PY) -m benchmarks.load_balance $(BENCH_ARGS)

bench-gpu: .venv/bench/.installed  ## compare bits, throughput, data wait and memory on this machine's GPUs with peers: 10 minutes, and a file to send back
	@$(PY) -m benchmarks.gpu --peers-python .venv/bench/bin/python $(BENCH_ARGS)

bench-exact-sharding: .venv/.installed  ## compare memory and step time of exact parallel=fsdp with fully_shard and ddp: 15 minutes
	@$(PY) -m benchmarks.exact_sharding $(BENCH_ARGS)

bench-order: .venv/.installed  ## measure the cost of the sample order for 100 million samples
	@$(PY) benchmarks/order.py

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
