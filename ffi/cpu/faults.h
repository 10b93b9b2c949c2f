// Faults that tests ask for. In a build without JAX_EP_TEST_HOOKS nothing can set one.
#pragma once

#include <atomic>
#include <cstdint>

namespace jax_ep {

enum class FaultKind : int { kNone, kSkipSend, kWrongTag, kLate, kJitter };

// One rank's. `kJitter` holds until it is replaced, the others act on the rank's next operation.
struct FaultPlan {
  std::atomic<FaultKind> kind{FaultKind::kNone};
  std::atomic<int64_t> microseconds{
      0};  // kLate: the delay; kJitter: the longest delay of a message
};

}  // namespace jax_ep
