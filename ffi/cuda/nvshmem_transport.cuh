// Peers in other processes, on this host or another, over NVSHMEM's symmetric heap. A peer whose
// memory this GPU addresses is written to directly. To any other a warp writes its row into its own
// send region and puts it from there; words travel by themselves, in a put each.
//
// What is put may arrive in any order, so what must not overtake has a fence between: rows and
// their flags (low latency has none: ll_puts.cuh), one credit and the next, one operation and the
// next. NVSHMEM's fence orders all that this GPU has put before, whichever thread did: a barrier of
// the warp between put and fence is enough.
#pragma once

#include <type_traits>

#include "cuda/ptx.cuh"
#include "cuda/window.h"
#include "transport/cuda_nvshmem_calls.cuh"

namespace jax_ep::gpu {

template <class T>
__device__ void put_word(char* own_address, T value, int pe) {
  static_assert(std::is_same_v<T, uint32_t> || std::is_same_v<T, uint64_t>, "other words may tear");
  nvshmem::put_word(reinterpret_cast<T*>(own_address), value, pe);
}

struct NvshmemTransport {
  // What is written to window() may lie in our send region, and must be put from there. Bulk copies
  // do not know of this.
  static constexpr bool kPuts = true;

  template <class Context>
  __device__ static bool is_remote(const Context& ctx, int rank) {
    return ctx.block.window[rank] == nullptr;
  }

  // Where this rank writes what is to lie at `offset` of a peer's window: there, or in its own send
  // region, from where put() sends it.
  template <class Context>
  __device__ static char* window(const Context& ctx, int rank, int64_t offset) {
    if (!is_remote(ctx, rank)) return ctx.block.window[rank] + offset;
    return ctx.own_window(ctx.op.layout.staged(offset, ctx.rank(), rank));
  }

  // A warp, after a barrier of its own: sends what it has written to window(ctx, rank, offset).
  template <class Context>
  __device__ static void put(const Context& ctx, int rank, int64_t offset, int64_t bytes) {
    if (!is_remote(ctx, rank)) return;
    nvshmem::put_warp(ctx.own_window(offset), window(ctx, rank, offset), static_cast<size_t>(bytes),
                      ctx.op.peers->pe[rank]);
  }

  // A warp: what this GPU puts from here on arrives after what it has put before.
  __device__ static void order(const Operation& op) {
    if (op.peers->num_remote == 0) return;
    __syncwarp();
    if (lane_id() == 0) nvshmem::fence();
    __syncwarp();
  }

  // The caller has fenced, and ordered, the payload that the flag stands for.
  template <class Context, class T>
  __device__ static void signal(const Context& ctx, int rank, int64_t offset, T value) {
    if (is_remote(ctx, rank)) {
      put_word(ctx.own_window(offset), value, ctx.op.peers->pe[rank]);
    } else {
      store_relaxed<kSystemScope>(reinterpret_cast<T*>(ctx.block.window[rank] + offset), value);
    }
  }

  // Word `index` of those at `offset`, which says by itself that it has come.
  template <class Context>
  __device__ static void send_word(const Context& ctx, int rank, int64_t offset, int index,
                                   uint32_t value) {
    signal(ctx, rank, offset + int64_t{4} * index, value);
  }

  // As signal(), before the block has the windows' addresses in common: `window` is the rank's,
  // null where it cannot be addressed.
  template <class T>
  __device__ static void store_window(const Operation& op, char* window, int rank, int64_t offset,
                                      T value) {
    if (window == nullptr) {
      put_word(op.peers->window[op.rank] + offset, value, op.peers->pe[rank]);
    } else {
      store_relaxed<kSystemScope>(reinterpret_cast<T*>(window + offset), value);
    }
  }

  // A word of payload to a remote rank: the flag that stands for it comes after order().
  template <class Context>
  __device__ static void put_scalar(const Context& ctx, int rank, int64_t offset, float value) {
    put_word(ctx.own_window(offset), __float_as_uint(value), ctx.op.peers->pe[rank]);
  }

  // A flag of `rank` that this thread has just acquired in our window: on some systems the row that
  // a network adapter wrote before it needs this to be seen.
  template <class Context>
  __device__ static void see_payload(const Context& ctx, int rank, char* flag, uint32_t value) {
    if (is_remote(ctx, rank)) {
      nvshmem::test_word(reinterpret_cast<uint32_t*>(flag), value);
    }
  }

  // Control blocks. `control`: of the rank, null where it cannot be addressed.
  template <class T>
  __device__ static void store_control(const Operation& op, char* control, int rank, int64_t offset,
                                       T value) {
    if (control == nullptr) {
      put_word(op.control + offset, value, op.peers->pe[rank]);
    } else {
      store_relaxed<kSystemScope>(reinterpret_cast<T*>(control + offset), value);
    }
  }
  // After all that this thread has read, and after the word's former value.
  template <class T>
  __device__ static void release_control(const Operation& op, char* control, int rank,
                                         int64_t offset, T value) {
    fence_system();
    if (control == nullptr) nvshmem::fence();
    store_control(op, control, rank, offset, value);
  }

  // One thread, when all blocks of an operation have ended: nothing of it may arrive after the
  // words of the next one, which have the same places. NVSHMEM gives this wait no deadline.
  __device__ static void settle(const Operation& op) {
    if (op.peers->num_remote != 0) nvshmem::quiet();
  }
};

}  // namespace jax_ep::gpu
