// Low-latency dispatch: at most as many tokens as an epoch carries, one launch, or one to send and
// one to receive.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/ll_window.h"

namespace jax_ep::gpu {

enum class LlOutput : int {
  kRows,         // rows as they were sent
  kValues,       // float8 on the wire and in the output, with scales beside
  kDequantized,  // float8 on the wire, rows in the output
};

// Of rows, in bytes and channels; in 32 bits, since a product with one of them is an instruction
// then.
struct LlRowSizes {
  int bytes;          // in x
  int output_bytes;   // in the output
  int hidden;         // H
  int num_scales;     // G, with float8
  int scales_offset;  // in a message of float8
};

constexpr int kListUnit = 4;  // rows that are read from a list at once

// How one launch uses its multiprocessors. Offsets are into dynamic shared memory; -1: not there,
// and one block routes or places for all in device memory.
struct LlDispatchPlan {
  LlGrid grid;
  LlDivisor by_experts_per_tok;
  LlDivisor by_experts_per_rank;
  int experts_per_rank;
  int ranks_at_once;  // to which a warp sends records
  LlRowSizes row;
  int mask_words;        // of 32 tokens
  int list_entries;      // K, on a multiple of 4
  int64_t masks_offset;  // uint32 [mask_words, E]: a bit for each token that chose the expert
  int64_t bases_offset;
  int64_t rows_offset;  // int32 [R, list_entries]
  bool own_rows_first;  // of every other block: its payload would only queue behind the others'
  int64_t shared_bytes;
};

// Shapes: T tokens and K experts per token of this rank, R ranks, E_l experts here, H channels in
// rows of layout.shape.row_bytes bytes, G = ceil(H / 128) scales.
//
// Padded: row e * R * T + i is the i-th row of expert e, in the order of source, token, k. The rows
// past an expert's count are not written; their weights are 0. Compact: the experts follow each
// other, and rows from the capacity on are dropped.
//
// A start reads x, topk_idx and topk_weights and writes sanitised_idx. Its done reads x, which must
// not have changed, and writes everything else.
struct LlDispatchParams {
  Operation op;
  LlDispatchPlan plan;
  LlTurn turn;
  const char* x;              // [T] rows
  const int32_t* topk_idx;    // [T, K]
  const float* topk_weights;  // [T, K]
  char* tokens;               // [capacity] rows, or [capacity, H] float8
  float* scales;              // [capacity, G], with float8 output
  float* weights;             // [capacity]
  int32_t* group_sizes;       // [E_l] rows of each expert
  int32_t* valid_sizes;       // [E_l] the same: there is no alignment
  int32_t* num_dropped;       // []
  int32_t* sanitised_idx;     // [T, K] topk_idx with -1 for entries that are no expert
  int32_t* recv_rows;         // [R, T, K] output row of each entry, -1 for none
  // Statistics, or null: what came before, and that plus this operation's share.
  const int32_t* expert_tokens_before;  // [E_l]
  int32_t* expert_tokens;               // [E_l] group_sizes added, modulo 2^32
  const uint32_t* waited_ns_before;     // [R]
  uint32_t* waited_ns;  // [R] from when we begin to receive until we see that the peer has begun to
                        // send
  int64_t capacity;     // E_l * R * T when padded
  bool padded;
  bool zero_tail;  // compact: rows past the last are zeros, else not written
  LlOutput output;
  bool power_of_two_scales;
  RowType row_type;  // of x, and of rows in the output
};

// Loads the kernels on the current device and lifts their shared memory limit.
cudaError_t prepare_ll_dispatch();

// turn, num_tokens, output and row_type as in the parameters.
LlDispatchPlan plan_ll_dispatch(const WindowShape& shape, const LlTurn& turn, int num_tokens,
                                LlOutput output, RowType row_type, int num_sms,
                                const DeviceLimits& limits);

cudaError_t launch_ll_dispatch(const LlDispatchParams& params, cudaStream_t stream);

}  // namespace jax_ep::gpu
