// The starts of one channel whose done has not come yet. A channel carries two epochs at a time:
// while one of them is open, its buffer is not to be written again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "layout/window_layout.h"
#include "protocol/split.h"

namespace jax_ep {

class OpenStarts {
 public:
  struct Start {
    uint64_t epoch;
    OpTag tag;
    StartTicket ticket;
  };

  bool any() const { return !starts_.empty(); }
  uint64_t oldest() const { return starts_.front().epoch; }

  // Whether no open start lies in a buffer that epochs up to `last` will use.
  bool admits(uint64_t last) const { return starts_.empty() || oldest() + kNumBuffers > last; }

  StartTicket open(uint64_t epoch, const OpTag& tag) {
    starts_.push_back({epoch, tag, start_ticket(epoch, tag_value(tag), generation_)});
    return starts_.back().ticket;
  }
  std::optional<Start> close(const StartTicket& ticket) {
    const auto it = std::find_if(starts_.begin(), starts_.end(), [&](const Start& start) {
      return same_ticket(start.ticket, ticket);
    });
    if (it == starts_.end()) return std::nullopt;
    const Start start = *it;
    starts_.erase(it);
    return start;
  }

  // The last epoch that has been read once everything given out before `next_epoch` has ended:
  // dones may come in another order than their starts, credits count upwards.
  uint64_t read_through(uint64_t next_epoch) const {
    return (starts_.empty() ? next_epoch : oldest()) - 1;
  }

  // No ticket given so far fits any more.
  void forget() {
    starts_.clear();
    ++generation_;
  }

 private:
  std::vector<Start> starts_;  // oldest first, at most kNumBuffers
  uint32_t generation_ = 0;
};

}  // namespace jax_ep
