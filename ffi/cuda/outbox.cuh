// Between the warps that send rows and the warp that sets the arrival flags. A system-wide fence is
// slow, so one fence by the publisher covers every row that the block's senders have completed
// since the last; it publishes whenever there is something, or flags would wait for rows that never
// come.
#pragma once

#include "cuda/messages.cuh"

namespace jax_ep::gpu {

struct Outbox {
  static constexpr uint32_t kEntries = 16;
  struct Entry {
    uint64_t ranks;  // bit set of destinations
    int token;
  };
  uint32_t completed;  // entries whose rows are written
  uint32_t published;  // entries whose flags are set
  uint32_t finished;   // the sender posts no more
  Entry entry[kEntries];
};

// One lane of the sending warp, before `sequence` rows have been completed.
__device__ inline void post(Outbox& box, uint32_t sequence, int token, uint64_t ranks) {
  while (sequence - load_acquire<kBlockScope>(&box.published) >= Outbox::kEntries) {
  }
  box.entry[sequence % Outbox::kEntries] = {ranks, token};
}

// One warp, until all senders (at most 32) have finished.
template <class Transport>
__device__ void publish(const OpContext& ctx, Outbox* boxes, int num_senders) {
  const int lane = lane_id();
  const bool active = lane < num_senders;
  uint32_t published = 0;
  while (true) {
    // `finished` first: what is completed after it has been seen is all there will be.
    const bool finished = !active || load_acquire<kBlockScope>(&boxes[lane].finished) != 0;
    const uint32_t completed =
        active ? load_acquire<kBlockScope>(&boxes[lane].completed) : published;
    if (!__any_sync(kFullWarp, completed != published)) {
      if (__all_sync(kFullWarp, finished)) return;
      continue;
    }
    __syncwarp();
    fence_system();  // between the bulk copies' completion and any flag
    for (int w = 0; w < num_senders; ++w) {
      const uint32_t end = __shfl_sync(kFullWarp, completed, w);
      for (uint32_t i = __shfl_sync(kFullWarp, published, w); i != end; ++i) {
        const Outbox::Entry& entry = boxes[w].entry[i % Outbox::kEntries];
        set_arrival_flags<Transport>(ctx, entry.token, entry.ranks);
      }
    }
    __syncwarp();
    published = completed;
    if (active) store_release<kBlockScope>(&boxes[lane].published, published);
  }
}

}  // namespace jax_ep::gpu
