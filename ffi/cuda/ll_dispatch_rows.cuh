// The two halves of low-latency dispatch. A block takes items of (token, part of its columns): it
// sends all of its own before it waits for any, and receives the same token from every source.
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
  uint32_t senders[2][2];    // sources that send us the item's token, a bit each
};

__device__ inline uint64_t ranks_in(const uint32_t (&halves)[2]) {
  return static_cast<uint64_t>(halves[1]) << 32 | halves[0];
}

template <class Transport, class Wire>
class LlDispatch {
 public:
  __device__ LlDispatch(const OpContext& ctx, const LlDispatchParams& p, char* shared,
                        LlDispatchBlock& block)
      : ctx_(ctx),
        p_(p),
        block_(block),
        num_experts_per_tok_(p.op.layout.shape.num_experts_per_tok),
        num_items_(p.plan.grid.num_items(p.op.num_tokens)),
        rows_(reinterpret_cast<int32_t*>(shared + p.plan.rows_offset)),
        router_(ctx, p, shared) {}

  // All threads, before the operation begins: loads that need neither epoch nor peers, and the
  // block's shared memory. A block barrier must follow.
  __device__ void prepare() {
    if (threadIdx.x < 4) block_.senders[threadIdx.x / 2][threadIdx.x % 2] = 0;
    if (!p_.turn.send) return;
    load_entries(first_item());
    load(first_item());
    router_.prepare();
  }

  // All threads.
  template <class Places>
  __device__ void run(Places places, const LlCounters& counters) {
    int item = first_item();
    bool sending = p_.turn.send;
    if (sending) sending = send(&item);
    check_in(p_.op, p_.turn, counters);
    if (p_.turn.send && !sending) return;
    if (p_.turn.send && speaks_for_rank() && routes_in_shared(p_)) report_all_faults(p_);
    if (!p_.turn.receive) return;
    meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
    if (!places.prepare()) return;
    if (num_items_ > first_item()) receive(places, item);
    places.finish();
  }

 private:
  __device__ int first_item() const { return static_cast<int>(blockIdx.x); }
  __device__ int token_of(int item) const { return item / p_.plan.grid.num_parts; }
  __device__ bool is_first_part(int item) const { return item % p_.plan.grid.num_parts == 0; }
  __device__ int column_of(int item) const {
    return item % p_.plan.grid.num_parts * p_.plan.grid.part_columns +
           static_cast<int>(threadIdx.x);
  }
  __device__ bool has_column(int item) const {
    return item < num_items_ && static_cast<int>(threadIdx.x) < p_.plan.grid.part_columns &&
           column_of(item) < p_.plan.grid.num_columns;
  }

  __device__ void load(int item) {
    loaded_ = has_column(item) ? Wire::load(p_, token_of(item), column_of(item)) : Wire::nothing();
  }
  // Lane k of the first warp: entry k of the item's token.
  __device__ void load_entries(int item) {
    expert_ = -1;
    if (warp_id() != 0 || lane_id() >= num_experts_per_tok_ || item >= num_items_) return;
    const int64_t entry = int64_t{token_of(item)} * num_experts_per_tok_ + lane_id();
    expert_ = p_.topk_idx[entry];
    weight_ = p_.topk_weights[entry];
  }

  // ---- Sending.

  // Leaves the last item in *item, and its column in value_. False when the operation is aborted.
  __device__ bool send(int* item) {
    if (!router_.template run<Transport>()) return false;
    while (true) {
      value_ = Wire::encode(p_, loaded_);
      if (*item < num_items_) {
        if (warp_id() == 0) send_records(*item);
        __syncthreads();
        send_column(*item);
      }
      const int next = *item + static_cast<int>(gridDim.x);
      if (next >= num_items_) return true;
      *item = next;
      load(next);
      load_entries(next);
      __syncthreads();  // everybody has read the destinations
    }
  }

  // One warp. Every rank learns of every token, also when nothing of it comes.
  __device__ void send_records(int item) {
    RouteFault fault;
    const int expert = sanitise_in_warp(expert_, 0, p_.op.layout.shape.num_experts, &fault);
    const bool active = lane_id() < num_experts_per_tok_;
    const int token = token_of(item);
    const SendRoute route = active ? router_.route_of(token, expert) : SendRoute{-1, kNoRoute};
    const uint64_t destinations = destinations_of(ctx_, route.rank).ranks;
    if (lane_id() < 2) {
      block_.destinations[lane_id()] = static_cast<uint32_t>(destinations >> (32 * lane_id()));
    }
    if (!active || !is_first_part(item)) return;
    p_.sanitised_idx[int64_t{token} * num_experts_per_tok_ + lane_id()] = expert;
    const int64_t offset = p_.op.layout.route_records(parity_of(ctx_.epoch), ctx_.rank(), token) +
                           lane_id() * kRecordBytes;
    for (int r = 0; r < ctx_.num_ranks(); ++r) {
      store_record(Transport::window(ctx_, r, offset), ctx_.epoch,
                   r == route.rank ? route.route : kNoRoute, weight_);
    }
  }

  __device__ void send_column(int item) {
    if (!has_column(item)) return;
    const int64_t offset =
        p_.op.layout.dispatch_message(parity_of(ctx_.epoch), ctx_.rank(), token_of(item));
    // Each rank begins with the one after it, so that they do not all send to the same.
    const uint64_t all = ranks_in(block_.destinations);
    const uint64_t after = all & (~uint64_t{0} << ctx_.rank());
    send_to(after, offset, column_of(item));
    send_to(all ^ after, offset, column_of(item));
  }
  __device__ void send_to(uint64_t ranks, int64_t offset, int column) const {
    for (; ranks != 0; ranks &= ranks - 1) {
      const int rank = __ffsll(static_cast<long long>(ranks)) - 1;
      Wire::send(p_, Transport::window(ctx_, rank, offset), column, value_);
    }
  }

  // ---- Receiving.

  // From the last item sent, whose column this thread still has, down to the first.
  template <class Places>
  __device__ void receive(const Places& places, int item) {
    if (!p_.turn.send) {
      item += (num_items_ - 1 - item) / static_cast<int>(gridDim.x) * static_cast<int>(gridDim.x);
    }
    bool held = p_.turn.send;
    int set = 0;
    for (; item >= 0; item -= static_cast<int>(gridDim.x)) {
      if (!held) load(item);
      find_rows(places, item, block_.senders[set]);
      __syncthreads();
      if (!held) value_ = Wire::encode(p_, loaded_);
      held = false;
      const uint64_t senders = ranks_in(block_.senders[set]);
      set ^= 1;
      if (threadIdx.x < 2) block_.senders[set][threadIdx.x] = 0;
      if ((senders >> ctx_.rank() & 1) != 0) expand(item, ctx_.rank(), Wire::decode(p_, value_));
      receive_columns(item, senders & ~(uint64_t{1} << ctx_.rank()));
      __syncthreads();
    }
  }

  // Threads take an entry each: its output row, in rows_ [R, K], and who sends.
  template <class Places>
  __device__ void find_rows(const Places& places, int item, uint32_t (&senders)[2]) {
    const int token = token_of(item);
    const int entries = ctx_.num_ranks() * num_experts_per_tok_;
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      const int source = i / num_experts_per_tok_;
      const int k = i - source * num_experts_per_tok_;
      const int64_t offset =
          p_.op.layout.route_records(parity_of(ctx_.epoch), source, token) + k * kRecordBytes;
      const RouteRecord record = wait_for_record(ctx_, ctx_.own_window(offset), source);
      int row = -1;
      if (record.route != kNoRoute) {
        atomicOr(&senders[source / 32], 1u << (source % 32));
        row = places.row_of(record.route, source);
      }
      rows_[i] = row;
      if (!is_first_part(item)) continue;
      const int64_t message = int64_t{source} * p_.op.num_tokens + token;
      p_.recv_rows[message * num_experts_per_tok_ + k] = row;
      if (row >= 0) p_.weights[row] = record.weight;
    }
  }

  // All threads: the rows of one source's token get this thread's column.
  __device__ void expand(int item, int source, const typename Wire::Output& output) const {
    if (!has_column(item)) return;
    for (int k = 0; k < num_experts_per_tok_; ++k) {
      const int row = rows_[source * num_experts_per_tok_ + k];
      if (row >= 0) Wire::store(p_, row, column_of(item), output);
    }
  }

  // All threads. Several sources are looked at together, or each would cost a round trip.
  __device__ void receive_columns(int item, uint64_t senders) const {
    constexpr int kAtOnce = 2;
    const bool active = has_column(item);
    while (senders != 0) {
      int source[kAtOnce];
      typename Wire::Column value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        source[i] = senders != 0 ? __ffsll(static_cast<long long>(senders)) - 1 : -1;
        senders &= senders - 1;
        value[i] = typename Wire::Column{};
        if (active && source[i] >= 0)
          value[i] = Wire::look(p_, slot(source[i], item), column_of(item));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (source[i] < 0) continue;
        if (active) {
          Wire::wait(ctx_, p_, slot(source[i], item), column_of(item), source[i], &value[i]);
        }
        __syncwarp();
        expand(item, source[i], Wire::decode(p_, value[i]));
      }
    }
  }
  __device__ char* slot(int source, int item) const {
    return ctx_.own_window(
        p_.op.layout.dispatch_message(parity_of(ctx_.epoch), source, token_of(item)));
  }

  const OpContext& ctx_;
  const LlDispatchParams& p_;
  LlDispatchBlock& block_;
  const int num_experts_per_tok_;
  const int num_items_;
  int32_t* const rows_;
  LlRouter router_;
  typename Wire::Loaded loaded_;
  typename Wire::Column value_;
  int expert_ = -1;
  float weight_ = 0.0f;
};

// All threads of one block: what the outputs of an aborted operation hold.
__device__ inline void spoil_ll_dispatch(const LlDispatchParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const WindowShape& shape = p.op.layout.shape;
  const int64_t entries = int64_t{p.op.num_tokens} * shape.num_experts_per_tok;
  if (p.turn.send) fill(p.sanitised_idx, entries, -1, thread, threads);
  if (!p.turn.receive) return;
  if (p.output == LlOutput::kValues) {
    constexpr uint32_t kNans = 0x7F7F7F7Fu;
    fill(reinterpret_cast<uint32_t*>(p.tokens), p.capacity * p.output_row_bytes() / 4, kNans,
         thread, threads);
    fill_nan(reinterpret_cast<char*>(p.scales), p.capacity * num_scales(p.hidden()) * 4,
             RowType::kFloat32);
  } else {
    fill_nan(p.tokens, p.capacity * shape.row_bytes, p.row_type);
  }
  fill_nan(reinterpret_cast<char*>(p.weights), p.capacity * 4, RowType::kFloat32);
  fill(p.group_sizes, shape.experts_per_rank(), 0, thread, threads);
  fill(p.valid_sizes, shape.experts_per_rank(), 0, thread, threads);
  fill(p.num_dropped, 1, 0, thread, threads);
  fill(p.recv_rows, entries * shape.num_ranks, -1, thread, threads);
  for (int e = thread; p.expert_tokens != nullptr && e < shape.experts_per_rank(); e += threads) {
    p.expert_tokens[e] = p.expert_tokens_before[e];
  }
  for (int r = thread; p.waited_ns != nullptr && r < shape.num_ranks; r += threads) {
    p.waited_ns[r] = p.waited_ns_before[r];
  }
}

}  // namespace jax_ep::gpu
