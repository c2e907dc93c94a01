# make demo: the whole chain on a real model, on a laptop. make test: what CI runs. make help: all targets.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TARGET := .cache/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast faults lint format clean

help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter; PIP_ARGS=... is handed to pip (another index, say)."

install: $(VENV)/.installed  ## Make .venv with eyas and all that its demo, tests and checks need

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "eyas needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable ".[gguf,test,dev]"
	@touch $@

$(TARGET)/config.json: | $(VENV)/.installed
	$(BIN)/python examples/demo/fetch_target.py $(TARGET)

demo: $(VENV)/.installed $(TARGET)/config.json  ## Train a draft for SmolLM2-135M and see it work (about ten minutes on 2 cores)
	$(BIN)/eyas run examples/demo/run.yaml

test: $(VENV)/.installed $(TARGET)/config.json  ## Run every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test-fast: $(VENV)/.installed  ## Run the tests that take no more than a few seconds each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow"

faults: $(VENV)/.installed  ## Make every fault that the preflight must find, and print what it says
	@$(BIN)/python -m tests.preflight.print_faults

lint: $(VENV)/.installed  ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(VENV)/.installed  ## Format and mend what can be mended automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove runs and caches made here (not .venv)
	rm -rf runs .cache .pytest_cache .ruff_cache .hypothesis
