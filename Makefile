# `make help` lists the targets. Every recipe runs from .venv; nothing needs to be activated.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
TESTS ?= -m "not slow and not long"
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench docs clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: .venv/.stamp ## Make .venv with everything needed to run, test and develop (again when versions change)

# torch goes first and by itself: the build chosen then (CPU or CUDA) satisfies everything that follows.
.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: venv ## Train a tiny model twice on this machine, plain and under control, and compare
	$(BIN)/python -m swiftcruise.cli.demo

test: venv ## Run the tests (those marked slow or long too: make test TESTS=)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

lint: venv ## Style, types, import floors, generated documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

bench: venv ## Run the benchmarks
	$(BIN)/python benchmarks/hook_overhead.py
	$(BIN)/python benchmarks/real_training.py
	$(BIN)/python benchmarks/plant_fidelity.py
	$(BIN)/python benchmarks/env_speed.py

docs: venv ## Write the generated tables of the documentation anew
	$(BIN)/python docs/generate.py

clean: ## Remove .venv and everything that was built
	rm -rf .venv build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
