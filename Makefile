# Four commands: demo, test, lint, bench. Each makes .venv if it has to; PYTHON and VENV choose
# another interpreter and place. On machines with GPUs: test-gpu.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell find ffi -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') \
           $(wildcard cmake/*.cmake) CMakeLists.txt pyproject.toml
CXX_FILES := $(shell find ffi tests/native -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-gpu check-cuda lint format bench clean

# Fault hooks are compiled in: the tests need them, and they cost nothing until one is set.
EXTRAS := dev
DEFINES := JAX_EP_TEST_HOOKS=ON JAX_EP_CUDA=OFF
$(VENV)/installed-cuda: EXTRAS := dev,cuda
$(VENV)/installed-cuda: DEFINES := JAX_EP_TEST_HOOKS=ON JAX_EP_CUDA=ON JAX_EP_CUDA_ARCHITECTURES=native
$(VENV)/installed $(VENV)/installed-cuda: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' \
	  $(addprefix --config-settings=cmake.define.,$(DEFINES))
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/train_moe_lm.py

# Compiling takes most of the tests' time: XLA's machine code is left as it first comes.
test: $(VENV)/installed
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0" \
	  $(BIN)/python -m pytest -q tests $(PYTEST_ARGS)

test-gpu: $(VENV)/installed-cuda
	$(BIN)/python -m pytest -q tests/gpu

# Compiles the CUDA backend and that over NVSHMEM for one architecture, and loads them; needs nvcc and
# no GPU. The build does not see $(VENV), so it is told where NVSHMEM's wheel lies.
CUDA_MAJOR = $(shell nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
NVSHMEM = nvidia-nvshmem-cu$(CUDA_MAJOR)==3.4.5
NVSHMEM_FOLDER = import importlib.util as u; print(u.find_spec('nvidia.nvshmem').submodule_search_locations[0])
check-cuda: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps '$(NVSHMEM)'
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/check-cuda . \
	  --config-settings=build-dir=build/check-cuda-objects \
	  --config-settings=cmake.define.JAX_EP_CUDA=ON \
	  --config-settings=cmake.define.JAX_EP_NVSHMEM=ON \
	  --config-settings=cmake.define.NVSHMEM_HOME="$$($(BIN)/python -c "$(NVSHMEM_FOLDER)")" \
	  --config-settings=cmake.define.JAX_EP_CUDA_ARCHITECTURES=90a
	$(BIN)/python tests/gpu/check_module.py build/check-cuda/jax_ep

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
