// Low-latency dispatch's half that sends, where every block has one item. It ends when the links
// have taken all of its payload, so that goes before everything else: nobody need wait for the
// counts and records that queue behind it, done comes later.
//
// Up to the payload every instruction is executed once and has to be fetched: for all warps of a
// multiprocessor that takes several times what it takes for one or two, and each jump as long as
// dozens of instructions (docs/performance.md). So warps do different things: the first finds who
// needs the token, the last greets the peers, and all others wait.
#pragma once

#include "cuda/ll_dispatch_item.cuh"

namespace jax_ep::gpu {

template <class Wire>
class LlDispatchStart : LlDispatchItem<GroupTransport, Wire> {
  using Item = LlDispatchItem<GroupTransport, Wire>;
  using Item::block_, Item::ctx_, Item::item_, Item::p_, Item::value_;

 public:
  __device__ LlDispatchStart(const LlContext& ctx, const LlDispatchParams& p, char* shared,
                             LlDispatchBlock& block)
      : Item(ctx, p, shared, block), router_(ctx, p, shared) {}

  // All threads, before the operation begins. First of all, what the token's entries say; then what
  // else neither epoch nor peers decide. (What is asked for once the links are busy comes late.)
  __device__ void ask_entries() {
    Item::take(Item::first_item());
    if (warp_id() != 0 || !Item::has_entry()) return;
    const int entry = item_.token * Item::num_experts_per_tok() + lane_id();
    expert_ = p_.topk_idx[entry];
    weight_ = p_.topk_weights[entry];
  }
  __device__ void ask() {
    settle(&item_);
    loaded_ = Wire::load(p_, item_);
    router_.ask();
  }
  // Then. A block barrier must follow.
  __device__ void find_destinations() const {
    if (warp_id() != 0) return;
    const auto num_experts = static_cast<uint32_t>(p_.op.layout.shape.num_experts);
    const int rank = p_.plan.by_experts_per_rank.quotient(max(expert_, 0));
    const bool remote = (static_cast<uint32_t>(expert_) < num_experts) & (rank != ctx_.rank());
    const uint32_t bit = remote ? uint32_t{1} << (rank % 32) : 0;
    const uint32_t low = __reduce_or_sync(kFullWarp, rank < 32 ? bit : 0);
    const uint32_t high = __reduce_or_sync(kFullWarp, rank < 32 ? 0 : bit);
    if (lane_id() < 2) block_.destinations[lane_id()] = lane_id() == 0 ? low : high;
  }
  __device__ void encode() { value_ = Wire::encode(p_, loaded_); }

  // All threads.
  __device__ void run() {
    Item::send_columns();
    router_.clear();
    if (warp_id() == 0) {
      block_.expert[lane_id()] = expert_;
      block_.weight[lane_id()] = weight_;
      if (lane_id() == 0) block_.faulty = 0;
    }
    __syncthreads();
    router_.prepare();
    if (warp_id() == 0) Item::resolve_entries();
    __syncthreads();
    router_.template send_counts<GroupTransport>();
    if (warp_id() != 0 || Item::idle()) return;
    Item::send_records(router_);
    if (block_.faulty != 0) report_block_faults(p_, ctx_.epoch);
  }

 private:
  LlRouter router_;
  typename Wire::Loaded loaded_;
  int32_t expert_ = -1;  // of this lane's entry
  float weight_ = 0.0f;
};

}  // namespace jax_ep::gpu
