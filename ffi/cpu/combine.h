// Combine on CPU: the experts' rows back to their tokens' ranks, weighted and summed.
#pragma once

#include <cstdint>

#include "cpu/rank_context.h"
#include "protocol/numeric.h"
#include "protocol/signals.h"

namespace jax_ep {

struct CombineArgs {
  const char* y;             // [capacity, H], or [R * T, H] if not expanded
  const float* row_weights;  // [capacity], or null: every weight is 1
  const float* row_scalars;  // [capacity], or null: no scalars travel
  const int32_t* topk_idx;   // [T, K], of this rank's tokens
  const int32_t* recv_rows;  // [R * T, K], rows that this rank computed for (source, token, k)
  char* out;                 // [T, H]
  float* scalars;            // [T, K], or null
  int num_tokens;            // T
  int64_t capacity;
  RowType row_type;
  int64_t hidden;
  bool expanded = true;  // false: a slot that has rows adds its one row of y, with weight 1

  OperandView view() const {
    return {y, capacity, num_tokens, row_weights, row_scalars, recv_rows, !expanded};
  }
};

// As run_dispatch.
bool run_combine(RankContext& context, const CombineArgs& args, const OpTag& tag,
                 uint64_t first_epoch);

// The halves of a combine that one epoch carries. Start sends the peers' sums; done adds the own
// rank's rows, from the same y, and writes out.
bool run_combine_start(RankContext& context, const CombineArgs& args, const OpTag& tag,
                       uint64_t epoch);
bool run_combine_done(RankContext& context, const CombineArgs& args, const OpTag& tag,
                      uint64_t epoch);

}  // namespace jax_ep
