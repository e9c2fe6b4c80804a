# What people do with this repository; `make` alone lists it.
# Parameters: PYTHON (interpreter for the virtual environment), PYTEST_ARGS, DEMO_ARGS,
# WORKERS (processes that run tests side by side; a file stays with one of them),
# MARKS (which tests `make test` runs; MARKS= for all, as CI does).

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
DEMO_ARGS ?=
MARKS ?= not vm

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SETUP := PYTHON='$(PYTHON)' tools/setup-debian.sh
MAN_PAGES := $(wildcard gpuguard/resources/man/*)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv setup demo test test-vm test-fast test-vllm docs lint bench man clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv with gpuguard and its development tools

$(STAMP): pyproject.toml tools/make-venv.sh
	@tools/make-venv.sh '$(PYTHON)' '$(VENV)'
	@touch $@

setup: ## install what the tests need from the distribution (apt-get), if missing
	@$(SETUP) test

# Set-up comes first: on a fresh Debian the interpreter cannot make a virtual environment
# until a package is there. Hence the nested calls, which also keep the order under -j.
demo: ## play the incident on this machine: no GPU, no root, nothing changed outside its folder
	@$(SETUP) demo
	@$(MAKE) venv
	@$(BIN)/gpuguard demo $(DEMO_ARGS)

test: ## set up, then run the suite, slow tests included, all but the virtual machine
	@$(MAKE) setup
	@$(MAKE) venv
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m '$(MARKS)' $(PYTEST_ARGS)

test-vm: ## a virtual machine that reboots into a new kernel: minutes of software emulation
	@$(MAKE) test MARKS=vm

test-fast: $(STAMP) ## run the tests that take seconds
	@$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

docs: $(STAMP) ## write docs/metrics.md from the table of metrics
	@$(BIN)/python tools/metrics_reference.py

test-vllm: ## lanes of a real vLLM on the CPU: 3.5 GB once, then a quarter of an hour (root)
	@$(MAKE) setup
	@$(MAKE) venv
	@tools/make-vllm.sh
	@GPUGUARD_REAL_VLLM=1 $(BIN)/python -m pytest tests/test_vllm_real.py tests/test_ansible_vllm.py $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy, shellcheck, yamllint, the layers of the code
	@$(BIN)/python -m pytest -q tests/test_lint.py tests/test_layers.py $(PYTEST_ARGS)

bench: ## measure what benchmarks/ promises
	@$(MAKE) setup
	@$(MAKE) venv
	@$(BIN)/python -m benchmarks

man: ## show the manual pages
	@man -l $(MAN_PAGES)

clean: ## remove what make and the tools left in this folder
	@rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
