// Dispatch on CPU: every token's row to the ranks that hold its experts, laid out there
// expert-major or, with a row map, once in its slot.
#pragma once

#include <cstdint>

#include "cpu/rank_context.h"
#include "cpu/route.h"
#include "protocol/numeric.h"
#include "protocol/signals.h"

namespace jax_ep {

struct DispatchArgs {
  const char* x;              // [T, H]
  const int32_t* topk_idx;    // [T, K]
  const float* topk_weights;  // [T, K]
  char* tokens;               // [capacity, H], or with row_map [R * T, H]; see float8
  float* weights;             // [capacity]
  int32_t* group_sizes;       // [E_l], aligned
  int32_t* valid_sizes;       // [E_l]
  int32_t* num_dropped;       // []
  int32_t* clean_topk_idx;    // [T, K], faults replaced by -1
  int32_t* recv_rows;         // [R * T, K]
  int num_tokens;             // T
  int64_t capacity;
  int64_t expert_alignment;
  bool zero_tail;
  int32_t* row_map = nullptr;  // [capacity], slots; null: tokens are expert-major
  // Padded layout: the rows of every expert's own block. 0: experts lie one after another.
  int64_t expert_rows = 0;
  // Where quantised with scales, tokens are float8.
  Float8Rows float8 = {};
  // Where present, topk_idx is its sanitised one, clean_topk_idx is not written, and no counts are
  // exchanged.
  GivenRoute route = {};

  OperandView view() const { return {x, num_tokens, num_tokens, nullptr, nullptr, nullptr}; }
};

// Carries out the epochs from `first_epoch` on. False when a wait was given up; a record is filed.
bool run_dispatch(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                  uint64_t first_epoch);

// The halves of a dispatch that one epoch carries. Start reads x, topk_idx and topk_weights and
// writes clean_topk_idx alone; done reads x again, for the own rank's rows.
bool run_dispatch_start(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                        uint64_t epoch);
// What follows a start when nothing of this rank's and channel's came between.
bool run_dispatch_receive(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                          uint64_t epoch);
bool run_dispatch_done(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                       uint64_t epoch);

}  // namespace jax_ep
