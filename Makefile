# The whole verb list. `make demo` and `make test` set the machine up by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup demo check fix browser test stress bench clean

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
	@$(BIN)/python tests/house/weigh.py src

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A browser for the tests of pages: fetched where apt can be used; where there is none, those tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -qq -o Acquire::Retries=3; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Acquire::Retries=3 --no-install-recommends chromium >/dev/null; }; } || true
	@command -v chromium >/dev/null || echo "There is no chromium and apt could not fetch it: the tests in tests/browser are skipped."

# One thread for each of the two workers: two threads on two busy cores are many times slower than one.
test: check browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not stress" -n 2 --dist loadfile -rs
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels

stress: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stress -n 2 --dist loadfile

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache
