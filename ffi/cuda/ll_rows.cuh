// The rows of ours that low-latency combine adds up for an item: which they are, and where they can
// be read. A list of them is made while the operation begins, in which the rows of a source follow
// each other, and bulk copies bring those of other ranks' tokens into shared memory in its order:
// one instruction a row, and no register. When these have been sent, our own take their place.
// Rows for which there is no room there, and all on devices without bulk copies, are read where
// they are.
#pragma once

#include "cuda/ll_combine.h"
#include "cuda/ll_payload.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// Of a thread's columns, in float32.
template <RowType kType, int kUnits>
struct LlSums {
  using Vector = RowVector<kType>;

  float of[kUnits][Vector::kElements];

  __device__ void add(const LlColumns<kUnits>& columns, float weight) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) Vector::add_weighted(of[u], columns.v[u], weight);
  }
  __device__ LlColumns<kUnits> rounded() const {
    LlColumns<kUnits> columns;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) columns.v[u] = Vector::pack(of[u]);
    return columns;
  }
};

// All lanes of a warp: the bits of any.
__device__ inline uint64_t any_lane(uint64_t mask) {
  const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mask));
  const uint32_t high = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mask >> 32));
  return static_cast<uint64_t>(high) << 32 | low;
}

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
    int num_remote_groups;
    alignas(8) uint64_t here;  // barrier: the copies are
  };

  __device__ LlRows(const LlContext& ctx, const LlCombineParams& p, char* shared, State& state)
      : ctx_(ctx),
        p_(p),
        state_(state),
        rows_(reinterpret_cast<int*>(shared + p.plan.rows_offset)),
        weights_(reinterpret_cast<float*>(shared + p.plan.weights_offset)),
        groups_(reinterpret_cast<LlRowGroup*>(shared + p.plan.groups_offset)),
        stage_(shared + p.plan.stage_offset) {}

  // All threads, when nobody reads the last item's rows any more: lists those of `use`, and begins
  // to copy the remote ones, or without these our own. A block barrier must follow. Copies and list
  // are two warps' work, side by side, where there are two that have nothing else to do: the second
  // warp looks at our own token, the last one sees to the peers.
  __device__ void find(const LlItem& item, const LlRowUse& use, bool is_first) const {
    if (warp_id() == 0) bring(item, use.remote, is_first);
    if (warp_id() == lister()) list(item, use);
  }
  // All threads, when nobody reads the remote rows any more: begins to copy our own.
  __device__ void bring_own(const LlItem& item) const {
#if defined(JAX_EP_BULK_COPY)
    if (warp_id() != lister()) return;
    const uint32_t bytes = static_cast<uint32_t>(item.size()) * 16;
    const int rows = min(num_all() - num_remote(), p_.plan.num_staged);
#pragma unroll 1
    for (int i = lane_id(); i < rows; i += kWarp) copy(item, rows_[num_remote() + i], i, bytes);
    if (lane_id() == 0) barrier_expect(&state_.here, rows * bytes);
#endif
  }
  // All threads that read copies. use: how often rows were brought before these.
  __device__ void wait(uint32_t use) const {
#if defined(JAX_EP_BULK_COPY)
    barrier_wait(&state_.here, use & 1);
#endif
  }

  // By source, beginning with the one after this rank and ending with our own; in the order of k.
  __device__ int num_remote() const { return state_.num_remote_rows; }
  __device__ int num_all() const { return state_.num_rows; }
  __device__ int num_remote_groups() const { return state_.num_remote_groups; }
  __device__ LlRowGroup group(int i) const { return groups_[i]; }

  // A thread that has columns: adds those of rows [begin, end) of the list, one after the other, to
  // the sums. Several are read at a time, without a branch between them. first: the row whose copy
  // lies first.
  template <RowType kType, int kUnits>
  __device__ void add(const LlItem& item, int first, int begin, int end,
                      LlSums<kType, kUnits>* sums) const {
    constexpr int kMost = 4 / kUnits;  // rows between memory and the sums
    const int staged = min(end, first + p_.plan.num_staged);
    int i = begin;
#pragma unroll 1
    for (; i + kMost <= staged; i += kMost) add_staged<kMost>(item, i, i - first, sums);
    if (kMost > 2 && i + 2 <= staged) {
      add_staged<2>(item, i, i - first, sums);
      i += 2;
    }
    if (i < staged) {
      add_staged<1>(item, i, i - first, sums);
      ++i;
    }
#pragma unroll 1
    for (; i < end; ++i) {
      const char* row = p_.y + wide_product(rows_[i], p_.plan.row_bytes);
      sums->add(load_columns<kUnits>(row, item), weights_[i]);
    }
  }

  // All lanes of a warp: the sources of the remote rows, a bit each.
  __device__ uint64_t remote_sources() const {
    uint64_t mine = 0;
#pragma unroll 1
    for (int g = lane_id(); g < num_remote_groups(); g += kWarp) {
      mine |= uint64_t{1} << groups_[g].source;
    }
    return any_lane(mine);
  }

  // Row of entry k of the token of this number of a source, -1 for none.
  __device__ int row_at(const LlItem& item, int source, int k) const {
    const int message = source * p_.op.num_tokens + item.token;
    const int row = p_.recv_rows[message * num_experts_per_tok() + k];
    return row >= 0 && row < p_.capacity ? row : -1;
  }

 private:
  // Of a lane: entry k of the token of a source.
  struct Entry {
    bool remote;
    int source;
    int k;
    int row;  // -1 for none
  };

  __device__ int num_experts_per_tok() const { return p_.op.layout.shape.num_experts_per_tok; }

  // The warp that lists the rows.
  __device__ static int lister() { return blockDim.x < 4 * kWarp ? 0 : 2; }

  // One warp: body(entry), with an entry of each lane, until all of `use` are through, our own
  // last; once if there are none.
  template <class Body>
  __device__ void for_each_entry(const LlItem& item, const LlRowUse& use, Body body) const {
    const int entries = ctx_.num_ranks() * num_experts_per_tok();
    const int remote_entries = entries - num_experts_per_tok();
    const int end = use.own ? entries : remote_entries;
    int first = use.remote ? 0 : remote_entries;
#pragma unroll 1
    do {
      const int entry = first + lane_id();
      const int distance = p_.plan.by_experts_per_tok.quotient(entry);
      Entry e{entry < remote_entries, ctx_.rank() + 1 + distance,
              entry - distance * num_experts_per_tok(), -1};
      if (e.source >= ctx_.num_ranks()) e.source -= ctx_.num_ranks();
      const bool is_one = lane_id() < p_.plan.entries_at_once && entry < end;
      if (is_one) e.row = row_at(item, e.source, e.k);
      body(e);
      first += p_.plan.entries_at_once;
    } while (first < end);
  }

  // One warp: the list's first rows of a kind are on their way.
  __device__ void bring(const LlItem& item, bool remote, bool is_first) const {
#if defined(JAX_EP_BULK_COPY)
    const uint32_t bytes = static_cast<uint32_t>(item.size()) * 16;
    bool is_new = is_first;
    int rows = 0;
    for_each_entry(item, {remote, !remote}, [&](const Entry& e) {
      if (is_new) set_up_barrier();  // while the load is on its way
      is_new = false;
      const unsigned all = __ballot_sync(kFullWarp, e.row >= 0);
      const int place = rows + __popc(all & lanes_below());
      if (e.row >= 0 && place < p_.plan.num_staged) copy(item, e.row, place, bytes);
      __syncwarp();
      rows += __popc(all);
    });
    // Bytes may come before they are expected: this is the barrier's only arrival.
    if (lane_id() == 0) barrier_expect(&state_.here, min(rows, p_.plan.num_staged) * bytes);
#endif
  }
  __device__ void copy(const LlItem& item, int row, int place, uint32_t bytes) const {
#if defined(JAX_EP_BULK_COPY)
    const char* from = p_.y + wide_product(row, p_.plan.row_bytes) + item.begin() * 16;
    bulk_load(stage_ + place * p_.plan.stage_bytes, from, bytes, &state_.here);
#endif
  }
  __device__ void set_up_barrier() const {
#if defined(JAX_EP_BULK_COPY)
    if (lane_id() == 0) barrier_init(&state_.here, 1);
    barrier_init_fence();
    __syncwarp();
#endif
  }

  // One warp.
  __device__ void list(const LlItem& item, const LlRowUse& use) const {
    int rows = 0;
    int remote_rows = 0;
    int groups = 0;
    int remote_groups = 0;
    for_each_entry(item, use, [&](const Entry& e) {
      const bool is_row = e.row >= 0;
      const float weight = is_row && p_.row_weights != nullptr ? p_.row_weights[e.row] : 1.0f;
      const unsigned all = __ballot_sync(kFullWarp, is_row);
      const int behind = num_experts_per_tok() - 1 - e.k;  // entries of the source
      const bool is_last = is_row && (all >> lane_id() >> 1 & ((1u << behind) - 1)) == 0;
      const unsigned last = __ballot_sync(kFullWarp, is_last);
      const unsigned remote = __ballot_sync(kFullWarp, e.remote);
      const int place = rows + __popc(all & lanes_below());
      if (is_last) groups_[groups + __popc(last & lanes_below())] = {e.source, place + 1};
      if (is_row) {
        rows_[place] = e.row;
        weights_[place] = weight;
      }
      rows += __popc(all);
      remote_rows += __popc(all & remote);
      groups += __popc(last);
      remote_groups += __popc(last & remote);
    });
    if (lane_id() != 0) return;
    state_.num_rows = rows;
    state_.num_remote_rows = remote_rows;
    state_.num_remote_groups = remote_groups;
  }

  template <int kRows, RowType kType, int kUnits>
  __device__ void add_staged(const LlItem& item, int first, int place,
                             LlSums<kType, kUnits>* sums) const {
    const auto* at = reinterpret_cast<const uint4*>(stage_ + place * p_.plan.stage_bytes);
    LlColumns<kUnits> columns[kRows];
    float weights[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const auto* row = at + i * (p_.plan.stage_bytes / 16) + threadIdx.x;
      columns[i] = {};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (u == 0 || item.has(u)) columns[i].v[u] = row[u * blockDim.x];
      }
      weights[i] = weights_[first + i];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums->add(columns[i], weights[i]);
  }

  const LlContext& ctx_;
  const LlCombineParams& p_;
  State& state_;
  int* const rows_;
  float* const weights_;
  LlRowGroup* const groups_;
  char* const stage_;
};

}  // namespace jax_ep::gpu
