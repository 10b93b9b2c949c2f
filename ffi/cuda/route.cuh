// Phase 1 of dispatch, and all of notify: where each (token, k) goes. The first blocks of the grid
// share the tokens out in order; each counts its entries per expert, learns the counts of the
// blocks before it, and so knows every entry's index among this rank's rows of its expert. Counts
// leave for the peers before all but a first row of each sender: behind payload they would queue.
#pragma once

#include "cuda/operation.cuh"
#include "cuda/vectors.cuh"
#include "layout/message.h"
#include "protocol/routing.h"

namespace jax_ep::gpu {

constexpr int kMaxRoutingBlocks = 32;
constexpr int kTileTokens = 256;
constexpr int kMaskWords = kTileTokens / 32;

// The memory of a routing block, in words: per expert its first index and a mask of the tile's
// tokens, and the sanitised entries of the block's first tile.
JAX_EP_HD constexpr int64_t route_workspace_words(const WindowShape& shape) {
  return int64_t{shape.num_experts} * (1 + kMaskWords) +
         int64_t{kTileTokens} * shape.num_experts_per_tok;
}

// Each learns the counts of all, so that few are better while a block has little to count.
inline int wanted_routing_blocks(int num_tokens) {
  constexpr int kFew = 16;
  constexpr int kFewTokens = 1024;
  return num_tokens <= kFewTokens ? kFew : kMaxRoutingBlocks;
}

struct RouteArgs {
  const int32_t* topk_idx;  // [T, K]
  int32_t* sanitised;       // [T, K]
  uint32_t* workspace;      // [route_workspace_words]
  bool in_shared;           // the workspace, or else in device memory, for one block
  int num_blocks;           // that route; at most the grid and kMaxRoutingBlocks

  __device__ int32_t* first_tile(const WindowShape& shape) const {
    return reinterpret_cast<int32_t*>(workspace) + int64_t{shape.num_experts} * (1 + kMaskWords);
  }
};

// The same rule as sanitised_expert(), for a warp that holds whole tokens, one entry a lane.
// `group` tells the tokens of the warp apart.
__device__ inline int sanitise_in_warp(int expert, int group, int num_experts, RouteFault* fault) {
  const bool in_range = expert >= 0 && expert < num_experts;
  const int64_t key = in_range ? int64_t{group} << 32 | expert : int64_t{-1} - lane_id();
  const bool repeated = (__match_any_sync(kFullWarp, key) & lanes_below()) != 0;
  *fault = RouteFault::kNone;
  if (expert == -1) return -1;
  if (!in_range) *fault = RouteFault::kOutOfRange;
  if (in_range && repeated) *fault = RouteFault::kDuplicate;
  return *fault == RouteFault::kNone ? expert : -1;
}

// The first index of the tokens of routing block `block`.
__device__ inline int first_token_of(const RouteArgs& args, int num_tokens, int block) {
  return static_cast<int>(static_cast<int64_t>(block) * num_tokens / args.num_blocks);
}

__device__ inline void record_fault(const Operation& op, int token, int k, RouteFault fault,
                                    int32_t value) {
  ChannelState* state = op.state();
  atomicAdd(&state->fault_count.value, 1u);
  const uint64_t packed = pack_fault(token, k, fault == RouteFault::kDuplicate, value);
  atomicMax(reinterpret_cast<unsigned long long*>(&state->first_fault),
            static_cast<unsigned long long>(~packed));
}

// All threads of a routing block: sanitises its entries and counts them per expert in the
// workspace, whose first E words are zero. Needs neither epoch nor peers.
__device__ inline void count_entries(const Operation& op, const RouteArgs& args) {
  constexpr int kAhead = 4;
  const int num_experts = op.layout.shape.num_experts;
  const int num_experts_per_tok = op.layout.shape.num_experts_per_tok;
  const int begin = first_token_of(args, op.num_tokens, blockIdx.x);
  const int end = first_token_of(args, op.num_tokens, blockIdx.x + 1);
  const int tokens_per_warp = kWarp / num_experts_per_tok;
  const int offset = lane_id() / num_experts_per_tok;
  const int k = lane_id() % num_experts_per_tok;
  int32_t* const first_tile = args.first_tile(op.layout.shape);
  const int step = static_cast<int>(blockDim.x) / kWarp * tokens_per_warp;
  for (int first = begin + warp_id() * tokens_per_warp; first < end; first += kAhead * step) {
    int entry[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int token = first + i * step + offset;
      const bool active = offset < tokens_per_warp && token < end;
      entry[i] = active ? args.topk_idx[int64_t{token} * num_experts_per_tok + k] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      RouteFault fault;
      const int token = first + i * step + offset;
      const int expert = sanitise_in_warp(entry[i], offset, num_experts, &fault);
      if (offset < tokens_per_warp && token < end) {
        args.sanitised[int64_t{token} * num_experts_per_tok + k] = expert;
        if (token < begin + kTileTokens) {
          first_tile[(token - begin) * num_experts_per_tok + k] = expert;
        }
        if (expert >= 0) atomicAdd(&args.workspace[expert], 1u);
        if (fault != RouteFault::kNone) record_fault(op, token, k, fault, entry[i]);
      }
    }
  }
}

__device__ inline void clear_workspace(const Operation& op, const RouteArgs& args) {
  fill(args.workspace, int64_t{op.layout.shape.num_experts} * (1 + kMaskWords), 0u,
       static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

// All threads of a routing block, before the operation begins: it hides the latency of both. Device
// memory may be gone by then, so that a workspace there has to wait.
__device__ inline void count_ahead(const Operation& op, const RouteArgs& args) {
  if (!args.in_shared) return;
  clear_workspace(op, args);
  __syncthreads();
  count_entries(op, args);
}
// And once it has begun.
__device__ inline void count_late(const Operation& op, const RouteArgs& args) {
  if (args.in_shared) return;
  clear_workspace(op, args);
  __syncthreads();
  count_entries(op, args);
  __syncthreads();
}

// What follows the counting. `Sink` says who hears of it:
//   template <class Transport> void send_total(ctx, args, expert, total)   one thread of each block
//   void keep(ctx, entry, expert, index)      where the entry is none, both are -1
template <class Sink>
class Router {
 public:
  __device__ Router(const OpContext& ctx, const RouteArgs& args, const Sink& sink)
      : ctx_(ctx),
        args_(args),
        sink_(sink),
        num_experts_(ctx.op.layout.shape.num_experts),
        num_experts_per_tok_(ctx.op.layout.shape.num_experts_per_tok),
        first_(first_token_of(args, ctx.op.num_tokens, blockIdx.x)),
        end_(first_token_of(args, ctx.op.num_tokens, blockIdx.x + 1)),
        starts_(args.workspace),
        masks_(args.workspace + num_experts_) {}

  // All threads of a routing block, once all have counted.
  template <class Transport>
  __device__ void run() {
    exchange_counts<Transport>();
    __syncthreads();
    for (int tile = first_; tile < end_; tile += kTileTokens) assign_indices(tile);
  }

 private:
  // starts_: this block's counts become its first index per expert; the sink gets the totals.
  template <class Transport>
  __device__ void exchange_counts() {
    const int block = static_cast<int>(blockIdx.x);
    uint64_t* counts = ctx_.op.scratch.block_counts;
    for (int e = threadIdx.x; e < num_experts_; e += blockDim.x) {
      store_relaxed<kDeviceScope>(&counts[int64_t{block} * num_experts_ + e],
                                  epoch_word(ctx_.epoch, starts_[e]));
    }
    for (int e = threadIdx.x; e < num_experts_; e += blockDim.x) {
      uint32_t before = 0;
      uint32_t total = 0;
      if (!sum_counts(counts + e, &before, &total)) return;
      starts_[e] = before;
      sink_.template send_total<Transport>(ctx_, args_, e, total);
    }
  }

  // One expert's counts over the routing blocks: of those before this one, and of all.
  __device__ bool sum_counts(const uint64_t* counts, uint32_t* before, uint32_t* total) {
    constexpr int kAtOnce = 16;
    for (int first = 0; first < args_.num_blocks; first += kAtOnce) {
      uint64_t word[kAtOnce];
      BoundedWait bound;
      bool complete = false;
      while (!complete) {
        complete = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int block = min(first + i, args_.num_blocks - 1);
          word[i] = load_relaxed<kDeviceScope>(&counts[int64_t{block} * num_experts_]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) complete &= word_is_of(word[i], ctx_.epoch);
        if (!complete && bound.over(ctx_, WaitFor::kCount, ctx_.rank(), ctx_.epoch,
                                    epoch_word(ctx_.epoch, 0), word[0])) {
          return false;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int block = first + i;
        if (block < args_.num_blocks) *total += word_value(word[i]);
        if (block < static_cast<int>(blockIdx.x)) *before += word_value(word[i]);
      }
    }
    return true;
  }

  // An entry's index is its expert's start plus the tokens of the tile before it that chose the
  // expert too: a bit per token and expert, so that no order of threads matters.
  __device__ void assign_indices(int tile) {
    const int tokens = min(kTileTokens, end_ - tile);
    const int entries = tokens * num_experts_per_tok_;
    const int64_t first_entry = int64_t{tile} * num_experts_per_tok_;
    const int32_t* const experts =
        tile == first_ ? args_.first_tile(ctx_.op.layout.shape) : args_.sanitised + first_entry;
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      const int expert = experts[i];
      const int token = i / num_experts_per_tok_;
      if (expert >= 0) atomicOr(&masks_[token / 32 * num_experts_ + expert], 1u << (token % 32));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      const int expert = experts[i];
      int index = -1;
      if (expert >= 0) index = starts_[expert] + bits_before(expert, i / num_experts_per_tok_);
      sink_.keep(ctx_, first_entry + i, expert, index);
    }
    if (tile + kTileTokens >= end_) return;
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts_; e += blockDim.x) {
      starts_[e] += bits_before(e, kTileTokens);
      for (int w = 0; w < kMaskWords; ++w) masks_[w * num_experts_ + e] = 0;
    }
    __syncthreads();
  }

  __device__ int bits_before(int expert, int token) const {
    int bits = 0;
    for (int w = 0; w < token / 32; ++w) bits += __popc(masks_[w * num_experts_ + expert]);
    if (token % 32 != 0) {
      bits += __popc(masks_[token / 32 * num_experts_ + expert] & ((1u << (token % 32)) - 1));
    }
    return bits;
  }

  const OpContext& ctx_;
  const RouteArgs& args_;
  const Sink& sink_;
  const int num_experts_;
  const int num_experts_per_tok_;
  const int first_;  // tokens of this block
  const int end_;
  uint32_t* const starts_;  // [E]
  uint32_t* const masks_;   // [kMaskWords, E]
};

// Totals go to the experts' ranks, routes to scratch.
struct DispatchSink {
  template <class Transport>
  __device__ void send_total(const OpContext& ctx, const RouteArgs& args, int expert,
                             uint32_t total) const {
    const int experts_per_rank = ctx.op.layout.shape.experts_per_rank();
    const int rank = expert / experts_per_rank;
    if (rank % args.num_blocks != static_cast<int>(blockIdx.x)) return;
    const int64_t offset = ctx.op.layout.dispatch_count(ctx.chunk_parity(0), ctx.rank(),
                                                        expert - rank * experts_per_rank);
    Transport::signal(ctx, rank, offset, epoch_word(ctx.epoch, total));
  }
  __device__ void keep(const OpContext& ctx, int64_t entry, int expert, int index) const {
    const int experts_per_rank = ctx.op.layout.shape.experts_per_rank();
    SendRoute route{-1, kNoRoute};
    if (expert >= 0) {
      route.rank = expert / experts_per_rank;
      route.route = pack_route(expert - route.rank * experts_per_rank, index);
    }
    ctx.op.scratch.routes[entry] = route;
  }
};

// All threads of a routing block of a dispatch that has begun.
template <class Transport>
__device__ void route_entries(const OpContext& ctx, const RouteArgs& args) {
  count_late(ctx.op, args);
  const DispatchSink sink;
  Router<DispatchSink>(ctx, args, sink).template run<Transport>();
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint32_t, kDeviceScope> routed(ctx.op.state()->blocks_routed.value);
    routed.fetch_add(1, cuda::memory_order_release);
  }
}

}  // namespace jax_ep::gpu
