// What one rank's worker on one channel needs to carry out operations, and the waits it may do.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/faults.h"
#include "cpu/operand_view.h"
#include "cpu/wire_rows.h"
#include "protocol/error_record.h"
#include "protocol/routing.h"
#include "transport/window.h"

namespace jax_ep {

struct DataFault {
  int64_t count = 0;  // faults in all; the rest describes the first
  RouteFault kind = RouteFault::kNone;
  int token = 0;
  int k = 0;
  int32_t value = 0;
};

struct RankContext {
  Window window;
  std::chrono::nanoseconds timeout;
  FaultPlan* faults;
  // Files a record and poisons the group.
  std::function<void(const ErrorRecord&)> report;
  std::function<void(const DataFault&)> report_data_fault;
  // Whether a peer's process has left: it sends no more. Null where one process has all ranks.
  std::function<bool(int peer)> has_left;

  // By rank, of the operation that runs; null: windows carry the payload.
  const OperandView* operands = nullptr;
  // What may be read of a peer in place, and it of us; null: the windows carry what travels between
  // the two.
  const OperandView* operands_of(int peer) const {
    return operands != nullptr && operands[peer].in_process ? &operands[peer] : nullptr;
  }

  // Epochs up to here have all been read by this rank once the operation at hand has ended. Set by
  // the group.
  uint64_t read_through = UINT64_MAX;

  // Scratch of this worker, kept between operations.
  std::vector<uint32_t> routes;    // [T * K]
  std::vector<int32_t> owners;     // [T * K], ranks of the experts; -1 for none
  std::vector<int32_t> counts;     // [E], rows of this rank per expert
  std::vector<int32_t> received;   // [E_l * R], rows per (local expert, source)
  std::vector<int32_t> bases;      // [E_l * R], first row of (local expert, source)
  std::vector<char> covered;       // [capacity], rows that some (token, k) names
  std::vector<int32_t> experts;    // [T * K], what a done takes for topk_idx
  std::vector<int64_t> waited_ns;  // [R], time spent waiting for each peer; empty: not asked for
  WireScratch wire_rows;           // a dispatch's rows on their way
};

}  // namespace jax_ep
