# The whole verb list. `make demo` and `make test` set the machine up by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup demo check fix test stress bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/layerscope demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One thread for each of the two workers: two threads on two busy cores are many times slower than one.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not stress" -n 2 --dist loadfile
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels

stress: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stress -n 2 --dist loadfile

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache
