// Notify on CPU: all ranks learn how many rows every rank has for every expert, and the host learns
// it first.
#pragma once

#include <cstdint>

#include "cpu/rank_context.h"
#include "protocol/notice.h"
#include "protocol/signals.h"

namespace jax_ep {

struct NotifyArgs {
  const int32_t* topk_idx;  // [T, K]
  int32_t* clean_topk_idx;  // [T, K], faults replaced by -1
  int32_t* row_index;       // [T, K], index among this rank's rows for the expert; -1 for none
  int32_t* counts;          // [R, E]
  int num_tokens;           // T
  uint32_t ticket;          // kNoTicket: the host does not wait
  DeviceWords counters;     // this rank's

  // It reads no payload.
  OperandView view() const { return {nullptr, 0, num_tokens, nullptr, nullptr, nullptr}; }
};

// Carries out epoch `epoch` of the dispatch channel. False when a wait was given up; a record is
// filed.
bool run_notify(RankContext& context, const NotifyArgs& args, const OpTag& tag, uint64_t epoch);

}  // namespace jax_ep
