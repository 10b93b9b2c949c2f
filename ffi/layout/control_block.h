// The control block of one rank: what outlives an epoch. It follows no buffer parity, is written by
// its owner (epochs) and by its peers (credits, poison), and lives until the process exits, so that
// a replayed graph can always read it.
//
//   line                        content
//   0                           poison word (uint32): 0 healthy, else 1 + the rank that gave up
//   1 + channel                 epoch (uint64): epochs completed on that channel by this rank
//   3 + channel                 doorbell {uint32 rings, uint32 sleepers}: CPU waiters park on it
//   5 + channel * R + peer      credit (uint64): last epoch that `peer` has finished reading from
//   us
#pragma once

#include <cstdint>

#include "layout/host_device.h"

namespace jax_ep {

enum Channel : int { kDispatchChannel = 0, kCombineChannel = 1 };
constexpr int kNumChannels = 2;

struct ControlLayout {
  static constexpr int64_t kLineBytes = 128;
  int num_ranks;

  JAX_EP_HD constexpr int64_t poison() const { return 0; }
  JAX_EP_HD constexpr int64_t epoch(Channel channel) const { return line(1 + channel); }
  JAX_EP_HD constexpr int64_t doorbell(Channel channel) const {
    return line(1 + kNumChannels + channel);
  }
  JAX_EP_HD constexpr int64_t credit(Channel channel, int peer) const {
    return line(1 + 2 * kNumChannels + int64_t{channel} * num_ranks + peer);
  }
  JAX_EP_HD constexpr int64_t total_bytes() const {
    return line(1 + 2 * kNumChannels + int64_t{kNumChannels} * num_ranks);
  }

 private:
  JAX_EP_HD static constexpr int64_t line(int64_t index) { return index * kLineBytes; }
};

}  // namespace jax_ep
