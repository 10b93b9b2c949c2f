// The messages of dispatch and of combine's gradient: their slots, their flags, their arrival.
#pragma once

#include "cuda/tickets.cuh"

namespace jax_ep::gpu {

// A message of this operation: the token, and the rank at its other end.
struct MessageId {
  int peer;
  int token;
};

// Where this rank's message of a token lies in every peer's window.
__device__ inline int64_t message_offset(const OpContext& ctx, MessageId id) {
  const int chunk = ctx.chunk_of(id.token);
  return ctx.op.layout.dispatch_message(ctx.chunk_parity(chunk), id.peer,
                                        id.token - chunk * ctx.op.tokens_per_epoch);
}
__device__ inline int64_t flag_offset(const OpContext& ctx, MessageId id) {
  const int chunk = ctx.chunk_of(id.token);
  return ctx.op.layout.dispatch_flag(ctx.chunk_parity(chunk), id.peer,
                                     id.token - chunk * ctx.op.tokens_per_epoch);
}

// The destinations of one token's message.
struct Destinations {
  uint64_t ranks;    // bit set, without this rank
  unsigned leaders;  // lanes: the first entry for each of these ranks
};

// Lane k holds the rank of entry k's expert, or -1.
__device__ inline Destinations destinations_of(const OpContext& ctx, int rank) {
  const bool remote = rank >= 0 && rank != ctx.rank();
  const unsigned low = remote && rank < 32 ? 1u << rank : 0;
  const unsigned high = remote && rank >= 32 ? 1u << (rank - 32) : 0;
  const unsigned same = __match_any_sync(kFullWarp, rank);
  const bool leads = remote && (same & lanes_below()) == 0;
  return {static_cast<uint64_t>(__reduce_or_sync(kFullWarp, high)) << 32 |
              __reduce_or_sync(kFullWarp, low),
          __ballot_sync(kFullWarp, leads)};
}

// A warp tells `ranks` that this token's message has arrived; the payload has been fenced.
template <class Transport>
__device__ void set_arrival_flags(const OpContext& ctx, int token, uint64_t ranks) {
  const int64_t offset = flag_offset(ctx, {ctx.rank(), token});
  const uint64_t epoch = ctx.chunk_epoch(ctx.chunk_of(token));
  for (int r = lane_id(); r < ctx.num_ranks(); r += kWarp) {
    if ((ranks >> r & 1) == 0) continue;
    Transport::signal(ctx, r, offset, arrival_flag(epoch, true));
  }
}

// And the ranks not in `ranks` that there is none. Nothing stands behind these flags to be fenced.
template <class Transport>
__device__ void set_absent_flags(const OpContext& ctx, int token, uint64_t ranks) {
  const int64_t offset = flag_offset(ctx, {ctx.rank(), token});
  const uint64_t epoch = ctx.chunk_epoch(ctx.chunk_of(token));
  for (int r = lane_id(); r < ctx.num_ranks(); r += kWarp) {
    if (r == ctx.rank() || (ranks >> r & 1) != 0) continue;
    Transport::signal(ctx, r, offset, arrival_flag(epoch, false));
  }
}

// The messages that the other ranks send us, as they arrive. Ticket = (token, group of sources);
// the lanes of a warp watch one source each.
class Arrivals {
 public:
  static constexpr int kMaxGroup = 8;

  __device__ explicit Arrivals(const OpContext& ctx)
      : ctx_(ctx),
        num_sources_(ctx.num_ranks() - 1),
        groups_(max(1, (num_sources_ + kMaxGroup - 1) / kMaxGroup)),
        group_size_((num_sources_ + groups_ - 1) / groups_),
        tickets_(ctx.op.state()->receive_ticket) {
    next_ticket();
  }

  __device__ bool exhausted() const { return exhausted_; }

  // Looks once for a message that has arrived. `on_absent(id)` is called by the whole warp for each
  // message that its source says it will not send.
  template <class OnAbsent>
  __device__ bool poll(MessageId* id, OnAbsent on_absent) {
    if (state_ == State::kPending) read_flag();
    __syncwarp();  // what one lane has acquired, all may read
    for (unsigned absent = __ballot_sync(kFullWarp, state_ == State::kAbsent); absent != 0;
         absent &= absent - 1) {
      on_absent(message_of(__ffs(absent) - 1));
    }
    if (state_ == State::kAbsent) state_ = State::kIdle;
    const unsigned arrived = __ballot_sync(kFullWarp, state_ == State::kArrived);
    if (arrived != 0) {
      const int lane = __ffs(arrived) - 1;
      *id = message_of(lane);
      if (lane_id() == lane) state_ = State::kIdle;
    }
    if (__all_sync(kFullWarp, state_ == State::kIdle)) next_ticket();
    return arrived != 0;
  }

  // Asked after a poll that found nothing.
  __device__ bool give_up(const OpContext& ctx) {
    bool over = false;
    if (state_ == State::kPending) {
      const uint64_t epoch = ctx.chunk_epoch(ctx.chunk_of(token_));
      over = bound_.over(ctx, WaitFor::kRow, source_, epoch, arrival_flag(epoch, true), seen_);
    }
    return __any_sync(kFullWarp, over);
  }

 private:
  enum class State { kIdle, kPending, kAbsent, kArrived };

  __device__ void next_ticket() {
    const uint32_t ticket = tickets_.take();
    token_ = static_cast<int>(ticket / groups_);
    exhausted_ = num_sources_ == 0 || token_ >= ctx_.op.num_tokens;
    if (exhausted_) return;
    const int index = static_cast<int>(ticket % groups_) * group_size_ + lane_id();
    if (lane_id() >= group_size_ || index >= num_sources_) return;
    source_ = (ctx_.rank() + 1 + index) % ctx_.num_ranks();
    state_ = State::kPending;
    bound_.restart();
  }

  __device__ void read_flag() {
    const int64_t offset = flag_offset(ctx_, {source_, token_});
    seen_ = load_acquire<kSystemScope>(reinterpret_cast<uint32_t*>(ctx_.own_window(offset)));
    switch (read_arrival(seen_, ctx_.chunk_epoch(ctx_.chunk_of(token_)))) {
      case Arrival::kPending:
        break;
      case Arrival::kAbsent:
        state_ = State::kAbsent;
        break;
      case Arrival::kArrived:
        GroupTransport::see_payload(ctx_, source_, ctx_.own_window(offset), seen_);
        state_ = State::kArrived;
        break;
    }
  }

  __device__ MessageId message_of(int lane) const {
    return {__shfl_sync(kFullWarp, source_, lane), token_};
  }

  const OpContext& ctx_;
  const int num_sources_;
  const int groups_;
  const int group_size_;
  Tickets tickets_;
  BoundedWait bound_;
  State state_ = State::kIdle;
  int token_ = 0;
  int source_ = 0;
  uint32_t seen_ = 0;
  bool exhausted_ = false;
};

}  // namespace jax_ep::gpu
