// The regions of one window buffer, listed once. Sizes come from region_bytes() and addresses from
// WindowLayout, which walks the same list: nothing else in the project computes either.
#pragma once

#include <cstdint>

#include "layout/message.h"

namespace jax_ep {

// Slots begin on pairs of cache lines: rows that straddle them cost a fifth of an NVLink's rate
// (docs/decisions/0004).
constexpr int64_t kSlotAlignment = 128;
constexpr int64_t kRecordBytes = 16;

// What a window must hold. One "slot" is [source rank][source token of this epoch].
struct WindowShape {
  int num_ranks;            // R
  int tokens_per_epoch;     // C: tokens per rank that one epoch carries
  int num_experts;          // E, a multiple of R
  int num_experts_per_tok;  // K
  int64_t row_bytes;        // H * itemsize, a multiple of 16
  bool staging;             // some peer is reached by RDMA only: send regions are present
  bool records = false;     // low latency on GPUs: routes travel in records beside the messages

  JAX_EP_HD constexpr int experts_per_rank() const { return num_experts / num_ranks; }
  JAX_EP_HD constexpr int64_t num_slots() const {
    return static_cast<int64_t>(num_ranks) * tokens_per_epoch;
  }
  JAX_EP_HD constexpr MessageFormat message() const { return {row_bytes, num_experts_per_tok}; }
  // From one slot of dispatch data, and of combine data, to the next.
  JAX_EP_HD constexpr int64_t message_stride() const {
    return align_up(message().bytes(), kSlotAlignment);
  }
  JAX_EP_HD constexpr int64_t row_stride() const { return align_up(row_bytes, kSlotAlignment); }
};

enum Region : int {
  kDispatchData,    // messages by slot
  kDispatchCounts,  // per source: E_l words (epoch, rows for that expert)
  kDispatchTags,    // per source: one word (epoch, tag)
  kDispatchFlags,   // per slot: arrival flag
  kDispatchSend,    // staging of outgoing messages
  kCombineData,     // rows by slot: source here is the rank that owns the experts
  kCombineScalars,  // per slot: K float32 (gradients of the weights)
  kCombineFlags,    // per slot: arrival flag
  kCombineTags,     // per source: one word (epoch, tag)
  kCombineSend,     // staging of outgoing rows
  kNotifyCounts,    // per source: all E counts, each a word (epoch, count)
  kRouteRecords,    // per slot: K records of two words, (epoch, route) and (epoch, weight); with
                    // staging as many slots again, of outgoing records
  kNumRegions,
};

// From one item of a region to the next, in bytes.
JAX_EP_HD constexpr int64_t item_stride(const WindowShape& shape, Region region) {
  switch (region) {
    case kDispatchData:
    case kDispatchSend:
      return shape.message_stride();
    case kCombineData:
    case kCombineSend:
      return shape.row_stride();
    case kDispatchCounts:
    case kDispatchTags:
    case kCombineTags:
    case kNotifyCounts:
      return 8;
    case kDispatchFlags:
    case kCombineFlags:
      return 4;
    case kCombineScalars:
      return int64_t{4} * shape.num_experts_per_tok;
    case kRouteRecords:
      return kRecordBytes * shape.num_experts_per_tok;
    case kNumRegions:
      break;
  }
  return 0;
}

JAX_EP_HD constexpr int64_t num_items(const WindowShape& shape, Region region) {
  switch (region) {
    case kDispatchData:
    case kDispatchFlags:
    case kCombineData:
    case kCombineScalars:
    case kCombineFlags:
      return shape.num_slots();
    case kDispatchSend:
    case kCombineSend:
      return shape.staging ? shape.num_slots() : 0;
    case kRouteRecords:
      return shape.records ? shape.num_slots() * (shape.staging ? 2 : 1) : 0;
    case kDispatchTags:
    case kCombineTags:
      return shape.num_ranks;
    case kDispatchCounts:
      return int64_t{shape.num_ranks} * shape.experts_per_rank();
    case kNotifyCounts:
      return int64_t{shape.num_ranks} * shape.num_experts;
    case kNumRegions:
      break;
  }
  return 0;
}

JAX_EP_HD constexpr int64_t region_bytes(const WindowShape& shape, Region region) {
  return num_items(shape, region) * item_stride(shape, region);
}

constexpr const char* region_name(Region region) {
  constexpr const char* kNames[kNumRegions] = {
      "dispatch_receive_data",   "dispatch_receive_counts", "dispatch_receive_tags",
      "dispatch_arrival_flags",  "dispatch_send_data",      "combine_receive_data",
      "combine_receive_scalars", "combine_arrival_flags",   "combine_receive_tags",
      "combine_send_data",       "notify_counts",           "route_records"};
  return kNames[region];
}

}  // namespace jax_ep
