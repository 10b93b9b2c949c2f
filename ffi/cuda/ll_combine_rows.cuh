// The two halves of low-latency combine. A block takes items of (token, part of its columns): the
// token's rows here are summed and sent to every source that has a token of this number, then the
// sums for our own token of this number are received and added up.
#pragma once

#include "cuda/ll_combine.h"
#include "cuda/ll_payload.cuh"
#include "cuda/messages.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// A row of y, and the source whose token it is of.
struct LlCombineRow {
  int32_t row;
  int32_t source;
};

// What a block knows of its item, in shared memory; the rows lie behind it, by source, beginning
// with the one after this rank and ending with our own, in the order of k.
struct LlCombineItem {
  int num_rows;
  int num_remote_rows;
  uint32_t named[2];    // ranks with experts of our token, a bit each
  uint32_t present[2];  // sources with rows in the list, a bit each
};

template <class Transport, RowType kType>
class LlCombine {
 public:
  __device__ LlCombine(const OpContext& ctx, const LlCombineParams& p, char* shared,
                       LlCombineItem& block)
      : ctx_(ctx),
        p_(p),
        block_(block),
        num_experts_per_tok_(p.op.layout.shape.num_experts_per_tok),
        num_items_(p.plan.grid.num_items(p.op.num_tokens)),
        list_(reinterpret_cast<LlCombineRow*>(shared + p.plan.list_offset)) {}

  // All threads, before the operation begins: the first item's rows, which depend on neither epoch
  // nor peers. A block barrier must follow.
  __device__ void prepare() {
    const int item = p_.turn.send ? first_item() : last_item();
    if (item >= 0 && item < num_items_) list_rows(item);
  }

  // All threads, once the operation has begun.
  __device__ void run(const LlCounters& counters) {
    const int step = static_cast<int>(gridDim.x);
    for (int item = first_item(); p_.turn.send && item < num_items_; item += step) {
      if (item != first_item()) list_next_rows(item);
      send(item);
    }
    check_in(p_.op, p_.turn, counters);
    if (!p_.turn.receive) return;
    meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
    for (int item = last_item(); item >= 0; item -= step) {
      if (item != last_item()) list_next_rows(item);
      receive(item);
    }
  }

 private:
  using Vector = RowVector<kType>;
  static constexpr int kAtOnce = 4;       // rows of ours in flight
  static constexpr int kPeersAtOnce = 2;  // others' sums

  __device__ int first_item() const { return static_cast<int>(blockIdx.x); }
  // -1 when there is none.
  __device__ int last_item() const {
    const int step = static_cast<int>(gridDim.x);
    const int first = first_item();
    return first < num_items_ ? first + (num_items_ - 1 - first) / step * step : -1;
  }
  __device__ int token_of(int item) const { return item / p_.plan.grid.num_parts; }
  __device__ bool is_first_part(int item) const { return item % p_.plan.grid.num_parts == 0; }
  __device__ int column_of(int item) const {
    return item % p_.plan.grid.num_parts * p_.plan.grid.part_columns +
           static_cast<int>(threadIdx.x);
  }
  __device__ bool has_column(int item) const {
    return static_cast<int>(threadIdx.x) < p_.plan.grid.part_columns &&
           column_of(item) < p_.plan.grid.num_columns;
  }
  __device__ const uint4* y_column(int row, int item) const {
    const char* at = p_.y + int64_t{row} * p_.op.layout.shape.row_bytes;
    return reinterpret_cast<const uint4*>(at) + column_of(item);
  }
  __device__ float weight_of(int row) const {
    return p_.row_weights != nullptr ? p_.row_weights[row] : 1.0f;
  }
  __device__ int row_at(int source, int token, int k) const {
    const int64_t message = int64_t{source} * p_.op.num_tokens + token;
    const int row = p_.recv_rows[message * num_experts_per_tok_ + k];
    return row >= 0 && row < p_.capacity ? row : -1;
  }
  __device__ int64_t row_offset(int peer, int token) const {
    return p_.op.layout.combine_row(parity_of(ctx_.epoch), peer, token);
  }
  __device__ int64_t flag_offset_of(int peer, int token) const {
    return p_.op.layout.combine_flag(parity_of(ctx_.epoch), peer, token);
  }
  __device__ int64_t scalars_offset(int peer, int token) const {
    return p_.op.layout.combine_scalars(parity_of(ctx_.epoch), peer, token);
  }

  // ---- The item's rows.

  // Two warps; a block barrier must follow.
  __device__ void list_rows(int item) {
    if (warp_id() == 0) list_rows_of(token_of(item));
    if (warp_id() == 1) name_ranks(token_of(item));
  }
  __device__ void list_next_rows(int item) {
    __syncthreads();  // everybody has used the last item's
    list_rows(item);
    __syncthreads();
  }

  __device__ void list_rows_of(int token) {
    const int entries = ctx_.num_ranks() * num_experts_per_tok_;
    const int remote = entries - num_experts_per_tok_;
    int count = 0;
    int remote_count = 0;
    uint64_t present = 0;
    for (int first = 0; first < entries; first += kAtOnce * kWarp) {
      LlCombineRow found[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int entry = first + i * kWarp + lane_id();
        const int turn = entry / num_experts_per_tok_;
        const int source = (ctx_.rank() + 1 + turn) % ctx_.num_ranks();
        found[i] = {-1, source};
        if (entry < entries) {
          found[i].row = row_at(source, token, entry - turn * num_experts_per_tok_);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool valid = found[i].row >= 0;
        const unsigned all = __ballot_sync(kFullWarp, valid);
        if (valid) {
          list_[count + __popc(all & lanes_below())] = found[i];
          present |= uint64_t{1} << found[i].source;
        }
        const bool is_remote = first + i * kWarp + lane_id() < remote;
        remote_count += __popc(__ballot_sync(kFullWarp, valid && is_remote));
        count += __popc(all);
      }
    }
    write_mask(present, block_.present);
    if (lane_id() == 0) {
      block_.num_rows = count;
      block_.num_remote_rows = remote_count;
    }
  }

  __device__ void name_ranks(int token) {
    const int rank = rank_of_entry(token);
    write_mask(rank >= 0 ? uint64_t{1} << rank : 0, block_.named);
  }
  // Lane k: where the expert of entry k lives, -1 for none.
  __device__ int rank_of_entry(int token) const {
    if (lane_id() >= num_experts_per_tok_) return -1;
    const WindowShape& shape = p_.op.layout.shape;
    const int expert = p_.topk_idx[int64_t{token} * num_experts_per_tok_ + lane_id()];
    return expert >= 0 && expert < shape.num_experts ? expert / shape.experts_per_rank() : -1;
  }
  __device__ static void write_mask(uint64_t mine, uint32_t (&mask)[2]) {
    const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mine));
    const uint32_t high = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mine >> 32));
    if (lane_id() == 0) {
      mask[0] = low;
      mask[1] = high;
    }
  }
  __device__ static uint64_t read_mask(const uint32_t (&mask)[2]) {
    return static_cast<uint64_t>(mask[1]) << 32 | mask[0];
  }

  // ---- Sending.

  __device__ void send(int item) const {
    if (is_first_part(item) && warp_id() == 0) send_side_data(token_of(item));
    if (has_column(item)) send_column(item);
  }

  // One warp: the flags of sums that do not come, and scalars.
  __device__ void send_side_data(int token) const {
    const uint64_t present = read_mask(block_.present);
    for (int r = lane_id(); r < ctx_.num_ranks(); r += kWarp) {
      if (r == ctx_.rank() || (present >> r & 1) != 0) continue;
      Transport::signal(ctx_, r, flag_offset_of(ctx_.rank(), token),
                        arrival_flag(ctx_.epoch, false));
    }
    if (p_.row_scalars == nullptr || lane_id() >= num_experts_per_tok_) return;
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      if (r == ctx_.rank() || (present >> r & 1) == 0) continue;
      const int row = row_at(r, token, lane_id());
      const float scalar = row >= 0 ? p_.row_scalars[row] : 0.0f;
      char* to = Transport::window(ctx_, r, scalars_offset(ctx_.rank(), token));
      store_relaxed<kSystemScope>(reinterpret_cast<uint32_t*>(to) + lane_id(),
                                  without_sentinel(__float_as_uint(scalar)));
    }
  }

  __device__ void send_column(int item) const {
    const int end = block_.num_remote_rows;
    const int64_t offset = row_offset(ctx_.rank(), token_of(item)) + int64_t{column_of(item)} * 16;
    float sum[Vector::kElements] = {};
    for (int first = 0; first < end; first += kAtOnce) {
      LlCombineRow row[kAtOnce];
      uint4 v[kAtOnce];
      float weight[kAtOnce];
      load_rows(item, first, end, row, v, weight);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= end) continue;
        Vector::add_weighted(sum, v[i], weight[i]);
        const bool more = first + i + 1 < end && list_[first + i + 1].source == row[i].source;
        if (more) continue;
        store_words(Transport::window(ctx_, row[i].source, offset),
                    without_sentinel(Vector::pack(sum)));
#pragma unroll
        for (int e = 0; e < Vector::kElements; ++e) sum[e] = 0.0f;
      }
    }
  }

  __device__ void load_rows(int item, int first, int end, LlCombineRow (&row)[kAtOnce],
                            uint4 (&v)[kAtOnce], float (&weight)[kAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= end) continue;
      row[i] = list_[first + i];
      v[i] = load_constant(y_column(row[i].row, item));
      weight[i] = weight_of(row[i].row);
    }
  }

  // ---- Receiving.

  __device__ void receive(int item) const {
    if (p_.scalars != nullptr && is_first_part(item) && warp_id() == 0) {
      receive_scalars(token_of(item));
    }
    __syncwarp();
    if (has_column(item)) receive_column(item);
  }

  __device__ void receive_column(int item) const {
    const int token = token_of(item);
    const int64_t column = int64_t{column_of(item)} * 16;
    const int own_begin = block_.num_remote_rows;
    const int own_end = block_.num_rows;
    // Our own rows are loaded while the others' sums are on their way.
    LlCombineRow row[kAtOnce];
    uint4 own[kAtOnce];
    float weight[kAtOnce];
    load_rows(item, own_begin, own_end, row, own, weight);
    float sum[Vector::kElements] = {};
    uint64_t left = read_mask(block_.named) | uint64_t{1} << ctx_.rank();
    while (left != 0) {
      int peer[kPeersAtOnce];
      uint4 v[kPeersAtOnce];
#pragma unroll
      for (int i = 0; i < kPeersAtOnce; ++i) {
        peer[i] = left != 0 ? __ffsll(static_cast<long long>(left)) - 1 : -1;
        left &= left - 1;
        if (peer[i] < 0 || peer[i] == ctx_.rank()) continue;
        v[i] = load_words(ctx_.own_window(row_offset(peer[i], token) + column));
      }
#pragma unroll
      for (int i = 0; i < kPeersAtOnce; ++i) {
        if (peer[i] < 0) continue;
        if (peer[i] == ctx_.rank()) {
          add_own(item, own_begin, own_end, own, weight, sum);
        } else if (wait_for_sum(peer[i], token, column, &v[i])) {
          Vector::add_weighted(sum, v[i], 1.0f);
        }
      }
    }
    auto* to = reinterpret_cast<uint4*>(p_.out + token * p_.op.layout.shape.row_bytes);
    store_streaming(to + column_of(item), Vector::pack(sum));
  }

  // Our own rows at our place among the ranks, unrounded.
  __device__ void add_own(int item, int begin, int end, const uint4 (&own)[kAtOnce],
                          const float (&weight)[kAtOnce], float (&sum)[Vector::kElements]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i < end) Vector::add_weighted(sum, own[i], weight[i]);
    }
    for (int first = begin + kAtOnce; first < end; first += kAtOnce) {
      LlCombineRow row[kAtOnce];
      uint4 v[kAtOnce];
      float weights[kAtOnce];
      load_rows(item, first, end, row, v, weights);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < end) Vector::add_weighted(sum, v[i], weights[i]);
      }
    }
  }

  // False when the peer sends none, because it has dropped all rows of the token, or when the
  // operation is aborted. Puts the sentinels back.
  __device__ bool wait_for_sum(int peer, int token, int64_t column, uint4* v) const {
    char* at = ctx_.own_window(row_offset(peer, token) + column);
    const auto* flag =
        reinterpret_cast<const uint32_t*>(ctx_.own_window(flag_offset_of(peer, token)));
    BoundedWait bound;
    while (!has_arrived(*v)) {
      const uint32_t seen = load_relaxed<kSystemScope>(flag);
      *v = load_words(at);
      if (read_arrival(seen, ctx_.epoch) == Arrival::kAbsent) return false;
      if (bound.over(ctx_, WaitFor::kRow, peer, ctx_.epoch, 0, v->x)) return false;
    }
    restore_sentinels(at);
    return true;
  }

  // One warp: all K scalars of every sum that comes, of which each lane keeps its own.
  __device__ void receive_scalars(int token) const {
    if (lane_id() >= num_experts_per_tok_) return;
    const int mine = rank_of_entry(token);
    float scalar = 0.0f;
    if (mine == ctx_.rank()) {
      const int row = row_at(ctx_.rank(), token, lane_id());
      if (row >= 0) scalar = p_.row_scalars[row];
    }
    const uint64_t named = read_mask(block_.named);
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      if (r == ctx_.rank() || (named >> r & 1) == 0) continue;
      uint32_t word;
      if (wait_for_scalar(r, token, &word) && mine == r) scalar = __uint_as_float(word);
    }
    p_.scalars[int64_t{token} * num_experts_per_tok_ + lane_id()] = scalar;
  }
  __device__ bool wait_for_scalar(int peer, int token, uint32_t* word) const {
    auto* at =
        reinterpret_cast<uint32_t*>(ctx_.own_window(scalars_offset(peer, token))) + lane_id();
    const auto* flag =
        reinterpret_cast<const uint32_t*>(ctx_.own_window(flag_offset_of(peer, token)));
    BoundedWait bound;
    while ((*word = load_relaxed<kSystemScope>(at)) == kSentinel) {
      if (read_arrival(load_relaxed<kSystemScope>(flag), ctx_.epoch) == Arrival::kAbsent)
        return false;
      if (bound.over(ctx_, WaitFor::kRow, peer, ctx_.epoch, 0, *word)) return false;
    }
    store_relaxed<kSystemScope>(at, kSentinel);
    return true;
  }

  const OpContext& ctx_;
  const LlCombineParams& p_;
  LlCombineItem& block_;
  const int num_experts_per_tok_;
  const int num_items_;
  LlCombineRow* const list_;
};

// All threads of one block: what the outputs of an aborted operation hold.
__device__ inline void spoil_ll_combine(const LlCombineParams& p) {
  if (!p.turn.receive) return;
  const WindowShape& shape = p.op.layout.shape;
  fill_nan(p.out, p.op.num_tokens * shape.row_bytes, p.row_type);
  if (p.scalars != nullptr) {
    fill_nan(reinterpret_cast<char*>(p.scalars),
             int64_t{4} * p.op.num_tokens * shape.num_experts_per_tok, RowType::kFloat32);
  }
  for (int r = threadIdx.x; p.waited_ns != nullptr && r < shape.num_ranks; r += blockDim.x) {
    p.waited_ns[r] = p.waited_ns_before[r];
  }
}

}  // namespace jax_ep::gpu
