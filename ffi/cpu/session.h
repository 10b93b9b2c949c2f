// One operation of one rank on one channel: its signals to the peers and its bounded waits for
// theirs. Every wait ends: with what it waited for, by the deadline, or because a peer gave up.
#pragma once

#include <chrono>
#include <cstdint>

#include "cpu/rank_context.h"
#include "protocol/epochs.h"
#include "protocol/signals.h"
#include "transport/host_signals.h"

namespace jax_ep {

class Session {
 public:
  Session(RankContext& context, Channel channel, const OpTag& tag);

  int rank() const { return window_.rank; }
  int num_ranks() const { return window_.num_ranks; }
  const Window& window() const { return window_; }
  // Peers in the order that spreads a group's traffic: the next rank first, the own rank excluded.
  int peer(int step) const { return (rank() + 1 + step) % num_ranks(); }
  int num_peers() const { return num_ranks() - 1; }

  // All peers have finished reading the epoch that used this epoch's buffer before.
  [[nodiscard]] bool wait_credits(uint64_t epoch);
  void send_tags(uint64_t epoch);
  // Every peer is in this epoch of the same operation.
  [[nodiscard]] bool check_tags(uint64_t epoch);
  void send_credits(uint64_t epoch);

  void send_word(int peer, int64_t offset, uint64_t word);
  [[nodiscard]] bool wait_word(int peer, int64_t offset, uint64_t epoch, WaitFor wait,
                               uint64_t* word);

  // Releases everything written to the peer's slot before.
  void send_flag(int peer, int64_t offset, uint64_t epoch, bool arrived);
  Arrival poll_flag(int64_t offset, uint64_t epoch) const;
  [[nodiscard]] bool wait_flag(int peer, int64_t offset, uint64_t epoch, Arrival* arrival);

  // Wakes the peer if it is parked. Batched: not per message.
  void ring(int peer);
  void ring_all();
  // For tests of interleavings: an arbitrary pause between two messages.
  void jitter();

 private:
  struct Point {
    WaitFor wait;
    int peer;
    uint64_t epoch;
    uint64_t expected;
  };

  template <typename Ready, typename Seen>
  bool wait_until(const Point& point, Ready ready, Seen seen);
  template <typename Ready, typename Seen>
  bool wait_parked(const Point& point, Ready ready, Seen seen);
  void give_up(const Point& point, ErrorKind kind, uint64_t seen);
  bool poisoned() const;
  int64_t tag_offset(uint64_t epoch, int source) const;

  RankContext& context_;
  const Window& window_;
  Channel channel_;
  OpKind op_;
  uint32_t tag_;
  uint32_t random_;
};

}  // namespace jax_ep
