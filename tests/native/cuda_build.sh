#!/usr/bin/env bash
# Builds the native GPU harness. Usage: cuda_build.sh OUTPUT [extra nvcc flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
output=$1
shift
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
flags=(-std=c++17 -O3 -lineinfo -I ffi -I tests/native -gencode=arch=compute_90a,code=sm_90a -Xcompiler -Wall "$@")
sources=(ffi/cuda/{dispatch,float8_rows,notify,combine,combine_grad,scratch,ll_dispatch,ll_combine,ll_combine_grad}.cu
         ffi/cuda/{cuda_rank,ll_window}.cc
         ffi/transport/cuda_{counters,memory,window}.cc tests/native/cuda_harness.cu)
pids=()
for source in "${sources[@]}"; do
  nvcc "${flags[@]}" -c "$source" -o "$objects/$(basename "$source").o" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
nvcc "${flags[@]}" "$objects"/*.o -o "$output"
