// Low-latency dispatch's half that receives, where every block has one item. Mostly all has come
// when it begins: counts and records are looked at before the operation begins, and waited for only
// if they have not. As in LlDispatchStart, warps do different things until the rows are known: the
// last greets the peers, the one before it finds rows, the others gather counts.
#pragma once

#include "cuda/ll_dispatch_item.cuh"

namespace jax_ep::gpu {

template <class Wire, class Places>
class LlDispatchDone : LlDispatchItem<GroupTransport, Wire> {
  using Item = LlDispatchItem<GroupTransport, Wire>;
  using Item::block_, Item::ctx_, Item::item_, Item::p_, Item::rows_, Item::value_;

 public:
  __device__ LlDispatchDone(const LlContext& ctx, const LlDispatchParams& p, char* shared,
                            LlDispatchBlock& block)
      : Item(ctx, p, shared, block), shared_(shared), places_(ctx, p, shared) {
    Item::take(Item::first_item());
  }

  // All threads, before the operation begins: what neither epoch nor peers decide.
  __device__ void ask() {
    settle(&item_);
    loaded_ = Wire::load(p_, item_);
    if (threadIdx.x < 2) block_.senders[0][threadIdx.x] = 0;
    // All of the list is written when rows are found, if there are rows.
    if (p_.plan.list_entries == Item::num_experts_per_tok() && !Item::idle()) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < ctx_.num_ranks() * p_.plan.list_entries; i += blockDim.x) {
      rows_[i] = -1;
    }
  }
  // Then, in our window: true where what this thread looks at has come.
  __device__ bool look(const char* window) {
    const char* const buffer = window + p_.op.layout.buffer(parity_of(ctx_.epoch));
    has_entry_ = is_entry(first_entry());
    ulonglong2 words = {};
    if (has_entry_) {
      first_ = entry(first_entry());
      words = load_long_words(record_of(buffer, first_));
    }
    const bool counted = is_busy() || places_.look(buffer, threadIdx.x, entries_step());
    record_ = {word_value(words.x), __uint_as_float(word_value(words.y))};
    const bool told = word_is_of(words.x, ctx_.epoch) & word_is_of(words.y, ctx_.epoch);
    return counted & (told | !has_entry_);
  }
  // Then. A block barrier must follow.
  __device__ void encode() { value_ = Wire::encode(p_, loaded_); }

  // All threads. told: all that they looked at had come. False when the operation is aborted.
  __device__ bool run(bool told) {
    int row = -1;
    has_entry_ = has_entry_ && told;
    if (told) places_.place();
    if (has_entry_) row = place(first_, record_);
    if (!told || num_entries() > entries_step()) {
      if (!find_late(ctx_, p_, shared_, block_, told)) return false;
    }
    __syncthreads();
    // Asked for before our own rows are written, which takes as long as the answers' way.
    const uint64_t senders = ranks_in(block_.senders[0]);
    const typename Wire::Columns first = Item::look(senders);
    Item::expand(ctx_.rank(), Wire::decode(p_, value_));
    Item::receive_columns(senders, first);
    if (has_entry_) write_entry(first_, row, record_.weight);
    if (told) meet_peers(ctx_, p_.waited_ns_before, p_.waited_ns);
    places_.finish();
    return true;
  }

 private:
  // Threads that see to no peer take an entry each, the last of them the first; where there are no
  // others, those that do.
  __device__ int busy_threads() const {
    const int busy = peer_threads(ctx_.num_ranks());
    return busy < static_cast<int>(blockDim.x) ? busy : 0;
  }
  __device__ bool is_busy() const { return peer_of_thread() < busy_threads(); }
  __device__ int first_entry() const { return peer_of_thread() - busy_threads(); }
  __device__ int entries_step() const { return static_cast<int>(blockDim.x) - busy_threads(); }
  __device__ int num_entries() const { return ctx_.num_ranks() * Item::num_experts_per_tok(); }
  __device__ bool is_entry(int i) const { return i >= 0 && i < num_entries() && !Item::idle(); }

  struct Entry {
    int source;
    int k;
  };
  __device__ Entry entry(int i) const {
    const int source = p_.plan.by_experts_per_tok.quotient(max(i, 0));
    return {source, i - source * Item::num_experts_per_tok()};
  }
  __device__ const char* record_of(const char* buffer, const Entry& e) const {
    return Item::record_of(buffer, e.source, e.k);
  }
  __device__ void write_entry(const Entry& e, int row, float weight) const {
    Item::write_entry(e.source, e.k, row, weight);
  }

  // One thread: the entry's output row, -1 for none.
  __device__ int place(const Entry& e, const RouteRecord& record) const {
    const int row = record.route != kNoRoute ? places_.row_of(record.route, e.source) : -1;
    rows_[e.source * p_.plan.list_entries + e.k] = row;
    Item::add_sender(block_.senders[0], e.source, record);
    return row;
  }
  // All threads: waits for what had not come, and finds the rows that are not found yet. A call: it
  // is rare, and to jump over its code would cost all others. False when the operation is aborted.
  __device__ __noinline__ static bool find_late(const LlContext ctx, const LlDispatchParams& p,
                                                char* shared, LlDispatchBlock& block, bool told) {
    const LlDispatchDone late(ctx, p, shared, block);
    int i = late.first_entry();
    if (told) {
      i += late.entries_step();
    } else {
      meet_peers(ctx, p.waited_ns_before, p.waited_ns);
      if (!late.places_.prepare()) return false;
    }
#pragma unroll 1
    for (; late.is_entry(i); i += late.entries_step()) {
      const Entry e = late.entry(i);
      const char* const at = late.record_of(late.own_buffer(), e);
      const RouteRecord record = wait_for_record(ctx, at, e.source, load_long_words(at));
      late.write_entry(e, late.place(e, record), record.weight);
    }
    return true;
  }

  char* const shared_;
  Places places_;
  typename Wire::Loaded loaded_;
  bool has_entry_ = false;
  Entry first_;         // of this thread's entries
  RouteRecord record_;  // of that
};

}  // namespace jax_ep::gpu
