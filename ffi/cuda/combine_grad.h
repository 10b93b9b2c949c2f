// Combine's gradient: the cotangent of every token goes the way the token went, and becomes there
// the cotangent of each of its expert rows and of that row's weight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window.h"

namespace jax_ep::gpu {

// How one launch uses its multiprocessors.
struct CombineGradPlan {
  bool bulk;  // rows go through shared memory by bulk copies, else plain 16-byte accesses
  int num_blocks;
  int threads;
  int senders;    // warps that send before they receive
  int workers;    // warps in all, but for the one that publishes in the bulk kernel
  int num_parts;  // bulk: pieces of a row
  int64_t piece_bytes;
  int64_t g_bytes;  // a cotangent
  int64_t barrier_offset;
  int64_t outbox_offset;
  int64_t shared_bytes;

  // Shared memory of one warp: a cotangent and three pieces.
  JAX_EP_HD int64_t warp_bytes() const { return g_bytes + 3 * piece_bytes; }
};

// Shapes: T tokens and K experts per token of this rank, rows of layout.shape.row_bytes bytes.
struct CombineGradParams {
  Operation op;
  CombineGradPlan plan;
  const char* g;             // [T] rows, the cotangent of combine's result
  const int32_t* topk_idx;   // [T, K]
  const int32_t* recv_rows;  // [R, T, K]
  const float* row_weights;  // [capacity]
  const char* y;             // [capacity] rows
  char* d_y;                 // [capacity] rows: weight * g
  float* d_row_weights;      // [capacity]: <y, g>
  int64_t capacity;
  int64_t expert_alignment;
  bool zero_tail;
  RowType row_type;
};

cudaError_t prepare_combine_grad();

CombineGradPlan plan_combine_grad(const WindowShape& shape, int num_sms,
                                  const DeviceLimits& limits);

cudaError_t launch_combine_grad(const CombineGradParams& params, cudaStream_t stream);

}  // namespace jax_ep::gpu
