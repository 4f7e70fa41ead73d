# Everything runs from .venv, which the targets make and fill themselves.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
CUDA := $(VENV)/.cuda-installed
BINARY := $(VENV)/.binary-installed
BINARY_EXTRAS ?= serve
CUDA_SOURCES = $(shell find strata_cli tests benchmarks -name '*.cu' -o -name '*.cuh')

export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEMO_SYSTEM := You are a decision function. You will be given a state and one question. \
	Reply with the answer label only: no words, no punctuation, no explanation.

define DEMO_PROMPT
State:
A small chess engine with a terminal interface. It plays at several levels, reads and writes games in PGN, and can be used by graphical chess boards.

Question: Which section does this package belong to?
Options:
A. games
B. mail
C. net
D. python
Answer with the letter only.
endef
export DEMO_SYSTEM DEMO_PROMPT

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu gpu-bundle check fmt fmt-check lint types imports bench binary docs docs-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) ## install strata and the developer's tools into .venv
	@echo "ready: $(BIN)/strata --help"

demo: $(CORE) ## ask the embedded model which section a package belongs to
	@printf 'system: %s\n\n%s\n\n' "$$DEMO_SYSTEM" "$$DEMO_PROMPT"
	$(BIN)/strata read "$$DEMO_PROMPT" --system "$$DEMO_SYSTEM" \
		--allowed A --allowed B --allowed C --allowed D

test: $(DEV) ## run the tests that need no GPU
	$(BIN)/python -m pytest -q -m "not gpu"

test-gpu: $(CUDA) ## run the tests that need a GPU
	$(BIN)/python -m pytest -q -m gpu

gpu-bundle: $(DEV) ## pack all that a GPU machine without a network needs; ONLY="gguf orjson" for few wheels
	$(BIN)/python -m tools.gpu_bundle $(if $(ONLY),--only $(ONLY))

check: fmt-check lint types imports test docs-check ## everything that must hold before a commit

fmt: $(DEV) ## lay out the sources and mend what the linter can
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(CUDA_SOURCES),$(BIN)/clang-format -i $(CUDA_SOURCES))

fmt-check: $(DEV) ## fail when `make fmt` would change the layout
	$(BIN)/ruff format --check .
	$(if $(CUDA_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES))

lint: $(DEV) ## check style and common mistakes
	$(BIN)/ruff check .

types: $(DEV) ## check types
	$(BIN)/mypy

imports: $(DEV) ## check that imports point down the rooms
	$(BIN)/lint-imports --no-logo

bench: $(CORE) ## measure how fast the embedded model starts, reads and generates
	PYTHONPATH=. $(BIN)/python benchmarks/embedded.py

binary: $(BINARY) ## build dist/strata.pyz, one file for this Python; BINARY_EXTRAS=serve,cuda for GPUs
	mkdir -p dist
	$(BIN)/shiv --console-script strata --output-file dist/strata.pyz --compressed --reproducible \
		--python '/usr/bin/env python3' --preamble tools/binary/preamble.py \
		--quiet --disable-pip-version-check '.[$(BINARY_EXTRAS)]'
	@ls -l dist/strata.pyz

docs: $(DEV) ## write the pages on settings, the command line and rooms
	$(BIN)/python -m tools.generate_docs

docs-check: $(DEV) ## fail when `make docs` would change a page
	$(BIN)/python -m tools.generate_docs --check

clean: ## remove .venv and everything that tools leave behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml
	$(if $(PYTHON),,$(error strata needs Python 3.11 or newer; set PYTHON=/path/to/python3))
	@echo "installing into $(VENV), once; takes a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(DEV): $(CORE)
	@echo "installing the developer's tools into $(VENV), once"
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(CUDA): $(DEV)
	@echo "installing the CUDA bindings and the kernel compiler into $(VENV), once"
	@$(BIN)/python -m pip install --quiet --editable '.[dev,cuda]'
	@touch $@

$(BINARY): $(CORE)
	@echo "installing what packs one file into $(VENV), once"
	@$(BIN)/python -m pip install --quiet 'shiv>=1.0.8'
	@touch $@
