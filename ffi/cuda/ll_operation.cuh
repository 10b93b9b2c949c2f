// How a low-latency launch begins and ends. An operation takes one epoch. It sends and receives in
// one launch, or in two: `start` sends and returns, `done` receives, and two operations of a
// channel may be between the two.
//
// Nothing is done at the end of a launch that could be done earlier, because a round trip to a
// counter would be a tenth of the operation: blocks check in once they have used the counters, and
// the last to check in advances them. Launches of one channel follow each other on the device.
#pragma once

#include "cuda/ll_window.h"
#include "cuda/operation.cuh"
#include "protocol/split.h"

namespace jax_ep::gpu {

// As this launch finds them.
struct LlCounters {
  uint64_t done;
  uint64_t started;
  uint32_t finished_base;

  __device__ static LlCounters read(const Operation& op) {
    const int64_t offset = op.control_layout().epoch(op.channel);
    const LowLatencyState* state = op.low_latency_state();
    return {*reinterpret_cast<const uint64_t*>(op.control + offset), state->started,
            state->finished_base};
  }
  __device__ uint64_t epoch(const LlTurn& turn) const { return (turn.send ? started : done) + 1; }
};

// The last thread of each block, between sending and receiving: there the round trip hides behind
// the wire. Relaxed is enough: the block has long used the counters, so that its loads of them are
// over.
__device__ inline void check_in(const Operation& op, const LlTurn& turn,
                                const LlCounters& counters) {
  if (threadIdx.x != blockDim.x - 1) return;
  LowLatencyState* state = op.low_latency_state();
  cuda::atomic_ref<uint32_t, kDeviceScope> checked_in(state->checked_in.value);
  if (checked_in.fetch_add(1, cuda::memory_order_relaxed) + 1 != gridDim.x) return;
  state->checked_in.value = 0;
  state->finished_base = counters.finished_base + gridDim.x;
  if (turn.send) state->started = counters.epoch(turn);
  if (turn.receive) {
    const int64_t offset = op.control_layout().epoch(op.channel);
    *reinterpret_cast<uint64_t*>(op.control + offset) = counters.epoch(turn);
  }
}

// All threads of all blocks decide alike. An operation out of turn would read or overwrite another
// one's buffer: more than two starts without their done, a done that is not the oldest start's, a
// fused operation between a start and its done.
__device__ inline bool in_turn(const OpContext& ctx, const LlTurn& turn, const LlCounters& counters,
                               const StartTicket& pending, uint32_t generation) {
  const uint64_t in_flight = counters.started - counters.done;
  if (turn.send && turn.receive) return in_flight == 0;
  if (turn.send) return in_flight < kNumBuffers;
  return in_flight > 0 && same_ticket(pending, start_ticket(ctx.epoch, ctx.op.tag, generation));
}

// Of a done the record expects the epoch itself, of all others an earlier one: the texts of
// kUsage tell them apart by that.
__device__ inline void give_up_out_of_turn(const OpContext& ctx, const LlTurn& turn,
                                           const LlCounters& counters, uint32_t pending) {
  give_up(ctx, {ErrorKind::kUsage, ctx.op.kind, WaitFor::kStart, ctx.rank(), ctx.rank(), ctx.epoch,
                turn.send ? counters.done : ctx.epoch, turn.send ? counters.started : pending});
}

__device__ inline int64_t ll_tag_offset(const OpContext& ctx) {
  const WindowLayout& layout = ctx.op.layout;
  const int parity = parity_of(ctx.epoch);
  return ctx.op.channel == kDispatchChannel ? layout.dispatch_tag(parity, ctx.rank())
                                            : layout.combine_tag(parity, ctx.rank());
}

// What the beginning of an operation depends on. All of it is asked for before any of it is used:
// one after the other, these loads would take longer than the payload's way.
struct LlOpening {
  uint32_t open;
  uint32_t poison;
  uint32_t generation;
  StartTicket pending;  // of a done
  int32_t rank_operand;
  // Of this thread's peer.
  uint64_t credit;
  char* window;
  char* control;

  __device__ static LlOpening read(const Operation& op, const LlTurn& turn) {
    const ControlLayout control = op.control_layout();
    const int peer = min(static_cast<int>(threadIdx.x), op.num_ranks() - 1);
    LlOpening o;
    o.window = op.peers->window[peer];
    o.control = op.peers->control[peer];
    o.open = op.peers->open;
    o.rank_operand = *op.rank_operand;
    o.generation = op.peers->generation;
    o.pending = turn.send ? StartTicket{} : StartTicket{turn.ticket[0], turn.ticket[1]};
    // Only stores depend on the credit, and they follow a branch on it.
    o.credit = load_relaxed<kSystemScope>(
        reinterpret_cast<uint64_t*>(op.control + control.credit(op.channel, peer)));
    o.poison =
        load_relaxed<kSystemScope>(reinterpret_cast<uint32_t*>(op.control + control.poison()));
    return o;
  }
};

// One thread per peer, of every block. A credit is sent before any is waited for, so that ranks
// cannot wait for each other.
__device__ inline bool greet_ll(const OpContext& ctx, const LlTurn& turn,
                                const LlCounters& counters, const LlOpening& opening) {
  const Operation& op = ctx.op;
  const int peer = static_cast<int>(threadIdx.x);
  if (speaks_for_rank() && peer != ctx.rank()) {
    const int64_t offset = op.control_layout().credit(op.channel, ctx.rank());
    store_relaxed<kSystemScope>(reinterpret_cast<uint64_t*>(opening.control + offset),
                                counters.done);
  }
  if (turn.send) {
    const bool may_start = peer == ctx.rank() || may_write(ctx.epoch, opening.credit);
    if (!may_start && !wait_for_credit(ctx, peer, ctx.epoch)) return false;
    if (speaks_for_rank()) {
      store_relaxed<kSystemScope>(reinterpret_cast<uint64_t*>(opening.window + ll_tag_offset(ctx)),
                                  epoch_word(ctx.epoch, op.tag));
    }
  }
  if (!speaks_for_rank() || peer != 0 || opening.rank_operand == ctx.rank()) return true;
  return check_rank_operand(ctx);
}

// One thread: what the program gets whether or not the operation begins.
__device__ inline void write_turn_outputs(const OpContext& ctx, const LlTurn& turn,
                                          uint32_t generation) {
  if (turn.order_token != nullptr) *turn.order_token = 0.0f;
  if (turn.ticket_out == nullptr) return;
  const StartTicket ticket = start_ticket(ctx.epoch, ctx.op.tag, generation);
  turn.ticket_out[0] = ticket.epoch;
  turn.ticket_out[1] = ticket.check;
}

// All threads of all blocks: reads what the block needs of device memory and greets the peers.
// False when the operation is aborted; otherwise the caller has check_in() to call. A block
// barrier.
__device__ inline bool begin_ll(const OpContext& ctx, const LlTurn& turn,
                                const LlCounters& counters, const LlOpening& opening) {
  const Operation& op = ctx.op;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer == 0) ctx.block.aborted = 0;
  if (peer < op.num_ranks()) {
    ctx.block.window[peer] = opening.window;
    ctx.block.control[peer] = opening.control;
  }
  bool ready = opening.open != 0 && opening.poison == 0;
  if (ready && !in_turn(ctx, turn, counters, opening.pending, opening.generation)) {
    ready = false;
    if (speaks_for_rank() && peer == 0) {
      give_up_out_of_turn(ctx, turn, counters, opening.pending.epoch);
    }
  }
  if (ready && peer < op.num_ranks()) ready = greet_ll(ctx, turn, counters, opening);
  if (peer == 0 && speaks_for_rank()) write_turn_outputs(ctx, turn, opening.generation);
  const bool begun = __syncthreads_and(ready);
  if (!begun) check_in(op, turn, counters);
  return begun;
}

// Threads of the speaking block, one per peer: the peer is at the same operation as we are. With
// `waited`, how long it kept us waiting is added to it, modulo 2^32.
__device__ inline void meet_peers(const OpContext& ctx, const uint32_t* waited_before,
                                  uint32_t* waited) {
  const int peer = static_cast<int>(threadIdx.x);
  if (!speaks_for_rank() || peer >= ctx.num_ranks()) return;
  const uint64_t begin = waited != nullptr ? nanoseconds() : 0;
  check_tag(ctx, peer);
  if (waited == nullptr) return;
  const auto nanoseconds_here = static_cast<uint32_t>(nanoseconds() - begin);
  waited[peer] = waited_before[peer] + (peer == ctx.rank() ? 0 : nanoseconds_here);
}

// One block of those that gave up overwrites the outputs, once all others have ended. They all end:
// each of their waits has a deadline.
template <class Spoil>
__device__ void spoil_once(const OpContext& ctx, const LlCounters& counters, Spoil spoil) {
  LowLatencyState* state = ctx.op.low_latency_state();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint32_t, kDeviceScope> failed(state->failed.value);
    const bool first = failed.fetch_add(1, cuda::memory_order_relaxed) == 0;
    ctx.block.is_last_block = first;
    const uint32_t others = gridDim.x - 1;
    while (first &&
           load_acquire<kDeviceScope>(&state->finished.value) - counters.finished_base != others) {
    }
    if (first) store_relaxed<kDeviceScope>(&state->failed.value, 0u);
  }
  __syncthreads();
  if (ctx.block.is_last_block != 0) spoil();
  __syncthreads();
}

// All threads of all blocks, when their work is done. `needs_last`: the block that ends last calls
// `at_last` with all its threads.
template <class Spoil, class AtLast>
__device__ void finish_ll(const OpContext& ctx, const LlCounters& counters, bool begun,
                          bool needs_last, Spoil spoil, AtLast at_last) {
  if (__syncthreads_or(!begun || ctx.aborted())) spoil_once(ctx, counters, spoil);
  LowLatencyState* state = ctx.op.low_latency_state();
  cuda::atomic_ref<uint32_t, kDeviceScope> finished(state->finished.value);
  if (!needs_last) {
    if (threadIdx.x == 0) finished.fetch_add(1, cuda::memory_order_release);
    return;
  }
  if (threadIdx.x == 0) {
    const uint32_t count = finished.fetch_add(1, cuda::memory_order_acq_rel) + 1;
    ctx.block.is_last_block = count - counters.finished_base == gridDim.x;
  }
  __syncthreads();
  if (ctx.block.is_last_block != 0) at_last();
}

// All threads of the block that ends a `done`: a peer that is two operations ahead may go on at
// once, whether or not we come to our next operation.
__device__ inline void send_credits(const OpContext& ctx) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= ctx.num_ranks() || peer == ctx.rank()) return;
  if (ctx.op.peers->open == 0) return;
  const int64_t offset = ctx.op.control_layout().credit(ctx.op.channel, ctx.rank());
  char* control = ctx.op.peers->control[peer];
  store_release<kSystemScope>(reinterpret_cast<uint64_t*>(control + offset), ctx.epoch);
}

}  // namespace jax_ep::gpu
