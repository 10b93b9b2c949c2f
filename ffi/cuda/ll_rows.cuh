// The rows of ours that low-latency combine adds up for an item: which they are, and where they can
// be read. Bulk copies bring them into shared memory while the operation begins: one instruction a
// row, and no register. Rows for which there is no room there, and all on devices without bulk
// copies, are read where they are.
#pragma once

#include "cuda/ll_combine.h"
#include "cuda/ll_payload.cuh"

namespace jax_ep::gpu {

// What of an item's rows a block is about to add up.
struct LlRowUse {
  bool remote;  // those of other ranks' tokens
  bool own;
};

class LlRows {
 public:
  // In shared memory.
  struct State {
    int num_rows;
    int num_remote_rows;
    uint32_t present[2];          // sources with rows, a bit each
    alignas(8) uint64_t here[2];  // barriers: remote rows, own rows
  };

  __device__ LlRows(const LlContext& ctx, const LlCombineParams& p, char* shared, State& state)
      : ctx_(ctx),
        p_(p),
        state_(state),
        list_(reinterpret_cast<LlRow*>(shared + p.plan.list_offset)),
        stage_(shared + p.plan.stage_offset) {}

  // One warp, when nobody reads the last item's rows any more. A block barrier must follow. turn:
  // how many items were found before this one.
  __device__ void find(const LlItem& item, const LlRowUse& use, uint32_t turn) const {
    const int num_experts_per_tok = p_.op.layout.shape.num_experts_per_tok;
    const int entries = ctx_.num_ranks() * num_experts_per_tok;
    const int remote_entries = entries - num_experts_per_tok;
    Found found{};
#pragma unroll 1
    for (int first = 0; first < entries; first += kWarp) {
      const int entry = first + lane_id();
      const int distance = p_.plan.by_experts_per_tok.quotient(entry);
      int source = ctx_.rank() + 1 + distance;
      if (source >= ctx_.num_ranks()) source -= ctx_.num_ranks();
      const int k = entry - distance * num_experts_per_tok;
      const int row = entry < entries ? row_at(item, source, k) : -1;
      if (turn == 0 && first == 0) set_up_barriers();  // while the load is on its way
      add(item, use, entry < remote_entries, source, row, &found);
    }
    const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(found.present));
    const uint32_t high = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(found.present >> 32));
    if (lane_id() != 0) return;
    state_.present[0] = low;
    state_.present[1] = high;
    state_.num_rows = found.rows;
    state_.num_remote_rows = found.remote_rows;
#if defined(JAX_EP_BULK_COPY)
    barrier_arrive(&state_.here[0]);
    barrier_arrive(&state_.here[1]);
#endif
  }

  // All threads that read rows, with find()'s turn.
  __device__ void wait_for_remote(uint32_t turn) const { wait(0, turn); }
  __device__ void wait_for_own(uint32_t turn) const { wait(1, turn); }

  // By source, beginning with the one after this rank and ending with our own; in the order of k.
  __device__ int num_remote() const { return state_.num_remote_rows; }
  __device__ int num_all() const { return state_.num_rows; }
  __device__ LlRow row(int i) const { return list_[i]; }
  __device__ uint64_t present() const {
    return static_cast<uint64_t>(state_.present[1]) << 32 | state_.present[0];
  }

  // Row of entry k of the token of this number of a source, -1 for none.
  __device__ int row_at(const LlItem& item, int source, int k) const {
    const int message = source * p_.op.num_tokens + item.token;
    const int row = p_.recv_rows[message * p_.op.layout.shape.num_experts_per_tok + k];
    return row >= 0 && row < p_.capacity ? row : -1;
  }

 private:
  __device__ void set_up_barriers() const {
#if defined(JAX_EP_BULK_COPY)
    if (lane_id() < 2) barrier_init(&state_.here[lane_id()], 1);
    barrier_init_fence();
    __syncwarp();
#endif
  }

  // By one warp, so far; `present` differs between its lanes.
  struct Found {
    int rows;
    int remote_rows;
    int copies;
    uint64_t present;
  };

  // Each lane's row, or -1: into the list, and on its way.
  __device__ void add(const LlItem& item, const LlRowUse& use, bool remote, int source, int row,
                      Found* found) const {
    const float weight = row >= 0 && p_.row_weights != nullptr ? p_.row_weights[row] : 1.0f;
    const unsigned all = __ballot_sync(kFullWarp, row >= 0);
    const unsigned of_others = __ballot_sync(kFullWarp, row >= 0 && remote);
    const char* at = p_.y + wide_product(row, p_.plan.row_bytes) + item.begin() * 16;
#if defined(JAX_EP_BULK_COPY)
    const uint32_t bytes = static_cast<uint32_t>(item.size()) * 16;
    const unsigned wanted = (use.remote ? of_others : 0) | (use.own ? all & ~of_others : 0);
    const int copy = found->copies + __popc(wanted & lanes_below());
    const bool copied = (wanted >> lane_id() & 1) != 0 && copy < p_.plan.num_staged;
    const unsigned copies = __ballot_sync(kFullWarp, copied);
    if (lane_id() == 0) {
      barrier_expect_more(&state_.here[0], __popc(copies & of_others) * bytes);
      barrier_expect_more(&state_.here[1], __popc(copies & ~of_others) * bytes);
    }
    __syncwarp();
    if (copied) {
      char* to = stage_ + copy * p_.plan.stage_bytes;
      bulk_load(to, at, bytes, &state_.here[remote ? 0 : 1]);
      at = to;
    }
    found->copies += __popc(copies);
#endif
    if (row >= 0) {
      list_[found->rows + __popc(all & lanes_below())] = {at, source, weight};
      found->present |= uint64_t{1} << source;
    }
    found->rows += __popc(all);
    found->remote_rows += __popc(of_others);
  }

  __device__ void wait(int which, uint32_t turn) const {
#if defined(JAX_EP_BULK_COPY)
    barrier_wait(&state_.here[which], turn & 1);
#endif
  }

  const LlContext& ctx_;
  const LlCombineParams& p_;
  State& state_;
  LlRow* const list_;
  char* const stage_;
};

}  // namespace jax_ep::gpu
