// Where rows go in the output, on the receiving rank.
#pragma once

#include "cuda/ll_dispatch.h"
#include "cuda/ll_payload.cuh"
#include "cuda/placement.cuh"
#include "protocol/quantize.h"

namespace jax_ep::gpu {

__device__ inline const uint64_t* count_word(const LlContext& ctx, int source, int expert) {
  const int64_t offset = ctx.op.layout.dispatch_count(parity_of(ctx.epoch), source, expert);
  return reinterpret_cast<const uint64_t*>(ctx.own_window(offset));
}

// Rows that a source sends for an expert; whatever arrived, no more than a source has tokens.
__device__ inline int clamp_count(const LlContext& ctx, uint32_t count) {
  return static_cast<int>(min(count, static_cast<uint32_t>(ctx.op.num_tokens)));
}

// Number i of the counts, whether it has come or not.
__device__ inline uint64_t look_at_count(const LlContext& ctx, const LlDispatchPlan& plan, int i) {
  if (i >= ctx.op.layout.shape.num_experts) return 0;
  const int source = plan.by_experts_per_rank.quotient(i);
  return load_relaxed<kSystemScope>(count_word(ctx, source, i - source * plan.experts_per_rank));
}

// All threads of the block: what every source sends for every expert, to be read after a barrier.
// at(source, expert): where. The next count is looked at before this one is waited for.
template <class At>
__device__ void gather_counts(const LlContext& ctx, const LlDispatchPlan& plan, At at) {
  const int num_words = ctx.op.layout.shape.num_experts;
  uint64_t next = look_at_count(ctx, plan, threadIdx.x);
#pragma unroll 1
  for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
    const int source = plan.by_experts_per_rank.quotient(i);
    const int expert = i - source * plan.experts_per_rank;
    const uint64_t seen = next;
    next = look_at_count(ctx, plan, i + static_cast<int>(blockDim.x));
    uint32_t count = word_value(seen);
    if (!word_is_of(seen, ctx.epoch) &&
        !wait_for_word(ctx, count_word(ctx, source, expert), ctx.epoch, WaitFor::kCount, source,
                       &count)) {
      return;
    }
    *at(source, expert) = clamp_count(ctx, count);
  }
}

// Adds an expert's rows to the statistics, in arithmetic that may wrap.
__device__ inline void count_rows(const LlDispatchParams& p, int expert, int rows) {
  if (p.expert_tokens == nullptr) return;
  p.expert_tokens[expert] = static_cast<int32_t>(
      static_cast<uint32_t>(p.expert_tokens_before[expert]) + static_cast<uint32_t>(rows));
}

// Each expert has a place of R * T rows. The counts come before the records do, so that a block
// that has gathered them knows a row as soon as it has the record. Where shared memory has no room,
// all blocks gather the same counts in the same device memory.
class PaddedPlaces {
 public:
  __device__ PaddedPlaces(const LlContext& ctx, const LlDispatchParams& p, char* shared)
      : ctx_(ctx),
        p_(p),
        counts_(p.plan.bases_offset >= 0 ? reinterpret_cast<int32_t*>(shared + p.plan.bases_offset)
                                         : p.op.scratch.row_bases) {}

  __device__ static constexpr bool in_block() { return true; }

  // All threads. False when the operation is aborted.
  __device__ bool prepare() const {
    gather_counts(ctx_, p_.plan, [&](int source, int expert) { return count_of(source, expert); });
    return !__syncthreads_or(ctx_.aborted());
  }

  __device__ int row_of(uint32_t route, int source) const {
    const int expert = route_expert(route);
    if (expert >= p_.plan.experts_per_rank) return -1;
    int row = route_index(route);
#pragma unroll 1
    for (int s = 0; s < source; ++s) row += *count_of(s, expert);
    return row < rows_of_expert() ? expert * rows_of_expert() + row : -1;
  }

  // Warps of all blocks take an expert each: its size, and zero weights behind its rows.
  __device__ void finish() const {
    const int num_warps = static_cast<int>(blockDim.x) / kWarp;
    const int num_local = p_.plan.experts_per_rank;
#pragma unroll 1
    for (int e = static_cast<int>(blockIdx.x) * num_warps + warp_id(); e < num_local;
         e += static_cast<int>(gridDim.x) * num_warps) {
      int rows = 0;
#pragma unroll 1
      for (int s = lane_id(); s < ctx_.num_ranks(); s += kWarp) rows += *count_of(s, e);
      rows = __reduce_add_sync(kFullWarp, rows);
      if (lane_id() == 0) {
        p_.group_sizes[e] = rows;
        p_.valid_sizes[e] = rows;
        if (e == 0) *p_.num_dropped = 0;
        count_rows(p_, e, rows);
      }
#pragma unroll 1
      for (int i = rows + lane_id(); i < rows_of_expert(); i += kWarp) {
        p_.weights[e * rows_of_expert() + i] = 0.0f;
      }
    }
  }

 private:
  __device__ int32_t* count_of(int source, int expert) const {
    return counts_ + expert * ctx_.num_ranks() + source;
  }
  __device__ int rows_of_expert() const { return ctx_.num_ranks() * p_.op.num_tokens; }

  const LlContext& ctx_;
  const LlDispatchParams& p_;
  int32_t* const counts_;  // [E_l, R]
};

// A call: inlined, it would take registers from the common path.
__device__ __noinline__ inline bool place_in_device_memory(const OpContext ctx,
                                                           const PlacementArgs args,
                                                           const Placement place) {
  return place_rows(ctx, args, place, 0);
}

// All threads of all blocks. Rows of float8 begin on multiples of 4 bytes.
__device__ __noinline__ inline void zero_words(char* to, int64_t begin, int64_t end) {
  const int64_t aligned = min(end, align_up(begin, 16));
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  auto* words = reinterpret_cast<uint32_t*>(to);
  for (int64_t i = begin / 4 + thread; i < aligned / 4; i += threads) words[i] = 0;
  for (int64_t i = aligned / 16 + thread; i < end / 16; i += threads) {
    store_streaming(reinterpret_cast<uint4*>(to) + i, make_uint4(0, 0, 0, 0));
  }
  for (int64_t i = max(aligned / 4, end / 16 * 4) + thread; i < end / 4; i += threads) {
    words[i] = 0;
  }
}

// The experts follow each other. Each block sums up the counts for itself, or block 0 for all in
// device memory.
class CompactPlaces {
 public:
  __device__ CompactPlaces(const LlContext& ctx, const LlDispatchParams& p, char* shared)
      : ctx_(ctx), p_(p), num_local_(p.plan.experts_per_rank), place_(place(p, shared)) {}

  // False: the rows are placed in a call, over which nothing should be kept in registers.
  __device__ bool in_block() const { return place_.shared; }

  // All threads. False when the operation is aborted.
  __device__ bool prepare() {
    const PlacementArgs args{1, p_.capacity, p_.group_sizes, p_.valid_sizes, p_.num_dropped};
    // The routes are those of another launch, or this block has waited for them already.
    if (!place_.shared) return place_in_device_memory(ctx_, args, place_);
    gather_counts(ctx_, p_.plan, [&](int source, int expert) {
      return place_.bases + expert * ctx_.num_ranks() + source;
    });
    if (__syncthreads_or(ctx_.aborted())) return false;
    place_in_block();
    if (blockIdx.x == 0 && warp_id() == 0) write_sizes(ctx_, args, place_);
    return true;
  }

  __device__ int row_of(uint32_t route, int source) const {
    const int expert = route_expert(route);
    if (expert >= num_local_) return -1;
    const int64_t row =
        int64_t{place_.bases[expert * ctx_.num_ranks() + source]} + route_index(route);
    return row < p_.capacity ? static_cast<int>(row) : -1;
  }

  // All threads of all blocks: zeros behind the last row, and statistics.
  __device__ void finish() const {
    const int64_t total = min(int64_t{place_.bases[num_local_ * ctx_.num_ranks()]}, p_.capacity);
    const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 1
    for (int64_t r = total + thread; r < p_.capacity; r += threads) p_.weights[r] = 0.0f;
    if (p_.expert_tokens != nullptr && blockIdx.x == 0) {
      for (int e = threadIdx.x; e < num_local_; e += blockDim.x) {
        count_rows(p_, e, segment_of(place_, ctx_.num_ranks(), e).group_size(p_.capacity));
      }
    }
    if (!p_.zero_tail) return;
    const int64_t row_bytes = p_.plan.row.output_bytes;
    zero_words(p_.tokens, total * row_bytes, p_.capacity * row_bytes);
    if (p_.output != LlOutput::kValues) return;
    const int64_t scale_bytes = int64_t{4} * p_.plan.row.num_scales;
    zero_words(reinterpret_cast<char*>(p_.scales), total * scale_bytes, p_.capacity * scale_bytes);
  }

 private:
  __device__ static Placement place(const LlDispatchParams& p, char* shared) {
    const bool fits = p.plan.bases_offset >= 0;
    auto* bases =
        fits ? reinterpret_cast<int32_t*>(shared + p.plan.bases_offset) : p.op.scratch.row_bases;
    return {bases, bases + p.op.layout.shape.num_experts + 1, fits};
  }

  // All threads, each a range of experts: the counts in bases become first rows. A block barrier.
  __device__ void place_in_block() {
    __shared__ int64_t rows_of_warp[kLlMaxThreads / kWarp];
    const int num_ranks = ctx_.num_ranks();
    const int per_thread =
        (num_local_ + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
    const int first = min(num_local_, static_cast<int>(threadIdx.x) * per_thread);
    const int end = min(num_local_, first + per_thread);
    int64_t rows = 0;
#pragma unroll 1
    for (int e = first; e < end; ++e) {
      rows += place_expert(place_.bases + int64_t{e} * num_ranks, num_ranks, ctx_.op.num_tokens,
                           rows, 1)
                  .true_rows;
      place_.ends[e] = static_cast<int32_t>(rows);
    }
    int64_t before = rows;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t other = __shfl_up_sync(kFullWarp, before, distance);
      if (lane_id() >= distance) before += other;
    }
    if (lane_id() == kWarp - 1) rows_of_warp[warp_id()] = before;
    before -= rows;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warp_id(); ++w) before += rows_of_warp[w];
#pragma unroll 1
    for (int e = first; e < end; ++e) {
#pragma unroll 1
      for (int s = 0; s < num_ranks; ++s) {
        place_.bases[int64_t{e} * num_ranks + s] += static_cast<int32_t>(before);
      }
      place_.ends[e] += static_cast<int32_t>(before);
    }
    if (threadIdx.x == blockDim.x - 1) {
      place_.bases[int64_t{num_local_} * num_ranks] = static_cast<int32_t>(before + rows);
    }
    __syncthreads();
  }

  const LlContext& ctx_;
  const LlDispatchParams& p_;
  const int num_local_;
  const Placement place_;
};

}  // namespace jax_ep::gpu
