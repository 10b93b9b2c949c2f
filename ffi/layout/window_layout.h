// Offsets of every region and the address of every slot in a window: two buffers of the same
// layout, selected by the epoch's parity.
#pragma once

#include <cstdint>

#include "layout/regions.h"

namespace jax_ep {

constexpr int kNumBuffers = 2;
constexpr int64_t kBufferAlignment = 4096;
constexpr int64_t kRegionAlignment = 128;  // a cache line pair: regions never share one

// A kernel of low latency takes addresses on its shortest path: what they need of arithmetic in 64
// bits, and of divisions, is done here.
struct WindowLayout {
  WindowShape shape;
  int experts_per_rank;
  int32_t stride[kNumRegions];  // from one item to the next
  int64_t offset[kNumRegions];  // inside one buffer
  int64_t buffer_bytes;         // one buffer, a multiple of kBufferAlignment

  JAX_EP_HD static constexpr WindowLayout make(const WindowShape& shape) {
    WindowLayout layout{shape, shape.experts_per_rank(), {}, {}, 0};
    int64_t end = 0;
    for (int r = 0; r < kNumRegions; ++r) {
      const auto region = static_cast<Region>(r);
      layout.stride[r] = static_cast<int32_t>(item_stride(shape, region));
      layout.offset[r] = align_up(end, kRegionAlignment);
      end = layout.offset[r] + region_bytes(shape, region);
    }
    layout.buffer_bytes = align_up(end, kBufferAlignment);
    return layout;
  }

  JAX_EP_HD constexpr int64_t total_bytes() const { return kNumBuffers * buffer_bytes; }

  // Offsets in the window of a buffer, and of an item of a region.
  JAX_EP_HD constexpr int64_t buffer(int parity) const { return parity != 0 ? buffer_bytes : 0; }
  JAX_EP_HD constexpr int64_t item(Region region, int parity, int index) const {
    return buffer(parity) + offset[region] + wide_product(index, stride[region]);
  }
  JAX_EP_HD constexpr int slot(int source, int token) const {
    return source * shape.tokens_per_epoch + token;
  }

  JAX_EP_HD constexpr int64_t dispatch_message(int parity, int source, int token) const {
    return item(kDispatchData, parity, slot(source, token));
  }
  JAX_EP_HD constexpr int64_t dispatch_count(int parity, int source, int local_expert) const {
    return item(kDispatchCounts, parity, source * experts_per_rank + local_expert);
  }
  JAX_EP_HD constexpr int64_t dispatch_tag(int parity, int source) const {
    return item(kDispatchTags, parity, source);
  }
  JAX_EP_HD constexpr int64_t dispatch_flag(int parity, int source, int token) const {
    return item(kDispatchFlags, parity, slot(source, token));
  }
  JAX_EP_HD constexpr int64_t combine_row(int parity, int source, int token) const {
    return item(kCombineData, parity, slot(source, token));
  }
  JAX_EP_HD constexpr int64_t combine_scalars(int parity, int source, int token) const {
    return item(kCombineScalars, parity, slot(source, token));
  }
  JAX_EP_HD constexpr int64_t combine_flag(int parity, int source, int token) const {
    return item(kCombineFlags, parity, slot(source, token));
  }
  JAX_EP_HD constexpr int64_t combine_tag(int parity, int source) const {
    return item(kCombineTags, parity, source);
  }
  JAX_EP_HD constexpr int64_t notify_count(int parity, int source, int expert) const {
    return item(kNotifyCounts, parity, source * shape.num_experts + expert);
  }
  JAX_EP_HD constexpr int64_t route_records(int parity, int source, int token) const {
    return item(kRouteRecords, parity, slot(source, token));
  }
  // Where `rank` stages, in its own send region, what is to lie at `target` of the window of
  // `peer`: a place that it has in the region of messages, of combine's rows or of route records.
  JAX_EP_HD constexpr int64_t staged(int64_t target, int rank, int peer) const {
    const int64_t in_buffer = target < buffer_bytes ? target : target - buffer_bytes;
    if (shape.records && in_buffer >= offset[kRouteRecords]) {
      return target + int64_t{slot(shape.num_ranks + peer - rank, 0)} * stride[kRouteRecords];
    }
    const bool is_row = in_buffer >= offset[kCombineData];
    const Region data = is_row ? kCombineData : kDispatchData;
    const Region send = is_row ? kCombineSend : kDispatchSend;
    return target + offset[send] - offset[data] + int64_t{slot(peer - rank, 0)} * stride[data];
  }
};

}  // namespace jax_ep
