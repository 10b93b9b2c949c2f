// What combine sums: an item is one output row, the rows that add up to it in the order that fixes
// its bits, and where it goes. For a token of another rank these are our expert rows in the order
// of k. For a token of ours they are our expert rows in the order of k, then, by rank, the other
// ranks' partial sums with weight 1.
#pragma once

#include "cuda/combine.h"
#include "cuda/messages.cuh"

namespace jax_ep::gpu {

// In shared memory, followed by source[K] and weight[K].
struct Item {
  char* destination;
  int flag_rank;  // whose arrival flag to set once the row is written, -1: none
  int token;
  int count;  // sources
  int peer;   // of a row that is sent

  static constexpr int64_t kHeaderBytes = 32;
  JAX_EP_HD static constexpr int64_t bytes(int num_experts_per_tok) {
    return align_up(kHeaderBytes + int64_t{12} * num_experts_per_tok, 16);
  }
  __device__ const char** sources() {
    return reinterpret_cast<const char**>(reinterpret_cast<char*>(this) + kHeaderBytes);
  }
  __device__ float* weights(int num_experts_per_tok) {
    return reinterpret_cast<float*>(sources() + num_experts_per_tok);
  }
};
static_assert(sizeof(Item) <= Item::kHeaderBytes, "the header of an item");

__device__ inline int64_t combine_row_offset(const OpContext& ctx, MessageId id) {
  const int chunk = ctx.chunk_of(id.token);
  return ctx.op.layout.combine_row(ctx.chunk_parity(chunk), id.peer,
                                   id.token - chunk * ctx.op.tokens_per_epoch);
}
__device__ inline int64_t combine_flag_offset(const OpContext& ctx, MessageId id) {
  const int chunk = ctx.chunk_of(id.token);
  return ctx.op.layout.combine_flag(ctx.chunk_parity(chunk), id.peer,
                                    id.token - chunk * ctx.op.tokens_per_epoch);
}
__device__ inline int64_t combine_scalars_offset(const OpContext& ctx, MessageId id) {
  const int chunk = ctx.chunk_of(id.token);
  return ctx.op.layout.combine_scalars(ctx.chunk_parity(chunk), id.peer,
                                       id.token - chunk * ctx.op.tokens_per_epoch);
}

// A warp looks at several tokens at once: lane = group * K + k.
struct Lanes {
  int num_groups;
  int group;  // of this lane; num_groups for lanes beyond
  int k;
  unsigned mates;  // lanes of this lane's group

  __device__ static Lanes make(int num_experts_per_tok, int max_groups) {
    const int groups = min(max_groups, kWarp / num_experts_per_tok);
    const int group = min(groups, lane_id() / num_experts_per_tok);
    const unsigned width =
        num_experts_per_tok == kWarp ? kFullWarp : (1u << num_experts_per_tok) - 1;
    const unsigned mates = group < groups ? width << (group * num_experts_per_tok) : 0;
    return {groups, group, lane_id() - group * num_experts_per_tok, mates};
  }
  __device__ bool active() const { return mates != 0; }
  __device__ int first() const { return lane_id() - k; }
};

// One entry's expert row here, if it has one.
struct ExpertRow {
  int row = -1;
  float weight = 0.0f;
};

__device__ inline ExpertRow load_expert_row(const CombineParams& p, MessageId id, int k) {
  const int num_experts_per_tok = p.op.layout.shape.num_experts_per_tok;
  const int64_t message = int64_t{id.peer} * p.op.num_tokens + id.token;
  const int row = p.recv_rows[message * num_experts_per_tok + k];
  if (row < 0 || row >= p.capacity) return {};
  return {row, p.row_weights != nullptr ? p.row_weights[row] : 1.0f};
}
// The row of y that an entry adds to its message's sum.
__device__ inline const char* row_address(const CombineParams& p, MessageId id, int row) {
  const int64_t message = int64_t{id.peer} * p.op.num_tokens + id.token;
  return p.y + (p.y_by_message ? message : row) * p.op.layout.shape.row_bytes;
}
// Of the lanes of one message whose entries have rows, those whose rows are added.
__device__ inline unsigned added_rows(const CombineParams& p, unsigned with_rows) {
  return p.y_by_message ? with_rows & (0u - with_rows) : with_rows;
}

// A batch starts whole, so it must not wait for a chunk that depends on its own tokens: with no
// more of them than a chunk has, it spans two chunks, and waits for none later than the one before.
__device__ inline int batch_size(const OpContext& ctx, int most) {
  return min(most, ctx.op.tokens_per_epoch);
}

// Rows that we send: tickets over (token, other rank), in the order of tokens.
class SendItems {
 public:
  __device__ SendItems(const OpContext& ctx, const CombineParams& p, int max_groups)
      : ctx_(ctx),
        p_(p),
        lanes_(Lanes::make(p.op.layout.shape.num_experts_per_tok, batch_size(ctx, max_groups))),
        num_sources_(ctx.num_ranks() - 1),
        tickets_(ctx.op.state()->send_ticket) {}

  // Loads the next batch. False when there is none, or the operation is aborted.
  __device__ bool next() {
    if (num_sources_ == 0) return false;
    const int64_t first = int64_t{tickets_.take()} * lanes_.num_groups;
    const int64_t messages = int64_t{num_sources_} * p_.op.num_tokens;
    if (first >= messages) return false;
    const int64_t index = first + lanes_.group;
    valid_ = lanes_.active() && index < messages;
    id_ = message_of(valid_ ? index : first);
    entry_ = valid_ ? load_expert_row(p_, id_, lanes_.k) : ExpertRow{};
    added_ = added_rows(p_, __ballot_sync(kFullWarp, entry_.row >= 0) & lanes_.mates);
    first_ = first;
    end_ = min(messages, first + lanes_.num_groups);
    for (int chunk = ctx_.chunk_of(message_of(end_ - 1).token); chunk_ < chunk; ++chunk_) {
      if (!wait_for_credits(ctx_, chunk_ + 1) || !wait_for_side_data(chunk_ + 1)) return false;
    }
    return true;
  }

  // Sends what needs no sum: the flags of messages without rows, and scalars.
  template <class Transport>
  __device__ void send_side_data() const {
    send_side_data_of_lane<Transport>();
    if (ctx_.op.num_chunks > kNumBuffers) count_side_data();
  }

  // The lanes that stand for this batch's items: the first lane of each group with rows.
  __device__ unsigned items() const {
    return __ballot_sync(kFullWarp, valid_ && lanes_.k == 0 && count() > 0);
  }

  // Writes the items of this batch; item `i` of items() goes where at(i) says.
  template <class Transport, class At>
  __device__ void write(unsigned items, At at) const {
    if (!valid_ || count() == 0) return;
    Item* item = at(__popc(items & ((1u << lanes_.first()) - 1)));
    if (lanes_.k == 0) {
      const int64_t offset = combine_row_offset(ctx_, {ctx_.rank(), id_.token});
      item->destination = Transport::window(ctx_, id_.peer, offset);
      item->flag_rank = id_.peer;
      item->token = id_.token;
      item->count = count();
    }
    if ((added_ >> lane_id() & 1) == 0) return;
    const int position = __popc(added_ & lanes_below());
    item->sources()[position] = row_address(p_, id_, entry_.row);
    item->weights(p_.op.layout.shape.num_experts_per_tok)[position] = entry_.weight;
  }

 private:
  template <class Transport>
  __device__ void send_side_data_of_lane() const {
    if (!valid_) return;
    if (count() == 0) {
      if (lanes_.k != 0) return;
      const uint64_t epoch = ctx_.chunk_epoch(ctx_.chunk_of(id_.token));
      Transport::signal(ctx_, id_.peer, combine_flag_offset(ctx_, {ctx_.rank(), id_.token}),
                        arrival_flag(epoch, false));
    } else if (p_.row_scalars != nullptr) {
      const int64_t offset = combine_scalars_offset(ctx_, {ctx_.rank(), id_.token});
      if constexpr (Transport::kPuts) {
        if (Transport::is_remote(ctx_, id_.peer)) {
          Transport::put_scalar(ctx_, id_.peer, offset + int64_t{4} * lanes_.k, scalar());
          return;
        }
      }
      auto* to = reinterpret_cast<float*>(Transport::window(ctx_, id_.peer, offset));
      to[lanes_.k] = scalar();
    }
  }

  // A peer waits for the flags of the ranks that its token names, and for no other: its credit does
  // not say that all our flags of a chunk are set. A late one must not overwrite the next in its
  // place. So a chunk begins when all messages of those in the same buffer before it are counted.
  __device__ void count_side_data() const {
    __syncwarp();
    if (lane_id() != 0) return;
    for (int64_t first = first_; first < end_;) {
      const int chunk = ctx_.chunk_of(message_of(first).token);
      const int64_t end = min(end_, (chunk + 1) * messages_of_chunk());
      cuda::atomic_ref<uint32_t, kDeviceScope> sent(
          ctx_.op.state()->side_data_sent[chunk % kNumBuffers].value);
      sent.fetch_add(static_cast<uint32_t>(end - first), cuda::memory_order_release);
      first = end;
    }
  }
  // False when the operation is aborted.
  __device__ bool wait_for_side_data(int chunk) const {
    const auto target = static_cast<uint32_t>(chunk / kNumBuffers * messages_of_chunk());
    const uint32_t* sent = &ctx_.op.state()->side_data_sent[chunk % kNumBuffers].value;
    BoundedWait bound;
    for (uint32_t seen; (seen = load_acquire<kDeviceScope>(sent)) < target;) {
      if (bound.over(ctx_, WaitFor::kRow, ctx_.rank(), ctx_.chunk_epoch(chunk), target, seen))
        break;
    }
    return !__any_sync(kFullWarp, ctx_.aborted());
  }
  __device__ int64_t messages_of_chunk() const {
    return int64_t{num_sources_} * ctx_.op.tokens_per_epoch;
  }

  __device__ int count() const { return __popc(added_); }
  __device__ float scalar() const { return entry_.row >= 0 ? p_.row_scalars[entry_.row] : 0.0f; }
  __device__ MessageId message_of(int64_t index) const {
    const int token = static_cast<int>(index / num_sources_);
    const int other = static_cast<int>(index - int64_t{token} * num_sources_);
    return {(ctx_.rank() + 1 + other) % ctx_.num_ranks(), token};
  }

  const OpContext& ctx_;
  const CombineParams& p_;
  const Lanes lanes_;
  const int num_sources_;
  Tickets tickets_;
  int chunk_ = 0;
  int64_t first_ = 0;  // messages of this batch
  int64_t end_ = 0;
  bool valid_ = false;
  MessageId id_{0, 0};
  ExpertRow entry_;
  unsigned added_ = 0;  // lanes of this lane's message whose rows are summed
};

// Tokens of ours, as the other ranks' sums for them arrive.
class FinalItems {
 public:
  __device__ FinalItems(const OpContext& ctx, const CombineParams& p, int max_groups)
      : ctx_(ctx),
        p_(p),
        lanes_(Lanes::make(p.op.layout.shape.num_experts_per_tok, batch_size(ctx, max_groups))),
        tickets_(ctx.op.state()->receive_ticket) {
    ahead_ = load();
  }

  // Moves to the next batch, whose loads were started a batch ago. False when there is none, or the
  // operation is aborted.
  __device__ bool next() {
    now_ = ahead_;
    if (now_.first_token >= p_.op.num_tokens) return false;
    ahead_ = load();
    tokens_ = min(lanes_.num_groups, p_.op.num_tokens - now_.first_token);
    if (!wait_for_turn(ctx_, ctx_.chunk_of(now_.first_token + tokens_ - 1))) return false;
    const bool remote = now_.rank >= 0 && now_.rank != ctx_.rank();
    const int key = remote ? lanes_.group * kMaxRanks + now_.rank : -1 - lane_id();
    leader_ = __ffs(__match_any_sync(kFullWarp, key)) - 1;
    pending_ = remote && leader_ == lane_id();
    const bool own = now_.rank == ctx_.rank() && now_.entry.row >= 0;
    const unsigned added = added_rows(p_, __ballot_sync(kFullWarp, own) & lanes_.mates);
    included_ = pending_ || (added >> lane_id() & 1) != 0;
    bound_.restart();
    return true;
  }

  __device__ int first_token() const { return now_.first_token; }
  __device__ int num_tokens() const { return tokens_; }

  // Looks at the flags once; the number of this batch's tokens, from the first, that are complete.
  __device__ int poll() {
    if (pending_) {
      const uint64_t epoch = ctx_.chunk_epoch(ctx_.chunk_of(token()));
      const int64_t offset = combine_flag_offset(ctx_, {now_.rank, token()});
      seen_ = load_acquire<kSystemScope>(reinterpret_cast<uint32_t*>(ctx_.own_window(offset)));
      const Arrival arrival = read_arrival(seen_, epoch);
      pending_ = arrival == Arrival::kPending;
      if (arrival == Arrival::kAbsent) included_ = false;
      if (arrival == Arrival::kArrived) {
        GroupTransport::see_payload(ctx_, now_.rank, ctx_.own_window(offset), seen_);
      }
    }
    __syncwarp();  // what one lane has acquired, all may read
    const unsigned pending = __ballot_sync(kFullWarp, pending_);
    if (pending == 0) return tokens_;
    return min(tokens_, (__ffs(pending) - 1) / p_.op.layout.shape.num_experts_per_tok);
  }

  // Asked after a poll that found nothing new.
  __device__ bool give_up() {
    bool over = false;
    if (pending_) {
      const uint64_t epoch = ctx_.chunk_epoch(ctx_.chunk_of(token()));
      over = bound_.over(ctx_, WaitFor::kRow, now_.rank, epoch, arrival_flag(epoch, true), seen_);
    }
    return __any_sync(kFullWarp, over);
  }

  // Writes the items of tokens [begin, end) of the batch, which are complete; at(g) says where.
  template <class At>
  __device__ void write(int begin, int end, At at) {
    const int num_experts_per_tok = p_.op.layout.shape.num_experts_per_tok;
    const bool leader_included = __shfl_sync(kFullWarp, included_, leader_);
    const bool own = now_.rank == ctx_.rank();
    const int key = included_ ? (own ? -1 : now_.rank) * kMaxExpertsPerTok + lanes_.k : 0x7FFFFFFF;
    int position = 0;
    for (int k = 0; k < num_experts_per_tok; ++k) {
      const int other = __shfl_sync(kFullWarp, key, min(lanes_.first() + k, kWarp - 1));
      position += other < key;
    }
    const unsigned included = __ballot_sync(kFullWarp, included_);
    if (!lanes_.active() || lanes_.group < begin || lanes_.group >= end) return;
    Item* item = at(lanes_.group);
    if (lanes_.k == 0) {
      item->destination = p_.out + token() * p_.op.layout.shape.row_bytes;
      item->flag_rank = -1;
      item->token = token();
      item->count = __popc(included & lanes_.mates);
    }
    if (p_.scalars != nullptr) write_scalar(leader_included);
    if (!included_) return;
    const int64_t offset = combine_row_offset(ctx_, {now_.rank, token()});
    const MessageId self{ctx_.rank(), token()};
    item->sources()[position] =
        own ? row_address(p_, self, now_.entry.row) : ctx_.own_window(offset);
    item->weights(num_experts_per_tok)[position] = own ? now_.entry.weight : 1.0f;
  }

 private:
  struct Batch {
    int first_token = 0;
    int rank = -1;  // of this lane's expert
    ExpertRow entry;
  };

  __device__ int token() const { return now_.first_token + lanes_.group; }

  __device__ Batch load() {
    Batch batch;
    const int64_t first = int64_t{tickets_.take()} * lanes_.num_groups;
    batch.first_token = static_cast<int>(min(first, int64_t{p_.op.num_tokens}));
    const int token = batch.first_token + lanes_.group;
    if (!lanes_.active() || token >= p_.op.num_tokens) return batch;
    const WindowShape& shape = p_.op.layout.shape;
    const int expert = p_.topk_idx[int64_t{token} * shape.num_experts_per_tok + lanes_.k];
    if (expert < 0 || expert >= shape.num_experts) return batch;
    batch.rank = expert / shape.experts_per_rank();
    if (batch.rank == ctx_.rank())
      batch.entry = load_expert_row(p_, {ctx_.rank(), token}, lanes_.k);
    return batch;
  }

  __device__ void write_scalar(bool arrived) const {
    float scalar = 0.0f;
    if (now_.rank == ctx_.rank()) {
      if (now_.entry.row >= 0) scalar = p_.row_scalars[now_.entry.row];
    } else if (now_.rank >= 0 && arrived) {
      const int64_t offset = combine_scalars_offset(ctx_, {now_.rank, token()});
      scalar =
          load_relaxed<kDeviceScope>(reinterpret_cast<float*>(ctx_.own_window(offset)) + lanes_.k);
    }
    p_.scalars[int64_t{token()} * p_.op.layout.shape.num_experts_per_tok + lanes_.k] = scalar;
  }

  const OpContext& ctx_;
  const CombineParams& p_;
  const Lanes lanes_;
  Tickets tickets_;
  Batch now_;
  Batch ahead_;
  BoundedWait bound_;
  int tokens_ = 0;
  int leader_ = 0;  // lane that watches for this lane's rank and token
  bool pending_ = false;
  bool included_ = false;
  uint32_t seen_ = 0;
};

}  // namespace jax_ep::gpu
