# `make up` and `make test` need only Python >= 3.11, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := bash
BY_LINES := set -o pipefail;
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: up test test-parts test-end-to-end lint format clean

up: $(VENV)/.installed
	@exec $(BIN)/microserving up $(ARGS)

# The end-to-end tests mostly wait for processes, the others mostly compute: side by side they take little more than half
# the time; sed keeps their lines apart. With ARGS, one run of just these tests.
test: lint
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-parts test-end-to-end
endif

test-parts: $(VENV)/.installed-dev
	@$(BY_LINES) $(BIN)/pytest --ignore tests/e2e | sed -u 's/^/  /'

test-end-to-end: $(VENV)/.installed-dev
	@$(BY_LINES) $(BIN)/pytest tests/e2e | sed -u 's/^/| /'

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info

# Debian's python3 has no ensurepip unless python3-venv is installed: its own pip then puts one into the venv.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "microserving needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 chooses one" >&2; exit 1; }
	@echo "creating $(VENV) ($$($(PYTHON) --version))"
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check --quiet pip; \
	else echo "python3 has neither pip nor ensurepip; on Debian: apt install python3-pip (or python3-venv)" >&2; \
	  exit 1; fi || { rm -rf $(VENV); exit 1; }

# Done again whenever pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing microserving and what it needs into $(VENV) (the first time this takes a minute or two)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing microserving, what it needs and the tools for tests into $(VENV) (the first time: some minutes)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.installed $@
