// The two halves of low-latency combine. A block takes items of (token, part of its columns): the
// token's rows here are summed and sent to every source that has a token of this number, then the
// sums for our own token of this number are received and added up.
#pragma once

#include "cuda/ll_combine.h"
#include "cuda/ll_payload.cuh"
#include "cuda/ll_puts.cuh"
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
  __device__ LlCombine(const LlContext& ctx, const LlCombineParams& p, char* shared,
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
    if (first_item() >= num_items_) return;
    take(p_.turn.send ? first_item() : last_item());
    list_rows();
  }

  // All threads, once the operation has begun: sends all items of the block, then receives them,
  // the last one first, whose rows are still listed. (One loop: code that is not there twice does
  // not have to be fetched twice.)
  __device__ void run() {
    const bool idle = first_item() >= num_items_;
    const int step = static_cast<int>(gridDim.x);
    const int last = idle ? first_item() : last_item();
    int item = p_.turn.send ? first_item() : last;
    bool sending = p_.turn.send;
#pragma unroll 1
    while (true) {
      if (!sending && item == last) meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
      if (!idle) sending ? send() : receive();
      if (sending && item == last) {
        sending = false;
        if (!p_.turn.receive) return;
        continue;
      }
      item += sending ? step : -step;
      if (idle || item < 0) return;
      take(item);
      __syncthreads();  // everybody has used the last item's rows
      list_rows();
      __syncthreads();
    }
  }

 private:
  using Vector = RowVector<kType>;
  static constexpr int kAtOnce = 4;  // rows of ours in flight

  __device__ int first_item() const { return static_cast<int>(blockIdx.x); }
  __device__ int last_item() const {
    const int step = static_cast<int>(gridDim.x);
    return first_item() + (num_items_ - 1 - first_item()) / step * step;
  }
  __device__ const uint4* y_column(int row) const {
    const char* at = p_.y + int64_t{row} * p_.op.layout.shape.row_bytes;
    return reinterpret_cast<const uint4*>(at) + item_.column;
  }
  __device__ float weight_of(int row) const {
    return p_.row_weights != nullptr ? p_.row_weights[row] : 1.0f;
  }
  __device__ int row_at(int source, int k) const {
    const int64_t message = int64_t{source} * p_.op.num_tokens + item_.token;
    const int row = p_.recv_rows[message * num_experts_per_tok_ + k];
    return row >= 0 && row < p_.capacity ? row : -1;
  }
  __device__ char* own_row(int peer) const {
    return ctx_.own_window(p_.op.layout.combine_row(parity_of(ctx_.epoch), peer, item_.token)) +
           int64_t{item_.column} * 16;
  }
  __device__ int64_t flag_offset_of(int peer) const {
    return p_.op.layout.combine_flag(parity_of(ctx_.epoch), peer, item_.token);
  }
  __device__ const uint32_t* flag_of(int peer) const {
    return reinterpret_cast<const uint32_t*>(ctx_.own_window(flag_offset_of(peer)));
  }
  __device__ int64_t scalars_offset(int peer) const {
    return p_.op.layout.combine_scalars(parity_of(ctx_.epoch), peer, item_.token);
  }

  // ---- The item, and its rows.

  __device__ void take(int item) { item_ = LlItem::of(p_.plan.grid, item); }
  // Two warps; a block barrier must follow.
  __device__ void list_rows() {
    if (warp_id() == 0) list_rows_of_token();
    if (warp_id() == 1) name_ranks();
  }

  __device__ void list_rows_of_token() {
    const int entries = ctx_.num_ranks() * num_experts_per_tok_;
    const int remote = entries - num_experts_per_tok_;
    int count = 0;
    int remote_count = 0;
    uint64_t present = 0;
#pragma unroll 1
    for (int first = 0; first < entries; first += kWarp) {
      const int entry = first + lane_id();
      const int turn = p_.plan.by_experts_per_tok.quotient(entry);
      int source = ctx_.rank() + 1 + turn;
      if (source >= ctx_.num_ranks()) source -= ctx_.num_ranks();
      LlCombineRow found{-1, source};
      if (entry < entries) found.row = row_at(source, entry - turn * num_experts_per_tok_);
      const unsigned all = __ballot_sync(kFullWarp, found.row >= 0);
      remote_count += __popc(__ballot_sync(kFullWarp, found.row >= 0 && entry < remote));
      if (found.row >= 0) {
        list_[count + __popc(all & lanes_below())] = found;
        present |= uint64_t{1} << source;
      }
      count += __popc(all);
    }
    write_mask(present, block_.present);
    if (lane_id() == 0) {
      block_.num_rows = count;
      block_.num_remote_rows = remote_count;
    }
  }

  __device__ void name_ranks() {
    const int rank = rank_of_entry();
    write_mask(rank >= 0 ? uint64_t{1} << rank : 0, block_.named);
  }
  // Lane k: where the expert of entry k lives, -1 for none.
  __device__ int rank_of_entry() const {
    if (lane_id() >= num_experts_per_tok_) return -1;
    const WindowShape& shape = p_.op.layout.shape;
    const int expert = p_.topk_idx[int64_t{item_.token} * num_experts_per_tok_ + lane_id()];
    const bool valid = expert >= 0 && expert < shape.num_experts;
    return valid ? p_.plan.by_experts_per_rank.quotient(expert) : -1;
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

  __device__ void send() const {
    if (item_.first_part && warp_id() == 0) send_flags();
    if (item_.first_part && warp_id() == 1 && p_.row_scalars != nullptr) send_scalars();
    if (item_.has_column) send_column();
    put_sums();
  }

  // One warp: of the sums that do not come.
  __device__ void send_flags() const {
    const uint64_t present = read_mask(block_.present);
#pragma unroll 1
    for (int r = lane_id(); r < ctx_.num_ranks(); r += kWarp) {
      if (r == ctx_.rank() || (present >> r & 1) != 0) continue;
      Transport::signal(ctx_, r, flag_offset_of(ctx_.rank()), arrival_flag(ctx_.epoch, false));
    }
  }

  __device__ void send_scalars() const {
    if (lane_id() >= num_experts_per_tok_) return;
    const uint64_t present = read_mask(block_.present);
#pragma unroll 1
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      if (r == ctx_.rank() || (present >> r & 1) == 0) continue;
      const int row = row_at(r, lane_id());
      const float scalar = row >= 0 ? p_.row_scalars[row] : 0.0f;
      Transport::send_word(ctx_, r, scalars_offset(ctx_.rank()), lane_id(),
                           without_sentinel(__float_as_uint(scalar)));
    }
  }

  __device__ void send_column() const {
    const int end = block_.num_remote_rows;
    const int64_t offset = own_row(ctx_.rank()) - ctx_.own_window(0);
    float sum[Vector::kElements] = {};
#pragma unroll 1
    for (int first = 0; first < end; first += kAtOnce) {
      uint4 v[kAtOnce];
      float weight[kAtOnce];
      load_rows(first, end, v, weight);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= end) break;
        Vector::add_weighted(sum, v[i], weight[i]);
        const int source = list_[first + i].source;
        if (first + i + 1 < end && list_[first + i + 1].source == source) continue;
        store_words(Transport::window(ctx_, source, offset), without_sentinel(Vector::pack(sum)));
#pragma unroll
        for (int e = 0; e < Vector::kElements; ++e) sum[e] = 0.0f;
      }
    }
  }

  // All threads: what lies in the send region.
  __device__ void put_sums() const {
    const uint64_t ranks = read_mask(block_.present) & ~(uint64_t{1} << ctx_.rank());
    put_to_remote<Transport>(ctx_, ranks, [&](int rank) {
      const int64_t row = p_.op.layout.combine_row(parity_of(ctx_.epoch), ctx_.rank(), item_.token);
      Transport::put(ctx_, rank, row + int64_t{item_.part_begin} * 16,
                     int64_t{item_.part_end - item_.part_begin} * 16);
    });
  }

  __device__ void load_rows(int first, int end, uint4 (&v)[kAtOnce],
                            float (&weight)[kAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= end) break;
      const int row = list_[first + i].row;
      v[i] = load_constant(y_column(row));
      weight[i] = weight_of(row);
    }
  }

  // ---- Receiving.

  __device__ void receive() const {
    if (p_.scalars != nullptr && item_.first_part && warp_id() == 0) receive_scalars();
    __syncwarp();
    if (item_.has_column) receive_column();
  }

  __device__ void receive_column() const {
    const int own_begin = block_.num_remote_rows;
    const int own_end = block_.num_rows;
    // Our own rows are loaded while the others' sums are on their way, and of these the next one
    // is looked at before this one is waited for.
    uint4 own[kAtOnce];
    float weight[kAtOnce];
    load_rows(own_begin, own_end, own, weight);
    float sum[Vector::kElements] = {};
    uint64_t left = read_mask(block_.named) | uint64_t{1} << ctx_.rank();
    uint4 next = look(left);
#pragma unroll 1
    while (left != 0) {
      const int peer = __ffsll(static_cast<long long>(left)) - 1;
      left &= left - 1;
      uint4 v = next;
      if (left != 0) next = look(left);
      if (peer == ctx_.rank()) {
        add_own(own_begin, own_end, own, weight, sum);
      } else if (wait_for_sum(peer, &v)) {
        Vector::add_weighted(sum, v, 1.0f);
      }
    }
    auto* to = reinterpret_cast<uint4*>(p_.out + item_.token * p_.op.layout.shape.row_bytes);
    store_streaming(to + item_.column, Vector::pack(sum));
  }

  // The words of the first of `ranks`, whether they have come or not.
  __device__ uint4 look(uint64_t ranks) const {
    const int peer = __ffsll(static_cast<long long>(ranks)) - 1;
    return peer == ctx_.rank() ? make_uint4(0, 0, 0, 0) : load_words(own_row(peer));
  }

  // Our own rows at our place among the ranks, unrounded.
  __device__ void add_own(int begin, int end, uint4 (&own)[kAtOnce], float (&weight)[kAtOnce],
                          float (&sum)[Vector::kElements]) const {
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i < end) Vector::add_weighted(sum, own[i], weight[i]);
      }
      begin += kAtOnce;
      if (begin >= end) return;
      load_rows(begin, end, own, weight);
    }
  }

  // False when the peer sends none, because it has dropped all rows of the token, or when the
  // operation is aborted. Puts the sentinels back.
  __device__ bool wait_for_sum(int peer, uint4* v) const {
    char* at = own_row(peer);
    LlWait bound;
    while (!has_arrived(*v)) {
      const uint32_t seen = load_relaxed<kSystemScope>(flag_of(peer));
      *v = load_words(at);
      if (read_arrival(seen, ctx_.epoch) == Arrival::kAbsent) return false;
      if (bound.over(ctx_, WaitFor::kRow, peer, v->x)) return false;
    }
    restore_sentinels(at);
    return true;
  }

  // One warp: all K scalars of every sum that comes, of which each lane keeps its own.
  __device__ void receive_scalars() const {
    if (lane_id() >= num_experts_per_tok_) return;
    const int mine = rank_of_entry();
    float scalar = 0.0f;
    if (mine == ctx_.rank()) {
      const int row = row_at(ctx_.rank(), lane_id());
      if (row >= 0) scalar = p_.row_scalars[row];
    }
    const uint64_t named = read_mask(block_.named);
#pragma unroll 1
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      if (r == ctx_.rank() || (named >> r & 1) == 0) continue;
      uint32_t word;
      if (wait_for_scalar(r, &word) && mine == r) scalar = __uint_as_float(word);
    }
    p_.scalars[int64_t{item_.token} * num_experts_per_tok_ + lane_id()] = scalar;
  }
  __device__ bool wait_for_scalar(int peer, uint32_t* word) const {
    auto* at = reinterpret_cast<uint32_t*>(ctx_.own_window(scalars_offset(peer))) + lane_id();
    LlWait bound;
    while ((*word = load_relaxed<kSystemScope>(at)) == kSentinel) {
      const uint32_t seen = load_relaxed<kSystemScope>(flag_of(peer));
      if (read_arrival(seen, ctx_.epoch) == Arrival::kAbsent) return false;
      if (bound.over(ctx_, WaitFor::kRow, peer, *word)) return false;
    }
    store_relaxed<kSystemScope>(at, kSentinel);
    return true;
  }

  const LlContext& ctx_;
  const LlCombineParams& p_;
  LlCombineItem& block_;
  const int num_experts_per_tok_;
  const int num_items_;
  LlCombineRow* const list_;
  LlItem item_;
};

// All threads of one block: what the outputs of an aborted operation hold.
__device__ __noinline__ inline void spoil_ll_combine(const LlCombineParams& p) {
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
