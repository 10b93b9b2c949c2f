// To ranks without addresses a block writes into its own send regions, as if they were the peer's
// window, and puts from there once all its threads have written. Only whole parts of an item are
// put, nothing between them: whatever else a send region holds is of another epoch.
//
// No flag follows and nothing is fenced. A put may arrive in any pieces and any order, as long as
// an aligned word of 4 bytes, or of 8 where it holds an epoch, arrives whole.
#pragma once

#include "cuda/ll_operation.cuh"

namespace jax_ep::gpu {

// All threads of the block, alike, when they have written what they have for `ranks`, of which this
// rank is none: a warp each calls put(rank) for those that have no addresses.
template <class Transport, class Put>
__device__ void put_to_remote(const LlContext& ctx, uint64_t ranks, Put put) {
  if constexpr (Transport::kPuts) {
    uint64_t remote = 0;
    for (uint64_t left = ranks; left != 0; left &= left - 1) {
      if (Transport::is_remote(ctx, __ffsll(static_cast<long long>(left)) - 1)) {
        remote |= left & (~left + 1);
      }
    }
    if (remote == 0) return;
    __syncthreads();  // all words are written
    const int num_warps = static_cast<int>(blockDim.x) / kWarp;
    for (int turn = 0; remote != 0; remote &= remote - 1, ++turn) {
      if (turn % num_warps == warp_id()) put(__ffsll(static_cast<long long>(remote)) - 1);
    }
  }
}

}  // namespace jax_ep::gpu
