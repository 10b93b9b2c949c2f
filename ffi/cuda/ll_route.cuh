// Where each entry of this rank's tokens goes, found by every block for itself: a bit per expert
// and token in shared memory says which tokens chose the expert, and the bits before a token count
// its index among this rank's rows of the expert. With more bits than shared memory holds, block 0
// routes for all in device memory, as high-throughput dispatch does.
#pragma once

#include "cuda/ll_dispatch.h"
#include "cuda/ll_payload.cuh"
#include "cuda/route.cuh"

namespace jax_ep::gpu {

__device__ inline bool routes_in_shared(const LlDispatchParams& p) {
  return p.plan.masks_offset >= 0;
}

// All threads of all blocks. Calls: inlined, these would take registers from the common path.
template <class Transport>
__device__ __noinline__ bool route_in_device_memory(const OpContext ctx,
                                                    const LlDispatchParams& p) {
  if (blockIdx.x == 0) {
    route_entries<Transport>(ctx, {p.topk_idx, p.sanitised_idx, p.op.scratch.route_workspace,
                                   /*in_shared=*/false, /*num_blocks=*/1});
    if (threadIdx.x == 0) report_faults(p.op);
  }
  if (threadIdx.x == 0) {
    BoundedWait bound;
    const uint32_t* routed = &p.op.state()->blocks_routed.value;
    while (load_acquire<kDeviceScope>(routed) == 0) {
      if (bound.over(ctx, WaitFor::kCount, ctx.rank(), ctx.epoch, 1, 0)) break;
    }
  }
  return !__syncthreads_or(ctx.aborted());
}

// All threads of one block: the faults that its threads have found, `count` of them by this one.
__device__ __noinline__ inline void report_some_faults(const LlDispatchParams& p, uint64_t first,
                                                       int count) {
  __shared__ unsigned long long first_of_all;
  __shared__ int count_of_all;
  if (threadIdx.x == 0) {
    first_of_all = ~0ull;
    count_of_all = 0;
  }
  __syncthreads();
  atomicMin(&first_of_all, static_cast<unsigned long long>(first));
  atomicAdd(&count_of_all, count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  ChannelState* state = p.op.state();
  state->fault_count.value = static_cast<uint32_t>(count_of_all);
  state->first_fault = ~static_cast<uint64_t>(first_of_all);
  report_faults(p.op);
  state->fault_count.value = 0;
  state->first_fault = 0;
}

// All threads of one block: looks for faults in all tokens.
__device__ inline void report_all_faults(const LlDispatchParams& p) {
  const int num_experts_per_tok = p.op.layout.shape.num_experts_per_tok;
  const int num_entries = p.op.num_tokens * num_experts_per_tok;
  uint64_t first = ~uint64_t{0};
  int count = 0;
  for (int i = threadIdx.x; i < num_entries; i += blockDim.x) {
    const int token = i / num_experts_per_tok;
    const int k = i - token * num_experts_per_tok;
    const int32_t* topk = p.topk_idx + int64_t{token} * num_experts_per_tok;
    RouteFault fault;
    sanitised_expert(topk, k, p.op.layout.shape.num_experts, &fault);
    if (fault == RouteFault::kNone) continue;
    ++count;
    first = min(first, pack_fault(token, k, fault == RouteFault::kDuplicate, topk[k]));
  }
  if (__syncthreads_or(count)) report_some_faults(p, first, count);
}

class LlRouter {
 public:
  __device__ LlRouter(const OpContext& ctx, const LlDispatchParams& p, char* shared)
      : ctx_(ctx),
        p_(p),
        num_experts_(p.op.layout.shape.num_experts),
        num_experts_per_tok_(p.op.layout.shape.num_experts_per_tok),
        num_entries_(p.op.num_tokens * num_experts_per_tok_),
        masks_(reinterpret_cast<uint32_t*>(shared + max(int64_t{0}, p.plan.masks_offset))) {}

  // All threads, before the operation begins: what needs neither epoch nor peers. A block barrier
  // must follow.
  __device__ void prepare() {
    if (!routes_in_shared(p_)) return;
    fill(masks_, int64_t{num_experts_} * p_.plan.mask_words, 0u, static_cast<int>(threadIdx.x),
         static_cast<int>(blockDim.x));
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead_[i] = expert_at(index_of(i));
  }

  // All threads, once. False when the operation is aborted; else routes can be asked for, and the
  // counts are on their way: before any payload, behind which they would queue.
  template <class Transport>
  __device__ bool run() {
    if (!routes_in_shared(p_)) return route_in_device_memory<Transport>(ctx_, p_);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) mark(index_of(i), ahead_[i]);
    for (int i = index_of(kAhead); i < num_entries_; i += blockDim.x) mark(i, expert_at(i));
    __syncthreads();
    for (int r = blockIdx.x; r < ctx_.num_ranks(); r += gridDim.x) send_counts<Transport>(r);
    return true;
  }

  // Lanes below K of one warp: the route of entry k, whose expert is sanitised.
  __device__ SendRoute route_of(int token, int expert) const {
    const int64_t entry = int64_t{token} * num_experts_per_tok_ + lane_id();
    if (!routes_in_shared(p_)) return p_.op.scratch.routes[entry];
    if (expert < 0) return {-1, kNoRoute};
    const int experts_per_rank = p_.op.layout.shape.experts_per_rank();
    const int rank = expert / experts_per_rank;
    return {rank, pack_route(expert - rank * experts_per_rank, bits_before(expert, token))};
  }

 private:
  static constexpr int kAhead = 4;

  __device__ int index_of(int i) const { return static_cast<int>(threadIdx.x + i * blockDim.x); }
  __device__ int expert_at(int entry) const {
    return entry < num_entries_ ? p_.topk_idx[entry] : -1;
  }
  // A token that names an expert twice counts once: it sets the same bit.
  __device__ void mark(int entry, int expert) {
    if (expert < 0 || expert >= num_experts_) return;
    const int token = entry / num_experts_per_tok_;
    atomicOr(&masks_[expert * p_.plan.mask_words + token / 32], 1u << (token % 32));
  }
  __device__ int bits_before(int expert, int token) const {
    const uint32_t* words = masks_ + expert * p_.plan.mask_words;
    int bits = __popc(words[token / 32] & ((1u << (token % 32)) - 1));
    for (int w = 0; w < token / 32; ++w) bits += __popc(words[w]);
    return bits;
  }

  template <class Transport>
  __device__ void send_counts(int rank) {
    const int num_local = p_.op.layout.shape.experts_per_rank();
    for (int e = threadIdx.x; e < num_local; e += blockDim.x) {
      const uint32_t* words = masks_ + (rank * num_local + e) * p_.plan.mask_words;
      uint32_t count = 0;
      for (int w = 0; w < p_.plan.mask_words; ++w) count += __popc(words[w]);
      const int64_t offset = p_.op.layout.dispatch_count(parity_of(ctx_.epoch), ctx_.rank(), e);
      Transport::signal(ctx_, rank, offset, epoch_word(ctx_.epoch, count));
    }
  }

  const OpContext& ctx_;
  const LlDispatchParams& p_;
  const int num_experts_;
  const int num_experts_per_tok_;
  const int num_entries_;
  uint32_t* const masks_;  // [E, mask_words]
  int ahead_[kAhead];
};

}  // namespace jax_ep::gpu
