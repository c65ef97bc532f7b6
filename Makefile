# `make tour` and `make test` need Python 3.10 or newer, make and a package index. Everything else goes into a
# virtual environment of the project's own, which is made once and brought up to date when pyproject.toml changes.

PYTHON ?= python3
VENV   ?= .venv
# More arguments for the command that a target ends in: make test ARGS="-k pool", make bench ARGS=--json
ARGS   ?=
# How long to soak.
SECONDS ?= 60

BIN       := $(VENV)/bin
# One stamp for each set of packages that has been installed.
BASE      := $(VENV)/.installed
TEST      := $(VENV)/.installed-test
NOTEBOOKS := $(VENV)/.installed-notebooks
MUTANTS   := $(VENV)/.installed-mutants
DOCS      := $(VENV)/.installed-docs

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The tests start many processes, which read the bytecode that the first has left, also where the environment forbids it.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Most tests wait now and then, so that four processes keep two cores at work.
SIMULATED := $(PYTEST) --driver=simulated -n 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help tour check test test-gpu soak mutants lint bench notebooks docs clean

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1:/p' $(MAKEFILE_LIST) | awk -F: '{ printf "%-18s%s\n", $$1, $$2 }'

tour: $(BASE) ## Install the package and watch it work, on a GPU if there is one
	$(BIN)/python -m streamalloc tour $(ARGS)

check: lint ## Check style and types, then run the main tests, for each commit (a minute)
	$(SIMULATED) -m "not slow" $(addprefix tests/,core pool vmm ipc checker simulator) $(ARGS)

test: lint ## Check style and types, then run all tests on the simulated driver
	$(SIMULATED) $(ARGS)

test-gpu: $(TEST) ## Run the tests on the real driver and its GPUs
	$(PYTEST) --driver=cuda $(ARGS)

soak: $(TEST) ## Threads, collections and kills for a minute, or as long as SECONDS says
	STREAMALLOC_SOAK_SECONDS=$(SECONDS) $(PYTEST) --driver=simulated --soak tests/package/test_soak.py $(ARGS)

mutants: $(MUTANTS) ## Plant faults in the package and count those that the tests catch (an hour or more)
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(TEST) ## Check style, types and the workflows of CI only
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/zizmor --offline --quiet .github

bench: $(BASE) ## Measure the package beside the raw calls
	$(BIN)/python -m streamalloc bench $(ARGS)

notebooks: $(NOTEBOOKS) ## Run the notebooks again and keep their new outputs
	STREAMALLOC_DRIVER=simulated $(BIN)/python notebooks/execute.py $(ARGS)

docs: $(DOCS) ## Build the documentation into build/docs
	STREAMALLOC_DRIVER=simulated $(BIN)/python -m sphinx --fail-on-warning --keep-going -d build/doctrees $(ARGS) notebooks build/docs

clean: ## Remove the virtual environment, builds and caches
	test ! -f $(VENV)/pyvenv.cfg || rm -rf $(VENV)
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BASE):      PACKAGE := .
$(TEST):      PACKAGE := .[test]
$(NOTEBOOKS): PACKAGE := .[notebooks]
$(MUTANTS):   PACKAGE := .[test,mutants]
$(DOCS):      PACKAGE := .[docs]

$(BASE) $(TEST) $(NOTEBOOKS) $(MUTANTS) $(DOCS): pyproject.toml $(VENV)/.created
	@echo "Installing $(PACKAGE) into $(VENV)"
	@$(BIN)/python -m pip install --quiet --editable '$(PACKAGE)'
	@touch $@

# The stamp, not bin/python, says that the environment is whole: an interrupted run is taken up again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "streamalloc needs Python 3.10 or newer, and $(PYTHON) is not. Name another one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
	  echo "On Debian and Ubuntu: apt install python3-venv. Or name another Python: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@
