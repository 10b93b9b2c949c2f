// Split operations: a start takes an epoch and sends, its done names that epoch and receives.
#pragma once

#include <cstdint>

#include "layout/host_device.h"
#include "protocol/signals.h"

namespace jax_ep {

enum class Half { kWhole, kStart, kDone };

// What a start hands to its done. `check` tells epochs of one number apart: of other operations,
// and from before a reset.
struct StartTicket {
  uint32_t epoch;  // modulo 2^32
  uint32_t check;
};
static_assert(sizeof(StartTicket) == 8, "programs carry a ticket as uint32[2]");

// tag: tag_value() of the operation. generation: how often the buffer has been reset.
JAX_EP_HD constexpr StartTicket start_ticket(uint64_t epoch, uint32_t tag, uint32_t generation) {
  return {static_cast<uint32_t>(epoch), mix_bits(tag, generation)};
}
JAX_EP_HD constexpr bool same_ticket(const StartTicket& a, const StartTicket& b) {
  return a.epoch == b.epoch && a.check == b.check;
}

}  // namespace jax_ep
