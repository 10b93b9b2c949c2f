// Phase 2 of dispatch: where the rows of each (expert, source) begin in the output. Each block
// collects the counts of all ranks and places the experts for itself; with more experts than
// shared memory holds, block 0 does it for all.
#pragma once

#include "cuda/operation.cuh"
#include "cuda/vectors.cuh"
#include "protocol/routing.h"

namespace jax_ep::gpu {

struct Placement {
  int32_t* bases;  // [E_l, R] first row of each source, then [1] the number of rows in all
  int32_t* ends;   // [E_l] row after the expert's last true row
  bool shared;     // in this block's shared memory

  JAX_EP_HD static constexpr int64_t words(int num_experts, int experts_per_rank) {
    return int64_t{num_experts} + 1 + experts_per_rank;
  }
};

struct PlacementArgs {
  int64_t alignment;
  int64_t capacity;
  int32_t* group_sizes;  // [E_l]
  int32_t* valid_sizes;  // [E_l]
  int32_t* num_dropped;  // []
};

// A row beyond any capacity stays beyond it: counts that nobody sent must not wrap around.
__device__ inline int32_t clamped_row(int64_t row) {
  return static_cast<int32_t>(min(row, int64_t{INT32_MAX}));
}

// One warp: lanes take contiguous ranges of experts, so that one scan over lanes joins them.
__device__ inline void place_experts(const OpContext& ctx, const PlacementArgs& args,
                                     const Placement& place) {
  const int num_ranks = ctx.num_ranks();
  const int num_local = ctx.op.layout.shape.experts_per_rank();
  const int per_lane = (num_local + kWarp - 1) / kWarp;
  const int first = min(num_local, lane_id() * per_lane);
  const int end = min(num_local, first + per_lane);
  int64_t rows = 0;
#pragma unroll 1
  for (int e = first; e < end; ++e) {
    const ExpertSegment segment = place_expert(place.bases + int64_t{e} * num_ranks, num_ranks,
                                               ctx.op.num_tokens, rows, args.alignment);
    place.ends[e] = clamped_row(segment.begin + segment.true_rows);
    rows += segment.padded_rows;
  }
  int64_t before = rows;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t other = __shfl_up_sync(kFullWarp, before, distance);
    if (lane_id() >= distance) before += other;
  }
  before -= rows;
#pragma unroll 1
  for (int e = first; e < end; ++e) {
#pragma unroll 1
    for (int s = 0; s < num_ranks; ++s) {
      int32_t& base = place.bases[int64_t{e} * num_ranks + s];
      base = clamped_row(base + before);
    }
    place.ends[e] = clamped_row(place.ends[e] + before);
  }
  if (lane_id() == kWarp - 1) {
    place.bases[int64_t{num_local} * num_ranks] = clamped_row(before + rows);
  }
  __syncwarp();
}

__device__ inline ExpertSegment segment_of(const Placement& place, int num_ranks, int expert) {
  const int64_t begin = place.bases[int64_t{expert} * num_ranks];
  const int64_t padded_end = place.bases[int64_t{expert + 1} * num_ranks];
  return {begin, place.ends[expert] - begin, padded_end - begin};
}

// One warp of block 0.
__device__ inline void write_sizes(const OpContext& ctx, const PlacementArgs& args,
                                   const Placement& place) {
  int dropped = 0;
#pragma unroll 1
  for (int e = lane_id(); e < ctx.op.layout.shape.experts_per_rank(); e += kWarp) {
    const ExpertSegment segment = segment_of(place, ctx.num_ranks(), e);
    args.group_sizes[e] = segment.group_size(args.capacity);
    args.valid_sizes[e] = segment.valid_size(args.capacity);
    dropped += static_cast<int>(segment.true_rows) - segment.valid_size(args.capacity);
  }
  dropped = __reduce_add_sync(kFullWarp, dropped);
  if (lane_id() == 0) *args.num_dropped = dropped;
}

template <class Context>
__device__ void wait_for_counts(const Context& ctx, const Placement& place) {
  const int num_local = ctx.op.layout.shape.experts_per_rank();
  const int num_words = ctx.num_ranks() * num_local;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
    const int source = i / num_local;
    const int expert = i - source * num_local;
    const int64_t offset = ctx.op.layout.dispatch_count(ctx.chunk_parity(0), source, expert);
    uint32_t count;
    if (!wait_for_word(ctx, reinterpret_cast<uint64_t*>(ctx.own_window(offset)), ctx.epoch,
                       WaitFor::kCount, source, &count)) {
      return;
    }
    place.bases[int64_t{expert} * ctx.num_ranks() + source] = static_cast<int32_t>(count);
  }
}

// Counts of all ranks as they have sent them.
struct SentCounts {
  __device__ void collect(const OpContext& ctx, const Placement& place) const {
    wait_for_counts(ctx, place);
  }
};

// One thread: a counter of this rank's own blocks has reached `target`.
__device__ inline void wait_for_blocks(const OpContext& ctx, const Counter& counter,
                                       uint32_t target) {
  BoundedWait bound;
  for (uint32_t seen; (seen = load_acquire<kDeviceScope>(&counter.value)) < target;) {
    if (bound.over(ctx, WaitFor::kCount, ctx.rank(), ctx.epoch, target, seen)) return;
  }
}

// All threads. False when the operation is aborted; else this block knows all routes and all rows.
// counts.collect(ctx, place): by all threads, puts the counts of all ranks into place.bases.
template <class Counts = SentCounts>
__device__ bool place_rows(const OpContext& ctx, const PlacementArgs& args, const Placement& place,
                           int num_routing_blocks, const Counts& counts = Counts{}) {
  const bool mine = place.shared || blockIdx.x == 0;
  const int peer = static_cast<int>(threadIdx.x);
  if (speaks_for_rank() && peer < ctx.num_ranks()) check_tag(ctx, peer);
  if (mine) counts.collect(ctx, place);
  if (__syncthreads_or(ctx.aborted())) return false;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  if (num_routing_blocks > 0 && threadIdx.x == (num_warps - 2) * kWarp) {
    wait_for_blocks(ctx, ctx.op.state()->blocks_routed, num_routing_blocks);
  }
  if (warp_id() == num_warps - 1) {  // not one of the first: they have rows to send
    if (mine) place_experts(ctx, args, place);
    if (!place.shared && lane_id() == 0) {
      Counter& placed = ctx.op.state()->rows_placed;
      if (mine) {
        store_release<kDeviceScope>(&placed.value, 1u);
      } else {
        wait_for_blocks(ctx, placed, 1);
      }
    }
    if (blockIdx.x == 0) write_sizes(ctx, args, place);
  }
  return !__syncthreads_or(ctx.aborted());
}

}  // namespace jax_ep::gpu
