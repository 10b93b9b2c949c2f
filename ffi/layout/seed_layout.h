// The low-latency window as the project's first source describes it (DeepEP's
// get_low_latency_rdma_size_hint, simplified): row and source index per message, counts and flags
// of one int32. Kept as the yardstick that our own layout is tested against; no kernel uses it.
#pragma once

#include <cstdint>

#include "layout/message.h"

namespace jax_ep {

struct SeedLayout {
  static constexpr int kNumRegions = 6;
  int64_t message_bytes;
  int64_t size[kNumRegions];  // dispatch: receive data, receive counts, send data;
                              // combine: receive data, receive flags, send data
  int64_t region_sum;
  int64_t buffer_bytes;  // region_sum rounded up to 4096
  int64_t total_bytes;   // both buffers

  static constexpr SeedLayout make(int64_t tokens, int64_t row_bytes, int64_t num_ranks) {
    SeedLayout seed{align_up(row_bytes + 4, 16), {}, 0, 0, 0};
    const int64_t messages = tokens * num_ranks * seed.message_bytes;
    const int64_t rows = tokens * num_ranks * align_up(row_bytes, 16);
    const int64_t sizes[kNumRegions] = {messages, 4 * num_ranks,          messages,
                                        rows,     4 * num_ranks * tokens, rows};
    for (int i = 0; i < kNumRegions; ++i) {
      seed.size[i] = sizes[i];
      seed.region_sum += sizes[i];
    }
    seed.buffer_bytes = align_up(seed.region_sum, 4096);
    seed.total_bytes = 2 * seed.buffer_bytes;
    return seed;
  }
};

}  // namespace jax_ep
