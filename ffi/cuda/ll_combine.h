// Low-latency combine: at most as many tokens as an epoch carries, one launch, or one to send and
// one to receive.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/ll_window.h"

namespace jax_ep::gpu {

// In the list of an item's rows of ours, those for one rank's token follow each other.
struct LlRowGroup {
  int source;  // whose token it is of
  int end;     // of its rows, which begin where the last group's end
};

// Offsets are into dynamic shared memory.
struct LlCombinePlan {
  LlGrid grid;
  LlDivisor by_experts_per_tok;
  LlDivisor by_experts_per_rank;
  int row_bytes;
  int entries_at_once;     // (source, k) that a warp finds at a time: all K of some sources
  int64_t rows_offset;     // int32 [R * K]: the list's rows
  int64_t weights_offset;  // float [R * K]: theirs
  int64_t groups_offset;   // LlRowGroup [R]
  int64_t stage_offset;    // [num_staged, stage_bytes]: remote rows, then our own
  int stage_bytes;
  int num_staged;
  int64_t shared_bytes;
};

// Shapes: T tokens and K experts per token of this rank, R ranks, rows of layout.shape.row_bytes
// bytes. The order of every sum is that of high-throughput combine.
//
// A start and its done read the same y, row_weights, row_scalars, topk_idx and recv_rows, which
// must not have changed in between; the start writes no output.
struct LlCombineParams {
  Operation op;
  LlCombinePlan plan;
  LlTurn turn;
  const char* y;                     // [capacity] rows, where recv_rows says
  const float* row_weights;          // [capacity], or null: every weight is 1
  const float* row_scalars;          // [capacity], or null: no scalars
  const int32_t* topk_idx;           // [T, K]
  const int32_t* recv_rows;          // [R, T, K]
  char* out;                         // [T] rows
  float* scalars;                    // [T, K], or null
  const uint32_t* waited_ns_before;  // [R], or null
  uint32_t* waited_ns;               // [R] as in LlDispatchParams
  int64_t capacity;
  RowType row_type;
};

cudaError_t prepare_ll_combine();

LlCombinePlan plan_ll_combine(const WindowShape& shape, int num_tokens, int num_sms,
                              const DeviceLimits& limits);

cudaError_t launch_ll_combine(const LlCombineParams& params, cudaStream_t stream);

}  // namespace jax_ep::gpu
