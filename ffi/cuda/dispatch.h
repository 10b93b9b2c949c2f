// Dispatch: every token's row to the ranks that hold its experts, there expanded to one row per
// expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window.h"

namespace jax_ep::gpu {

// How one launch uses its multiprocessors. Offsets are into dynamic shared memory; -1: not there.
struct DispatchPlan {
  bool bulk;  // bulk copies through shared memory, else plain 16-byte accesses
  int num_blocks;
  int most_routing_blocks;
  int senders;         // warps
  int receivers;       // warps
  int helpers;         // warps; in the bulk kernel the first of them publishes
  bool receive_ahead;  // receivers load a part before they store the one before it
  int num_parts;       // a row travels in this many parts
  int64_t part_bytes;
  int64_t stage_bytes;  // a part and the records that go with it
  int64_t workspace_offset;
  int64_t bases_offset;
  int64_t outbox_offset;
  int64_t barrier_offset;
  int64_t shared_bytes;

  int threads() const { return 32 * (senders + receivers + helpers); }
};

// Shapes: T tokens and K experts per token of this rank, R ranks, E_l experts here, rows of
// layout.shape.row_bytes bytes, G = ceil(H / 128) scales of a quantised row.
struct DispatchParams {
  Operation op;
  DispatchPlan plan;
  const char* x;              // [T] rows
  const int32_t* topk_idx;    // [T, K]
  const float* topk_weights;  // [T, K]
  char* tokens;               // [capacity] rows, expert-major; [R, T] rows with a row_map
  float* weights;             // [capacity]
  int32_t* group_sizes;       // [E_l] with alignment rows
  int32_t* valid_sizes;       // [E_l] without
  int32_t* num_dropped;       // []
  int32_t* sanitised_idx;     // [T, K] topk_idx with -1 for entries that are no expert
  // Along a routing of the program, or null. sanitised_idx is null then.
  const int32_t* row_index;  // [T, K] place of each entry among this rank's for its expert
  const int32_t* counts;     // [R, E] entries of every rank for every expert
  int32_t* recv_rows;        // [R, T, K] output row of each entry, -1 for none
  int32_t* row_map;          // [capacity] slot of each row, R * T for none; null: rows are copied
  int64_t capacity;
  int64_t expert_alignment;
  bool zero_tail;
  RowType row_type;
  // Rows that travel quantised have H channels (else 0) and layout.shape.row_bytes of their packed
  // form, which launch_dispatch makes.
  int64_t hidden;
  char* packed;   // [T] packed rows
  float* scales;  // [rows of tokens, G], tokens being float8; null: tokens are rows of row_type
  bool power_of_two_scales;
  int num_routing_blocks;  // set by launch_dispatch

  JAX_EP_HD bool routed() const { return counts != nullptr; }
  JAX_EP_HD bool quantized() const { return hidden > 0; }
  JAX_EP_HD int64_t output_row_bytes() const {
    if (!quantized()) return op.layout.shape.row_bytes;
    return scales != nullptr ? hidden : hidden * row_type_bytes(row_type);
  }
};

// Loads the kernels on the current device and lifts their shared memory limit.
cudaError_t prepare_dispatch();

DispatchPlan plan_dispatch(const WindowShape& shape, int num_sms, const DeviceLimits& limits);
// Of packed rows, which are not cut into parts: every value needs its scale.
DispatchPlan plan_packed_dispatch(const WindowShape& shape, int num_sms,
                                  const DeviceLimits& limits);

cudaError_t launch_dispatch(const DispatchParams& given, cudaStream_t stream);

}  // namespace jax_ep::gpu
