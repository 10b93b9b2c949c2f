// Combine: every token's expert rows back to its rank, weighted and summed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window.h"

namespace jax_ep::gpu {

// How one launch uses its multiprocessors. Offsets are into dynamic shared memory.
struct CombinePlan {
  bool bulk;  // rows come through shared memory by bulk copies, else by plain 16-byte loads
  int num_blocks;
  int threads;
  int consumers;  // bulk: warps that sum
  int senders;    // plain: warps that send before they finish tokens
  int num_parts;  // a row is summed in this many parts
  int64_t part_bytes;
  int num_slots;  // bulk: parts that shared memory holds
  int64_t items_offset;
  int64_t item_bytes;
  int64_t schedule_offset;
  int64_t barrier_offset;
  int64_t shared_bytes;
};

// Shapes: T tokens and K experts per token of this rank, rows of layout.shape.row_bytes bytes.
struct CombineParams {
  Operation op;
  CombinePlan plan;
  const char* y;             // [capacity] rows, expert-major, or [R, T] rows, one a message
  const float* row_weights;  // [capacity], or null: every weight is 1
  const float* row_scalars;  // [capacity], or null: no scalars
  const int32_t* topk_idx;   // [T, K]
  const int32_t* recv_rows;  // [R, T, K]
  char* out;                 // [T] rows
  float* scalars;            // [T, K], or null
  int64_t capacity;
  bool y_by_message;  // each message with a row has one row of y, of weight 1
  RowType row_type;
};

cudaError_t prepare_combine();

CombinePlan plan_combine(const WindowShape& shape, int num_sms, const DeviceLimits& limits);

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream);

}  // namespace jax_ep::gpu
