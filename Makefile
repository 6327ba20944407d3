# make demo      a virtual environment, the package, and a real training run of about three minutes
# make test      lint, types and tests, in the same environment
# make soak      the long tests: pairs of methods, kills, full disks, memory, NaN, malformed input; writes their tables
# make bench     the ratios that we promise, checked on this machine, and the embedded bench; 20 minutes
# make measure   all of benchmarks/ in full, into benchmarks/results; some hours
# make clean     removes the environment and the caches; leaves runs/ alone
#
# PYTHON=python3.12 picks the interpreter; ARGS="max_steps=20" goes to `thrifty train`; JOBS=4 to pytest.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin

.PHONY: demo test lint soak bench measure clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/thrifty train $(ARGS)

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m soak
	set -e; for soak in oom nan malformed disk pressure; do \
	  echo "$$soak"; $(BIN)/python benchmarks/soak/$$soak.py --out benchmarks/results/soak-$$soak.json; done
	rm -f benchmarks/results/soak-kills.json
	$(BIN)/python benchmarks/soak/kill.py --kills 200 --out benchmarks/results/soak-kills.json

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/check.py
	$(BIN)/thrifty bench $(ARGS)

measure: $(VENV)/.installed-dev
	set -e; for script in published search_speed guard_overhead bench_can_tell regret \
	    overhead start_up saving utilisation recipes fine_tuning time_to_loss; do \
	  echo "$$script"; $(BIN)/python benchmarks/$$script.py; done
	$(BIN)/thrifty bench --publish benchmarks/results $(ARGS)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "thrifty needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name another interpreter: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps keep a second call from installing again; a change of the two files below installs anew.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed
