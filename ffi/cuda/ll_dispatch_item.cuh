// What the kernels of low-latency dispatch do with an item: a token and a part of its columns.
#pragma once

#include "cuda/ll_place.cuh"
#include "cuda/ll_route.cuh"
#include "cuda/ll_wire.cuh"
#include "cuda/messages.cuh"

namespace jax_ep::gpu {

// In shared memory. Two sets of senders take turns, so that one can be cleared while the other is
// in use.
struct LlDispatchBlock {
  uint32_t destinations[2];  // ranks that need this block's token, a bit each
  uint32_t senders[2][2];    // other ranks that send us the item's token, a bit each
  uint32_t faulty;           // not 0 when entries of this block's tokens were faults
  // Of the token that is sent, entry k in lane k of the first warp. (What nobody needs for long
  // would cost every thread a register.)
  int32_t expert[kWarp];  // sanitised; -1 for none
  int32_t rank[kWarp];    // where it lives
  float weight[kWarp];
  uint32_t own_route[kWarp];
};

__device__ inline uint64_t ranks_in(const uint32_t (&halves)[2]) {
  return static_cast<uint64_t>(halves[1]) << 32 | halves[0];
}

template <class Transport, class Wire>
class LlDispatchItem {
 protected:
  __device__ LlDispatchItem(const LlContext& ctx, const LlDispatchParams& p, char* shared,
                            LlDispatchBlock& block)
      : ctx_(ctx),
        p_(p),
        block_(block),
        rows_(reinterpret_cast<int32_t*>(shared + p.plan.rows_offset)) {}

  __device__ int num_experts_per_tok() const { return p_.op.layout.shape.num_experts_per_tok; }
  __device__ int num_items() const { return p_.plan.grid.num_items(p_.op.num_tokens); }
  __device__ int first_item() const { return static_cast<int>(blockIdx.x); }
  __device__ bool idle() const { return first_item() >= num_items(); }
  // An idle block has an item of no columns.
  __device__ void take(int item) {
    item_ = LlItem::of(p_.plan.grid, item);
    if (idle()) item_.left = 0;
  }
  // Of the first warp: entry k of the item's token is lane k's.
  __device__ bool has_entry() const { return lane_id() < num_experts_per_tok() && !idle(); }

  // ---- Sending.

  // The first warp: what becomes of the token's entries, and which ranks need the token. A block
  // barrier must follow.
  __device__ void resolve_entries() const {
    wait_for_copies();  // of the entries, where they came so
    RouteFault fault;
    const int given = has_entry() ? block_.expert[lane_id()] : -1;
    const int expert = sanitise_token(given, p_.op.layout.shape.num_experts, &fault);
    const int rank = expert >= 0 ? p_.plan.by_experts_per_rank.quotient(expert) : -1;
    block_.expert[lane_id()] = expert;
    block_.rank[lane_id()] = rank;
    const bool remote = rank >= 0 && rank != ctx_.rank();
    const uint64_t destination = remote ? uint64_t{1} << rank : 0;
    const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(destination));
    const uint32_t high = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(destination >> 32));
    if (lane_id() < 2) block_.destinations[lane_id()] = lane_id() == 0 ? low : high;
    if (!has_entry() || !item_.first_part()) return;
    if (fault != RouteFault::kNone && routes_in_shared(p_)) block_.faulty = 1;
    p_.sanitised_idx[item_.token * num_experts_per_tok() + lane_id()] = expert;
  }

  // The first warp, a lane for each entry and for as many ranks as there are lanes. Every rank
  // learns of every token, also when nothing of it comes.
  __device__ void send_records(const LlRouter& router) const {
    const int first_rank = p_.plan.by_experts_per_tok.quotient(lane_id());
    if (first_rank >= p_.plan.ranks_at_once) return;
    const int k = lane_id() - first_rank * num_experts_per_tok();
    const int rank = block_.rank[k];
    const uint32_t route = router.route_of(item_.token, k, block_.expert[k], rank);
    if (first_rank == 0) block_.own_route[k] = rank == ctx_.rank() ? route : kNoRoute;
    if (!item_.first_part()) return;
    const float weight = block_.weight[k];
    const int64_t offset =
        p_.op.layout.route_records(parity_of(ctx_.epoch), ctx_.rank(), item_.token) +
        k * kRecordBytes;
#pragma unroll 1
    for (int r = first_rank; r < ctx_.num_ranks(); r += p_.plan.ranks_at_once) {
      store_record(Transport::window(ctx_, r, offset), ctx_.epoch, r == rank ? route : kNoRoute,
                   weight);
    }
  }

  __device__ void send_columns() const {
    if (!item_.has(0)) return;
    const int64_t offset =
        p_.op.layout.dispatch_message(parity_of(ctx_.epoch), ctx_.rank(), item_.token);
    // Each rank begins with the one after it, so that they do not all send to the same.
    const uint64_t all = ranks_in(block_.destinations);
    const uint64_t after = all & (~uint64_t{0} << ctx_.rank());
    uint64_t now = after != 0 ? after : all;
    uint64_t later = all ^ now;
#pragma unroll 1
    while (now != 0) {
      const int rank = __ffsll(static_cast<long long>(now)) - 1;
      Wire::send(p_, Transport::window(ctx_, rank, offset), item_, value_);
      now &= now - 1;
      if (now == 0) {
        now = later;
        later = 0;
      }
    }
  }

  // ---- Receiving.

  __device__ const char* record_of(const char* buffer, int source, int k) const {
    const WindowLayout& layout = p_.op.layout;
    return buffer + layout.offset[kRouteRecords] +
           wide_product(layout.slot(source, item_.token), layout.stride[kRouteRecords]) +
           k * kRecordBytes;
  }
  __device__ const char* own_buffer() const {
    return ctx_.own_window(p_.op.layout.buffer(parity_of(ctx_.epoch)));
  }
  __device__ void add_sender(uint32_t (&senders)[2], int source, const RouteRecord& record) const {
    if (record.route == kNoRoute || source == ctx_.rank()) return;
    atomicOr(&senders[source / 32], 1u << (source % 32));
  }

  // One thread: what the outputs say of entry k of one source's token.
  __device__ void write_entry(int source, int k, int row, float weight) const {
    if (!item_.first_part()) return;
    const int message = source * p_.op.num_tokens + item_.token;
    p_.recv_rows[message * num_experts_per_tok() + k] = row;
    if (row >= 0) p_.weights[row] = weight;
  }

  // All threads: the rows of one source's token get the item's columns.
  __device__ void expand(int source, const typename Wire::Output& output) const {
    const typename Wire::Place place = Wire::place(p_, item_);
    const int32_t* rows = rows_ + source * p_.plan.list_entries;
    const int32_t* const end = rows + p_.plan.list_entries;
#pragma unroll 1
    for (; rows != end; rows += kListUnit) {
      const int4 four = *reinterpret_cast<const int4*>(rows);
      if (four.x >= 0) Wire::store(place, four.x, item_, output);
      if (four.y >= 0) Wire::store(place, four.y, item_, output);
      if (four.z >= 0) Wire::store(place, four.z, item_, output);
      if (four.w >= 0) Wire::store(place, four.w, item_, output);
    }
  }

  // All threads. The next source is looked at before this one is waited for, or each would cost a
  // round trip. `next`: what the first of the senders sends.
  __device__ void receive_columns(uint64_t senders, typename Wire::Columns next) const {
#pragma unroll 1
    while (senders != 0) {
      const int source = __ffsll(static_cast<long long>(senders)) - 1;
      senders &= senders - 1;
      typename Wire::Columns value = next;
      if (senders != 0) next = look(senders);
      if (item_.has(0)) Wire::wait(ctx_, p_, slot(source), item_, source, &value);
      __syncwarp();
      expand(source, Wire::decode(p_, value));
    }
  }
  // At what the first of `sources` sends, whether it has come or not.
  __device__ typename Wire::Columns look(uint64_t sources) const {
    if (!item_.has(0) || sources == 0) return {};
    const int source = __ffsll(static_cast<long long>(sources)) - 1;
    return Wire::look(p_, slot(source), item_);
  }
  __device__ char* slot(int source) const {
    return ctx_.own_window(
        p_.op.layout.dispatch_message(parity_of(ctx_.epoch), source, item_.token));
  }

  const LlContext& ctx_;
  const LlDispatchParams& p_;
  LlDispatchBlock& block_;
  int32_t* const rows_;  // [R, list_entries] of the item's token in the output, -1 for none
  LlItem item_;
  typename Wire::Columns value_;  // of our own token
};

}  // namespace jax_ep::gpu
