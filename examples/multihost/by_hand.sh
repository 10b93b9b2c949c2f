#!/bin/bash
# Starts the training example in several processes of this machine, without a launcher.
#
#   examples/multihost/by_hand.sh 4 --steps 50            # 4 processes of one CPU device each
#   JAX_NUM_CPU_DEVICES=2 examples/multihost/by_hand.sh 2 # 2 processes of two
#
# Stops all as soon as one fails: the others could only wait for it.
set -euo pipefail
if (($# < 1)); then
  echo "usage: $0 NUM_PROCESSES [options of train_moe_lm.py]" >&2
  exit 2
fi
num_processes=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
coordinator=${COORDINATOR:-127.0.0.1:12321}
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for ((process = 0; process < num_processes; ++process)); do
  JAX_PLATFORMS=cpu "${PYTHON:-python}" "$here/../train_moe_lm.py" \
    --distributed "$coordinator" "$num_processes" "$process" "$@" &
  pids+=($!)
done
for ((process = 0; process < num_processes; ++process)); do wait -n; done
