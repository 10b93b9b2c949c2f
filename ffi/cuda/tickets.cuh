// How warps share work. Tokens are drawn from counters of the whole grid, because multiprocessors
// get very unequal shares of the links.
#pragma once

#include "cuda/operation.cuh"

namespace jax_ep::gpu {

// Draws one ticket ahead, so that a warp never waits for the counter.
class Tickets {
 public:
  __device__ explicit Tickets(Counter& counter) : counter_(&counter.value) { draw(); }

  __device__ uint32_t take() {
    const uint32_t ticket = __shfl_sync(kFullWarp, next_, 0);
    draw();
    return ticket;
  }

 private:
  __device__ void draw() {
    if (lane_id() == 0) next_ = atomicAdd(counter_, 1u);
  }
  uint32_t* counter_;
  uint32_t next_ = 0;
};

}  // namespace jax_ep::gpu
