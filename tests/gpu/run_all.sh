#!/usr/bin/env bash
# Everything that needs GPUs, on a machine without a network: builds and installs the package with the
# tools at hand, builds the native harness, runs tests/gpu, and prints a short table last.
#
#   tests/gpu/run_all.sh [build] [pytest] [timing]     build and pytest if none is named
#
# Logs go to $OUT, or to build/gpu-logs. PYTHON (python3), ARCH (90a) and PYTEST_ARGS choose more.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
arch=${ARCH:-90a}
logs=${OUT:-build/gpu-logs}
steps=" ${*:-build pytest} "
site=$PWD/build/gpu-site
harness=$PWD/build/cuda_harness
mkdir -p "$logs" build
export JAX_EP_REQUIRE_GPU=1 PYTHONUNBUFFERED=1
# NVLink multicast stays off in whatever we start.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
table=()
failed=0

run_step() {  # name, seconds at most, command...
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1
  status=$?
  report "$name" "$status" $((SECONDS - began))
}

report() {  # name, exit status, seconds
  local verdict=ok
  if [ "$2" != 0 ]; then
    verdict="FAILED ($2)"
    failed=1
    echo "---- $1 failed; the end of its log:"
    tail -n 60 "$logs/$1.log"
  fi
  table+=("$(printf '%-8s %-13s %4d s' "$1" "$verdict" "$3")")
}

wants() { [[ $steps == *" $1 "* ]]; }

nvidia-smi -L
"$python" -c 'import jax, sys; print("jax", jax.__version__, "python", sys.version.split()[0])'

if wants build; then
  # Beside each other: each keeps a few cores busy.
  began=$SECONDS
  timeout --kill-after=10 280 tests/native/cuda_build.sh "$harness" >"$logs/harness.log" 2>&1 &
  harness_build=$!
  run_step build 300 "$python" -m pip install --no-build-isolation --no-deps --upgrade \
    --target "$site" . -C cmake.define.JAX_EP_CUDA=ON \
    -C cmake.define.JAX_EP_CUDA_ARCHITECTURES="$arch"
  wait "$harness_build"
  report harness $? $((SECONDS - began))
  run_step module 60 "$python" tests/gpu/check_module.py "$site/jax_ep"
fi
export PYTHONPATH=$site
if wants timing; then
  CUDA_MODULE_LOADING=EAGER run_step timing 120 "$harness" time
  cat "$logs/timing.log"
fi
if wants pytest; then
  export JAX_EP_CUDA_HARNESS=$harness
  # -P: the package that was built, not the sources in the current folder.
  # shellcheck disable=SC2086
  run_step pytest 420 "$python" -P -m pytest -q -p no:cacheprovider --durations=12 \
    ${PYTEST_ARGS:-tests/gpu}
  grep -E '^[0-9.]+s (call|setup)|^(FAILED|ERROR)|[0-9] (passed|failed)' "$logs/pytest.log" |
    tail -n 50
fi

echo "---- summary"
printf '%s\n' "${table[@]}"
exit $failed
