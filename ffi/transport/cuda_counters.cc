#include "transport/cuda_counters.h"

#include <cstring>

#include "transport/cuda_memory.h"

namespace jax_ep::gpu {

MappedCounters make_mapped_counters(int ordinal, int64_t num_words) {
  const DeviceGuard guard(ordinal);
  void* host = nullptr;
  void* device = nullptr;
  const auto bytes = static_cast<size_t>(num_words) * sizeof(uint64_t);
  require_ok(cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
             "page-locked memory for the counters of notices");
  std::memset(host, 0, bytes);
  require_ok(cudaHostGetDevicePointer(&device, host, 0), "the device's address of host memory");
  return MappedCounters({static_cast<uint64_t*>(host)}, {static_cast<uint64_t*>(device)},
                        [](HostWords) {});
}

}  // namespace jax_ep::gpu
