# Each target sets up a virtual environment on a fresh machine (Python >= 3.10 with venv), then runs.
#
#   make demo    compile a small LTX-2 transformer and look at what was rewritten
#   make test    all tests that this machine can run (GPU tests skip themselves without one)
#   make lint    ruff, mypy, dead code
#   make coverage  the share of the package that the CPU tests run
#   make package   sdist and wheel in dist/, and their tests
#   make docs    the documentation, in site/
#   make bench   the benchmarks that this machine can run
#   make fuzz    20,000 composed and mutated graphs; GRAPHS and SEED for others
#
# Tests of the report's page drive a headless Chromium where there is one (Debian: apt install chromium), and are skipped
# where there is none; LTX_INDUCTOR_BROWSER=required make test lets them fail instead.
#
# PYTHON picks the interpreter, TORCH the torch version, VENV the folder: make test TORCH=2.11.0 VENV=.venv-2.11

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
WORKERS ?= 2
GRAPHS ?= 20000
SEED ?= 0
RUN := $(VENV)/bin/python
SETUP := pyproject.toml Makefile

.PHONY: demo test lint coverage package docs bench fuzz clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(RUN) -m ltx_inductor demo

test: $(VENV)/.dev
	$(RUN) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	! $(RUN) -m vulture | grep -E "unused (function|class|method|import|property)|unreachable"

coverage: $(VENV)/.dev
	$(RUN) -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-report=term --cov-fail-under=90 $(ARGS)

package: $(VENV)/.dev
	$(RUN) -m hatchling build
	$(RUN) -m pytest tests/test_package.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

bench: $(VENV)/.dev
	$(RUN) benchmarks/pass_cost.py
	if $(RUN) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(RUN) benchmarks/rope.py && $(RUN) benchmarks/host.py && $(RUN) benchmarks/block.py; \
	else echo "no GPU here: benchmarks/rope.py, host.py and block.py were not run"; fi

fuzz: $(VENV)/.dev
	$(RUN) -m tests.fuzz --graphs $(GRAPHS) --seed $(SEED)

clean:
	rm -rf $(VENV) site dist docs/rules

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 10), f'Python >= 3.10 is needed, this is {sys.version}'"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(SETUP) | $(VENV)/bin/python
	$(RUN) -m pip install --quiet torch==$(TORCH) --editable ".[demo]"
	touch $@

# ltx-core's dependencies are heavy, and the attention that the tests compile needs none of them. NATTEN without its binary
# is its Python front end, which the tests trace; with build isolation pip would fetch another torch to build it with.
$(VENV)/.dev: $(SETUP) | $(VENV)/bin/python
	$(RUN) -m pip install --quiet torch==$(TORCH) --editable ".[dev]"
	$(RUN) -m pip install --quiet --no-deps ltx-core==1.0.0
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation natten==0.21.7
	touch $@ $(VENV)/.demo
