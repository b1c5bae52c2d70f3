# `make up` starts a cluster, `make test` runs every check; both do all set-up they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RETRY := --reruns 1 --rerun-show-tracebacks

.PHONY: up test faults lint venv rpc

up: venv
	$(BIN)/cpd up $(ARGS)

# Real processes share the cores with whatever else runs: who fails gets another try, and the summary says so and why.
test: lint
	$(BIN)/python -m pytest $(RETRY)
	@# NIXL and ucxx each bring a UCX of their own, and a process that has both crashes.
	$(BIN)/python -m pytest $(RETRY) -m nixl tests/kvtransfer

# Every fault to every process, Redis and the network, in every phase of a request. As root, links are cut, too.
faults: venv
	$(BIN)/python -m pytest $(RETRY) -m "faults or not faults" tests/faults/test_matrix.py

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(READY)

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@# Compiling what is imported when it is imported is quicker than compiling all of torch and Ray now.
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -m engine.ops.kernels
	touch $(READY)

# Regenerates cpd/rpc from proto/; tests/cpd/test_rpc.py fails when it is stale.
rpc: venv
	$(BIN)/python scripts/generate_rpc.py
