#include "transport/mapped_counters.h"

namespace jax_ep {

MappedCounters make_process_counters(int64_t num_words) {
  auto* words = new uint64_t[num_words]();
  return MappedCounters({words}, {words}, [](HostWords host) { delete[] host.first; });
}

}  // namespace jax_ep
