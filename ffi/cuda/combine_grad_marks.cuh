// Rows that no entry names get zeros. A bit per row says which are named; the bits are zero between
// operations.
#pragma once

#include "cuda/combine_grad.h"
#include "cuda/operation.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

__device__ inline void mark_named_rows(const CombineGradParams& p) {
  const WindowShape& shape = p.op.layout.shape;
  ChannelState* state = p.op.state();
  const int64_t entries = int64_t{shape.num_ranks} * p.op.num_tokens * shape.num_experts_per_tok;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  uint32_t highest = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < entries; i += threads) {
    const int row = p.recv_rows[i];
    if (row < 0 || row >= p.capacity || row / 32 >= p.op.scratch.row_mark_words) continue;
    atomicOr(&p.op.scratch.row_marks[row / 32], 1u << (row % 32));
    highest = max(highest, static_cast<uint32_t>(row) + 1);
  }
  highest = __reduce_max_sync(kFullWarp, highest);
  if (lane_id() == 0 && highest > 0) atomicMax(&state->highest_row.value, highest);
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint32_t, kDeviceScope> marked(state->blocks_marked.value);
    marked.fetch_add(1, cuda::memory_order_release);
  }
}

// Each warp takes 32 rows at a time, and clears their bits.
__device__ inline void zero_unnamed_rows(const CombineGradParams& p) {
  const int64_t row_bytes = p.op.layout.shape.row_bytes;
  const int64_t highest = load_relaxed<kDeviceScope>(&p.op.state()->highest_row.value);
  const int64_t end =
      p.zero_tail ? p.capacity : min(p.capacity, align_up(highest, p.expert_alignment));
  const int64_t words = (p.capacity + 31) / 32;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t w = int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp_id(); w < words; w += warps) {
    uint32_t marks = 0;
    if (w < p.op.scratch.row_mark_words) {
      marks = load_relaxed<kDeviceScope>(&p.op.scratch.row_marks[w]);
      __syncwarp();
      if (lane_id() == 0 && marks != 0) p.op.scratch.row_marks[w] = 0;
    }
    const int64_t mine = w * 32 + lane_id();
    const bool unnamed = mine < p.capacity && (marks >> lane_id() & 1) == 0;
    if (unnamed) p.d_row_weights[mine] = 0.0f;
    for (unsigned left = __ballot_sync(kFullWarp, unnamed && mine < end); left != 0;
         left &= left - 1) {
      const int64_t row = w * 32 + __ffs(left) - 1;
      zero_vectors(p.d_y + row * row_bytes, row_bytes / 16, lane_id(), kWarp);
    }
  }
}

// One thread. False when the operation was aborted.
__device__ inline bool wait_for_marks(const OpContext& ctx) {
  BoundedWait bound;
  const uint32_t* marked = &ctx.op.state()->blocks_marked.value;
  for (uint32_t seen; (seen = load_acquire<kDeviceScope>(marked)) < gridDim.x;) {
    if (bound.over(ctx, WaitFor::kRow, ctx.rank(), ctx.epoch, gridDim.x, seen)) return false;
  }
  return true;
}

// All threads of one block: what the outputs of an aborted operation hold.
__device__ inline void spoil_combine_grad(const CombineGradParams& p) {
  fill_nan(p.d_y, p.capacity * p.op.layout.shape.row_bytes, p.row_type);
  fill_nan(reinterpret_cast<char*>(p.d_row_weights), p.capacity * 4, RowType::kFloat32);
}

}  // namespace jax_ep::gpu
