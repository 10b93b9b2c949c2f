// How a low-latency launch begins and ends. An operation takes one epoch. It sends and receives in
// one launch, or in two: `start` sends and returns, `done` receives, and two operations of a
// channel may be between the two.
//
// A round trip to a counter, a fence or a call would each be a tenth of the operation. So blocks
// add their share to a counter and do not look at it, nothing is fenced that is not an error, and
// a thread whose wait took too long only writes that down: the block tells the others at its end.
#pragma once

#include "cuda/ll_window.h"
#include "cuda/operation.cuh"
#include "protocol/split.h"

namespace jax_ep::gpu {

// In shared memory: what the first of the block's threads that gave up has to say, and what the
// block needs then.
struct LlVerdict {
  uint32_t given;
  ErrorKind kind;
  WaitFor wait;
  int32_t peer;
  uint64_t expected;
  uint64_t seen;
  uint64_t deadline;  // of all waits of the block, from the first that lasts a while; 0: none did
  // As the launch found them. Whoever needs them after its beginning needs them here: they would
  // keep four registers of every thread.
  uint64_t started;
  uint64_t done;
};

class LlWait;

struct LlContext : OpContext {
  using Wait = LlWait;

  LlVerdict& verdict;

  // One thread, before any may give up.
  __device__ void clear(uint64_t started, uint64_t done) const {
    verdict.started = started;
    verdict.done = done;
    block.aborted = 0;
    verdict.given = 0;
    verdict.deadline = 0;
  }
};

__device__ inline void write_down(const LlContext& ctx, ErrorKind kind, WaitFor wait, int peer,
                                  uint64_t expected, uint64_t seen) {
  LlVerdict& verdict = ctx.verdict;
  if (atomicExch(&verdict.given, 1u) == 0) {
    verdict.kind = kind;
    verdict.wait = wait;
    verdict.peer = peer;
    verdict.expected = expected;
    verdict.seen = seen;
  }
  ctx.abort();
}
__device__ inline void give_up(const LlContext& ctx, const ErrorRecord& record) {
  write_down(ctx, record.kind, record.wait, record.peer, record.expected, record.seen);
}

// As BoundedWait, without a call.
class LlWait {
 public:
  __device__ bool over(const LlContext& ctx, WaitFor wait, int peer, uint64_t seen) {
    if (++polls_ % kPollsPerCheck != 0) return false;
    if (ctx.aborted()) return true;
    if (window_poisoned(ctx.op)) {
      ctx.abort();
      return true;
    }
    const uint64_t now = nanoseconds();
    const uint64_t deadline = load_relaxed<kBlockScope>(&ctx.verdict.deadline);
    if (deadline == 0) store_relaxed<kBlockScope>(&ctx.verdict.deadline, now + ctx.op.timeout_ns);
    if (deadline == 0 || now < deadline) return false;
    write_down(ctx, ErrorKind::kTimeout, wait, peer, 0, seen);
    return true;
  }
  __device__ bool over(const LlContext& ctx, WaitFor wait, int peer, uint64_t, uint64_t,
                       uint64_t seen) {
    return over(ctx, wait, peer, seen);
  }

 private:
  static constexpr uint32_t kPollsPerCheck = 64;
  uint32_t polls_ = 0;
};

// One thread: tells the host, and all ranks of the group, what the block has written down.
__device__ __noinline__ inline void announce(const OpContext ctx, const LlVerdict& verdict) {
  if (verdict.kind == ErrorKind::kTimeout) {
    const uint64_t expected =
        verdict.wait == WaitFor::kCredit ? ctx.epoch - kNumBuffers : epoch_word(ctx.epoch, 0);
    give_up_waiting(ctx, verdict.wait, verdict.peer, ctx.epoch, expected, verdict.seen);
  } else {
    give_up(ctx, {verdict.kind, ctx.op.kind, verdict.wait, ctx.rank(), verdict.peer, ctx.epoch,
                  verdict.expected, verdict.seen});
  }
}

// A token, and the part of its columns that a block moves: those of a thread are a block's threads
// apart.
struct LlItem {
  int token;
  int column;  // this thread's first
  int left;    // columns of the part from there on

  __device__ static LlItem of(const LlGrid& grid, int item) {
    const int token = grid.by_parts.quotient(item);
    const int part = item - token * grid.num_parts;
    const int begin = part * grid.part_columns;
    const int end = min(begin + grid.part_columns, grid.num_columns);
    const int column = begin + static_cast<int>(threadIdx.x);
    return {token, column, end - column};
  }
  __device__ bool first_part() const { return begin() == 0; }
  // The part's first column, and how many there are.
  __device__ int begin() const { return column - static_cast<int>(threadIdx.x); }
  __device__ int size() const { return left + static_cast<int>(threadIdx.x); }
  __device__ bool has(int unit) const { return left > unit * static_cast<int>(blockDim.x); }
  __device__ int column_of(int unit) const { return column + unit * static_cast<int>(blockDim.x); }
};

// As this launch finds them.
struct LlCounters {
  uint64_t started;
  uint64_t done;

  // Asks for them: in shares, until they are looked at.
  __device__ static LlCounters ask(const Operation& op) {
    const LowLatencyState* state = op.low_latency_state();
    return {load_relaxed<kDeviceScope>(&state->started), load_relaxed<kDeviceScope>(&state->done)};
  }
  __device__ void look() {
    look_from_here(&started);
    look_from_here(&done);
    started /= kLaunchShare;
    done /= kLaunchShare;
  }
  __device__ uint64_t epoch(const LlTurn& turn) const { return (turn.send ? started : done) + 1; }
};

__device__ inline uint64_t share_of_block() {
  return speaks_for_rank() ? kLaunchShare - (gridDim.x - 1) : 1;
}

// One thread of each block, when the block has used the counters. Nothing is ordered by it but the
// launches that follow.
__device__ inline void add_share(const Operation& op, const LlTurn& turn) {
  using Word = unsigned long long;
  LowLatencyState* state = op.low_latency_state();
  const auto share = static_cast<Word>(share_of_block());
  if (turn.send) atomicAdd(reinterpret_cast<Word*>(&state->started), share);
  if (turn.receive) atomicAdd(reinterpret_cast<Word*>(&state->done), share);
}

// All threads of all blocks decide alike. An operation out of turn would read or overwrite another
// one's buffer: more than two starts without their done, a done that is not the oldest start's, a
// fused operation between a start and its done.
__device__ inline bool in_turn(const LlContext& ctx, const LlTurn& turn, const LlCounters& counters,
                               const StartTicket& pending, uint32_t generation) {
  const uint64_t in_flight = counters.started - counters.done;
  if (turn.send) return in_flight < (turn.receive ? 1 : kNumBuffers);
  const StartTicket ours = start_ticket(ctx.epoch, ctx.op.tag, generation);
  return (in_flight != 0) & same_ticket(pending, ours);
}

// Of a done the record expects the epoch itself, of all others an earlier one: the texts of
// kUsage tell them apart by that.
__device__ inline void give_up_out_of_turn(const LlContext& ctx, const LlTurn& turn,
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

// The threads that see to the peers, one each, are a block's last: its first warp has other things
// to do while they wait for memory. Not below the number of ranks: none.
__device__ inline int peer_of_thread() {
  return static_cast<int>(blockDim.x) - 1 - static_cast<int>(threadIdx.x);
}

// Threads at a block's end whose warps see to the peers.
__device__ inline int peer_threads(int num_ranks) {
  return min((num_ranks + kWarp - 1) / kWarp * kWarp, static_cast<int>(blockDim.x));
}

// What the beginning of an operation depends on. All of it is asked for before any of it is used:
// one after the other, these loads would take longer than the payload's way.
struct LlOpening {
  uint32_t open;
  uint32_t poison;
  uint32_t generation;
  StartTicket pending;  // of a done
  int32_t rank_operand;
  uint64_t credit;  // of this thread's peer

  // All threads, first of all. The peer's addresses go to the block.
  __device__ static LlOpening read(const Operation& op, const LlTurn& turn, BlockState& block) {
    const ControlLayout control = op.control_layout();
    const int peer = peer_of_thread();
    LlOpening o{};
    if (peer >= op.num_ranks()) return o;
    copy_async(&block.window[peer], &op.peers->window[peer]);
    copy_async(&block.control[peer], &op.peers->control[peer]);
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

// A credit is sent before any is waited for, so that ranks cannot wait for each other.
__device__ inline bool greet_ll(const LlContext& ctx, const LlTurn& turn,
                                const LlCounters& counters, const LlOpening& opening, int peer) {
  const Operation& op = ctx.op;
  if (speaks_for_rank() && peer != ctx.rank()) {
    const int64_t offset = op.control_layout().credit(op.channel, ctx.rank());
    GroupTransport::store_control(op, ctx.block.control[peer], peer, offset, counters.done);
  }
  if (turn.send) {
    const bool may_start = peer == ctx.rank() || may_write(ctx.epoch, opening.credit);
    if (!may_start && !wait_for_credit(ctx, peer, ctx.epoch)) return false;
    if (speaks_for_rank()) {
      GroupTransport::store_window(op, ctx.block.window[peer], peer, ll_tag_offset(ctx),
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

// One thread per peer, of every block; true for all others.
__device__ inline bool greet_peers(const LlContext& ctx, const LlTurn& turn,
                                   const LlCounters& counters, const LlOpening& opening) {
  const Operation& op = ctx.op;
  const int peer = peer_of_thread();
  // Puts of an earlier launch must not arrive after those of this one for the same word: a credit,
  // or a flag of combine that nobody need have waited for. All other words have been read by now.
  // Whole warps, whatever their threads have found: they meet inside.
  const bool may_overtake = speaks_for_rank() || (op.channel == kCombineChannel && turn.send);
  const int last_of_warp = static_cast<int>(blockDim.x) - (warp_id() + 1) * kWarp;
  if (may_overtake && last_of_warp < op.num_ranks()) GroupTransport::order(op);
  if (peer >= op.num_ranks()) return true;
  if (peer == 0) ctx.clear(counters.started, counters.done);
  wait_for_copies();  // of addresses
  const bool our_turn = in_turn(ctx, turn, counters, opening.pending, opening.generation);
  const bool may_send = !turn.send | (peer == ctx.rank()) | may_write(ctx.epoch, opening.credit);
  bool ready = (opening.open != 0) & (opening.poison == 0);
  // Of most blocks that is all: without a branch, it is one piece of code to fetch.
  if (ready & our_turn & may_send & !speaks_for_rank()) return true;
  if (ready && !our_turn) {
    ready = false;
    if (speaks_for_rank() && peer == 0) {
      give_up_out_of_turn(ctx, turn, counters, opening.pending.epoch);
    }
  }
  if (ready) ready = greet_ll(ctx, turn, counters, opening, peer);
  if (peer == 0 && speaks_for_rank()) write_turn_outputs(ctx, turn, opening.generation);
  return ready;
}

// All threads of all blocks: greets the peers. False when the operation is aborted. A block
// barrier.
__device__ inline bool begin_ll(const LlContext& ctx, const LlTurn& turn,
                                const LlCounters& counters, const LlOpening& opening) {
  return __syncthreads_and(greet_peers(ctx, turn, counters, opening));
}

// All threads; those of the speaking block, one per peer: the peer is at the same operation as we
// are. With `waited`, how long it kept us waiting is added to it, modulo 2^32.
__device__ inline void meet_peers(const LlContext& ctx, const uint32_t* waited_before,
                                  uint32_t* waited) {
  const int peer = peer_of_thread();
  if (!speaks_for_rank() || peer >= ctx.num_ranks()) return;
  const uint64_t begin = waited != nullptr ? nanoseconds() : 0;
  check_tag(ctx, peer);
  if (waited == nullptr) return;
  const auto nanoseconds_here = static_cast<uint32_t>(nanoseconds() - begin);
  waited[peer] = waited_before[peer] + (peer == ctx.rank() ? 0 : nanoseconds_here);
}

// One block of those that gave up overwrites the outputs, once all others have added their share.
// They all do: each of their waits has a deadline.
template <class Spoil>
__device__ __noinline__ void spoil_once(const LlContext ctx, const LlTurn turn, Spoil spoil) {
  // A share says that the block has issued its last store, not that the store is done: a fence
  // there would cost every operation a microsecond for the sake of one that fails.
  constexpr uint64_t kStoresTakeNs = 50'000;
  LowLatencyState* state = ctx.op.low_latency_state();
  if (threadIdx.x == 0) {
    if (ctx.verdict.given != 0) announce(ctx, ctx.verdict);
    tell_host_of_poison(ctx.op);
    ctx.block.is_last_block = atomicAdd(&state->failed.value, 1u) == 0;
    if (ctx.block.is_last_block != 0) {
      const uint64_t* counter = turn.send ? &state->started : &state->done;
      const LlVerdict& launch = ctx.verdict;
      const uint64_t before = (turn.send ? launch.started : launch.done) * kLaunchShare;
      const uint64_t others = kLaunchShare - share_of_block();
      while (load_acquire<kDeviceScope>(counter) - before != others) {
      }
      const uint64_t begin = nanoseconds();
      while (nanoseconds() - begin < kStoresTakeNs) {
      }
      store_relaxed<kDeviceScope>(&state->failed.value, 0u);
    }
  }
  __syncthreads();
  if (ctx.block.is_last_block != 0) spoil();
  __syncthreads();
}

// All threads of all blocks, when their work is done. `needs_last`: the block that ends last calls
// `at_last` with all its threads.
template <class Spoil, class AtLast>
__device__ void finish_ll(const LlContext& ctx, const LlTurn& turn, bool begun, bool needs_last,
                          Spoil spoil, AtLast at_last) {
  if (__syncthreads_or(!begun || ctx.aborted())) spoil_once(ctx, turn, spoil);
  if (threadIdx.x == 0) add_share(ctx.op, turn);
  if (!needs_last) return;
  LowLatencyState* state = ctx.op.low_latency_state();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint32_t, kDeviceScope> finished(state->finished.value);
    ctx.block.is_last_block = finished.fetch_add(1, cuda::memory_order_acq_rel) + 1 == gridDim.x;
  }
  __syncthreads();
  if (ctx.block.is_last_block == 0) return;
  if (threadIdx.x == 0) store_relaxed<kDeviceScope>(&state->finished.value, 0u);
  at_last();
}

// All threads of the block that ends last, where an operation used the counters of the channel.
__device__ __noinline__ inline void clear_channel_state(const Operation& op) {
  auto* words = reinterpret_cast<uint32_t*>(op.state());
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(ChannelState) / 4); i += blockDim.x) {
    words[i] = 0;
  }
}

}  // namespace jax_ep::gpu
