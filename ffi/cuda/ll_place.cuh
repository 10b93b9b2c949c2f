// Where rows go in the output, on the receiving rank.
#pragma once

#include "cuda/ll_dispatch.h"
#include "cuda/ll_payload.cuh"
#include "cuda/placement.cuh"
#include "protocol/quantize.h"

namespace jax_ep::gpu {

// Whose rows a warp of CompactPlaces sums up at once.
constexpr int kExpertsPerLane = 4;
constexpr int kExpertsPerWarp = kExpertsPerLane * kWarp;

// Words of shared memory that PaddedPlaces and CompactPlaces take at most.
JAX_EP_HD constexpr int64_t words_of_places(int num_experts, int num_local) {
  return int64_t{num_experts} + 2 * num_local + (num_local + kExpertsPerWarp - 1) / kExpertsPerWarp;
}

// The counts in one buffer of our window, [R, E_l].
__device__ inline const uint64_t* counts_in(const char* buffer, const LlContext& ctx) {
  return reinterpret_cast<const uint64_t*>(buffer + ctx.op.layout.offset[kDispatchCounts]);
}
__device__ inline const uint64_t* own_counts(const LlContext& ctx) {
  return counts_in(ctx.own_window(ctx.op.layout.buffer(parity_of(ctx.epoch))), ctx);
}

// One thread: count number i, which may have come already.
__device__ inline bool wait_for_count(const LlContext& ctx, const LlDispatchPlan& plan,
                                      const uint64_t* words, int i, uint64_t* seen) {
  uint32_t count = word_value(*seen);
  if (word_is_of(*seen, ctx.epoch)) return true;
  const bool come = wait_for_word(ctx, words + i, ctx.epoch, WaitFor::kCount,
                                  plan.by_experts_per_rank.quotient(i), &count);
  *seen = epoch_word(ctx.epoch, count);
  return come;
}

// Whatever arrived, no source has more rows for an expert than it has tokens.
__device__ inline int count_in(const LlContext& ctx, uint64_t word) {
  return static_cast<int>(min(word_value(word), static_cast<uint32_t>(ctx.op.num_tokens)));
}

// Threads of a block, from `first` on `step` apart: the counts of all sources, [R, E_l] in
// `counts`, which lie as they do in the window, two to a thread. Without a wait: true when all have
// come.
template <bool kWaits>
__device__ bool gather_counts(const LlContext& ctx, const LlDispatchPlan& plan,
                              const uint64_t* words, int first, int step, int32_t* counts) {
  const int num_words = ctx.op.layout.shape.num_experts;
  const auto epoch = static_cast<uint32_t>(ctx.epoch);
  bool here = true;
#pragma unroll 1
  for (int i = 2 * first; i < num_words; i += 2 * step) {
    const bool two = i + 1 < num_words;
    static_assert(kRegionAlignment % 16 == 0);  // there is room behind the last of an odd number
    ulonglong2 seen = load_long_words(words + i);
    const bool both = word_is_of(seen.x, epoch) & (word_is_of(seen.y, epoch) | !two);
    here &= both;
    if (kWaits && !both) {
      uint64_t word[2] = {seen.x, seen.y};
      if (!wait_for_count(ctx, plan, words, i, &word[0])) return false;
      if (two && !wait_for_count(ctx, plan, words, i + 1, &word[1])) return false;
      seen = make_ulonglong2(word[0], word[1]);
    }
    counts[i] = count_in(ctx, seen.x);
    if (two) counts[i + 1] = count_in(ctx, seen.y);
  }
  return here;
}

// Adds an expert's rows to the statistics, in arithmetic that may wrap.
__device__ inline void count_rows(const LlDispatchParams& p, int expert, int rows) {
  if (p.expert_tokens == nullptr) return;
  p.expert_tokens[expert] = static_cast<int32_t>(
      static_cast<uint32_t>(p.expert_tokens_before[expert]) + static_cast<uint32_t>(rows));
}

// Each expert has a place of R * T rows. The counts come before the records do, so that a block
// that has gathered them knows a row as soon as it has the record. Where shared memory has no room,
// all blocks gather the same counts in the same device memory. kInShared: there is room.
template <bool kInShared>
class PaddedPlaces {
 public:
  __device__ PaddedPlaces(const LlContext& ctx, const LlDispatchParams& p, char* shared)
      : ctx_(ctx),
        p_(p),
        num_local_(p.plan.experts_per_rank),
        counts_(kInShared || p.plan.bases_offset >= 0
                    ? reinterpret_cast<int32_t*>(shared + p.plan.bases_offset)
                    : p.op.scratch.row_bases) {}

  __device__ static constexpr bool in_block() { return true; }

  // Threads of the block, as in gather_counts(): true where all counts have come.
  __device__ bool look(const char* buffer, int first, int step) const {
    return gather_counts<false>(ctx_, p_.plan, counts_in(buffer, ctx_), first, step, counts_);
  }
  // All threads, when all counts had come, after a block barrier. Rows can be asked for then.
  __device__ void place() const {}
  // All threads: waits for the counts. False when the operation is aborted.
  __device__ bool prepare() const {
    gather_counts<true>(ctx_, p_.plan, own_counts(ctx_), threadIdx.x, blockDim.x, counts_);
    return !__syncthreads_or(ctx_.aborted());
  }

  __device__ int row_of(uint32_t route, int source) const {
    const int expert = route_expert(route);
    if (expert >= num_local_) return -1;
    int row = route_index(route);
#pragma unroll 1
    for (int i = expert; i < source * num_local_; i += num_local_) row += counts_[i];
    return row < rows_of_expert() ? expert * rows_of_expert() + row : -1;
  }

  // Warps of all blocks take an expert each: its size, and zero weights behind its rows.
  __device__ void finish() const {
    const int num_warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll 1
    for (int e = static_cast<int>(blockIdx.x) * num_warps + warp_id(); e < num_local_;
         e += static_cast<int>(gridDim.x) * num_warps) {
      int rows = 0;
#pragma unroll 1
      for (int s = lane_id(); s < ctx_.num_ranks(); s += kWarp) rows += counts_[s * num_local_ + e];
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
  __device__ int rows_of_expert() const { return ctx_.num_ranks() * p_.op.num_tokens; }

  const LlContext& ctx_;
  const LlDispatchParams& p_;
  const int num_local_;
  int32_t* const counts_;  // [R, E_l]
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

// The experts follow each other. Each block sums up the counts for itself: a warp, where its
// experts begin behind the first of them, and whoever needs a row, the warps before. Without room
// in shared memory block 0 does it for all in device memory. kInShared: there is room.
template <bool kInShared>
class CompactPlaces {
 public:
  __device__ CompactPlaces(const LlContext& ctx, const LlDispatchParams& p, char* shared)
      : ctx_(ctx),
        p_(p),
        num_local_(p.plan.experts_per_rank),
        shared_(kInShared || p.plan.bases_offset >= 0),
        counts_(shared_ ? reinterpret_cast<int32_t*>(shared + p.plan.bases_offset)
                        : p.op.scratch.row_bases),
        rows_(counts_ + p.op.layout.shape.num_experts),
        begins_(rows_ + num_local_),
        sums_(begins_ + num_local_) {}

  // False: the rows are placed in a call, over which nothing should be kept in registers.
  __device__ bool in_block() const { return shared_; }

  // As of PaddedPlaces; in shared memory.
  __device__ bool look(const char* buffer, int first, int step) const {
    return gather_counts<false>(ctx_, p_.plan, counts_in(buffer, ctx_), first, step, counts_);
  }
  __device__ void place() const {
    sum_up();
    __syncthreads();
    write_sizes_once();
  }
  // All threads. False when the operation is aborted.
  __device__ bool prepare() const {
    // The routes are those of another launch, or this block has waited for them already.
    if (!shared_) {
      if (!place_in_device_memory(ctx_, placement_args(), placement())) return false;
      write_sizes_once();
      return true;
    }
    gather_counts<true>(ctx_, p_.plan, own_counts(ctx_), threadIdx.x, blockDim.x, counts_);
    if (__syncthreads_or(ctx_.aborted())) return false;
    place();
    return true;
  }

  __device__ int row_of(uint32_t route, int source) const {
    const int expert = route_expert(route);
    if (expert >= num_local_) return -1;
    int64_t row = route_index(route);
    if (shared_) {
      row += begin_of(expert);
#pragma unroll 1
      for (int i = expert; i < source * num_local_; i += num_local_) row += counts_[i];
    } else {
      row += placement().bases[expert * ctx_.num_ranks() + source];
    }
    return row < p_.capacity ? static_cast<int>(row) : -1;
  }

  // All threads of all blocks: zeros behind the last row.
  __device__ void finish() const {
    const ExpertSegment last = segment(num_local_ - 1);
    const int64_t total = min(last.begin + last.true_rows, p_.capacity);
    const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 1
    for (int64_t r = total + thread; r < p_.capacity; r += threads) p_.weights[r] = 0.0f;
    if (!p_.zero_tail) return;
    const int64_t row_bytes = p_.plan.row.output_bytes;
    zero_words(p_.tokens, total * row_bytes, p_.capacity * row_bytes);
    if (p_.output != LlOutput::kValues) return;
    const int64_t scale_bytes = int64_t{4} * p_.plan.row.num_scales;
    zero_words(reinterpret_cast<char*>(p_.scales), total * scale_bytes, p_.capacity * scale_bytes);
  }

 private:
  // All threads, kExpertsPerLane experts each: one warp's instructions are fetched faster than
  // those of several. Whole warps: they meet inside.
  __device__ void sum_up() const {
    const int num_experts = ctx_.op.layout.shape.num_experts;
#pragma unroll 1
    for (int warp = warp_id(); warp * kExpertsPerWarp < num_local_;
         warp += static_cast<int>(blockDim.x) / kWarp) {
      const int begin = warp * kExpertsPerWarp + lane_id() * kExpertsPerLane;
      int rows[kExpertsPerLane] = {};
#pragma unroll 1
      for (int i = begin; i < num_experts; i += num_local_) {
#pragma unroll
        for (int j = 0; j < kExpertsPerLane; ++j) {
          if (begin + j < num_local_) rows[j] += counts_[i + j];
        }
      }
      __syncwarp();
      int sum = 0;
#pragma unroll
      for (int j = 0; j < kExpertsPerLane; ++j) sum += rows[j];
      int end = sum;
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int other = __shfl_up_sync(kFullWarp, end, distance);
        if (lane_id() >= distance) end += other;
      }
      int at = end - sum;
#pragma unroll
      for (int j = 0; j < kExpertsPerLane; ++j) {
        if (begin + j < num_local_) {
          rows_[begin + j] = rows[j];
          begins_[begin + j] = at;
        }
        at += rows[j];
      }
      if (lane_id() == kWarp - 1) sums_[warp] = end;
    }
  }
  __device__ int begin_of(int expert) const {
    int begin = begins_[expert];
#pragma unroll 1
    for (int warp = 0; warp < expert / kExpertsPerWarp; ++warp) begin += sums_[warp];
    return begin;
  }
  __device__ ExpertSegment segment(int expert) const {
    if (!shared_) return segment_of(placement(), ctx_.num_ranks(), expert);
    return {begin_of(expert), rows_[expert], rows_[expert]};
  }
  // All threads of all blocks: sizes and statistics. A warp of block 0 that has no rows to find.
  __device__ void write_sizes_once() const {
    if (blockIdx.x != 0 || warp_id() != static_cast<int>(blockDim.x) / kWarp - 1) return;
    int dropped = 0;
#pragma unroll 1
    for (int e = lane_id(); e < num_local_; e += kWarp) {
      const ExpertSegment expert = segment(e);
      const int size = expert.group_size(p_.capacity);
      p_.group_sizes[e] = size;
      p_.valid_sizes[e] = size;
      count_rows(p_, e, size);
      dropped += static_cast<int>(expert.true_rows) - size;
    }
    dropped = __reduce_add_sync(kFullWarp, dropped);
    if (lane_id() == 0) *p_.num_dropped = dropped;
  }

  __device__ PlacementArgs placement_args() const {
    return {1, p_.capacity, p_.group_sizes, p_.valid_sizes, p_.num_dropped};
  }
  __device__ Placement placement() const {
    int32_t* const bases = p_.op.scratch.row_bases;
    return {bases, bases + p_.op.layout.shape.num_experts + 1, /*shared=*/false};
  }

  const LlContext& ctx_;
  const LlDispatchParams& p_;
  const int num_local_;
  const bool shared_;
  int32_t* const counts_;  // [R, E_l]
  int32_t* const rows_;    // [E_l]
  int32_t* const begins_;  // [E_l] where it begins behind the first of its warp's experts
  int32_t* const sums_;    // [ceil(E_l / kExpertsPerWarp)] rows of a warp's experts
};

}  // namespace jax_ep::gpu
