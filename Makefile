# Every target makes .venv and installs what is missing, so each of them works first on a fresh machine.
#   make swarm ARGS="--peers 7 --steps 200"    PYTHON=/path/to/python3.12 make test

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help swarm test test-long containers lint words proto docs site pictures bench clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PROTOS := $(wildcard proto/*.proto)
# Two tests at a time: most of those that take long wait for processes to start or for each other.
WORKERS ?= 2

# The first interpreter that runs and is new enough.
FIND_PYTHON = for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$candidate"; exit; }; done; \
	echo "skipstone: needs Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python" >&2; exit 1

help:
	@echo "make swarm   train with a local swarm of real processes (ARGS=... goes to skipstone up)"
	@echo "make test    run the tests"
	@echo "make test-long   run the few that shorter ones make nearly superfluous (6 minutes)"
	@echo "make containers   test the image and the compose file on a container engine (3 minutes and more)"
	@echo "make lint    ruff, its formatter in check mode, mypy, odd constructions"
	@echo "make words   count odd constructions in code and documents, beside installed peers"
	@echo "make proto   generate protocol/generated from proto/"
	@echo "make docs    generate docs/results.md and the figures in README.md"
	@echo "make site    build the documents as a website in site/"
	@echo "make pictures   draw docs/pictures: plots of the results, and the view of a run (a minute)"
	@echo "make bench   run the benchmarks; each prints JSON"

swarm:
	@echo "skipstone: starting a local swarm"
	@$(MAKE) --no-print-directory --silent $(VENV)/.base
	@exec $(BIN)/skipstone up $(ARGS)

test:
	@echo "skipstone: running the tests"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not docker and not long" -n $(WORKERS) --dist loadgroup $(ARGS)

test-long:
	@echo "skipstone: running the tests that are left out of 'make test'"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/python -m pytest -m long $(ARGS)

containers:
	@echo "skipstone: testing a swarm of containers"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/python -m pytest -m docker -s tests/docker $(ARGS)

lint:
	@echo "skipstone: checking style and types"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m docs.words

words:
	@echo "skipstone: counting odd constructions; ours may have 3 in 1,000 words"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/python -m docs.words --peers

proto:
	@echo "skipstone: generating protocol/generated"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/python -m grpc_tools.protoc -Iprotocol/generated=proto --python_out=. --pyi_out=. $(PROTOS:proto/%=protocol/generated/%)

docs:
	@echo "skipstone: generating docs/results.md and the figures in README.md"
	@$(MAKE) --no-print-directory $(VENV)/.dev
	@$(BIN)/python -m docs.generate_results

site:
	@echo "skipstone: building the website in site/"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/mkdocs build --quiet --strict

pictures:
	@echo "skipstone: drawing docs/pictures"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@$(BIN)/python -m docs.pictures

bench:
	@echo "skipstone: running the benchmarks"
	@$(MAKE) --no-print-directory --silent $(VENV)/.dev
	@set -e; for benchmark in demo transport hop averaging codecs throughput paths; do $(BIN)/python benchmarks/$$benchmark.py; done

clean:
	rm -rf $(VENV) build dist site ./*.egg-info .mypy_cache .ruff_cache .pytest_cache

# Stamps: made anew whenever pyproject.toml changes. The dev installation contains the base one.
$(VENV)/.base: pyproject.toml setup.py | $(BIN)/python
	@echo "skipstone: installing into $(VENV) (the first time this takes a few minutes)"
	@$(PIP) install --quiet -e .
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py | $(BIN)/python
	@echo "skipstone: installing into $(VENV), with what the tests need (the first time this takes a few minutes)"
	@$(PIP) install --quiet -e '.[dev]'
	@touch $(VENV)/.base $@

$(BIN)/python:
	@echo "skipstone: making $(VENV)"
	@python=$$($(FIND_PYTHON)) && "$$python" -m venv $(VENV)
