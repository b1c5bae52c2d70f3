# `make up` starts a cluster, `make test` runs every check; both do all set-up they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
MINUTES ?= 20

.PHONY: up test acceptance lint rpc

up: $(READY)
	$(BIN)/cpd up $(ARGS)

# Tests mostly wait, for processes that start and for tokens, so two run at a time.
test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal
	@# NIXL and ucxx each bring their own UCX, and a process that loads both crashes.
	$(BIN)/python -m pytest -m nixl tests/kvtransfer

# Before a release, beside `make test`: every fault in every phase of a request (half an hour; as root, links
# are cut and machines lost, too), then random faults under load for MINUTES.
acceptance: $(DEV_READY)
	$(BIN)/python -m pytest -m "faults or not faults" tests/faults/test_matrix.py tests/faults/test_crashes.py \
		tests/faults/test_lost_machines.py tests/faults/test_networks.py
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

lint: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@# Python compiles what it imports. Compiling all of torch and Ray now would take longer.
	@echo "Installing what runs into $(VENV): 1.7 GB or more, a few minutes"
	$(BIN)/python -m pip install --no-compile --progress-bar on -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -m engine.ops.kernels
	touch $(READY)

# What only tests and lint need.
$(DEV_READY): $(READY) requirements-dev.lock scripts/install_test_tools.sh
	$(BIN)/python -m pip install --quiet --no-compile -r requirements-dev.lock
	scripts/install_test_tools.sh
	touch $(DEV_READY)

# Regenerates cpd/rpc from proto/; tests/cpd/test_rpc.py fails when it is stale.
rpc: $(DEV_READY)
	$(BIN)/python scripts/generate_rpc.py
