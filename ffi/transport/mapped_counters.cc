#include "transport/mapped_counters.h"

#include <algorithm>

#include "transport/host_signals.h"

namespace jax_ep {

MappedCounters make_process_counters(int64_t num_words) {
  auto* words = new uint64_t[num_words]();
  return MappedCounters({words}, {words}, [](HostWords host) { delete[] host.first; });
}

void store_counter(DeviceWords words, int64_t index, uint32_t ticket, uint64_t value) {
  std::atomic<uint64_t>& counter = atomic64(reinterpret_cast<char*>(words.first + index));
  const auto kept = static_cast<uint32_t>(std::min<uint64_t>(value, UINT32_MAX));
  uint64_t seen = counter.load(std::memory_order_relaxed);
  while (counter_state(seen, ticket) != CounterState::kReused &&
         !counter.compare_exchange_weak(seen, ticket_word(ticket, kept), std::memory_order_release,
                                        std::memory_order_relaxed)) {
  }
}

}  // namespace jax_ep
