#!/bin/bash
# The training example under Open MPI, whose environment jax.distributed.initialize() reads.
#
#   examples/multihost/mpirun.sh 4 --steps 50     # 4 processes on this machine
set -euo pipefail
num_processes=${1:?usage: $0 NUM_PROCESSES [options of train_moe_lm.py]}
shift
here=$(cd "$(dirname "$0")" && pwd)
exec mpirun -np "$num_processes" --bind-to none -x JAX_PLATFORMS=cpu \
  "${PYTHON:-python}" "$here/../train_moe_lm.py" --distributed "$@"
