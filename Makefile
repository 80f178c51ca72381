# The lab's commands. On a machine with nothing but Python 3.11 or newer and an index of packages:
#
#     make lab      sets up, fetches the model, runs every notebook at the quick scale
#     make test     sets up, runs the fast tests
#
# Variables:
#     PYTHON=…        the Python to build .venv with (default: the first suitable one found)
#     TORCH_INDEX=…   Linux without a GPU: the address of PyTorch's CPU index; saves gigabytes of CUDA
#     WHEELS=FOLDER   no network: install and pull from a folder made by `labkit pull --all --save FOLDER`
#     LABKIT_CACHE=…  where models and data are kept
#     WORKERS=…       parallel test processes (default: one per core, maximum 4)

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto

# What is installed depends on these contents (not on file times, which a fresh clone changes).
KEY := $(shell cat pyproject.toml constraints.txt setup.py 2>/dev/null | cksum | tr -d ' \t')
STAMP := $(VENV)/.installed-$(KEY)
MARK := $(VENV)/.installing

PIP_ARGS := -c constraints.txt
ifdef TORCH_INDEX
PIP_ARGS += --extra-index-url $(TORCH_INDEX)
endif
ifdef WHEELS
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELS))
export LABKIT_WHEELS := $(abspath $(WHEELS))
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help lab test check jupyter peers bench install clean

help: ## This list
	@echo "make TARGET, one of:"
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' Makefile | expand -t 12

lab: install ## Set up, check the machine, fetch model and data, run every notebook (quick)
	$(BIN)/labkit doctor
	$(BIN)/labkit pull
	$(BIN)/labkit run --scale quick

test: install ## Set up and run the fast tests
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --maxprocesses 4

check: install ## The slow tests, the linter, the type checker and the size table
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python tests/size.py
	$(BIN)/python -m pytest -m slow --durations=10

jupyter: install ## Open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=notebooks

peers: install ## Install what the benchmarks compare with (llama.cpp compiles for minutes)
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[peers]"

bench: install ## Measure decoding on this machine
	$(BIN)/labkit bench decode

install: $(STAMP)

# The mark file names the process of a running installation (pip may outlive make). A killed installation
# leaves the mark behind, perhaps with an incomplete package that pip would accept: then .venv is made again
# (pip keeps its downloads). An installation that fails by itself removes the mark, and the next one continues.
# The Pythons are tried in order. One that is too old, or a pyenv shim without a version, is skipped.
$(STAMP):
	@if [ -f $(MARK) ]; then \
	  if kill -0 "$$(cat $(MARK))" 2>/dev/null; then \
	    echo "make: process $$(cat $(MARK)) is installing into $(VENV); wait until it has finished." >&2; exit 1; \
	  fi; \
	  echo "The last installation was interrupted; starting $(VENV) afresh."; rm -rf $(VENV); \
	fi; \
	mkdir -p $(VENV) && echo $$PPID > $(MARK)
	@[ -x $(BIN)/python ] || { \
	  for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      echo "Making $(VENV) with $$($$python --version) ..."; \
	      $$python -m venv $(VENV) && exit 0; \
	      echo "make: $$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	      rm -rf $(VENV); exit 1; \
	    fi; \
	  done; \
	  echo "make: no Python 3.11 or newer was found; install one, or name it: make lab PYTHON=/path/to/python3" >&2; \
	  rm -rf $(VENV); exit 1; }
	@echo "Installing labkit and what it needs into $(VENV) (the first time takes minutes, mostly for torch) ..."
	@sh -c 'echo $$$$ > $(MARK); exec $(BIN)/python -m pip install $(PIP_ARGS) -e ".[lab,test]"' \
	  || { [ $$? -ge 128 ] || rm -f $(MARK); exit 1; }
	@rm -f $(VENV)/.installed-* $(MARK) && touch $@

clean: ## Remove .venv, results of runs and build leftovers (models stay in the cache folder)
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
