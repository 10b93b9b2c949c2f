// The host's side of notices: gives tickets and reads the counters of a buffer's ranks, without a
// word to any device.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "protocol/notice.h"
#include "transport/mapped_counters.h"

namespace jax_ep {

using NoticeClock = std::chrono::steady_clock;

// What a reader found. Where not all counters are there, it describes the first that is not.
struct NoticeReading {
  CounterState state = CounterState::kPending;
  int group = 0;
  int rank = 0;
  int64_t counter = 0;           // 0: rows received by the rank; 1 + expert: rows of that expert
  uint32_t seen = kNoTicket;     // the ticket found in its place
  std::vector<uint32_t> values;  // when ready: [group][rank][1 + E], 0 of ranks without counters
  NoticeClock::time_point read_at{};  // when the last look ended
};

class NoticeBoard {
 public:
  using Clock = NoticeClock;
  // How long a reader spins before it sleeps: about what an exchange of counts takes.
  static constexpr std::chrono::microseconds kSpin{50};
  // Gives MappedCounters::none() for a rank of another process.
  using Allocate = std::function<MappedCounters(int group, int rank, int64_t num_words)>;

  NoticeBoard(int num_groups, int num_ranks, int num_experts, const Allocate& allocate);

  uint32_t next_ticket();
  const NoticeLayout& layout() const { return layout_; }
  // Where the operation of a rank writes.
  DeviceWords counters(int group, int rank) const {
    return counters_[group * num_ranks_ + rank].device();
  }

  // Waits for all counters of a ticket, for `spin` without rest and then sleeping between looks,
  // until `deadline`.
  NoticeReading read(uint32_t ticket, Clock::time_point deadline,
                     Clock::duration spin = kSpin) const;

 private:
  // False while waiting may help.
  bool look(uint32_t ticket, NoticeReading* reading) const;
  // Takes over what is there, from value number values.size() on.
  void take_ready(uint32_t ticket, NoticeReading* reading) const;

  const int num_ranks_;
  const NoticeLayout layout_;
  std::vector<MappedCounters> counters_;  // [group][rank]
  std::atomic<uint32_t> last_ticket_{kNoTicket};
};

}  // namespace jax_ep
