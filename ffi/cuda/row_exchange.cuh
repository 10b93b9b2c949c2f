// Rows to the ranks that need them with ordinary 16-byte accesses: dispatch where there are no bulk
// copies, and combine's gradient everywhere. Some warps send first; all of them receive.
//
// `Work` says what travels and what becomes of it:
//   Entry load(token)                          lane k: at least the rank of entry k, -1 for none
//   const char* source_row(token)
//   int64_t message_bytes()                    of a message: row and record
//   void write_record(slot, token, entry, rank) by the whole warp: what follows the row in its
//   message void keep(token, entry)                    this rank's own rows of the token void
//   receive(row, id)                      the rows of a message that has arrived void absent(id) a
//   message that will not come
#pragma once

#include "cuda/messages.cuh"

namespace jax_ep::gpu {

// A warp copies a row to the address that each lane of `lanes` holds.
__device__ inline void copy_row(const char* row, int64_t row_bytes, char* target, unsigned lanes) {
  constexpr int kVectors = 8;
  if (lanes == 0) return;
  const auto* from = reinterpret_cast<const uint4*>(row);
  const int num_vectors = static_cast<int>(row_bytes / 16);
  for (int first = lane_id(); first - lane_id() < num_vectors; first += kVectors * kWarp) {
    uint4 v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kWarp < num_vectors) v[i] = load_streaming(from + first + i * kWarp);
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const auto address =
          __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(target), __ffs(left) - 1);
      auto* to = reinterpret_cast<uint4*>(address);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (first + i * kWarp < num_vectors) store_streaming(to + first + i * kWarp, v[i]);
      }
    }
  }
}

// A warp, of whose lanes those of `lanes` hold the ranks: sends them what it has written for them.
template <class Transport>
__device__ void put_messages(const OpContext& ctx, int rank, unsigned lanes, int64_t message,
                             int64_t bytes) {
  if (lanes == 0) return;
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    Transport::put(ctx, __shfl_sync(kFullWarp, rank, __ffs(left) - 1), message, bytes);
  }
  Transport::order(ctx.op);
}

template <class Transport, class Work>
__device__ void send_messages(const OpContext& ctx, Work& work) {
  Tickets tickets(ctx.op.state()->send_ticket);
  int chunk = 0;
  for (int token; (token = static_cast<int>(tickets.take())) < ctx.op.num_tokens;) {
    if (ctx.chunk_of(token) != chunk) {
      chunk = ctx.chunk_of(token);
      if (!wait_for_credits(ctx, chunk)) return;
    }
    const auto entry = work.load(token);
    const Destinations to = destinations_of(ctx, entry.rank);
    const int64_t message = message_offset(ctx, {ctx.rank(), token});
    char* slot = nullptr;
    if (to.leaders >> lane_id() & 1) slot = Transport::window(ctx, entry.rank, message);
    copy_row(work.source_row(token), ctx.op.layout.shape.row_bytes, slot, to.leaders);
    for (unsigned left = to.leaders; left != 0; left &= left - 1) {
      const int rank = __shfl_sync(kFullWarp, entry.rank, __ffs(left) - 1);
      work.write_record(Transport::window(ctx, rank, message), token, entry, rank);
    }
    __syncwarp();
    if constexpr (Transport::kPuts) {
      put_messages<Transport>(ctx, entry.rank, to.leaders, message, work.message_bytes());
    }
    fence_system();
    set_arrival_flags<Transport>(ctx, token, to.ranks);
    set_absent_flags<Transport>(ctx, token, to.ranks);
    work.keep(token, entry);
  }
}

template <class Work>
__device__ void receive_messages(const OpContext& ctx, Work& work) {
  Arrivals arrivals(ctx);
  while (!arrivals.exhausted()) {
    MessageId id;
    const bool found = arrivals.poll(&id, [&](MessageId absent) {
      work.absent(absent);
      if (lane_id() == 0) count_slots_read(ctx, ctx.chunk_of(absent.token), 1);
    });
    if (!found) {
      if (arrivals.give_up(ctx)) return;
      continue;
    }
    work.receive(ctx.own_window(message_offset(ctx, id)), id);
    __syncwarp();
    if (lane_id() == 0) count_slots_read(ctx, ctx.chunk_of(id.token), 1);
  }
}

template <class Transport, class Work>
__device__ void exchange_rows(const OpContext& ctx, Work& work, int num_senders) {
  if (warp_id() < num_senders) send_messages<Transport>(ctx, work);
  __syncwarp();
  if (!__any_sync(kFullWarp, ctx.aborted())) receive_messages(ctx, work);
}

}  // namespace jax_ep::gpu
