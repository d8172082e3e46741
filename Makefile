# `make demo` and `make test` set themselves up: the first one makes .venv and installs into it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LAYOUTS := $(addprefix tests/procs/runtime/test_, layout_equality.py mixed_plans.py \
  schedules_run.py zero_equality.py context_layouts.py user_cases_runtime.py \
  stage_degrees.py late_validation.py expert_layouts.py recompute.py frozen.py dropout.py \
  family_layouts.py parity.py chunked_attention.py grouped_experts.py muon.py) \
  tests/procs/checkpoint/test_checkpoint_plans.py
# Those that do not themselves make every other step strict (`strictly` of tests/procs/layouts.py).
WHOLLY_STRICT := tests/procs/runtime/test_ring_attention.py

PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
PARTS := $(addprefix test-,training runtime rest pure strict)
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test test-whole strict test-exports lint format $(PARTS)

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

install: $(STAMP)  ## make .venv and install Triptych with everything that runs and tests it

demo: $(STAMP)  ## train, resume on another layout, export and generate, on this machine
	@PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh

test: $(STAMP)  ## every test but tests/gpu; layouts are compared with and without strict comm
	@echo "in parts, $(JOBS) at a time; each prints when it has ended"
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j $(JOBS) $(PARTS)

test-whole: export TRIPTYCH_WHOLE = 1
test-whole: test  ## the same with every case of the long lists of cases

test-exports: $(STAMP)  ## exports before the real parsers of the real packages, which it installs
	$(PYTEST) tests/exports

test-training:
	$(PYTEST) tests/procs/train tests/procs/cli tests/procs/user_cases

strict: $(STAMP)  ## the tests that compare layouts once more, every step of them strict
	TRIPTYCH_WHOLE=1 TRIPTYCH_STRICT_COMM=1 $(PYTEST) $(LAYOUTS) $(WHOLLY_STRICT) \
	  tests/procs/train/test_train_resume.py

test-strict:
	TRIPTYCH_STRICT_COMM=1 $(PYTEST) $(WHOLLY_STRICT)

test-runtime:
	$(PYTEST) tests/procs/runtime

test-rest:
	$(PYTEST) tests/procs $(addprefix --ignore=tests/procs/,train cli user_cases runtime)

test-pure:
	$(PYTEST) tests/pure

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## write the style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Triptych needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[run,dev]'
	@touch $(STAMP)
