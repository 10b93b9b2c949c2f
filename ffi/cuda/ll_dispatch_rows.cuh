// Low-latency dispatch in one launch, and its halves where they have no kernel of their own: on
// transports of puts, with more items than blocks, or without room in shared memory. A block takes
// items of (token, part of its columns): it sends its own and receives the same token from every
// source. Counts and records go before any wait. Where the links are the bottleneck, half the
// blocks send their payload after a wait for counts, which depend on no payload.
#pragma once

#include "cuda/ll_dispatch_item.cuh"
#include "cuda/ll_puts.cuh"

namespace jax_ep::gpu {

template <class Transport, class Wire, class Places>
class LlDispatch : public LlDispatchItem<Transport, Wire> {
  using Item = LlDispatchItem<Transport, Wire>;
  using Item::block_, Item::ctx_, Item::item_, Item::p_, Item::rows_, Item::value_;
  using Item::first_item, Item::has_entry, Item::idle, Item::num_experts_per_tok, Item::num_items;
  using Item::own_buffer, Item::record_of, Item::send_columns, Item::take;

 public:
  __device__ LlDispatch(const LlContext& ctx, const LlDispatchParams& p, char* shared,
                        LlDispatchBlock& block)
      : Item(ctx, p, shared, block), router_(ctx, p, shared), places_(ctx, p, shared) {}

  // All threads, before the operation begins: the first item's column, and what else needs neither
  // epoch nor peers. A block barrier must follow.
  __device__ void prepare() {
    const bool sends = p_.turn.send;
    const bool ready = !sends || routes_in_shared(p_);
    typename Wire::Loaded loaded = {};
    if (ready) {
      if (sends) {
        router_.ask();
        router_.clear();
      }
      take(sends ? first_item() : last_item());
      if (sends) load_entries();
      loaded = Wire::load(p_, item_);
    }
    if (threadIdx.x < 2) block_.senders[0][threadIdx.x] = 0;
    if (threadIdx.x == 0) block_.faulty = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < ctx_.num_ranks() * p_.plan.list_entries; i += blockDim.x) {
      rows_[i] = -1;
    }
    if (!ready) return;
    if (sends) {
      __syncthreads();
      router_.prepare();
      if (warp_id() == 0) Item::resolve_entries();
    }
    value_ = Wire::encode(p_, loaded);
  }

  // All threads.
  __device__ void run() {
    if (p_.turn.send && !send()) return;
    if (p_.turn.receive && !receive()) return;
    if (warp_id() == 0 && block_.faulty != 0) report_block_faults(p_, ctx_.epoch);
  }

 private:
  __device__ int last_item() const {
    const int step = static_cast<int>(gridDim.x);
    if (num_items() <= step) return first_item();
    return first_item() + (num_items() - 1 - first_item()) / step * step;
  }
  __device__ void load_entries() const {
    if (warp_id() != 0) return;
    __syncwarp();  // all have sent the last item's records
    if (!has_entry()) return;
    const int entry = item_.token * num_experts_per_tok() + lane_id();
    copy_async(&block_.expert[lane_id()], p_.topk_idx + entry);
    copy_async(&block_.weight[lane_id()], p_.topk_weights + entry);
  }

  // ---- Sending.

  // Leaves the last item's column in value_. False when the operation is aborted.
  __device__ bool send() {
    bool ready = routes_in_shared(p_);  // the item is prepared
    if (ready) {
      router_.template send_counts<Transport>();
    } else if (!route_in_device_memory<Transport>(ctx_, p_)) {
      return false;
    }
#pragma unroll 1
    for (int item = first_item(); item < num_items(); item += static_cast<int>(gridDim.x)) {
      if (!ready) {
        take(item);
        load_entries();
        const typename Wire::Loaded loaded = Wire::load(p_, item_);
        __syncthreads();  // everybody has read the destinations
        if (warp_id() == 0) Item::resolve_entries();
        value_ = Wire::encode(p_, loaded);
        __syncthreads();
      }
      ready = false;
      if (warp_id() == 0) Item::send_records(router_);
      if (!own_rows_first()) send_columns();
      put_item();
    }
    return true;
  }
  // The links are busy with what the other half of the blocks sends; until our turn comes we can
  // write our own rows. (Stores that wait for a link would hold up these, and all loads.)
  __device__ bool own_rows_first() const {
    return !Transport::kPuts && p_.plan.own_rows_first && p_.turn.send && p_.turn.receive &&
           blockIdx.x % 2 != 0;
  }

  __device__ uint64_t others() const {
    return (~uint64_t{0} >> (64 - ctx_.num_ranks())) & ~(uint64_t{1} << ctx_.rank());
  }
  // All threads: what lies in send regions, records first.
  __device__ void put_item() const {
    const WindowLayout& layout = p_.op.layout;
    const int parity = parity_of(ctx_.epoch);
    const uint64_t named = ranks_in(block_.destinations);
    put_to_remote<Transport>(ctx_, item_.first_part() ? others() : named, [&](int rank) {
      if (item_.first_part()) {
        Transport::put(ctx_, rank, layout.route_records(parity, ctx_.rank(), item_.token),
                       kRecordBytes * num_experts_per_tok());
      }
      if ((named >> rank & 1) == 0) return;
      Wire::template put<Transport>(
          ctx_, p_, rank, layout.dispatch_message(parity, ctx_.rank(), item_.token), item_);
    });
  }

  // ---- Receiving.

  // From the last item, whose column this thread has, down to the first. False when the operation
  // is aborted.
  __device__ bool receive() {
    meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
    bool ready = places_.in_block();  // the column is there, and the record asked for
    // Before the counts are waited for.
    ulonglong2 record = ready && !idle() ? look_at_record() : ulonglong2{};
    if (!places_.prepare()) return false;
    int set = 0;
    const int step = static_cast<int>(gridDim.x);
#pragma unroll 1
    for (int item = idle() ? -1 : last_item(); item >= 0; item -= step, set ^= 1) {
      if (!ready) {
        take(item);
        const typename Wire::Loaded loaded = Wire::load(p_, item_);
        record = look_at_record();
        value_ = Wire::encode(p_, loaded);
      }
      ready = false;
      if (warp_id() == 0) {
        find_own_rows(p_.turn.send && item == last_item(), record);
      } else {
        find_rows(block_.senders[set], record);
      }
      if (threadIdx.x < 2) block_.senders[set ^ 1][threadIdx.x] = 0;
      __syncthreads();
      // Asked for before our own rows are written, which takes as long as the answers' way.
      const uint64_t senders = ranks_in(block_.senders[set]);
      const typename Wire::Columns first = Item::look(senders);
      Item::expand(ctx_.rank(), Wire::decode(p_, value_));
      if (own_rows_first()) send_columns();
      Item::receive_columns(senders, first);
      if (item >= step) __syncthreads();  // everybody has used the rows
    }
    places_.finish();
    return true;
  }

  // The first warp: the rows of our own token, whose route it knows, or which it reads as it was
  // sent. `words` is what the first look has seen.
  __device__ void find_own_rows(bool knows, ulonglong2 words) const {
    if (lane_id() >= num_experts_per_tok()) return;
    RouteRecord record{block_.own_route[lane_id()], block_.weight[lane_id()]};
    if (!knows) {
      const char* at = record_of(own_buffer(), ctx_.rank(), lane_id());
      record = wait_for_record(ctx_, at, ctx_.rank(), words);
    }
    place_entry(ctx_.rank(), lane_id(), record);
  }

  // The other warps' threads take an entry each of the other ranks' tokens.
  struct OtherEntry {
    int source;
    int k;
  };
  __device__ OtherEntry other_entry(int i) const {
    const int turn = p_.plan.by_experts_per_tok.quotient(i);
    return {turn < ctx_.rank() ? turn : turn + 1, i - turn * num_experts_per_tok()};
  }
  __device__ int num_other_entries() const {
    return (ctx_.num_ranks() - 1) * num_experts_per_tok();
  }
  __device__ int first_other_entry() const { return static_cast<int>(threadIdx.x) - kWarp; }
  // The record of this thread's first entry, or of our own token's, whether it has come or not.
  __device__ ulonglong2 look_at_record() const {
    const int i = first_other_entry();
    const bool own = i < 0;
    if (own ? lane_id() >= num_experts_per_tok() : i >= num_other_entries()) return {};
    const OtherEntry entry = own ? OtherEntry{ctx_.rank(), lane_id()} : other_entry(i);
    return load_long_words(record_of(own_buffer(), entry.source, entry.k));
  }

  // Each entry's output row, and who sends. `words` is what the first look has seen.
  __device__ void find_rows(uint32_t (&senders)[2], ulonglong2 words) const {
    const int step = static_cast<int>(blockDim.x) - kWarp;
#pragma unroll 1
    for (int i = first_other_entry(); i < num_other_entries(); i += step) {
      const auto [source, k] = other_entry(i);
      const char* at = record_of(own_buffer(), source, k);
      if (i != first_other_entry()) words = load_long_words(at);
      const RouteRecord record = wait_for_record(ctx_, at, source, words);
      Item::add_sender(senders, source, record);
      place_entry(source, k, record);
    }
  }

  // One thread: entry k of one source's token, in rows_ [R, K] and in the outputs.
  __device__ void place_entry(int source, int k, const RouteRecord& record) const {
    const int row = record.route != kNoRoute ? places_.row_of(record.route, source) : -1;
    rows_[source * p_.plan.list_entries + k] = row;
    Item::write_entry(source, k, row, record.weight);
  }

  LlRouter router_;
  Places places_;
};

}  // namespace jax_ep::gpu
