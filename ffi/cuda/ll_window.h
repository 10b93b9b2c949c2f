// What the launchers of low-latency operations share: which half of an operation a launch is, how
// it uses the device, and what the window must hold between operations.
//
// A payload word says by itself that it has arrived: until then it holds the sentinel. Whoever
// reads it puts the sentinel back, and no sender ever sends it. So all payload of the window must
// hold sentinels when the first operation starts, and again after operations were aborted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window.h"

namespace jax_ep::gpu {

constexpr uint32_t kSentinel = 0xFFFFFFFFu;

struct LlTurn {
  bool send;
  bool receive;
  uint32_t* ticket_out;    // [2] of a start: the StartTicket that its done must be given
  const uint32_t* ticket;  // [2] of a done: what its start gave
  float* order_token;      // [] or null: gets 0; whoever depends on it comes after the launch

  // The same, of which the compiler knows what it is.
  JAX_EP_HD LlTurn known(bool sends, bool receives) const {
    return {sends, receives, ticket_out, ticket, order_token};
  }

  static LlTurn fused() { return {true, true, nullptr, nullptr, nullptr}; }
  static LlTurn start(uint32_t* ticket) { return {true, false, ticket, nullptr, nullptr}; }
  static LlTurn done(const uint32_t* ticket) { return {false, true, nullptr, ticket, nullptr}; }
};

// Division by a number below 2^16 that is known at the launch, of dividends below 2^22: kernels of
// a few microseconds feel every instruction that has to be fetched, and a division is two dozen.
// The reciprocal is less than 2^-40 too large, so the quotient less than 2^-18.
struct LlDivisor {
  uint64_t reciprocal;

  static LlDivisor of(int divisor) {
    const auto d = static_cast<uint64_t>(divisor);
    return {((uint64_t{1} << 40) + d - 1) / d};
  }
  JAX_EP_HD int quotient(int dividend) const {
    return static_cast<int>((static_cast<uint64_t>(dividend) * reciprocal) >> 40);
  }
};

// A block takes items of (token, part of its columns) in turn; of an item, a thread moves one
// column, or more where that makes fewer turns.
struct LlGrid {
  int num_blocks;
  int threads;
  int units;        // columns that a thread moves at most
  int num_columns;  // of a row
  int num_parts;
  LlDivisor by_parts;
  int part_columns;

  JAX_EP_HD int num_items(int num_tokens) const { return num_tokens * num_parts; }
};

constexpr int kLlMaxThreads =
    448;  // half a row of 14 KB; more would leave a thread too few registers
constexpr int kLlMaxUnits = 2;
// Of kLlMaxThreads; more of smaller ones. Functions of NVSHMEM's that the kernels call do not know
// of launch bounds: they leave room for one.
#if defined(JAX_EP_NVSHMEM)
constexpr int kLlBlocksPerSm = 1;
#else
constexpr int kLlBlocksPerSm = 2;
#endif
// Columns of a part come in groups of this many: 128 bytes, or the channels that share a scale.
constexpr int kColumnGroup = 8;

// What more columns a thread make of a grid: smaller blocks, of which two share a multiprocessor,
// and one sends while the other waits; or parts as large as can be, for which less has to be done
// before the first row.
enum class LlBlocks { kSmall, kLarge };

// All blocks of an operation must be on the device at once, together with those of other ranks
// there: a block waits for peers' blocks that may come later in their grids. most_units: columns
// that the kernel's threads can move. shared_bytes: what a block takes, static memory included.
LlGrid plan_ll_grid(int num_tokens, int num_columns, int most_units, LlBlocks blocks,
                    int64_t shared_bytes, int num_sms, const DeviceLimits& limits);

// What each block may take of shared memory, all in all, and still as many be on the device.
int64_t ll_shared_room(const LlGrid& grid, int num_sms, const DeviceLimits& limits);

// Writes sentinels to all payload of one rank's window: after its creation, and after it has been
// cleared. A group of one rank has no payload.
cudaError_t fill_ll_window(char* window, const WindowLayout& layout, cudaStream_t stream);

}  // namespace jax_ep::gpu
