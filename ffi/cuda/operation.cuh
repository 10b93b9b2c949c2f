// How every kernel begins and ends an operation, and how it waits: for its peers, never for ever.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/window.h"
#include "protocol/epochs.h"
#if defined(JAX_EP_NVSHMEM)
#include "cuda/nvshmem_transport.cuh"
#endif

namespace jax_ep::gpu {

// In shared memory: the facts that a kernel reads from device memory once per block.
struct BlockState {
  uint32_t aborted;
  uint32_t is_last_block;
  char* window[kMaxRanks];
  char* control[kMaxRanks];
};

class BoundedWait;

struct OpContext {
  using Wait = BoundedWait;

  const Operation& op;
  BlockState& block;
  uint64_t epoch;  // of the operation's first chunk

  __device__ static OpContext make(const Operation& op, BlockState& block) {
    const int64_t offset = op.control_layout().epoch(op.channel);
    return {op, block, *reinterpret_cast<const uint64_t*>(op.control + offset) + 1};
  }

  __device__ int rank() const { return op.rank; }
  __device__ int num_ranks() const { return op.num_ranks(); }
  __device__ uint64_t chunk_epoch(int chunk) const { return epoch + chunk; }
  __device__ int chunk_parity(int chunk) const { return parity_of(epoch + chunk); }
  __device__ int chunk_of(int token) const {
    return op.num_chunks == 1 ? 0 : token / op.tokens_per_epoch;
  }
  __device__ char* own_window(int64_t offset) const { return block.window[op.rank] + offset; }

  __device__ bool aborted() const { return load_relaxed<kBlockScope>(&block.aborted) != 0; }
  __device__ void abort() const { store_relaxed<kBlockScope>(&block.aborted, 1u); }
};

// Peers in the same process: their memory is addressed directly.
struct PeerTransport {
  static constexpr bool kPuts = false;  // all that is written to window() is there

  __device__ static char* window(const OpContext& ctx, int rank, int64_t offset) {
    return ctx.block.window[rank] + offset;
  }
  // The caller has fenced the payload that the flag stands for.
  template <class T>
  __device__ static void signal(const OpContext& ctx, int rank, int64_t offset, T value) {
    store_relaxed<kSystemScope>(reinterpret_cast<T*>(window(ctx, rank, offset)), value);
  }
  // Word `index` of those at `offset`, which says by itself that it has come.
  __device__ static void send_word(const OpContext& ctx, int rank, int64_t offset, int index,
                                   uint32_t value) {
    auto* words = reinterpret_cast<uint32_t*>(window(ctx, rank, offset));
    store_relaxed<kSystemScope>(words + index, value);
  }
  // As signal(), before the block has the windows' addresses in common.
  template <class T>
  __device__ static void store_window(const Operation&, char* window, int, int64_t offset,
                                      T value) {
    store_relaxed<kSystemScope>(reinterpret_cast<T*>(window + offset), value);
  }
  template <class T>
  __device__ static void store_control(const Operation&, char* control, int, int64_t offset,
                                       T value) {
    store_relaxed<kSystemScope>(reinterpret_cast<T*>(control + offset), value);
  }
  template <class T>
  __device__ static void release_control(const Operation&, char* control, int, int64_t offset,
                                         T value) {
    store_release<kSystemScope>(reinterpret_cast<T*>(control + offset), value);
  }

  // What is written is there, in the order in which it is fenced.
  __device__ static void put(const OpContext&, int, int64_t, int64_t) {}
  __device__ static void order(const Operation&) {}
  __device__ static void see_payload(const OpContext&, int, char*, uint32_t) {}
  __device__ static void settle(const Operation&) {}
};

// Of all kernels of a module: it is built for one.
#if defined(JAX_EP_NVSHMEM)
using GroupTransport = NvshmemTransport;
#else
using GroupTransport = PeerTransport;
#endif

__device__ inline bool window_poisoned(const Operation& op) {
  const auto* word = reinterpret_cast<uint32_t*>(op.control + op.control_layout().poison());
  return load_relaxed<kSystemScope>(word) != 0;
}

// The rank that gave up has told its own host; ours may be another.
__device__ inline void tell_host_of_poison(const Operation& op) {
  const auto* word = reinterpret_cast<uint32_t*>(op.control + op.control_layout().poison());
  *const_cast<volatile uint32_t*>(&op.mailbox->poison) = load_relaxed<kSystemScope>(word);
}

// Writes the record for the host, once per rank, and stops every rank of the group.
// The functions of the slow path are calls and take the context by value: a reference would force
// every user of the fast path to keep its context in local memory.
__device__ __noinline__ inline void give_up(const OpContext ctx, ErrorRecord record) {
  const Operation& op = ctx.op;
  cuda::atomic_ref<uint32_t, kDeviceScope> claimed(op.scratch.state->error_claimed);
  if (claimed.exchange(1) == 0) {
    volatile ErrorRecord* to = &op.mailbox->error;
    to->op = record.op;
    to->wait = record.wait;
    to->rank = record.rank;
    to->peer = record.peer;
    to->epoch = record.epoch;
    to->expected = record.expected;
    to->seen = record.seen;
    fence_system();
    to->kind = record.kind;
  }
  for (int r = 0; r < op.num_ranks(); ++r) {
    GroupTransport::store_control(op, op.peers->control[r], r, op.control_layout().poison(),
                                  1u + op.rank);
  }
  ctx.abort();
}

__device__ inline const uint64_t* tag_word(const OpContext& ctx, int peer) {
  const int parity = parity_of(ctx.epoch);
  const int64_t offset = ctx.op.channel == kDispatchChannel
                             ? ctx.op.layout.dispatch_tag(parity, peer)
                             : ctx.op.layout.combine_tag(parity, peer);
  return reinterpret_cast<uint64_t*>(ctx.op.peers->window[ctx.rank()] + offset);
}

// A wait for `peer` that took too long: says whether the peer has started at all, and with the same
// operation as we have.
__device__ inline void give_up_waiting(const OpContext& ctx, WaitFor wait, int peer, uint64_t epoch,
                                       uint64_t expected, uint64_t seen) {
  ErrorRecord record{
      ErrorKind::kTimeout, ctx.op.kind, wait, ctx.rank(), peer, epoch, expected, seen};
  if (peer != ctx.rank()) {
    const uint64_t word = load_acquire<kSystemScope>(tag_word(ctx, peer));
    const bool started = word_is_of(word, ctx.epoch);
    if (!started && wait != WaitFor::kCredit) {
      record.wait = WaitFor::kTag;
      record.expected = epoch_word(ctx.epoch, ctx.op.tag);
      record.seen = word;
    } else if (started && word_value(word) != ctx.op.tag) {
      record.kind = ErrorKind::kMismatch;
      record.wait = WaitFor::kTag;
      record.expected = ctx.op.tag;
      record.seen = word_value(word);
    }
  }
  give_up(ctx, record);
}

// The deadline of a wait that has lasted a while, 0 when it must end.
__device__ __noinline__ inline uint64_t check_deadline(const OpContext ctx, uint64_t deadline,
                                                       WaitFor wait, int peer, uint64_t epoch,
                                                       uint64_t expected, uint64_t seen) {
  if (ctx.aborted()) return 0;
  if (window_poisoned(ctx.op)) {
    ctx.abort();
    return 0;
  }
  const uint64_t now = nanoseconds();
  if (deadline == 0) return now + ctx.op.timeout_ns;
  if (now < deadline) return deadline;
  give_up_waiting(ctx, wait, peer, epoch, expected, seen);
  return 0;
}

// Every spin of the kernels that depends on other ranks or blocks asks over() each time round.
class BoundedWait {
 public:
  // True when the caller must stop waiting, because its deadline has passed or because somebody has
  // given up already; the block is then marked as aborted.
  __device__ bool over(const OpContext& ctx, WaitFor wait, int peer, uint64_t epoch,
                       uint64_t expected, uint64_t seen) {
    if (++polls_ % kPollsPerCheck != 0) return false;
    deadline_ = check_deadline(ctx, deadline_, wait, peer, epoch, expected, seen);
    return deadline_ == 0;
  }
  __device__ void restart() {
    polls_ = 0;
    deadline_ = 0;
  }

 private:
  static constexpr uint32_t kPollsPerCheck = 64;
  uint32_t polls_ = 0;
  uint64_t deadline_ = 0;
};

// Waits for an (epoch, value) word, which stands for itself alone. False when the wait was given
// up.
template <class Context>
__device__ bool wait_for_word(const Context& ctx, const uint64_t* word, uint64_t epoch,
                              WaitFor wait, int peer, uint32_t* value) {
  typename Context::Wait bound;
  while (true) {
    const uint64_t seen = load_relaxed<kSystemScope>(word);
    *value = word_value(seen);
    if (word_is_of(seen, epoch)) return true;
    if (bound.over(ctx, wait, peer, epoch, epoch_word(epoch, 0), seen)) return false;
  }
}

__device__ inline uint64_t load_credit(const OpContext& ctx, int peer) {
  const int64_t offset = ctx.op.control_layout().credit(ctx.op.channel, peer);
  return load_acquire<kSystemScope>(reinterpret_cast<uint64_t*>(ctx.op.control + offset));
}

// Waits until `peer` has finished reading the buffer that epoch `epoch` is about to overwrite.
template <class Context>
__device__ bool wait_for_credit(const Context& ctx, int peer, uint64_t epoch) {
  typename Context::Wait bound;
  while (true) {
    const uint64_t credit = load_credit(ctx, peer);
    if (may_write(epoch, credit)) return true;
    if (bound.over(ctx, WaitFor::kCredit, peer, epoch, epoch - kNumBuffers, credit)) return false;
  }
}

// Called by one warp before it sends the first message of a later chunk.
__device__ inline bool wait_for_credits(const OpContext& ctx, int chunk) {
  for (int peer = lane_id(); peer < ctx.num_ranks(); peer += kWarp) {
    if (peer == ctx.rank()) continue;  // our own rows take no slot
    if (!wait_for_credit(ctx, peer, ctx.chunk_epoch(chunk))) break;
  }
  GroupTransport::order(ctx.op);  // flags of the chunk before, for which nobody need have waited
  return !__any_sync(kFullWarp, ctx.aborted());
}

template <class Context>
__device__ bool check_rank_operand(const Context& ctx) {
  const int32_t seen = *ctx.op.rank_operand;
  if (seen == ctx.rank()) return true;
  give_up(ctx,
          {ErrorKind::kMismatch, ctx.op.kind, WaitFor::kStart, ctx.rank(), ctx.rank(), ctx.epoch,
           static_cast<uint64_t>(ctx.rank()), static_cast<uint64_t>(static_cast<int64_t>(seen))});
  return false;
}

__device__ inline void send_credit(const OpContext& ctx, int peer, uint64_t epoch) {
  const int64_t offset = ctx.op.control_layout().credit(ctx.op.channel, ctx.rank());
  GroupTransport::release_control(ctx.op, ctx.block.control[peer], peer, offset, epoch);
}

// The block that speaks for its rank: the last, because the first ones have the routing to do.
__device__ inline bool speaks_for_rank() { return blockIdx.x == gridDim.x - 1; }

// One thread per peer, of every block: sees to the credit of the first chunk; the speaking block
// also tells the peer that we have read all former epochs (their kernels have ended, and a peer
// that waits for this has nothing to do before we begin) and which operation this is.
template <class Transport>
__device__ bool greet(const OpContext& ctx, int peer, uint64_t credit) {
  const Operation& op = ctx.op;
  if (speaks_for_rank() && peer != ctx.rank()) {
    const int64_t offset = op.control_layout().credit(op.channel, ctx.rank());
    Transport::store_control(op, op.peers->control[peer], peer, offset, ctx.epoch - 1);
  }
  const bool may_start = peer == ctx.rank() || may_write(ctx.epoch, credit);
  if (!may_start && !wait_for_credit(ctx, peer, ctx.epoch)) return false;
  if (!speaks_for_rank()) return true;
  const int parity = parity_of(ctx.epoch);
  const int64_t offset = op.channel == kDispatchChannel ? op.layout.dispatch_tag(parity, op.rank)
                                                        : op.layout.combine_tag(parity, op.rank);
  Transport::signal(ctx, peer, offset, epoch_word(ctx.epoch, op.tag));
  return peer != 0 || check_rank_operand(ctx);
}

// All threads of all blocks. Reads what the block needs of device memory and greets the peers.
// False when the operation is aborted.
template <class Transport>
__device__ bool begin_operation(const OpContext& ctx) {
  const Operation& op = ctx.op;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer == 0) ctx.block.aborted = 0;
  bool ready = op.peers->open != 0 && !window_poisoned(op);
  __syncthreads();  // before any thread may set it
  if (peer < op.num_ranks()) {
    const uint64_t credit = load_credit(ctx, peer);
    ctx.block.window[peer] = op.peers->window[peer];
    ctx.block.control[peer] = op.peers->control[peer];
    if (ready) ready = greet<Transport>(ctx, peer, credit);
  }
  const bool begun = __syncthreads_and(ready);
  if (begun && speaks_for_rank() && peer == 0) {
    store_release<kDeviceScope>(&op.state()->chunk_credits.value, 1u);
  }
  return begun;
}

// One thread of the speaking block per peer: the peer is at the same operation as we are.
template <class Context>
__device__ void check_tag(const Context& ctx, int peer) {
  uint32_t tag;
  if (!wait_for_word(ctx, tag_word(ctx, peer), ctx.epoch, WaitFor::kTag, peer, &tag)) return;
  if (tag == ctx.op.tag) return;
  give_up(ctx, {ErrorKind::kMismatch, ctx.op.kind, WaitFor::kTag, ctx.rank(), peer, ctx.epoch,
                ctx.op.tag, tag});
}

// Called by one warp before it uses slots of a later chunk without having waited for a flag there:
// the slots of the chunk that used the buffer before must all have been counted.
__device__ inline bool wait_for_turn(const OpContext& ctx, int chunk) {
  if (chunk < kNumBuffers || ctx.num_ranks() == 1) return true;
  const uint32_t target = static_cast<uint32_t>(chunk + 2 - kNumBuffers);
  const uint32_t* chunks = &ctx.op.state()->chunk_credits.value;
  BoundedWait bound;
  for (uint32_t done; (done = load_acquire<kDeviceScope>(chunks)) < target;) {
    if (bound.over(ctx, WaitFor::kRow, ctx.rank(), ctx.chunk_epoch(chunk), target, done)) break;
  }
  return !__any_sync(kFullWarp, ctx.aborted());
}

__device__ __noinline__ inline void count_slots_of_chunk(const OpContext ctx, int chunk,
                                                         uint32_t count) {
  ChannelState* state = ctx.op.state();
  uint32_t* read = &state->slots_read[chunk % kNumBuffers].value;
  const uint32_t slots = static_cast<uint32_t>(ctx.op.tokens_per_epoch) * (ctx.num_ranks() - 1);
  cuda::atomic_ref<uint32_t, kDeviceScope> counter(*read);
  if (counter.fetch_add(count, cuda::memory_order_acq_rel) + count != slots) return;
  // Credits are sent in order, the greeting's first. The rows of earlier chunks are with other
  // warps, which wait for none of ours.
  BoundedWait bound;
  uint32_t* credits = &state->chunk_credits.value;
  const uint32_t sent = static_cast<uint32_t>(chunk + 1);
  for (uint32_t seen; (seen = load_acquire<kDeviceScope>(credits)) != sent;) {
    if (bound.over(ctx, WaitFor::kRow, ctx.rank(), ctx.chunk_epoch(chunk), sent, seen)) return;
  }
  store_relaxed<kDeviceScope>(read, 0u);
  for (int r = 0; r < ctx.num_ranks(); ++r) send_credit(ctx, r, ctx.chunk_epoch(chunk));
  store_release<kDeviceScope>(credits, sent + 1);
}

// One lane, once `count` slots of other ranks have been read or found empty. Whoever reads the last
// slot of a chunk whose buffer this operation needs again tells the senders so; the credits of the
// last two chunks come with the next operation.
__device__ inline void count_slots_read(const OpContext& ctx, int chunk, uint32_t count) {
  if (chunk + kNumBuffers >= ctx.op.num_chunks || ctx.num_ranks() == 1) return;
  count_slots_of_chunk(ctx, chunk, count);
}

__device__ inline void report_faults(const Operation& op) {
  ChannelState* state = op.state();
  const uint32_t count = load_relaxed<kDeviceScope>(&state->fault_count.value);
  if (count == 0) return;
  volatile Mailbox* mailbox = op.mailbox;
  const uint64_t found = mailbox->faults_found;
  if (mailbox->faults_taken == found) {
    mailbox->first_fault = ~load_relaxed<kDeviceScope>(&state->first_fault);
    fence_system();
  }
  mailbox->faults_found = found + count;
}

// All threads of all blocks, when their work is done. The last block closes the operation: it
// advances the epoch and leaves the counters at zero. When the operation is aborted it calls
// `spoil`, which overwrites every output, whatever the other blocks have written.
template <class Spoil>
__device__ void finish_operation(const OpContext& ctx, bool begun, Spoil spoil) {
  const Operation& op = ctx.op;
  const int tid = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (tid == 0) {
    cuda::atomic_ref<uint32_t, kDeviceScope> done(op.state()->blocks_done.value);
    ctx.block.is_last_block = done.fetch_add(1, cuda::memory_order_acq_rel) + 1 == gridDim.x;
  }
  __syncthreads();
  if (ctx.block.is_last_block == 0) return;
  if (tid == 0) GroupTransport::settle(op);

  if (__syncthreads_or(!begun || ctx.aborted() || window_poisoned(op))) {
    if (tid == 0) tell_host_of_poison(op);
    spoil();
  } else if (tid == 0) {
    const int64_t offset = op.control_layout().epoch(op.channel);
    *reinterpret_cast<uint64_t*>(op.control + offset) = ctx.chunk_epoch(op.num_chunks - 1);
    report_faults(op);
  }
  __syncthreads();
  auto* words = reinterpret_cast<uint32_t*>(op.state());
  for (int i = tid; i < static_cast<int>(sizeof(ChannelState) / 4); i += blockDim.x) words[i] = 0;
}

}  // namespace jax_ep::gpu
