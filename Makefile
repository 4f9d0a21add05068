# make quickstart | test | check | bench: each makes the environment that it needs.
PYTHON ?= python3
VENV ?= .venv
COMPAT ?= .compat
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export TOKENIZERS_PARALLELISM = false

.PHONY: quickstart test test-gpu browser check format bench clean

quickstart: $(VENV)/.installed  ## train and compare four residual schemes on a small embedded corpus, in minutes
	$(BIN)/depthroute quickstart

test: $(VENV)/.installed-dev $(COMPAT)/.installed  ## the whole test suite, then its subset on the oldest supported transformers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 --dist worksteal
	OMP_NUM_THREADS=1 PYTHONPATH=$(COMPAT) $(BIN)/python -m pytest -m "compat and not gpu" -n 2 tests/models tests/residual tests/training tests/convert

test-gpu: $(VENV)/.installed-dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

browser: $(VENV)/.installed-dev  ## a Chromium for the tests of the report's page; without one they are skipped
	$(PIP) --editable ".[browser]"
	scripts/install_chromium.sh

check: $(VENV)/.installed-dev  ## style and types
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src tests scripts
	$(BIN)/ruff format src tests scripts

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, $(PYTHON) is older; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable ".[train,report]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

# The oldest supported transformers, laid over the environment by PYTHONPATH.
$(COMPAT)/.installed: $(VENV)/.installed-dev
	$(PIP) --upgrade --target $(COMPAT) transformers==5.17.0
	touch $@

bench: $(VENV)/.installed  ## all depth reads of a microbatch, measured on a CUDA device
	$(BIN)/depthroute bench route --out runs/bench

clean:
	rm -rf $(VENV) $(COMPAT) .mypy_cache .pytest_cache .ruff_cache runs
