// Gradient of combine on CPU: each token's cotangent to the ranks that computed its rows, along the
// routing that dispatch saved.
#pragma once

#include <cstdint>

#include "cpu/rank_context.h"
#include "protocol/numeric.h"
#include "protocol/signals.h"

namespace jax_ep {

struct CombineGradArgs {
  const char* g;             // [T, H], cotangent of combine's output
  const int32_t* topk_idx;   // [T, K]
  const int32_t* recv_rows;  // [R * T, K]
  const float* row_weights;  // [capacity]
  const char* y;             // [capacity, H], combine's input
  char* d_y;                 // [capacity, H]: weight * g of the row's token
  float* d_row_weights;      // [capacity]: <y, g>
  int num_tokens;            // T
  int64_t capacity;
  int64_t expert_alignment;
  bool zero_tail;
  RowType row_type;
  int64_t hidden;

  OperandView view() const { return {g, num_tokens, num_tokens, nullptr, nullptr, nullptr}; }
};

// As run_dispatch.
bool run_combine_grad(RankContext& context, const CombineGradArgs& args, const OpTag& tag,
                      uint64_t first_epoch);

}  // namespace jax_ep
