// Dispatch's payload by bulk copies. A sender warp loads a row into shared memory once and stores
// it from there to each remote rank's slot and to this rank's own expert rows; a receiver warp
// loads an arrived message once and stores its row to each of its expert rows. Two stages a warp:
// one row is loaded while the one before it is stored.
#pragma once

#include "cuda/dispatch_stages.cuh"
#include "cuda/outbox.cuh"

namespace jax_ep::gpu {

#if defined(JAX_EP_BULK_COPY)

template <class Transport, bool kRouted, bool kPacked>
class BulkSender {
 public:
  // A warp that sends starts to load its first row, of a token that is given to it and not drawn:
  // this needs neither the operation nor a route. Of other warps nothing is asked.
  __device__ BulkSender(const OpContext& ctx, const DispatchParams& p, const Stages& stages,
                        Outbox& box)
      : ctx_(ctx), p_(p), stages_(stages), box_(box) {
    token_ = sends() ? warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)
                     : p.op.num_tokens;
    start_load(token_, 0);
  }

  __device__ bool sends() const { return warp_id() < p_.plan.senders; }

  // Once the operation has begun and this block has done its share of the routes: sends the first
  // row while others route. Which ranks want it shows in topk_idx; the record follows when its
  // route is known, and then the flag.
  __device__ void send_early() {
    if (token_ >= p_.op.num_tokens || ctx_.chunk_of(token_) != 0) return;
    const Destinations to = destinations_of(ctx_, rank_of_entry());
    stages_.wait(item_);
    if (to.leaders >> lane_id() & 1) {
      bulk_store(slot_at(rank_of_entry()), stages_.at(item_), part_of(p_, 0).bytes);
    }
    bulk_commit();
    first_part_sent_ = true;
  }

  __device__ void run(const Placement& place) {
    entry_ = load_entry<kRouted>(p_, token_);
    uint32_t sent = 0;
    while (token_ < p_.op.num_tokens) {
      draw();
      const Destinations to = destinations_of(ctx_, entry_.rank);
      // A row at a time: more on their way would only queue, and this one's flag behind them.
      bulk_wait<0>();
      complete(sent);
      if (!may_send(ctx_.chunk_of(token_))) break;
      for (int part = 0; part < p_.plan.num_parts; ++part) {
        stages_.wait(item_);
        send_to_peers(part_of(p_, part), stages_.at(item_), to, first_part_sent_);
        first_part_sent_ = false;
        keep_part(part_of(p_, part), stages_.at(item_), place);
        bulk_commit();
        ++item_;
        if (part + 1 < p_.plan.num_parts) start_load(token_, part + 1);
      }
      set_absent_flags<Transport>(ctx_, token_, to.ranks);
      const int token = token_;
      take_next();
      if (lane_id() == 0) post(box_, sent, token, to.ranks);
      ++sent;
    }
    finish(sent);
  }

  // Instead of run(), when the operation is aborted.
  __device__ void drop() { finish(0); }

 private:
  // A token is drawn as late as its load allows: what a slow multiprocessor has drawn, no other can
  // send for it at the end.
  __device__ void draw() {
    if (lane_id() == 0) ticket_ = atomicAdd(&ctx_.op.state()->send_ticket.value, 1u);
  }
  __device__ int drawn() const {
    const int given = p_.plan.senders * static_cast<int>(gridDim.x);
    return given + static_cast<int>(__shfl_sync(kFullWarp, ticket_, 0));
  }
  __device__ void take_next() {
    token_ = drawn();
    entry_ = load_entry<kRouted>(p_, token_);
    start_load(token_, 0);
  }

  // The next load in order, if there is such a token.
  __device__ void start_load(int token, int index) {
    if (token >= p_.op.num_tokens) return;
    bulk_wait_read<1>();  // the row before the last has left its stage
    __syncwarp();
    const Part part = part_of(p_, index);
    if (lane_id() == 0) {
      uint64_t* barrier = stages_.barrier(loads_);
      barrier_expect(barrier, part.bytes);
      bulk_load(stages_.at(loads_), p_.x + token * p_.op.layout.shape.row_bytes + part.offset,
                part.bytes, barrier);
    }
    ++loads_;
  }

  // Before the first token of a later chunk: its buffer must have been read. What has been sent has
  // been handed over, since the peers' credits may depend on it.
  __device__ bool may_send(int chunk) {
    if (chunk == chunk_) return true;
    chunk_ = chunk;
    return wait_for_credits(ctx_, chunk);
  }

  __device__ int rank_of_entry() const {
    const WindowShape& shape = p_.op.layout.shape;
    if (lane_id() >= shape.num_experts_per_tok) return -1;
    const int expert = p_.topk_idx[int64_t{token_} * shape.num_experts_per_tok + lane_id()];
    return expert >= 0 && expert < shape.num_experts ? expert / shape.experts_per_rank() : -1;
  }
  __device__ char* slot_at(int rank) const {
    return Transport::window(ctx_, rank, message_offset(ctx_, {ctx_.rank(), token_}));
  }

  __device__ void send_to_peers(const Part& part, char* stage, const Destinations& to,
                                bool row_sent) {
    const TokenEntry& entry = entry_;
    const MessageFormat format = p_.op.layout.shape.message();
    const uint32_t record_bytes = static_cast<uint32_t>(format.bytes() - format.source_offset());
    char* records = stage + part.bytes;
    if (part.last) {
      write_records(records, record_bytes, entry, to.leaders);
      fence_bulk_shared();
      __syncwarp();
    }
    if (to.leaders >> lane_id() & 1) {
      const int order = __popc(to.leaders & lanes_below());
      char* slot = slot_at(entry.rank);
      // The first record lies right behind the row.
      const bool joined = part.last && order == 0 && !row_sent;
      if (!row_sent)
        bulk_store(slot + part.offset, stage, part.bytes + (joined ? record_bytes : 0));
      if (part.last && !joined) {
        bulk_store(slot + format.source_offset(), records + order * record_bytes, record_bytes);
      }
    }
  }

  // This rank's own rows of the token.
  __device__ void keep_part(const Part& part, char* stage, const Placement& place) {
    const TokenEntry& entry = entry_;
    const MessageId own{ctx_.rank(), token_};
    const int row = entry.rank == ctx_.rank() ? output_row(p_, place, entry.route, entry.rank) : -1;
    store_part<kPacked>(p_, own, row, part, stage);
    if (part.last) {
      record_row(p_, own, row, entry.weight);
      zero_unsent_slot(p_, own, row);
    }
  }

  // One record per destination: entries for other ranks are kNoRoute there.
  __device__ void write_records(char* records, uint32_t record_bytes, const TokenEntry& entry,
                                unsigned leaders) {
    for (; leaders != 0; leaders &= leaders - 1, records += record_bytes) {
      const int rank = __shfl_sync(kFullWarp, entry.rank, __ffs(leaders) - 1);
      auto* words = reinterpret_cast<uint32_t*>(records);
      if (lane_id() == 0) words[0] = static_cast<uint32_t>(token_);
      if (lane_id() < p_.op.layout.shape.num_experts_per_tok) {
        words[1 + 2 * lane_id()] = entry.rank == rank ? entry.route : kNoRoute;
        words[2 + 2 * lane_id()] = __float_as_uint(entry.weight);
      }
    }
  }

  // The rows of the first `tokens` tokens are written by all lanes.
  __device__ void complete(uint32_t tokens) {
    __syncwarp();
    if (lane_id() == 0) store_release<kBlockScope>(&box_.completed, tokens);
  }

  // Nothing may be on its way into or out of shared memory when the block ends.
  __device__ void finish(uint32_t sent) {
    for (; item_ < loads_; ++item_) stages_.wait(item_);
    bulk_wait<0>();
    complete(sent);
    if (lane_id() == 0) store_release<kBlockScope>(&box_.finished, 1u);
  }

  const OpContext& ctx_;
  const DispatchParams& p_;
  const Stages stages_;
  Outbox& box_;
  uint32_t ticket_ = 0;  // lane 0
  int token_;
  TokenEntry entry_;
  int chunk_ = 0;
  bool first_part_sent_ = false;
  int item_ = 0;   // parts sent
  int loads_ = 0;  // parts whose loads have been started
};

// One part on its way from the window to a stage.
struct Arriving {
  MessageId id{0, 0};
  int part = 0;
};

template <bool kPacked>
class BulkReceiver {
 public:
  __device__ BulkReceiver(const OpContext& ctx, const DispatchParams& p, const Stages& stages)
      : ctx_(ctx), p_(p), stages_(stages), part_(p.plan.num_parts) {}

  // Ahead: the next part is loaded, if it has arrived, before the one before it is stored. With
  // many blocks looking for it first costs more than it gains.
  __device__ void run(const Placement& place) {
    Arrivals arrivals(ctx_);
    const int most = p_.plan.receive_ahead ? kStages : 1;
    while (true) {
      if (loads_ - items_ < most && start_next(arrivals)) continue;
      if (items_ < loads_) {
        store_oldest(place);
      } else if (arrivals.exhausted() || arrivals.give_up(ctx_)) {
        break;
      }
    }
    bulk_wait<0>();
  }

 private:
  __device__ bool start_next(Arrivals& arrivals) {
    if (part_ == p_.plan.num_parts) {
      if (arrivals.exhausted() || !find(arrivals)) return false;
      part_ = 0;
    }
    (items_ == loads_ ? oldest_ : newest_) = {id_, part_};
    start_load(part_of(p_, part_));
    ++part_;
    return true;
  }

  __device__ bool find(Arrivals& arrivals) {
    return arrivals.poll(&id_, [&](MessageId absent) {
      record_row(p_, absent, -1, 0.0f);
      zero_unsent_slot(p_, absent, -1);
      count_read(absent);
    });
  }

  // The record comes with every part; with the last, it follows the row in the message too.
  __device__ void start_load(const Part& part) {
    // What was in this stage has left it: the last part stored or, not ahead, the one before.
    if (p_.plan.receive_ahead) {
      bulk_wait_read<0>();
    } else {
      bulk_wait_read<1>();
    }
    __syncwarp();
    const int item = loads_++;
    if (lane_id() != 0) return;
    const MessageFormat format = p_.op.layout.shape.message();
    const uint32_t record_bytes = static_cast<uint32_t>(format.bytes() - format.source_offset());
    const char* message = ctx_.own_window(message_offset(ctx_, id_));
    uint64_t* barrier = stages_.barrier(item);
    char* stage = stages_.at(item);
    fence_bulk_global();  // the flag was acquired with ordinary loads
    barrier_expect(barrier, part.bytes + record_bytes);
    if (part.last) {
      bulk_load(stage, message + part.offset, part.bytes + record_bytes, barrier);
    } else {
      bulk_load(stage, message + part.offset, part.bytes, barrier);
      bulk_load(stage + part.bytes, message + format.source_offset(), record_bytes, barrier);
    }
  }

  __device__ void store_oldest(const Placement& place) {
    const MessageId id = oldest_.id;
    const Part part = part_of(p_, oldest_.part);
    const char* stage = stages_.at(items_);
    stages_.wait(items_);
    uint32_t route = kNoRoute;
    float weight = 0.0f;
    if (lane_id() < p_.op.layout.shape.num_experts_per_tok) {
      const auto* words = reinterpret_cast<const uint32_t*>(stage + part.bytes);
      route = words[1 + 2 * lane_id()];
      weight = __uint_as_float(words[2 + 2 * lane_id()]);
    }
    const int row = output_row(p_, place, route, id.peer);
    store_part<kPacked>(p_, id, row, part, stage);
    bulk_commit();
    if (part.last) {
      record_row(p_, id, row, weight);
      zero_unsent_slot(p_, id, row);
      count_read(id);
    }
    __syncwarp();
    ++items_;
    oldest_ = newest_;
  }

  __device__ void count_read(MessageId id) {
    if (lane_id() == 0) count_slots_read(ctx_, ctx_.chunk_of(id.token), 1);
  }

  const OpContext& ctx_;
  const DispatchParams& p_;
  const Stages stages_;
  MessageId id_{0, 0};  // the message whose parts are being loaded
  int part_;            // its next part; all of them: it has none left
  int loads_ = 0;       // parts whose loads have been started
  int items_ = 0;       // parts stored
  Arriving oldest_;     // of the at most two parts in between
  Arriving newest_;
};

// A warp sets up what is its own. One lane does: barriers of several lanes are set up one by one.
__device__ inline void init_warp(const DispatchParams& p, char* shared) {
  const int warp = warp_id();
  if (warp >= p.plan.senders + p.plan.receivers) return;
  if (lane_id() == 0) {
    const Stages stages = stages_of(p, shared, warp);
    for (int stage = 0; stage < kStages; ++stage) barrier_init(stages.barrier(stage), 1);
    barrier_init_fence();
    if (warp < p.plan.senders) {
      auto& box = reinterpret_cast<Outbox*>(shared + p.plan.outbox_offset)[warp];
      box.completed = box.published = box.finished = 0;
    }
  }
  __syncwarp();
}

// Warps: senders, receivers, helpers. All of them route and place; then each has its role. False
// when the operation could not begin.
template <class Transport, bool kRouted, bool kPacked>
__device__ bool dispatch_bulk(const OpContext& ctx, const DispatchParams& p, char* shared) {
  const int warp = warp_id();
  init_warp(p, shared);
  auto* boxes = reinterpret_cast<Outbox*>(shared + p.plan.outbox_offset);
  BulkSender<Transport, kRouted, kPacked> sender(ctx, p, stages_of(p, shared, warp), boxes[warp]);
  route_ahead<kRouted>(p, shared);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) route_share<Transport, kRouted>(ctx, p, shared);
  if (begun && sender.sends()) sender.send_early();
  const Placement place = placement_in(p, shared);
  const bool placed = begun && place_all_rows<kRouted>(ctx, p, place);
  const int receiver = warp - p.plan.senders;
  const int helper = receiver - p.plan.receivers;
  if (sender.sends()) {
    if (placed) {
      sender.run(place);
    } else {
      sender.drop();
    }
  } else if (!placed) {
    return begun;  // senders publish nothing either
  } else if (helper == 0) {
    publish<Transport>(ctx, boxes, p.plan.senders);
  } else if (receiver < p.plan.receivers) {
    fence_bulk_shared();  // the route's workspace lies where the stages are
    __syncwarp();
    BulkReceiver<kPacked>(ctx, p, stages_of(p, shared, warp)).run(place);
  } else {
    const int threads = kWarp * (p.plan.helpers - 1);
    clear_unfilled_rows(ctx, p, place, (helper - 1) * kWarp + lane_id(), threads);
  }
  return begun;
}

#endif  // JAX_EP_BULK_COPY

}  // namespace jax_ep::gpu
