// The two halves of low-latency dispatch. A block takes items of (token, part of its columns): it
// sends its own and receives the same token from every source. Counts and records go before any
// wait, but a start's first payload goes before them; where the links are the bottleneck, half the
// blocks send their payload after a wait for counts, which depend on no payload.
#pragma once

#include "cuda/ll_place.cuh"
#include "cuda/ll_puts.cuh"
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

template <class Transport, class Wire, class Places>
class LlDispatch {
 public:
  __device__ LlDispatch(const LlContext& ctx, const LlDispatchParams& p, char* shared,
                        LlDispatchBlock& block)
      : ctx_(ctx),
        p_(p),
        block_(block),
        rows_(reinterpret_cast<int32_t*>(shared + p.plan.rows_offset)),
        router_(ctx, p, shared),
        places_(ctx, p, shared) {}

  // All threads, before the operation begins: the first item's column, and what else needs neither
  // epoch nor peers. A block barrier must follow.
  __device__ void prepare() {
    const bool sends = p_.turn.send;
    const bool ready = !sends || routes_in_shared(p_);
    typename Wire::Loaded loaded = {};
    if (ready) {
      if (sends) router_.ask();
      take(sends ? first_item() : last_item());
      if (sends) load_entries();
      loaded = load();
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
      if (!payload_first()) router_.prepare();
      if (warp_id() == 0) resolve_entries();
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
  __device__ int num_experts_per_tok() const { return p_.op.layout.shape.num_experts_per_tok; }
  __device__ int num_items() const { return p_.plan.grid.num_items(p_.op.num_tokens); }
  __device__ int first_item() const { return static_cast<int>(blockIdx.x); }
  __device__ int last_item() const {
    const int step = static_cast<int>(gridDim.x);
    if (num_items() <= step) return first_item();
    return first_item() + (num_items() - 1 - first_item()) / step * step;
  }
  __device__ bool idle() const { return first_item() >= num_items(); }
  __device__ void take(int item) { item_ = LlItem::of(p_.plan.grid, item); }

  __device__ typename Wire::Loaded load() {
    if (idle()) item_.left = 0;
    return Wire::load(p_, item_);
  }
  // Of the first warp: entry k of the item's token is lane k's.
  __device__ bool has_entry() const { return lane_id() < num_experts_per_tok() && !idle(); }
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
    const bool sent = ready && payload_first();
    if (sent) {
      send_columns();
      router_.prepare();
      __syncthreads();
    }
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
        const typename Wire::Loaded loaded = load();
        __syncthreads();  // everybody has read the destinations
        if (warp_id() == 0) resolve_entries();
        value_ = Wire::encode(p_, loaded);
        __syncthreads();
      }
      ready = false;
      if (warp_id() == 0) send_records();
      const bool is_sent = sent && item == first_item();
      if (!is_sent && !own_rows_first()) send_columns();
      put_item();
    }
    return true;
  }
  // A start ends when the links have taken all that it sends, so these begin at once. Nobody need
  // wait for the counts that queue behind: done comes later.
  __device__ bool payload_first() const {
    return !Transport::kPuts && p_.turn.send && !p_.turn.receive;
  }
  // The links are busy with what the other half of the blocks sends; until our turn comes we can
  // write our own rows. (Stores that wait for a link would hold up these, and all loads.)
  __device__ bool own_rows_first() const {
    return !Transport::kPuts && p_.plan.own_rows_first && p_.turn.send && p_.turn.receive &&
           blockIdx.x % 2 != 0;
  }

  // The first warp: what becomes of the token's entries, and which ranks need the token. A block
  // barrier must follow.
  __device__ void resolve_entries() const {
    wait_for_copies();  // of load_entries()
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
  __device__ void send_records() const {
    const int first_rank = p_.plan.by_experts_per_tok.quotient(lane_id());
    if (first_rank >= p_.plan.ranks_at_once) return;
    const int k = lane_id() - first_rank * num_experts_per_tok();
    const int rank = block_.rank[k];
    const uint32_t route = router_.route_of(item_.token, k, block_.expert[k], rank);
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
        const typename Wire::Loaded loaded = load();
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
      const typename Wire::Columns first = look(senders);
      expand(ctx_.rank(), Wire::decode(p_, value_));
      if (own_rows_first()) send_columns();
      receive_columns(senders, first);
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
      record = wait_for_record(ctx_, record_of(ctx_.rank(), lane_id()), ctx_.rank(), words);
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
    return load_long_words(record_of(entry.source, entry.k));
  }

  // Each entry's output row, and who sends. `words` is what the first look has seen.
  __device__ void find_rows(uint32_t (&senders)[2], ulonglong2 words) const {
    const int step = static_cast<int>(blockDim.x) - kWarp;
#pragma unroll 1
    for (int i = first_other_entry(); i < num_other_entries(); i += step) {
      const auto [source, k] = other_entry(i);
      const char* at = record_of(source, k);
      if (i != first_other_entry()) words = load_long_words(at);
      const RouteRecord record = wait_for_record(ctx_, at, source, words);
      if (record.route != kNoRoute) atomicOr(&senders[source / 32], 1u << (source % 32));
      place_entry(source, k, record);
    }
  }

  __device__ const char* record_of(int source, int k) const {
    return ctx_.own_window(p_.op.layout.route_records(parity_of(ctx_.epoch), source, item_.token) +
                           k * kRecordBytes);
  }

  // One thread: entry k of one source's token, in rows_ [R, K] and in the outputs.
  __device__ void place_entry(int source, int k, const RouteRecord& record) const {
    const int row = record.route != kNoRoute ? places_.row_of(record.route, source) : -1;
    rows_[source * p_.plan.list_entries + k] = row;
    if (!item_.first_part()) return;
    const int message = source * p_.op.num_tokens + item_.token;
    p_.recv_rows[message * num_experts_per_tok() + k] = row;
    if (row >= 0) p_.weights[row] = record.weight;
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
  int32_t* const rows_;
  LlRouter router_;
  Places places_;
  LlItem item_;
  typename Wire::Columns value_;
};

}  // namespace jax_ep::gpu
