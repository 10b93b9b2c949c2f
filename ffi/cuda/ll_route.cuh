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

// As sanitise_in_warp(), for a warp that holds one token, lane k entry k.
__device__ inline int sanitise_token(int expert, int num_experts, RouteFault* fault) {
  const bool in_range = expert >= 0 && expert < num_experts;
  const unsigned same = __match_any_sync(kFullWarp, in_range ? expert : -1 - lane_id());
  const bool repeated = in_range && (same & lanes_below()) != 0;
  *fault = repeated                   ? RouteFault::kDuplicate
           : in_range || expert == -1 ? RouteFault::kNone
                                      : RouteFault::kOutOfRange;
  return in_range && !repeated ? expert : -1;
}

// One warp: the faults of a token's entries, lane k's of entry k. Blocks come here in any order;
// the host is to see the first fault of the operation.
__device__ inline void report_token_faults(const Operation& op, uint64_t epoch, int token,
                                           RouteFault fault, int32_t value) {
  const unsigned faulty = __ballot_sync(kFullWarp, fault != RouteFault::kNone);
  if (lane_id() == __ffs(faulty) - 1) {
    const uint64_t packed = pack_fault(token, lane_id(), fault == RouteFault::kDuplicate, value);
    LowLatencyState* state = op.low_latency_state();
    cuda::atomic_ref<uint32_t, kDeviceScope> lock(state->fault_lock.value);
    while (lock.exchange(1, cuda::memory_order_acquire) != 0) {
    }
    volatile Mailbox* mailbox = op.mailbox;
    const uint64_t found = mailbox->faults_found;
    const bool shows_none = mailbox->faults_taken == found;
    if (shows_none || (state->fault_epoch == epoch && packed < mailbox->first_fault)) {
      mailbox->first_fault = packed;
      state->fault_epoch = epoch;
      fence_system();
    }
    mailbox->faults_found = found + __popc(faulty);
    lock.store(0, cuda::memory_order_release);
  }
  __syncwarp();
}

// One warp, once per block: looks again for the faults of the tokens whose first part the block
// has.
__device__ __noinline__ inline void report_block_faults(const LlDispatchParams& p, uint64_t epoch) {
  const int num_experts_per_tok = p.op.layout.shape.num_experts_per_tok;
  const int num_items = p.plan.grid.num_items(p.op.num_tokens);
  for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
    const LlItem item = LlItem::of(p.plan.grid, i);
    if (!item.first_part()) continue;
    int32_t value = -1;
    if (lane_id() < num_experts_per_tok) {
      value = p.topk_idx[int64_t{item.token} * num_experts_per_tok + lane_id()];
    }
    RouteFault fault;
    sanitise_token(value, p.op.layout.shape.num_experts, &fault);
    report_token_faults(p.op, epoch, item.token, fault, value);
  }
}

class LlRouter {
 public:
  __device__ LlRouter(const LlContext& ctx, const LlDispatchParams& p, char* shared)
      : ctx_(ctx),
        p_(p),
        masks_(reinterpret_cast<uint32_t*>(shared + max(int64_t{0}, p.plan.masks_offset))) {}

  // All threads, with routes in shared memory: asks for this rank's choices.
  __device__ void ask() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead_[i] = expert_at(index_of(i));
  }
  // Then. A block barrier must follow.
  __device__ void clear() const {
    const int num_words = num_experts() * p_.plan.mask_words;
#pragma unroll 1
    for (int i = index_of(0); i < num_words; i += blockDim.x) masks_[i] = 0;
  }
  // Then. Routes can be asked for after another block barrier.
  __device__ void prepare() const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) mark(index_of(i), ahead_[i]);
#pragma unroll 1
    for (int i = index_of(kAhead); i < num_entries(); i += blockDim.x) mark(i, expert_at(i));
  }

  // All threads.
  template <class Transport>
  __device__ void send_counts() const {
#pragma unroll 1
    for (int r = blockIdx.x; r < ctx_.num_ranks(); r += gridDim.x) send_counts<Transport>(r);
  }

  // The route of entry k, whose expert is sanitised and lives on `rank`.
  __device__ uint32_t route_of(int token, int k, int expert, int rank) const {
    if (!routes_in_shared(p_)) {
      return p_.op.scratch.routes[token * num_experts_per_tok() + k].route;
    }
    if (expert < 0) return kNoRoute;
    return pack_route(expert - rank * p_.plan.experts_per_rank, tokens_before(expert, token));
  }

 private:
  static constexpr int kAhead = 5;  // 224 threads: the choices of 128 tokens, 8 experts each
  static constexpr int kWordBits = 32;

  __device__ int num_experts() const { return p_.op.layout.shape.num_experts; }
  __device__ int num_experts_per_tok() const { return p_.op.layout.shape.num_experts_per_tok; }
  __device__ int num_entries() const { return p_.op.num_tokens * num_experts_per_tok(); }
  __device__ int index_of(int i) const { return static_cast<int>(threadIdx.x + i * blockDim.x); }
  __device__ int expert_at(int entry) const {
    return entry < num_entries() ? p_.topk_idx[entry] : -1;
  }
  // A token that names an expert twice counts once: it sets the same bit.
  __device__ void mark(int entry, int expert) const {
    if (expert < 0 || expert >= num_experts()) return;
    const int token = p_.plan.by_experts_per_tok.quotient(entry);
    atomicOr(&masks_[token / kWordBits * num_experts() + expert], 1u << (token % kWordBits));
  }
  // Tokens before this one that chose the expert.
  __device__ int tokens_before(int expert, int token) const {
    constexpr int kWords = 4;  // whose loads are on their way together
    int bits = 0;
#pragma unroll 1
    for (int first = 0; first < token; first += kWords * kWordBits) {
      uint32_t words[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int at = first + w * kWordBits;
        words[w] = at < token ? masks_[at / kWordBits * num_experts() + expert] : 0;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int below = min(max(token - first - w * kWordBits, 1), kWordBits);
        bits += __popc(words[w] & (~uint32_t{0} >> (kWordBits - below)));
      }
    }
    return bits;
  }

  template <class Transport>
  __device__ void send_counts(int rank) const {
    const int num_local = p_.plan.experts_per_rank;
#pragma unroll 1
    for (int e = threadIdx.x; e < num_local; e += blockDim.x) {
      const int count = tokens_before(rank * num_local + e, p_.op.num_tokens);
      const int64_t offset = p_.op.layout.dispatch_count(parity_of(ctx_.epoch), ctx_.rank(), e);
      Transport::signal(ctx_, rank, offset, epoch_word(ctx_.epoch, static_cast<uint32_t>(count)));
    }
  }

  const LlContext& ctx_;
  const LlDispatchParams& p_;
  int ahead_[kAhead];
  uint32_t* const masks_;  // [mask_words, E]: neighbours in different banks
};

}  // namespace jax_ep::gpu
