# Everything happens in .venv, which the targets make themselves. The first run of a target takes
# minutes (torch is large); later ones start at once and reinstall only what changed.
#
#   make demo        plan a translation model for four GPUs and compare the ways to place it
#   make test        run the tests            make test-gpu   those that need a CUDA device
#   make test-slow   those that take seconds each
#   make lint        formatting, types, import directions
#   make docs        HTML in docs/_build      make bench      speed of capture, simulator, start
#   make wheels      sdist and wheel for this platform, in dist
#   make fuzz        100,000 damaged files for every reader, 200 kills while writing
#
# Variables:
#   PYTHON=python3.12      the Python to make .venv with (3.11 or newer; found by itself)
#   TORCH=torch==2.13.0    the torch to install. Give another version, wheel or pip options, such
#                          as a CPU-only build on a machine without GPUs. With TORCH= the torch
#                          that .venv has is kept.
#   SITE=docs/_build/html  the folder to build documentation into, one folder for each version

TORCH ?= torch==2.13.0
PYTHON ?=
SITE ?= docs/_build/html
WORKERS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-gpu fuzz lint docs bench wheels clean FORCE

BIN := .venv/bin
DONE := .venv/devplace
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
# A process per file, and a worker in it that is replaced when a test takes it down: a GPU that
# fails in one test does not hide the others.
GPU_TESTS := -n 1 -m gpu -p tests.at_once --tb=short --show-capture=no -vv
NATIVE := CMakeLists.txt $(wildcard native/*.hpp native/*/*)

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(DONE)/package $(DONE)/extras
	@mkdir -p demo
	$(BIN)/devplace compare nmt-4 --machine k40x4 --budget 30s -o demo/plan.json
	@echo "The best plan is in demo/plan.json. Next:"
	@echo "  $(BIN)/devplace explain demo/plan.json                      what is where, and why"
	@echo "  $(BIN)/devplace trace demo/plan.json -o demo/trace.json     the timeline, for ui.perfetto.dev"
	@echo "  $(BIN)/devplace plan FILE.py:FUNCTION --machine k40x4       a model of yours"

test: $(DONE)/package $(DONE)/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not slow"

test-slow: $(DONE)/package $(DONE)/test $(DONE)/recipes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu"

fuzz: $(DONE)/package $(DONE)/test
	OMP_NUM_THREADS=1 DEVPLACE_FUZZ=100000 DEVPLACE_KILLS=200 $(BIN)/python -m pytest -n $(WORKERS) tests/fuzz

test-gpu: $(DONE)/package $(DONE)/test
	@failed=; for file in $$(grep -rlE "mark\.gpu|gpus\.MARKS" tests --include='test_*.py' | sort); do \
	  echo "== $$file"; code=0; $(BIN)/python -m pytest $(GPU_TESTS) $$file || code=$$?; \
	  [ $$code = 0 ] || [ $$code = 5 ] || failed="$$failed $$file"; done; \
	if [ -n "$$failed" ]; then echo "Failed:$$failed" >&2; exit 1; fi; \
	echo "All GPU tests passed or were skipped."

lint: $(DONE)/package $(DONE)/test $(DONE)/lint
	@failed=; for check in "ruff check" "ruff format --check" "mypy --strict src/devplace" lint-imports; do \
	  echo "== $$check"; $(BIN)/$$check || failed="$$failed '$$check'"; done; \
	if [ -n "$$failed" ]; then echo "Failed:$$failed" >&2; exit 1; fi

docs: $(DONE)/package $(DONE)/docs
	@version=$$($(BIN)/python -c 'import devplace; print(devplace.__version__)'); \
	$(BIN)/sphinx-build -q -W --keep-going -b html -d docs/_build/doctrees docs $(SITE)/$$version; \
	echo "Open $(SITE)/$$version/index.html; $(SITE)/index.html lists the versions"

bench: $(DONE)/package
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

# The wheel is built from the sdist. On Linux it may use no library that other Linuxes may lack.
wheels: $(DONE)/wheels
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	if [ "$$(uname)" = Linux ]; then PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist/repaired dist/*.whl; \
	  rm dist/*.whl; mv dist/repaired/*.whl dist; rmdir dist/repaired; fi
	@ls dist

clean:
	rm -rf .venv build demo dist docs/_build

$(BIN)/python:
	@echo "Making .venv"
	@for python in $(PYTHON) $(if $(PYTHON),,python3 python3.14 python3.13 python3.12 python3.11 python); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then "$$python" -m venv .venv && exit 0; fi; \
	done; \
	echo "devplace needs Python 3.11 or newer with the venv module (on Debian: python3-venv)," \
	  "and found none$(if $(PYTHON), at PYTHON=$(PYTHON)). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# Rewritten only when TORCH has another value than at the last installation.
$(DONE)/torch: FORCE $(BIN)/python
	@mkdir -p $(DONE)
	@if [ "$$(cat $@ 2>/dev/null || echo none)" != '$(TORCH)' ]; then \
	  if [ -n '$(TORCH)' ]; then echo "Installing $(TORCH)"; $(PIP) $(TORCH); \
	  else echo "Keeping the torch that .venv has"; fi; \
	  echo '$(TORCH)' > $@; fi

# Rewritten only when modules have come, gone or moved: an editable installation knows each by name.
$(DONE)/modules: FORCE $(BIN)/python
	@mkdir -p $(DONE)
	@find src -name '*.py' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(DONE)/package: pyproject.toml $(NATIVE) $(DONE)/torch $(DONE)/modules
	@echo "Installing devplace with its native simulator"
	@$(PIP) --editable .
	@$(BIN)/python -c 'from devplace.simulator import native_module as native; \
	print("Native simulator:", "built" if native() else "not built (no C++ compiler?); the plain Python one is used")'
	@touch $@

# Nothing fails without them: the placers that need them say so.
$(DONE)/extras: pyproject.toml $(DONE)/torch
	@echo "Installing graph partitioners and a linear solver"
	@$(BIN)/python -c 'import tomllib; \
	extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*extras["partition"], *extras["lp"], sep="\n")' > $@.txt
	@$(PIP) -r $@.txt || echo "There are none for this platform; going on without"
	@touch $@

# Nothing fails without them: the examples and tests that need them are skipped.
$(DONE)/recipes: pyproject.toml $(DONE)/torch
	@echo "Installing the libraries of the recipes"
	@$(BIN)/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["recipes"], sep="\n")' > $@.txt
	@$(PIP) -r $@.txt || echo "There are none for this platform; going on without"
	@touch $@

$(DONE)/test $(DONE)/lint $(DONE)/docs $(DONE)/wheels: $(DONE)/%: pyproject.toml $(DONE)/torch
	@echo "Installing what 'make $*' needs"
	@$(BIN)/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"], sep="\n")' > $@.txt
	@$(PIP) -r $@.txt
	@touch $@
