# Four commands: demo, test, lint, bench. Each makes .venv if it has to; PYTHON and VENV choose
# another interpreter and place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell find ffi -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') \
           CMakeLists.txt pyproject.toml
CXX_FILES := $(shell find ffi tests/native -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test lint format bench clean

# Fault hooks are compiled in: the tests need them, and they cost nothing until one is set.
$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]' \
	  --config-settings=cmake.define.JAX_EP_TEST_HOOKS=ON
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/train_moe_lm.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -q tests

bench: $(VENV)/installed
	$(BIN)/python benchmarks/bench_ep.py --json benchmarks/results

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build $(VENV)
