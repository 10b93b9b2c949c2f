// Offsets of every region and the address of every slot in a window: two buffers of the same
// layout, selected by the epoch's parity.
#pragma once

#include <cstdint>

#include "layout/regions.h"

namespace jax_ep {

constexpr int kNumBuffers = 2;
constexpr int64_t kBufferAlignment = 4096;
constexpr int64_t kRegionAlignment = 128;  // a cache line pair: regions never share one

struct WindowLayout {
  WindowShape shape;
  int64_t offset[kNumRegions];  // inside one buffer
  int64_t buffer_bytes;         // one buffer, a multiple of kBufferAlignment

  JAX_EP_HD static constexpr WindowLayout make(const WindowShape& shape) {
    WindowLayout layout{shape, {}, 0};
    int64_t end = 0;
    for (int r = 0; r < kNumRegions; ++r) {
      layout.offset[r] = align_up(end, kRegionAlignment);
      end = layout.offset[r] + region_bytes(shape, static_cast<Region>(r));
    }
    layout.buffer_bytes = align_up(end, kBufferAlignment);
    return layout;
  }

  JAX_EP_HD constexpr int64_t total_bytes() const { return kNumBuffers * buffer_bytes; }

  // Offset in the window of item `index` (of `item_bytes` each) of a region.
  JAX_EP_HD constexpr int64_t item(Region region, int parity, int64_t index,
                                   int64_t item_bytes) const {
    return parity * buffer_bytes + offset[region] + index * item_bytes;
  }
  JAX_EP_HD constexpr int64_t slot(int source, int token) const {
    return static_cast<int64_t>(source) * shape.tokens_per_epoch + token;
  }

  JAX_EP_HD constexpr int64_t dispatch_message(int parity, int source, int token) const {
    return item(kDispatchData, parity, slot(source, token), shape.message_stride());
  }
  JAX_EP_HD constexpr int64_t dispatch_count(int parity, int source, int local_expert) const {
    const int64_t index = static_cast<int64_t>(source) * shape.experts_per_rank() + local_expert;
    return item(kDispatchCounts, parity, index, 8);
  }
  JAX_EP_HD constexpr int64_t dispatch_tag(int parity, int source) const {
    return item(kDispatchTags, parity, source, 8);
  }
  JAX_EP_HD constexpr int64_t dispatch_flag(int parity, int source, int token) const {
    return item(kDispatchFlags, parity, slot(source, token), 4);
  }
  JAX_EP_HD constexpr int64_t combine_row(int parity, int source, int token) const {
    return item(kCombineData, parity, slot(source, token), shape.row_stride());
  }
  JAX_EP_HD constexpr int64_t combine_scalars(int parity, int source, int token) const {
    return item(kCombineScalars, parity, slot(source, token),
                int64_t{4} * shape.num_experts_per_tok);
  }
  JAX_EP_HD constexpr int64_t combine_flag(int parity, int source, int token) const {
    return item(kCombineFlags, parity, slot(source, token), 4);
  }
  JAX_EP_HD constexpr int64_t combine_tag(int parity, int source) const {
    return item(kCombineTags, parity, source, 8);
  }
  JAX_EP_HD constexpr int64_t notify_count(int parity, int source, int expert) const {
    const int64_t index = static_cast<int64_t>(source) * shape.num_experts + expert;
    return item(kNotifyCounts, parity, index, 8);
  }
  // Where `rank` stages, in its own send region, what is to lie at `target` of the window of
  // `peer`: a place that it has in the region of messages, of combine's rows or of route records.
  JAX_EP_HD constexpr int64_t staged(int64_t target, int rank, int peer) const {
    const int64_t in_buffer = target < buffer_bytes ? target : target - buffer_bytes;
    if (shape.records && in_buffer >= offset[kRouteRecords]) {
      const int64_t slots = slot(shape.num_ranks + peer, 0) - slot(rank, 0);
      return target + slots * kRecordBytes * shape.num_experts_per_tok;
    }
    const bool is_row = in_buffer >= offset[kCombineData];
    const int64_t to_send_region = is_row ? offset[kCombineSend] - offset[kCombineData]
                                          : offset[kDispatchSend] - offset[kDispatchData];
    const int64_t stride = is_row ? shape.row_stride() : shape.message_stride();
    return target + to_send_region + (slot(peer, 0) - slot(rank, 0)) * stride;
  }
  JAX_EP_HD constexpr int64_t route_records(int parity, int source, int token) const {
    return item(kRouteRecords, parity, slot(source, token),
                kRecordBytes * shape.num_experts_per_tok);
  }
};

}  // namespace jax_ep
