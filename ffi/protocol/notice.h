// Counters that an operation leaves for the host to read while the device goes on. Each is a word
// (ticket, value) with one writer: the ticket is an operand of the operation, so that a reader
// knows its own counters from those of other notices, and of other replays of a captured program.
#pragma once

#include <cstdint>
#include <type_traits>

#include "layout/host_device.h"

namespace jax_ep {

// Notices that can be read at a time. The next one takes the place of the oldest.
constexpr uint32_t kNoticeSlots = 16;
constexpr uint32_t kNoTicket = 0;  // of an operation that nobody waits for: it writes no counter

// The host's and the device's address of the same words: distinct types, since neither can be
// used on the other side.
enum class Side { kHost, kDevice };
template <Side side>
struct CounterWords {
  uint64_t* first = nullptr;
};
using HostWords = CounterWords<Side::kHost>;
using DeviceWords = CounterWords<Side::kDevice>;
static_assert(!std::is_convertible_v<HostWords, DeviceWords> &&
              !std::is_convertible_v<DeviceWords, HostWords>);

// The counters of one rank: in every slot the rows this rank receives, then the rows that each
// expert of the group receives.
struct NoticeLayout {
  int num_experts;

  JAX_EP_HD constexpr int64_t slot_words() const { return 1 + int64_t{num_experts}; }
  JAX_EP_HD constexpr int64_t num_words() const { return kNoticeSlots * slot_words(); }
  JAX_EP_HD constexpr int64_t first_word(uint32_t ticket) const {
    return (ticket % kNoticeSlots) * slot_words();
  }
  JAX_EP_HD constexpr int64_t recv_tokens(uint32_t ticket) const { return first_word(ticket); }
  JAX_EP_HD constexpr int64_t expert_tokens(uint32_t ticket, int expert) const {
    return first_word(ticket) + 1 + expert;
  }
};

JAX_EP_HD constexpr uint64_t ticket_word(uint32_t ticket, uint32_t value) {
  return (uint64_t{ticket} << 32) | value;
}
JAX_EP_HD constexpr uint32_t ticket_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

// Tickets count up modulo 2^32 and leave out kNoTicket. Of two that share a slot the later one has
// the word, in whatever order their operations run.
JAX_EP_HD constexpr uint32_t ticket_after(uint32_t ticket) {
  return ticket + 1 == kNoTicket ? kNoTicket + 1 : ticket + 1;
}
JAX_EP_HD constexpr bool is_later(uint32_t ticket, uint32_t than) {
  return static_cast<int32_t>(ticket - than) > 0;
}

enum class CounterState { kPending, kReady, kReused };

JAX_EP_HD constexpr CounterState counter_state(uint64_t word, uint32_t ticket) {
  const uint32_t seen = ticket_of(word);
  if (seen == ticket) return CounterState::kReady;
  return seen != kNoTicket && is_later(seen, ticket) ? CounterState::kReused
                                                     : CounterState::kPending;
}

}  // namespace jax_ep
