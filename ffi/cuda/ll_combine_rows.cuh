// The two halves of low-latency combine. A block takes items of (token, part of its columns): the
// token's rows here are summed and sent to every source that has a token of this number, then our
// own rows and the sums that arrive for our own token of this number are added up.
#pragma once

#include "cuda/ll_puts.cuh"
#include "cuda/ll_rows.cuh"
#include "cuda/messages.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// What a block knows of its item, in shared memory.
struct LlCombineBlock {
  LlRows::State rows;
  uint32_t named[2];  // ranks with experts of our token, a bit each
};

template <class Transport, RowType kType, int kUnits>
class LlCombine {
 public:
  __device__ LlCombine(const LlContext& ctx, const LlCombineParams& p, char* shared,
                       LlCombineBlock& block)
      : ctx_(ctx), p_(p), block_(block), rows_(ctx, p, shared, block.rows) {}

  // All threads, before the operation begins: the first item's rows, which depend on neither epoch
  // nor peers. A block barrier must follow.
  __device__ void prepare() {
    if (first_item() >= num_items()) return;
    take(p_.turn.send ? first_item() : last_item(), p_.turn.send);
  }
  // All threads, if run() is not called: no copy may be on its way when the block ends.
  __device__ void settle() const {
    if (first_item() >= num_items()) return;
    rows_.wait(brought_);
  }

  // All threads, once the operation has begun: sends all items of the block, then receives them,
  // the last one first, whose rows are still listed. (One loop: code that is not there twice does
  // not have to be fetched twice.)
  __device__ void run() {
    const bool idle = first_item() >= num_items();
    const int step = static_cast<int>(gridDim.x);
    bool sending = p_.turn.send;
    int item = sending || idle ? first_item() : last_item();
    if (!sending) meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
#pragma unroll 1
    while (true) {
      if (!idle) sending ? send() : receive();
      if (sending && is_last(item)) {
        if (!p_.turn.receive) return;
        sending = false;
        __syncthreads();  // everybody has used the remote rows
        ++brought_;
        if (!idle) rows_.bring_own(item_);
        meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
        continue;
      }
      item += sending ? step : -step;
      if (idle || item < 0) return;
      __syncthreads();  // everybody has used the last item's rows
      ++brought_;
      take(item, sending);
      __syncthreads();
    }
  }

 private:
  using Sums = LlSums<kType, kUnits>;
  // A sum stays away only where all rows of its token were dropped. The flags that say so lie close
  // together: looked at each time, they would be where all threads of the device meet.
  static constexpr int kLooksPerFlag = 16;

  __device__ int num_experts_per_tok() const { return p_.op.layout.shape.num_experts_per_tok; }
  __device__ int num_items() const { return p_.plan.grid.num_items(p_.op.num_tokens); }
  __device__ int first_item() const { return static_cast<int>(blockIdx.x); }
  __device__ bool is_last(int item) const {
    return item + static_cast<int>(gridDim.x) >= num_items();
  }
  __device__ int last_item() const {
    const int step = static_cast<int>(gridDim.x);
    return first_item() + (num_items() - 1 - first_item()) / step * step;
  }
  __device__ int64_t slot_offset(int peer) const {
    return p_.op.layout.combine_row(parity_of(ctx_.epoch), peer, item_.token);
  }
  __device__ int64_t flag_offset_of(int peer) const {
    return p_.op.layout.combine_flag(parity_of(ctx_.epoch), peer, item_.token);
  }
  __device__ const uint32_t* flag_of(int peer) const {
    return reinterpret_cast<const uint32_t*>(ctx_.own_window(flag_offset_of(peer)));
  }
  __device__ bool is_absent(int peer) const {
    const uint32_t seen = load_relaxed<kSystemScope>(flag_of(peer));
    return read_arrival(seen, ctx_.epoch) == Arrival::kAbsent;
  }
  __device__ int64_t scalars_offset(int peer) const {
    return p_.op.layout.combine_scalars(parity_of(ctx_.epoch), peer, item_.token);
  }

  // ---- The item, and its rows.

  // All threads; a block barrier must follow.
  __device__ void take(int item, bool sends) {
    item_ = LlItem::of(p_.plan.grid, item);
    const bool receives = p_.turn.receive && (!sends || is_last(item));
    rows_.find(item_, {/*remote=*/sends, /*own=*/receives}, brought_ == 0);
    if (warp_id() == 1) name_ranks();
  }

  __device__ void name_ranks() {
    const int rank = rank_of_entry();
    write_mask(rank >= 0 ? uint64_t{1} << rank : 0, block_.named);
  }
  // Lane k: where the expert of entry k lives, -1 for none.
  __device__ int rank_of_entry() const {
    if (lane_id() >= num_experts_per_tok()) return -1;
    const WindowShape& shape = p_.op.layout.shape;
    const int expert = p_.topk_idx[item_.token * num_experts_per_tok() + lane_id()];
    const bool valid = expert >= 0 && expert < shape.num_experts;
    return valid ? p_.plan.by_experts_per_rank.quotient(expert) : -1;
  }
  __device__ static void write_mask(uint64_t mine, uint32_t (&mask)[2]) {
    const uint64_t all = any_lane(mine);
    if (lane_id() == 0) {
      mask[0] = static_cast<uint32_t>(all);
      mask[1] = static_cast<uint32_t>(all >> 32);
    }
  }
  __device__ static uint64_t read_mask(const uint32_t (&mask)[2]) {
    return static_cast<uint64_t>(mask[1]) << 32 | mask[0];
  }

  // ---- Sending.

  // Columns first: their warps would be late by what else there is to send, and the item with them.
  __device__ void send() const {
    if (item_.has(0)) send_columns();
    __syncwarp();
    if (item_.first_part() && warp_id() == 0) send_flags();
    if (item_.first_part() && warp_id() == 1 && p_.row_scalars != nullptr) send_scalars();
    put_sums();
  }

  // One warp: of the sums that do not come.
  __device__ void send_flags() const {
    const uint64_t sources = rows_.remote_sources();
#pragma unroll 1
    for (int r = lane_id(); r < ctx_.num_ranks(); r += kWarp) {
      if (r == ctx_.rank() || (sources >> r & 1) != 0) continue;
      Transport::signal(ctx_, r, flag_offset_of(ctx_.rank()), arrival_flag(ctx_.epoch, false));
    }
  }

  __device__ void send_scalars() const {
    const uint64_t sources = rows_.remote_sources();
    if (lane_id() >= num_experts_per_tok()) return;
#pragma unroll 1
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      if ((sources >> r & 1) == 0) continue;
      const int row = rows_.row_at(item_, r, lane_id());
      const float scalar = row >= 0 ? p_.row_scalars[row] : 0.0f;
      Transport::send_word(ctx_, r, scalars_offset(ctx_.rank()), lane_id(),
                           without_sentinel(__float_as_uint(scalar)));
    }
  }

  __device__ void send_columns() const {
    const int64_t slot = slot_offset(ctx_.rank());
    const int num_groups = rows_.num_remote_groups();
    rows_.wait(brought_);
    int begin = 0;
#pragma unroll 1
    for (int g = 0; g < num_groups; ++g) {
      const LlRowGroup group = rows_.group(g);
      Sums sums = {};
      rows_.add(item_, 0, begin, group.end, &sums);
      begin = group.end;
      store_columns(Transport::window(ctx_, group.source, slot), item_,
                    without_sentinel(sums.rounded()));
    }
  }

  // All threads: what lies in the send region.
  __device__ void put_sums() const {
    if constexpr (Transport::kPuts) {
      put_to_remote<Transport>(ctx_, rows_.remote_sources(), [&](int rank) {
        const int64_t slot = slot_offset(ctx_.rank());
        Transport::put(ctx_, rank, slot + item_.begin() * 16, item_.size() * 16);
      });
    }
  }

  // ---- Receiving.

  __device__ void receive() const {
    if (p_.scalars != nullptr && item_.first_part() && warp_id() == 0) receive_scalars();
    __syncwarp();
    if (item_.has(0)) receive_columns();
  }

  // Our own rows first, unrounded, while the others' sums are on their way; then those, in the
  // order of ranks.
  __device__ void receive_columns() const {
    uint64_t left = read_mask(block_.named) & ~(uint64_t{1} << ctx_.rank());
    // The next sum is looked at before this one is waited for.
    LlColumns<kUnits> next = look(left);
    Sums sums = {};
    rows_.wait(brought_);
    rows_.add(item_, rows_.num_remote(), rows_.num_remote(), rows_.num_all(), &sums);
#pragma unroll 1
    while (left != 0) {
      const int peer = __ffsll(static_cast<long long>(left)) - 1;
      left &= left - 1;
      LlColumns<kUnits> columns = next;
      next = look(left);
      if (wait_for_sum(peer, &columns)) sums.add(columns, 1.0f);
    }
    char* out = p_.out + wide_product(item_.token, p_.plan.row_bytes);
    stream_columns(out, item_, sums.rounded());
  }

  // What the first of `ranks` sends, whether it has come or not.
  __device__ LlColumns<kUnits> look(uint64_t ranks) const {
    if (ranks == 0) return {};
    const int peer = __ffsll(static_cast<long long>(ranks)) - 1;
    return look_at_columns<kUnits>(ctx_.own_window(slot_offset(peer)), item_);
  }

  // False when the peer sends none, because it has dropped all rows of the token, or when the
  // operation is aborted. Puts the sentinels back.
  __device__ bool wait_for_sum(int peer, LlColumns<kUnits>* columns) const {
    char* slot = ctx_.own_window(slot_offset(peer));
    LlWait bound;
    int looks = 0;
    while (!has_arrived(*columns)) {
      *columns = look_at_columns<kUnits>(slot, item_);
      if (++looks % kLooksPerFlag == 0 && is_absent(peer)) return false;
      if (bound.over(ctx_, WaitFor::kRow, peer, columns->v[0].x)) return false;
    }
    restore_sentinels<kUnits>(slot, item_);
    return true;
  }

  // One warp: all K scalars of every sum that comes, of which each lane keeps its own.
  __device__ void receive_scalars() const {
    if (lane_id() >= num_experts_per_tok()) return;
    const int mine = rank_of_entry();
    float scalar = 0.0f;
    if (mine == ctx_.rank()) {
      const int row = rows_.row_at(item_, ctx_.rank(), lane_id());
      if (row >= 0) scalar = p_.row_scalars[row];
    }
    const uint64_t named = read_mask(block_.named);
#pragma unroll 1
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      if (r == ctx_.rank() || (named >> r & 1) == 0) continue;
      uint32_t word;
      if (wait_for_scalar(r, &word) && mine == r) scalar = __uint_as_float(word);
    }
    p_.scalars[item_.token * num_experts_per_tok() + lane_id()] = scalar;
  }
  __device__ bool wait_for_scalar(int peer, uint32_t* word) const {
    auto* at = reinterpret_cast<uint32_t*>(ctx_.own_window(scalars_offset(peer))) + lane_id();
    LlWait bound;
    while ((*word = load_relaxed<kSystemScope>(at)) == kSentinel) {
      if (is_absent(peer)) return false;
      if (bound.over(ctx_, WaitFor::kRow, peer, *word)) return false;
    }
    store_relaxed<kSystemScope>(at, kSentinel);
    return true;
  }

  const LlContext& ctx_;
  const LlCombineParams& p_;
  LlCombineBlock& block_;
  LlRows rows_;
  LlItem item_;
  uint32_t brought_ = 0;  // how often rows were brought before those that are used now
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
