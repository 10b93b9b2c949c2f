// Counters in page-locked host memory that a GPU writes and the host polls.
#pragma once

#include <cstdint>

#include "transport/mapped_counters.h"

namespace jax_ep::gpu {

// For the rank on this device. Throws CudaError. The memory stays until the process exits: a
// captured graph may hold its address as long.
MappedCounters make_mapped_counters(int ordinal, int64_t num_words);

}  // namespace jax_ep::gpu
