# Every target makes .venv first if it is missing or older than pyproject.toml; nothing else is needed
# than Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint fuzz chaos bench clean

help: ## what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/ - /'

setup: .venv/ready ## make .venv with fourfold and its development tools

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

quickstart: .venv/ready ## train on real text over 4 local ranks, a minute and a half on two cores
	$(BIN)/fourfold train examples/quickstart.toml

test: .venv/ready ## run every test: two at a time, then those that nothing may run beside
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -m alone

lint: .venv/ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: .venv/ready ## random layouts of random models against one process, for ten minutes: SEED=0 SECONDS=600
	$(BIN)/python -m tests.fuzz --seed $(or $(SEED),0) --seconds $(or $(SECONDS),600)

chaos: .venv/ready ## kill ranks of runs at random, compare with undisturbed ones, for ten minutes: SEED=0 SECONDS=600 KILLS=100
	$(BIN)/python -m tests.chaos --seed $(or $(SEED),0) --seconds $(or $(SECONDS),600) $(if $(KILLS),--kills $(KILLS))

bench: .venv/ready ## the side-by-side table: ours against PyTorch's own modules
	$(BIN)/python benchmarks/run_all.py

clean: ## remove .venv and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
