# The commands of dskit, one line each; `make help` lists them. PYTHON picks the interpreter (3.11 or newer),
# PIP_ARGS goes to pip as it is (`make demo PIP_ARGS="--no-cache-dir"`).
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(PYTHON) tools/install.py
export PIP_ARGS
# tests that start servers, browsers and measurements want the machine for themselves
ALONE := tests/serve $(wildcard tests/cli/test_bench*.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu notebooks lab lint bench soak

help: ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## create .venv with everything a contributor needs
	@$(INSTALL) dev

demo: ## install what serving needs, then serve the bundled model: chat page and API
	@$(INSTALL) serve && exec $(BIN)/dskit serve demo

test: ## the tests, set-up included (under nine minutes on two cores, set-up apart)
	@$(INSTALL) dev --browser && $(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix --ignore=,$(ALONE)) && $(BIN)/python -m pytest $(ALONE)

test-all: ## every property at its full count
	@$(INSTALL) dev --browser && $(BIN)/python -m pytest -m "not gpu and not soak" --timeout 1800 -n 2 --dist worksteal $(addprefix --ignore=,$(ALONE)) && $(BIN)/python -m pytest -m "not gpu and not soak" --timeout 1800 $(ALONE)

test-gpu: ## the tests that need an NVIDIA GPU, and those of the kernels compiled for it
	@$(INSTALL) dev && $(BIN)/python -m pytest -m gpu && $(BIN)/python -m pytest tests/kernels tests/ops

notebooks: ## write the .ipynb files from their .py twins and run them all
	@$(INSTALL) dev && $(BIN)/jupytext --to ipynb --update notebooks/*.py && $(BIN)/python -m pytest tests/notebooks -m "not gpu"

lab: ## open the first notebook in JupyterLab
	@$(INSTALL) notebook && $(BIN)/jupyter lab notebooks/00_start.ipynb

lint: ## ruff, and the size of each room
	@$(INSTALL) dev && $(BIN)/ruff check . && $(BIN)/python tools/sizes.py

bench: ## tokens per second and time to first token of the demo, beside transformers
	@$(INSTALL) dev && $(BIN)/dskit bench latency demo

soak: ## ten minutes of random requests, many of them cancelled or wrong
	@$(INSTALL) dev && $(BIN)/python -m pytest -m soak --timeout 1800
