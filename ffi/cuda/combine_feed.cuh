// How the rows that combine sums get into shared memory: two planners say what is to be summed, one
// for the rows we send and one for our own tokens, which it hands on as the other ranks' sums
// arrive; a loader brings the rows of one item after the other into a ring of slots. Sends and own
// tokens interleave, so that the link and the device's memory are both busy.
#pragma once

#include "cuda/combine_items.cuh"

namespace jax_ep::gpu {

// Items per planner, planned and not yet summed. What a block has planned no other can take over:
// with 16, blocks ended far apart (of 16, 8 and 4, on 2 x H200 at 64 blocks, T = 4096: 203, 195 and
// 190 us).
constexpr int kItemRing = 4;
constexpr int kItemBatch = 2;     // tokens that a planner looks at together, at most
constexpr int kScheduleRing = 8;  // items whose rows are in shared memory or on their way
constexpr int kOutputRing = 64;   // items summed whose flags are not yet set
constexpr int kSendLead = 8;      // sends that go before our first token (best of 1, 4 and 8)
constexpr int kServiceWarps = 4;  // besides the consumers

// One part of an item, as the loader hands it to the consumers.
struct ScheduledPart {
  uint32_t item_offset;  // see CombineBlock::item_at
  int count;             // sources; kStop: no more items
  int first_slot;
  uint32_t offset;  // in the row
  uint32_t bytes;
  int planner;
  bool last;  // of its item
};
constexpr int kStop = -1;

// The flag to set once an output is written.
struct OutputFlag {
  int rank;  // or one of these
  int token;
};
constexpr int kNoFlag = -1;
constexpr int kEndOfFlags = -2;

// Between a planner and the loader: counts of items, ever increasing.
struct PlannerState {
  uint32_t ready;
  uint32_t consumed;
  uint32_t finished;
};
enum Planner : int { kSends = 0, kFinals = 1, kPlanners = 2 };

// All of it in shared memory.
struct CombineShared {
  ScheduledPart schedule[kScheduleRing];
  OutputFlag flags[2 * kOutputRing];  // the loader runs ahead of the publisher by both rings
  PlannerState planner[kPlanners];
};
static_assert(2 * kOutputRing >= kOutputRing + kScheduleRing, "flags are overwritten too early");

struct CombineBarriers {
  uint64_t loaded[kScheduleRing];  // rows are in their slots
  uint64_t summed[kScheduleRing];  // and have been read by all consumers
  uint64_t written[kOutputRing];   // the output has been stored by all consumers
  uint64_t flagged[kOutputRing];   // and its flag set
};

#if defined(JAX_EP_BULK_COPY)

struct CombineBlock {
  const OpContext& ctx;
  const CombineParams& p;
  char* slots;
  char* items;
  CombineShared& state;
  CombineBarriers& barriers;

  __device__ uint32_t item_offset(int planner, uint32_t index) const {
    return (planner * kItemRing + index % kItemRing) * static_cast<uint32_t>(p.plan.item_bytes);
  }
  __device__ Item* item_at(uint32_t offset) const {
    return reinterpret_cast<Item*>(items + offset);
  }
  __device__ Item* item(int planner, uint32_t index) const {
    return item_at(item_offset(planner, index));
  }
};

__device__ inline void wait_for_room(const PlannerState& planner, uint32_t produced) {
  while (static_cast<int32_t>(produced - load_acquire<kBlockScope>(&planner.consumed)) >
         kItemRing) {
  }
  __syncwarp();
}

// With a token or two for each block, another block is free to take the second.
__device__ inline int item_batch(const CombineBlock& b) {
  return b.p.op.num_tokens <= 2 * static_cast<int>(gridDim.x) ? 1 : kItemBatch;
}

template <class Transport>
__device__ void plan_sends(const CombineBlock& b) {
  PlannerState& planner = b.state.planner[kSends];
  SendItems sends(b.ctx, b.p, item_batch(b));
  uint32_t produced = 0;
  while (sends.next()) {
    sends.send_side_data<Transport>();
    const unsigned items = sends.items();
    const uint32_t end = produced + __popc(items);
    wait_for_room(planner, end);
    sends.write<Transport>(items, [&](int i) { return b.item(kSends, produced + i); });
    __syncwarp();
    produced = end;
    if (lane_id() == 0) store_release<kBlockScope>(&planner.ready, produced);
  }
  if (lane_id() == 0) store_release<kBlockScope>(&planner.finished, 1u);
}

__device__ inline void plan_finals(const CombineBlock& b) {
  PlannerState& planner = b.state.planner[kFinals];
  if (speaks_for_rank()) {
    for (int r = lane_id(); r < b.ctx.num_ranks(); r += kWarp) check_tag(b.ctx, r);
    __syncwarp();
  }
  FinalItems finals(b.ctx, b.p, item_batch(b));
  uint32_t produced = 0;
  bool over = false;
  while (!over && finals.next()) {
    wait_for_room(planner, produced + finals.num_tokens());
    for (int done = 0; done < finals.num_tokens() && !over;) {
      const int complete = finals.poll();
      if (complete == done) {
        over = finals.give_up();
        continue;
      }
      finals.write(done, complete, [&](int i) { return b.item(kFinals, produced + i); });
      __syncwarp();
      done = complete;
      if (lane_id() == 0) store_release<kBlockScope>(&planner.ready, produced + done);
    }
    produced += finals.num_tokens();
  }
  if (lane_id() == 0) store_release<kBlockScope>(&planner.finished, 1u);
}

class Loader {
 public:
  __device__ explicit Loader(const CombineBlock& b) : b_(b) {}

  __device__ void run() {
    while (true) {
      const bool lead = finals_ + kSendLead <= sends_;  // else sends go first
      if (finals_ready_ == finals_ && (lead || sends_ready_ == sends_)) {
        finals_ready_ = ready(kFinals);
      }
      if (sends_ready_ == sends_) sends_ready_ = ready(kSends);
      const bool send = sends_ready_ != sends_;
      const bool final = finals_ready_ != finals_;
      if (final && (lead || !send)) {
        load_item(b_.item_offset(kFinals, finals_++), kFinals);
      } else if (send) {
        load_item(b_.item_offset(kSends, sends_++), kSends);
      } else if (all_planned()) {
        break;
      } else if (in_flight_ > 0 && __all_sync(kFullWarp, oldest_is_summed())) {
        retire();
      }
    }
    while (in_flight_ > 0) retire();
    schedule({0, kStop, 0, 0, 0, kSends, true}, {kEndOfFlags, 0});
  }

 private:
  // The same for all lanes.
  __device__ uint32_t ready(Planner planner) const {
    uint32_t count = 0;
    if (lane_id() == 0) count = load_acquire<kBlockScope>(&b_.state.planner[planner].ready);
    count = __shfl_sync(kFullWarp, count, 0);
    __syncwarp();  // what lane 0 has seen ready, all may read
    return count;
  }

  // `finished` is read first: what is ready after it has been seen is all there will be.
  __device__ bool ended(Planner planner, uint32_t taken) const {
    const PlannerState& state = b_.state.planner[planner];
    return load_acquire<kBlockScope>(&state.finished) != 0 &&
           load_acquire<kBlockScope>(&state.ready) == taken;
  }
  __device__ bool all_planned() const {
    return __all_sync(kFullWarp, ended(kSends, sends_) && ended(kFinals, finals_));
  }

  __device__ void load_item(uint32_t item_offset, Planner planner) {
    Item* item = b_.item_at(item_offset);
    const int count = item->count;
    const char* source = lane_id() < count ? item->sources()[lane_id()] : nullptr;
    const uint32_t row_bytes = static_cast<uint32_t>(b_.p.op.layout.shape.row_bytes);
    const uint32_t part_bytes = static_cast<uint32_t>(b_.p.plan.part_bytes);
    for (int part = 0; part < b_.p.plan.num_parts; ++part) {
      const uint32_t offset = part * part_bytes;
      const uint32_t bytes = min(part_bytes, row_bytes - offset);
      const bool last = part + 1 == b_.p.plan.num_parts;
      while (used_ + count > b_.p.plan.num_slots || in_flight_ == kScheduleRing) retire();
      int slot = next_slot_ + lane_id();
      if (slot >= b_.p.plan.num_slots) slot -= b_.p.plan.num_slots;
      uint64_t* loaded = &b_.barriers.loaded[next_ % kScheduleRing];
      schedule({item_offset, count, next_slot_, offset, bytes, planner, last},
               {last ? item->flag_rank : kNoFlag, item->token});
      if (lane_id() < count) {
        if (planner == kFinals) fence_bulk_global();  // flags were acquired with ordinary loads
        bulk_load(b_.slots + slot * part_bytes, source + offset, bytes, loaded);
      }
      next_slot_ += count;
      if (next_slot_ >= b_.p.plan.num_slots) next_slot_ -= b_.p.plan.num_slots;
      used_ += count;
    }
  }

  __device__ void schedule(const ScheduledPart& part, const OutputFlag& flag) {
    const int slot = next_ % kScheduleRing;
    __syncwarp();
    if (lane_id() == 0) {
      b_.state.schedule[slot] = part;
      b_.state.flags[next_ % (2 * kOutputRing)] = flag;
      barrier_expect(&b_.barriers.loaded[slot], max(part.count, 0) * part.bytes);
    }
    __syncwarp();
    ++next_;
    ++in_flight_;
  }

  __device__ bool oldest_is_summed() const {
    return barrier_passed(&b_.barriers.summed[tail_ % kScheduleRing], tail_ / kScheduleRing % 2);
  }

  // Waits until the oldest part has been summed, and frees its slots and, with the last part, its
  // item.
  __device__ void retire() {
    const int slot = tail_ % kScheduleRing;
    barrier_wait(&b_.barriers.summed[slot], tail_ / kScheduleRing % 2);
    const ScheduledPart& part = b_.state.schedule[slot];
    used_ -= part.count;
    if (part.last && lane_id() == 0) {
      if (part.planner == kFinals) {
        count_slots_read(b_.ctx, b_.ctx.chunk_of(b_.item_at(part.item_offset)->token),
                         b_.ctx.num_ranks() - 1);
      }
      PlannerState& planner = b_.state.planner[part.planner];
      store_release<kBlockScope>(&planner.consumed, planner.consumed + 1);
    }
    __syncwarp();
    ++tail_;
    --in_flight_;
  }

  const CombineBlock& b_;
  uint32_t sends_ = 0;  // items taken
  uint32_t finals_ = 0;
  uint32_t sends_ready_ = 0;  // items that are known to be ready
  uint32_t finals_ready_ = 0;
  uint32_t next_ = 0;  // parts scheduled
  uint32_t tail_ = 0;  // parts retired
  int in_flight_ = 0;
  int next_slot_ = 0;
  int used_ = 0;  // slots
};

#endif  // JAX_EP_BULK_COPY

}  // namespace jax_ep::gpu
