// What one rank's GPU knows of its group, and the memory that outlives an operation. Host and
// device.
#pragma once

#include <cstdint>

#include "layout/control_block.h"
#include "layout/window_layout.h"
#include "protocol/error_record.h"
#include "protocol/numeric.h"
#include "protocol/signals.h"

namespace jax_ep::gpu {

constexpr int kMaxRanks = 64;

// Where every rank's memory is, as this rank's GPU addresses it. In device memory until the process
// exits: a graph that is replayed after close() reads open == 0 and touches nothing.
struct PeerTable {
  uint32_t open;
  uint32_t generation;  // resets so far: tickets of starts from before the last are stale
  char* window[kMaxRanks];
  char* control[kMaxRanks];
  // Over NVSHMEM: ranks whose pointers are null are reached by puts to these processing elements.
  uint32_t num_remote;
  int32_t pe[kMaxRanks];
};

// Host memory that the GPU writes and the host reads without a CUDA call. The error's kind is
// written last. Faults are counted for ever; the host writes down how many it has reported.
struct Mailbox {
  ErrorRecord error;
  uint64_t faults_found;
  uint64_t first_fault;  // see pack_fault; the first since the host last took them
  uint64_t faults_taken;
  uint32_t poison;  // 1 + the rank that gave up, once an operation of ours has seen it
};

// One fault of the data in 64 bits, ordered by token, then k. Never zero.
JAX_EP_HD constexpr uint64_t pack_fault(int token, int k, bool duplicate, int32_t value) {
  return (uint64_t{1} << 63) | (static_cast<uint64_t>(token) << 40) |
         (static_cast<uint64_t>(k) << 34) | (static_cast<uint64_t>(duplicate) << 33) |
         static_cast<uint32_t>(value);
}
struct DataFault {
  int token;
  int k;
  bool duplicate;
  int32_t value;
};
JAX_EP_HD constexpr DataFault unpack_fault(uint64_t fault) {
  return {static_cast<int>((fault >> 40) & 0x7FFFFF), static_cast<int>((fault >> 34) & 0x3F),
          ((fault >> 33) & 1) != 0, static_cast<int32_t>(static_cast<uint32_t>(fault))};
}

// A counter on a cache line of its own.
struct alignas(128) Counter {
  uint32_t value;
};

// Counters of the operation in progress on one channel; all zero between operations.
struct ChannelState {
  Counter send_ticket;
  Counter receive_ticket;
  Counter blocks_routed;  // dispatch: blocks whose share of the routes is written
  Counter rows_placed;    // dispatch: 1 when block 0 has placed the experts for all blocks
  Counter blocks_marked;  // combine_grad: blocks whose share of the rows is marked
  Counter highest_row;    // combine_grad: 1 + the highest row that somebody names
  Counter blocks_done;
  Counter slots_read[kNumBuffers];  // of the chunk in that buffer
  Counter chunk_credits;            // 1 + chunks whose credit has been sent; 0: peers not greeted
  Counter side_data_sent[kNumBuffers];  // combine: messages of all chunks in that buffer so far
  Counter fault_count;
  alignas(128) uint64_t first_fault;  // ~pack_fault, the largest being the first
};

// A channel of a low-latency buffer, whose operations begin and end in launches of their own. The
// epoch in the control block is not used: launches are counted in shares that their blocks add, the
// last block's rounding a launch up to kLaunchShare. So a count divided by kLaunchShare is the same
// for all blocks of a launch, whichever of them have added their share, and nobody has to find out
// who is last. `started` and `done` outlive the operation.
constexpr uint64_t kLaunchShare = uint64_t{1} << 20;  // more than a launch has blocks
struct LowLatencyState {
  alignas(128) uint64_t started;  // launches that send
  uint64_t done;                  // launches that receive
  Counter failed;                 // blocks of the launch that gave up
  Counter finished;               // blocks of the launch that have ended, where one must be last
  Counter fault_lock;             // 1 while a block writes its faults to the mailbox
  uint64_t fault_epoch;           // whose fault the mailbox shows
};

struct RankState {
  uint32_t error_claimed;  // 1 once a thread of this rank has written the mailbox's error
  ChannelState channel[kNumChannels];
  LowLatencyState low_latency[kNumChannels];
};

struct SendRoute {
  int32_t rank;    // where the expert lives, -1 for no expert
  uint32_t route;  // pack_route
};

// Scratch of one rank, in device memory. Sizes are those of the window's shape.
struct Scratch {
  RankState* state;
  SendRoute* routes;       // [T, K]
  uint64_t* block_counts;  // [kMaxRoutingBlocks, E]: (epoch, entries of the block for that expert)
  uint32_t* route_workspace;  // [route_workspace_words], when shared memory has no room
  int32_t* row_bases;         // [E + E_l], likewise
  uint32_t* row_marks;        // [row_mark_words], a bit per output row, zero between operations
  int64_t row_mark_words;
};

// The part of a kernel's arguments that says which operation of which group it is.
struct Operation {
  WindowLayout layout;
  int rank;
  OpKind kind;
  Channel channel;
  uint32_t tag;
  int num_tokens;
  int tokens_per_epoch;
  int num_chunks;
  uint64_t timeout_ns;
  const int32_t* rank_operand;  // the program's own idea of this rank
  PeerTable* peers;
  char* control;
  Mailbox* mailbox;
  Scratch scratch;

  JAX_EP_HD int num_ranks() const { return layout.shape.num_ranks; }
  JAX_EP_HD ChannelState* state() const { return &scratch.state->channel[channel]; }
  JAX_EP_HD LowLatencyState* low_latency_state() const {
    return &scratch.state->low_latency[channel];
  }
  JAX_EP_HD ControlLayout control_layout() const { return {layout.shape.num_ranks}; }
};

}  // namespace jax_ep::gpu
